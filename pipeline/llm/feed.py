"""Which work an engine gets next: as many tokens as it can hold, the longest first inside a window."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Feed:
    """Admits pieces of work to an engine.

    What arrives waits. The first ``window`` pieces that wait are served longest first, and only then the
    next ones, whichever shard they belong to: the last pieces of a run are short, so that it has a short
    tail, and no piece waits for ever.

    Parameters
    ----------
    slots : int
        Pieces at once.
    tokens : int or None
        Tokens of all pieces at once; a piece that is larger is admitted alone. ``None`` is no limit.
    window : int
    """

    def __init__(self, slots: int, tokens: int | None, window: int) -> None:
        self._slots = slots
        self._tokens = tokens
        self._window = window
        self._arrivals: deque[_Piece] = deque()
        self._sorted: deque[_Piece] = deque()  # the longest first
        self._running = 0
        self._running_tokens = 0
        self._filling = False

    @asynccontextmanager
    async def admitted(self, tokens: int) -> AsyncIterator[None]:
        """Wait for admission of a piece of so many tokens, and hold its place."""
        piece = _Piece(tokens)
        self._arrivals.append(piece)
        if not self._filling:  # once for all that arrive in this turn of the loop
            self._filling = True
            asyncio.get_running_loop().call_soon(self._fill)
        try:
            await piece.turn
        except asyncio.CancelledError:
            if piece.turn.done() and not piece.turn.cancelled():
                self._leave(tokens)
            raise
        try:
            yield
        finally:
            self._leave(tokens)

    def _leave(self, tokens: int) -> None:
        self._running -= 1
        self._running_tokens -= tokens
        self._fill()

    def _fill(self) -> None:
        self._filling = False
        while self._running < self._slots:
            if not self._sorted and not self._sort():
                return
            piece = self._sorted[0]
            if not piece.turn.done():  # else its wait was given up
                if self._is_full_for(piece):
                    return
                self._running += 1
                self._running_tokens += piece.tokens
                piece.turn.set_result(None)
            self._sorted.popleft()

    def _is_full_for(self, piece: _Piece) -> bool:
        if self._tokens is None or not self._running:
            return False
        return self._running_tokens + piece.tokens > self._tokens

    def _sort(self) -> bool:
        """Take the next window; return whether anything waits."""
        first = [self._arrivals.popleft() for _ in range(min(self._window, len(self._arrivals)))]
        self._sorted = deque(sorted(first, key=lambda piece: -piece.tokens))
        return bool(first)


class _Piece:
    __slots__ = ("tokens", "turn")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
