"""Files and folders that appear whole or not at all.

Both functions build under a hidden temporary name beside the target (``.NAME.XXXXXXXX.tmp``), so that the
last step is a rename inside one file system. After an exception nothing is left behind; a process that is
killed can leave such a name, which nobody reads. What is published has been flushed to the disk before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hippoindex.errors import HippoIndexError, UsageError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file that replaces ``path`` in one step when the block ends without an exception.

    Parameters
    ----------
    path : str or Path
        File to write. Its folder must exist; a symbolic link is followed.

    Yields
    ------
    BinaryIO
        The temporary file, open for writing.

    Raises
    ------
    HippoIndexError
        If the file cannot be written (no such folder, no permission, disk full).
    """
    target = Path(path).resolve()
    temporary = _temporary_sibling(target)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise HippoIndexError(f"Cannot write {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def atomic_directory(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Build a folder that appears as ``path`` in one step when the block ends without an exception.

    Parameters
    ----------
    path : str or Path
        Folder to publish. Missing folders above it are made; a symbolic link is followed.
    replace : bool
        Whether a folder that is there and not empty may be replaced. It is then exchanged with the new one in
        one system call, and removed. On a file system that cannot exchange, it is moved aside first: for a
        moment ``path`` does not exist, but it is never a mixture.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    UsageError
        If ``path`` is a file, or a folder that is not empty while ``replace`` is false.
    HippoIndexError
        If the folder cannot be written.
    """
    target = Path(path).resolve()
    _check_target(target, replace=replace)
    temporary = _temporary_sibling(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        _check_target(target, replace=replace)
        _publish(temporary, target, replace=replace)
        _sync(target.parent)
    except OSError as error:
        raise HippoIndexError(f"Cannot write {path}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _check_target(target: Path, *, replace: bool) -> None:
    if target.is_dir():
        if not replace and any(target.iterdir()):
            raise UsageError(f"{target} exists and is not empty. Choose another folder or ask to replace it.")
    elif target.exists():
        raise UsageError(f"{target} is a file; a folder is to be written there. Choose another name.")


def _publish(temporary: Path, target: Path, *, replace: bool) -> None:
    """Rename ``temporary`` to ``target``; a folder it replaces is left under the name ``temporary``."""
    try:
        temporary.rename(target)  # the kernel itself refuses to rename over a folder that is not empty
    except OSError as error:
        if not replace or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(temporary, target):
            _swap_in_two_steps(temporary, target)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically (Linux ``renameat2``); false where that is not supported."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _swap_in_two_steps(temporary: Path, target: Path) -> None:
    aside = _temporary_sibling(target)
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    aside.rename(temporary)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
