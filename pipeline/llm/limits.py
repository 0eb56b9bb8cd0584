"""What keeps a client from asking for too much: requests at once, requests and tokens a second, dollars."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hippoindex.errors import SpendLimitError


class AdaptiveLimit:
    """Requests at once, as many as a server takes.

    The limit is reconsidered after every window of as many outcomes as it allows requests. It shrinks by half
    the share of refusals, as DCTCP's window does by that of marked packets (Alizadeh et al., SIGCOMM 2010,
    eq. 2), and grows by a sixteenth of ``most`` (at least 1) times the share that was not refused: a server
    that refuses all halves it, one that refuses a few at random hardly moves it.

    Parameters
    ----------
    most : int
        Where it begins, and more than which it never is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = max(1.0, most / 16)
        self._value = float(most)
        self._in_flight = 0
        self._outcomes = 0
        self._refusals = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def value(self) -> int:
        """The limit now."""
        return int(self._value)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one of the slots, first come first served, and hold it."""
        if self._in_flight >= self.value or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        else:
            self._in_flight += 1
        try:
            yield
        finally:
            self._release()

    def note(self, *, refused: bool) -> None:
        """Take the outcome of a request: whether the server said that it has too much to do."""
        self._outcomes += 1
        self._refusals += refused
        if self._outcomes < self.value:
            return
        refused_share = self._refusals / self._outcomes
        grown = self._value * (1 - refused_share / 2) + self._step * (1 - refused_share)
        self._value = min(max(1.0, grown), float(self._most))
        self._outcomes = self._refusals = 0
        self._admit()

    def _release(self) -> None:
        self._in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._in_flight < self.value:
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)


class Pace:
    """At most ``per_s`` units a second, in bursts of at most one second's worth (GCRA, a leaky bucket).

    Parameters
    ----------
    per_s : float or None
        ``None`` is no limit.
    """

    def __init__(self, per_s: float | None) -> None:
        self._per_s = per_s
        self._paid_until_s = 0.0

    async def wait(self, units: float) -> None:
        """Wait until so many units may be used, and use them."""
        if self._per_s is None:
            return
        now = time.monotonic()
        start = max(now - 1.0, self._paid_until_s)
        self._paid_until_s = start + units / self._per_s
        await asyncio.sleep(max(0.0, self._paid_until_s - now))

    def give_back(self, units: float) -> None:
        """Return units that were not needed (or, negative, take those that were needed besides)."""
        if self._per_s is not None:
            self._paid_until_s -= units / self._per_s


class Budget:
    """US dollars that may be spent. What is in flight counts with the most that it can cost.

    Parameters
    ----------
    max_usd : float or None
        ``None`` is no limit.
    section : str
        Section of the configuration that messages refer to.

    Attributes
    ----------
    spent_usd : float
    """

    def __init__(self, max_usd: float | None, section: str = "extract") -> None:
        self._section = section
        self.spent_usd = 0.0
        self._max_usd = max_usd
        self._reserved_usd = 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, usd: float) -> AsyncIterator[None]:
        """Hold the most that a request can cost while it is in flight.

        Raises
        ------
        SpendLimitError
            If it is not affordable and nothing is in flight that may turn out cheaper.
        """
        async with self._changed:
            while self._max_usd is not None and self.spent_usd + self._reserved_usd + usd > self._max_usd:
                if not self._reserved_usd:
                    raise SpendLimitError(self.spent_usd, self._max_usd, self._section)
                await self._changed.wait()
            self._reserved_usd += usd
        try:
            yield
        finally:
            async with self._changed:
                self._reserved_usd = max(0.0, self._reserved_usd - usd)
                if self._reserved_usd < 1e-12:  # so that a sum of roundings does not look like a request
                    self._reserved_usd = 0.0
                self._changed.notify_all()
