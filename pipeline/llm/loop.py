"""An event loop in a thread of its own, for engines that outlive a call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from hippoindex.errors import HippoIndexError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads on one event loop, which ends with the process.

    Parameters
    ----------
    name : str
        Of the thread.
    loop : asyncio.AbstractEventLoop, optional
        By default a new one.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; if the wait for it is interrupted, it is cancelled."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """End the loop, after a last coroutine; wait for that unless this is the loop's own thread."""
        if threading.current_thread() is self._thread:
            self._loop.create_task(self._end(last))
            return
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        try:
            if last is not None:
                await last
        finally:
            self._loop.stop()


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and return what they do, in order; the first error ends them all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        ours = (error for error in errors.exceptions if isinstance(error, HippoIndexError))
        raise next(ours, errors.exceptions[0]) from None
    return [task.result() for task in tasks]


async def awaited(opens: Callable[[], Awaitable[T]]) -> T:
    """Call and await, on the loop that this runs on, what opens something."""
    return await opens()
