"""Which work an engine gets next: the longest that waits, as many tokens at once as it can hold."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Feed:
    """Admits pieces of work to an engine, the longest first, whichever shard they belong to.

    So the last pieces of a run are short, and all end at about the same time; pieces of about the same length
    are at work together, which leaves an engine room for the prefixes that it keeps. Pieces come in by the
    shard and a shard is done with its last piece, so the short ones have their turn as well: without them
    there is soon nothing else to do.

    Parameters
    ----------
    slots : int
        Pieces at once.
    tokens : int or None
        Tokens of all pieces at once; a piece that is larger is admitted alone. ``None`` is no limit.
    """

    def __init__(self, slots: int, tokens: int | None) -> None:
        self._slots = slots
        self._tokens = tokens
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, _Piece]] = []  # a heap
        self._running = 0
        self._running_tokens = 0
        self._filling = False

    @asynccontextmanager
    async def admitted(self, tokens: int) -> AsyncIterator[None]:
        """Wait for admission of a piece of so many tokens, and hold its place."""
        piece = _Piece(tokens)
        heapq.heappush(self._waiting, (-tokens, next(self._numbers), piece))
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
        while self._waiting and self._running < self._slots:
            piece = self._waiting[0][2]
            if not piece.turn.done():  # else its wait was given up
                if self._is_full_for(piece):
                    return
                self._running += 1
                self._running_tokens += piece.tokens
                piece.turn.set_result(None)
            heapq.heappop(self._waiting)

    def _is_full_for(self, piece: _Piece) -> bool:
        if self._tokens is None or not self._running:
            return False
        return self._running_tokens + piece.tokens > self._tokens


class _Piece:
    __slots__ = ("tokens", "turn")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
