"""Storage as files below a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hippoindex.cluster.storage_backend import (
    ConditionFailedError,
    Content,
    Entry,
    ObjectMissingError,
    Stat,
    StorageError,
    TransientStorageError,
    Upload,
    removed_meanwhile,
)

#: Files that are no objects: one being written, and the lock of one that is replaced.
HIDDEN = re.compile(r"\..*\.(tmp|lock)")
#: Tokens of finished writes that are remembered; only those of writes in progress matter.
_REMEMBERED_TOKENS = 1024
#: The errors of a name that is not there, or is a folder, or lies below a file.
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT})


class DiskBackend:
    """Objects as files below a folder, which is made with the first of them.

    A file is written under a hidden temporary name, flushed to the disk, and renamed; or hard-linked where
    it must not replace another, because a link, unlike a rename, fails if the name is taken. To replace a
    version, a lock beside the file is held (``flock``, which NFS and Lustre pass on to other machines)
    between looking and renaming; the version is the SHA-256 of the content.

    Parameters
    ----------
    root : Path
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskBackend, (self._root,)

    def stat(self, name: str) -> Stat | None:
        """Look at the file."""
        path = self._root / name
        with _explained("look up", path), contextlib.suppress(*_NO_FILE):
            status = path.stat()
            return _stat(status) if stat.S_ISREG(status.st_mode) else None
        return None

    def read(self, name: str) -> Content | None:
        """Read the file."""
        path = self._root / name
        with _explained("read", path), contextlib.suppress(*_NO_FILE):
            data = path.read_bytes()
            return Content(data, len(data), _digest(data))
        return None

    def read_range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        """Read a part of the file, which must still be the same file."""
        path = self._root / name
        with _explained("read", path):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                raise ObjectMissingError(f"There is no {path}") from None
            with file:
                if _stat(os.fstat(file.fileno())).etag != etag:
                    raise ConditionFailedError(f"{path} has changed")
                return os.pread(file.fileno(), stop - start, start)

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str | None]:  # noqa: ARG002 - there is one page
        """Walk the folder."""
        folder = self._root / prefix.rpartition("/")[0]
        with _explained("list", folder):
            entries = [entry for entry in self._walk(folder) if entry.name.startswith(prefix)]
        return sorted(entries, key=lambda entry: os.fsencode(entry.name)), None

    def put(
        self, name: str, data: bytes, token: str, *, if_absent: bool = False, if_version: str | None = None
    ) -> str:
        """Write a temporary file and rename or link it."""
        target, version = self._root / name, _digest(data)
        if token in self._finished:
            return version
        temporary = _temporary(target, token)
        with _explained("write", target), contextlib.ExitStack() as stack:
            target.parent.mkdir(parents=True, exist_ok=True)
            if if_version is not None:
                stack.enter_context(_locked(target))
                if not target.is_file() or _digest(target.read_bytes()) != if_version:
                    raise ConditionFailedError(f"{target} has another version")
            stack.callback(temporary.unlink, missing_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                _flush(file)
            if if_absent:
                _link(temporary, target)
            else:
                temporary.replace(target)
            _sync_folder(target.parent)
        self._remember(token)
        return version

    def delete(self, names: Sequence[str]) -> None:
        """Remove files, and the folders that this empties."""
        for name in names:
            path = self._root / name
            with _explained("delete", path), contextlib.suppress(NotADirectoryError):
                path.unlink(missing_ok=True)
            for _ in range(name.count("/")):
                path = path.parent
                try:
                    path.rmdir()
                except OSError:  # it is not empty, or gone
                    break

    def begin(self, name: str, token: str) -> str:
        """Make the temporary file; the token is its id."""
        target = self._root / name
        with _explained("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _temporary(target, token).touch()
        return token

    def put_part(self, name: str, upload: str, number: int, offset: int, data: bytes) -> str:
        """Write into the temporary file."""
        target = self._root / name
        with _explained("write", target), _opened(target, upload) as file:
            file.seek(offset)
            file.write(data)
        return str(number)

    def complete(self, name: str, upload: str, token: str, parts: Sequence[str]) -> None:  # noqa: ARG002
        """Rename the temporary file."""
        if token in self._finished:
            return
        target = self._root / name
        with _explained("write", target):
            with _opened(target, upload) as file:
                _flush(file)
            _temporary(target, upload).replace(target)
            _sync_folder(target.parent)
        self._remember(token)

    def abort(self, name: str, upload: str) -> None:
        """Remove the temporary file."""
        temporary = _temporary(self._root / name, upload)
        with _explained("delete", temporary):
            temporary.unlink(missing_ok=True)

    def uploads(self, prefix: str) -> list[Upload]:
        """Find temporary files, those of :mod:`hippoindex.cluster.atomic` among them."""
        folder = self._root / prefix.rpartition("/")[0]
        found = []
        with _explained("list", folder):
            for path in folder.rglob(".*.tmp") if folder.is_dir() else ():
                hidden, _, token = path.name.removesuffix(".tmp").rpartition(".")
                name = path.with_name(hidden.removeprefix(".")).relative_to(self._root).as_posix()
                with contextlib.suppress(FileNotFoundError):  # it has ended since it was listed
                    status = path.stat()
                    if name.startswith(prefix) and stat.S_ISREG(status.st_mode):
                        found.append(Upload(name, token, time.time() - status.st_mtime))
        return found

    def local_path(self, name: str) -> Path | None:
        """Return the file."""
        return self._root / name

    def _walk(self, folder: Path) -> Iterator[Entry]:
        for parent, folders, names in os.walk(folder, onerror=_raise_unless_missing):
            folders[:] = [name for name in folders if not HIDDEN.fullmatch(name)]
            for name in names:
                path = Path(parent, name)
                if not HIDDEN.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):  # it was deleted since it was listed
                        status = path.stat()
                        name_below = path.relative_to(self._root).as_posix()
                        yield Entry(name_below, status.st_size, time.time() - status.st_mtime)

    def _remember(self, token: str) -> None:
        with self._mutex:
            self._finished[token] = None
            if len(self._finished) > _REMEMBERED_TOKENS:
                self._finished.popitem(last=False)


def _stat(status: os.stat_result) -> Stat:
    return Stat(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")


def _temporary(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.{token}.tmp")


@contextlib.contextmanager
def _opened(target: Path, upload: str) -> Iterator[BinaryIO]:
    """Open the temporary file of a streamed write."""
    try:
        file = _temporary(target, upload).open("r+b")
    except FileNotFoundError:
        raise removed_meanwhile(target) from None
    with file:
        yield file


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    with target.with_name(f".{target.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a kill
        yield


def _link(temporary: Path, target: Path) -> None:
    """Give a finished file its name unless the name is taken."""
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        if not target.samefile(temporary):  # else NFS had made the link and lost the answer
            raise ConditionFailedError(f"{target} exists") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(error: OSError) -> None:
    """Error handler of ``os.walk``: a folder that is not there has no files in it."""
    if not isinstance(error, _NO_FILE):
        raise error


@contextlib.contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:  # a folder that was made for this, and removed as empty since
        raise TransientStorageError(f"Cannot {action} {path}: a folder of it was removed") from error
    except OSError as error:
        kind = TransientStorageError if error.errno in _PASSING else StorageError
        raise kind(f"Cannot {action} {path}: {error.strerror or error}") from error
