"""Storage whose requests fail as those of real storage do, in an order that a test chooses."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from hippoindex.cluster.storage import Storage, StorageOptions
from hippoindex.cluster.storage_backend import Backend, Content, Entry, Stat, TransientStorageError, Upload

T = TypeVar("T")


class Fault(Enum):
    """What happens to a request."""

    NONE = "none"
    REFUSED = "refused"  # it fails and does nothing
    LOST = "lost"  # it is done, and its answer does not come back
    CUT = "cut"  # of a read only half comes back; other requests are refused
    SLOW = "slow"


class FaultyBackend:
    """A backend with faults.

    Parameters
    ----------
    inner : Backend
        What does the work.
    faults : iterable of Fault
        One for each request that is made, in order; after the last there are none.
    """

    def __init__(self, inner: Backend, faults: Iterable[Fault]) -> None:
        self.inner = inner
        self.injected: Counter[Fault] = Counter()
        self._faults = iter(faults)
        self._mutex = threading.Lock()

    def _next(self) -> Fault:
        with self._mutex:
            fault = next(self._faults, Fault.NONE)
            self.injected[fault] += 1
        return fault

    def _request(self, request: Callable[[], T], cut: Callable[[T], T] | None = None) -> T:
        fault = self._next()
        if fault is Fault.REFUSED or (fault is Fault.CUT and cut is None):
            raise TransientStorageError("injected: refused")
        if fault is Fault.SLOW:
            time.sleep(0.002)
        result = request()
        if fault is Fault.LOST:
            raise TransientStorageError("injected: answer lost")
        return cut(result) if fault is Fault.CUT and cut is not None else result

    def stat(self, name: str) -> Stat | None:
        return self._request(lambda: self.inner.stat(name))

    def read(self, name: str) -> Content | None:
        return self._request(
            lambda: self.inner.read(name),
            lambda found: found and replace(found, data=found.data[: len(found.data) // 2]),
        )

    def read_range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        return self._request(
            lambda: self.inner.read_range(name, start, stop, etag), lambda data: data[: len(data) // 2]
        )

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str | None]:
        return self._request(lambda: self.inner.page(prefix, after))

    def put(
        self, name: str, data: bytes, token: str, *, if_absent: bool = False, if_version: str | None = None
    ) -> str:
        return self._request(
            lambda: self.inner.put(name, data, token, if_absent=if_absent, if_version=if_version)
        )

    def delete(self, names: Sequence[str]) -> None:
        self._request(lambda: self.inner.delete(names))

    def begin(self, name: str, token: str) -> str:
        return self._request(lambda: self.inner.begin(name, token))

    def put_part(self, name: str, upload: str, number: int, offset: int, data: bytes) -> str:
        return self._request(lambda: self.inner.put_part(name, upload, number, offset, data))

    def complete(self, name: str, upload: str, token: str, parts: Sequence[str]) -> None:
        self._request(lambda: self.inner.complete(name, upload, token, parts))

    def abort(self, name: str, upload: str) -> None:
        self._request(lambda: self.inner.abort(name, upload))

    def uploads(self, prefix: str) -> list[Upload]:
        return self._request(lambda: self.inner.uploads(prefix))

    def local_path(self, name: str) -> Path | None:
        return self.inner.local_path(name)


def faulty(
    storage: Storage, faults: Iterable[Fault], *, attempts: int, part_bytes: int = 5 << 20
) -> tuple[Storage, FaultyBackend]:
    """Return the same storage with faults, retried without waits, and the backend that makes them."""
    backend = FaultyBackend(storage._backend, faults)
    options = StorageOptions(part_bytes=part_bytes, attempts=attempts, first_wait_s=0, max_wait_s=0)
    return Storage(storage.url, backend, options), backend


def after(count: int, faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield no fault ``count`` times, and then those given."""
    yield from [Fault.NONE] * count
    yield from faults
