"""What a kind of storage must be able to do, and the errors and small types it does it with.

:class:`hippoindex.cluster.storage.Storage` is written against :class:`Backend` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hippoindex.errors import HippoIndexError


class StorageError(HippoIndexError):
    """Storage that cannot be reached, read or written."""


class TransientStorageError(StorageError):
    """A request that failed and may succeed when it is made again."""


class ObjectMissingError(StorageError):
    """There is no object of that name."""


class ConditionFailedError(StorageError):
    """The object was there already, or had another version than expected: the write was not made."""


@dataclass(frozen=True)
class Entry:
    """An object of a listing.

    Attributes
    ----------
    name : str
    size_bytes : int
    age_s : float
        Since it was written, by the storage's clock and this machine's.
    """

    name: str
    size_bytes: int
    age_s: float


@dataclass(frozen=True)
class Stat:
    """Size of an object, and what tells its content from any other while it is read in pieces."""

    size_bytes: int
    etag: str


@dataclass(frozen=True)
class Content:
    """A small object as a whole.

    Attributes
    ----------
    data : bytes
    size_bytes : int
        What the storage said would come; ``data`` that was cut short is shorter.
    version : str
        What a conditional write expects. Equal versions mean equal content.
    """

    data: bytes
    size_bytes: int
    version: str


@dataclass(frozen=True)
class Upload:
    """A streamed write that has begun and was neither completed nor aborted."""

    name: str
    id: str
    age_s: float


class Backend(Protocol):
    """Requests to a kind of storage, each made once. Names have been checked.

    A write takes a token that no other write has. If the write of that token has been made already, making it
    again succeeds and changes nothing: so a write can be repeated when its answer was lost.

    Every method may raise :class:`TransientStorageError` or another :class:`StorageError`. Backends can be
    pickled, and used by many threads.
    """

    def stat(self, name: str) -> Stat | None:
        """Return what is known of an object; ``None`` where there is none."""
        ...

    def read(self, name: str) -> Content | None:
        """Return a whole object; ``None`` where there is none."""
        ...

    def read_range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        """Return bytes ``start`` to ``stop``; fewer if the answer was cut short.

        Raises ``ConditionFailedError`` if the object is no longer the one of that ``etag``, and
        ``ObjectMissingError`` if it is gone.
        """
        ...

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str | None]:
        """Return objects whose names begin with ``prefix``, in order, and where the next page begins.

        ``after`` is empty for the first page, and then what the page before returned. After the last page
        that is ``None``.
        """
        ...

    def put(
        self, name: str, data: bytes, token: str, *, if_absent: bool = False, if_version: str | None = None
    ) -> str:
        """Write a small object and return its version.

        Raises ``ConditionFailedError`` if ``if_absent`` and it exists, or if it has not ``if_version``.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove at most 1,000 objects; those that are not there do not matter."""
        ...

    def begin(self, name: str, token: str) -> str:
        """Begin a streamed write and return its id."""
        ...

    def put_part(self, name: str, upload: str, number: int, offset: int, data: bytes) -> str:
        """Write part ``number`` (from 1) and return what :meth:`complete` wants of it."""
        ...

    def complete(self, name: str, upload: str, token: str, parts: Sequence[str]) -> None:
        """Make the object of all parts appear, in place of one that is there."""
        ...

    def abort(self, name: str, upload: str) -> None:
        """Remove the parts of a streamed write; one that is not there does not matter."""
        ...

    def uploads(self, prefix: str) -> list[Upload]:
        """Return the streamed writes that have begun and not ended."""
        ...

    def local_path(self, name: str) -> Path | None:
        """Return the file that holds an object, where storage is files of this machine."""
        ...


def removed_meanwhile(where: str | Path) -> StorageError:
    """Return the error of a streamed write whose parts are gone."""
    return StorageError(
        f"The parts of {where} were removed before it was complete: does somebody clean up unfinished writes "
        "that are too young?"
    )
