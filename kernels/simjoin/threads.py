"""One thread a core, each with a single-threaded BLAS."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = TypeVar("Worker")


def in_threads(
    make: Callable[[], Worker], task: Callable[[Worker, Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield ``task(worker, item)`` in order, one thread and one worker a core, each with a BLAS of its own.

    Tiles are too small for a multi-threaded BLAS to share out well, and scanning takes a part of the time.
    """
    local: dict[int, Worker] = {}

    def run(item: Item) -> Result:
        key = threading.get_ident()
        if key not in local:
            local[key] = make()
        return task(local[key], item)

    with one_blas_thread(), ThreadPoolExecutor(n_threads()) as pool:
        try:
            yield from pool.map(run, items)
        finally:
            pool.shutdown(cancel_futures=True)


def n_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let every thread's BLAS calls run in that thread alone."""
    with threadpool_limits(1, user_api="blas"):
        yield
