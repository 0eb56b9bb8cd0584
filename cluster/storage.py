"""A folder on disk or an ``s3://bucket/prefix``, behind one interface.

:func:`open_storage` returns a :class:`Storage`: the same code above two backends that make one request each.
What it promises on both:

* An object appears whole or not at all, and is never seen half replaced.
* :meth:`Storage.create` and :meth:`Storage.replace` decide races: of many that create one name, or replace
  one version, exactly one wins. All else in this room that must happen once is built on these two.
* What can succeed when it is tried again is tried again, after waits that grow and are drawn at random. A
  write carries a token, so that one whose answer was lost is recognised as done, and is not taken for
  somebody else's.
* S3 has no rename, and none is needed: an object is put, or sent in parts and then completed.

Credentials come from the usual AWS places (environment, configuration files, the machine's role) and from
nowhere else; the endpoint from ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` or the configuration file.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import structlog
import tenacity

from hippoindex.cluster.atomic import atomic_write
from hippoindex.cluster.storage_backend import (
    Backend,
    ConditionFailedError,
    Content,
    Entry,
    ObjectMissingError,
    Stat,
    StorageError,
    TransientStorageError,
    Upload,
)
from hippoindex.cluster.storage_disk import HIDDEN, DiskBackend
from hippoindex.cluster.storage_s3 import S3Backend
from hippoindex.errors import UsageError

_log = structlog.get_logger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
#: S3 allows 10,000 parts and 5 TiB: parts double in size every so many.
_PARTS_OF_ONE_SIZE = 1000
_READ_BUFFER_BYTES = 1 << 20
_DELETED_AT_ONCE = 1000


@dataclass(frozen=True)
class StorageOptions:
    """How data is moved and how often a request is made.

    Attributes
    ----------
    part_bytes : int
        Size of the first parts of a streamed write, and of the pieces of a download. S3 wants at least 5 MiB.
    parallel_parts : int
        Parts of an object in flight. A streamed write holds so many, and one more, in memory.
    attempts : int
        How often a request is made before it counts as failed.
    first_wait_s, max_wait_s : float
        The wait after attempt n is drawn from 0 to ``min(max_wait_s, first_wait_s * 2 ** (n - 1))``.
    """

    part_bytes: int = 16 << 20
    parallel_parts: int = 4
    attempts: int = 10
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0


def open_storage(url: str | Path, options: StorageOptions | None = None) -> Storage:
    """Return the storage at a folder or an S3 prefix. Nothing is requested or made yet.

    Parameters
    ----------
    url : str or Path
        A folder, or ``s3://bucket`` or ``s3://bucket/prefix``.
    options : StorageOptions, optional

    Returns
    -------
    Storage

    Raises
    ------
    UsageError
        If the URL is neither.
    MissingPackageError
        If S3 is asked for and s3fs is not installed.
    """
    options = options or StorageOptions()
    if not str(url):
        raise UsageError("The storage has no name: give a folder or s3://bucket/prefix")
    scheme = _SCHEME.match(str(url))
    if scheme is None:
        root = Path(url).absolute()
        return Storage(str(root), DiskBackend(root), options)
    if scheme[1] != "s3":
        raise UsageError(
            f"Storage of the kind {scheme[1]}:// is not known: give a folder or s3://bucket/prefix"
        )
    bucket, prefix = _parse_s3(str(url))
    return Storage(f"s3://{bucket}/{prefix}".rstrip("/"), S3Backend(bucket, prefix), options)


def _parse_s3(url: str) -> tuple[str, str]:
    """Return bucket and prefix; a prefix that is not empty ends in a slash."""
    if re.search(r"[@?#]", url):  # and the message does not repeat what may be a secret
        raise UsageError(
            "An S3 URL has no '@', '?' or '#': it is s3://bucket/prefix, without credentials or settings. "
            "Those come from the AWS environment variables and files"
        )
    if not url.startswith("s3://"):
        raise UsageError(f"{url!r} has lost a slash: give s3://bucket/prefix as text, not as a Path")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise UsageError(f"{url!r} names no bucket: write s3://bucket/prefix")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{url!r}: {bucket!r} is no name of a bucket (3 to 63 of a-z, 0-9, dot and hyphen; access points "
            "are not supported)"
        )
    prefix = prefix.removesuffix("/")
    if prefix:
        _check_name(prefix, f"The prefix of {url!r}")
    return bucket, prefix and f"{prefix}/"


def _check_name(name: str, what: str) -> None:
    segments = name.split("/")
    if any(segment in {"", ".", ".."} for segment in segments) or not name.isprintable():
        raise UsageError(
            f"{what} is not a relative name: segments joined by single slashes, none empty, '.' or '..', "
            "no control characters"
        )
    if any(HIDDEN.fullmatch(segment) for segment in segments):
        raise UsageError(f"{what}: names like .x.tmp and .x.lock are kept for files that are being written")


class Storage:
    """Objects by name below a folder or an S3 prefix; made by :func:`open_storage`.

    A name is a relative path with forward slashes; for the disk's sake none may be a folder of another. May
    be used by many threads, and be pickled.

    Every method raises :class:`StorageError` (no such bucket, access denied, disk full), after repeated
    attempts where repeating may help, and ``UsageError`` for a name that is none.

    Parameters
    ----------
    url : str
        Where it is, for messages.
    backend : Backend
    options : StorageOptions
    """

    def __init__(self, url: str, backend: Backend, options: StorageOptions) -> None:
        self.url = url
        self._backend = backend
        self._options = options

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def check(self) -> None:
        """Try out what all else relies on, with a small object that is removed again.

        Worth a call before hours of work: it finds a missing bucket, denied access, a disk that cannot be
        written to, and an S3 server that takes conditional writes and ignores the condition (runs would then
        overwrite each other).

        Raises
        ------
        StorageError
        """
        name = f"probe-{secrets.token_hex(8)}"
        version = self.create(name, b"first")
        try:
            overwritten = self.create(name, b"second") or self.replace(name, b"third", f'"{"0" * 32}"')
            found = self.read(name)
        finally:
            self.delete(name)
        if overwritten or found is None or found.version != version:
            raise StorageError(
                f"{self.url} does not honour conditional writes (If-None-Match, If-Match), so two runs could "
                "overwrite each other: use storage that does"
            )

    def exists(self, name: str) -> bool:
        """Tell whether there is an object of that name."""
        return self._stat(name) is not None

    def read(self, name: str) -> Content | None:
        """Return a small object with its version, for :meth:`replace`; ``None`` where there is none."""
        checked = _checked(name)

        def request() -> Content | None:
            content = self._backend.read(checked)
            if content is not None and len(content.data) != content.size_bytes:
                raise TransientStorageError(f"{len(content.data)} of {content.size_bytes} bytes came")
            return content

        return self._try("read", name, request)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of an object that fits into memory.

        Raises
        ------
        ObjectMissingError
        """
        content = self.read(name)
        if content is None:
            raise self._missing(name)
        return content.data

    def open(self, name: str) -> BinaryIO:
        """Open an object for reading; seeking is free, and only what is read is fetched.

        Returns
        -------
        BinaryIO
            Reading raises ``StorageError`` once the object is replaced or deleted.

        Raises
        ------
        ObjectMissingError
        """
        reader = _RangeReader(self, name, self._existing(name))
        return cast("BinaryIO", io.BufferedReader(reader, _READ_BUFFER_BYTES))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the objects whose names begin with ``prefix``, in the order of their UTF-8 bytes.

        Parameters
        ----------
        prefix : str
            Any beginning of a name: ``"graph/"`` means a folder, ``"graph"`` also finds ``"graphs"``.
        """
        after: str | None = ""
        while after is not None:
            page, after = self._try("list", prefix, partial(self._backend.page, prefix, after))
            yield from page

    def create(self, name: str, data: bytes) -> str | None:
        """Write a small object unless there is one: of many that try, exactly one succeeds.

        Returns
        -------
        str or None
            The version of the new object; ``None`` if somebody else made one first.
        """
        return self._put(name, data, if_absent=True)

    def replace(self, name: str, data: bytes, expected: str) -> str | None:
        """Write a small object if the one that is there still has a version (compare and swap).

        It protects from others who do the same, not from :meth:`write` and :meth:`delete`.

        Parameters
        ----------
        name : str
        data : bytes
        expected : str
            ``version`` of :meth:`read`, or what :meth:`create` or this method returned.

        Returns
        -------
        str or None
            The new version; ``None`` if the object has another by now or is gone. That may also be because
            this very write was made, its answer was lost, and somebody has replaced it since.
        """
        return self._put(name, data, if_version=expected)

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        """Write an object of any size as a stream; it appears when the block ends without an exception.

        An object that is there is replaced. After an exception nothing is left: parts that were sent are
        removed. Those of a process that was killed stay until :meth:`remove_stale_uploads`.

        Yields
        ------
        BinaryIO
            Where to write. Closing it is not needed, and publishes nothing.
        """
        out = _PartWriter(self, _checked(name))
        try:
            yield cast("BinaryIO", out)
            out.publish()
        except BaseException:
            out.discard()
            raise

    def upload(self, path: str | Path, name: str) -> None:
        """Write a local file as an object.

        Raises
        ------
        StorageError
            Also if the file cannot be read, or changes its size meanwhile.
        """
        try:
            with Path(path).open("rb") as file, self.write(name) as out:
                size_bytes = os.fstat(file.fileno()).st_size
                shutil.copyfileobj(file, out, self._options.part_bytes)
                if out.tell() != size_bytes:
                    raise StorageError(f"{path} changed its size while it was written to {self.url}/{name}")
        except OSError as error:
            raise StorageError(f"Cannot read {path}: {error}") from error

    def download(self, name: str, path: str | Path) -> None:
        """Write an object to a local file, which appears when it is whole. Its folder must exist.

        Raises
        ------
        ObjectMissingError
        """
        stat, step, ahead = self._existing(name), self._options.part_bytes, self._options.parallel_parts
        ranges = ((start, min(start + step, stat.size_bytes)) for start in range(0, stat.size_bytes, step))
        with atomic_write(path) as file, ThreadPoolExecutor(ahead) as pool:
            for piece in _in_order(pool, lambda r: self._read_range(name, *r, stat.etag), ranges, ahead):
                file.write(piece)

    def delete(self, name: str) -> None:
        """Remove an object; it does not matter whether it is there."""
        self._try("delete", name, partial(self._backend.delete, [_checked(name)]))

    def delete_all(self, prefix: str) -> int:
        """Remove every object whose name begins with ``prefix``, and return how many there were."""
        names = (entry.name for entry in self.entries(prefix))
        deleted = 0
        while batch := list(islice(names, _DELETED_AT_ONCE)):
            self._try("delete", prefix, partial(self._backend.delete, batch))
            deleted += len(batch)
        return deleted

    def remove_stale_uploads(
        self, prefix: str = "", *, older_than_s: float, dry_run: bool = False
    ) -> list[Upload]:
        """Remove the parts that killed processes left of streamed writes: nobody sees them, but they cost.

        Parameters
        ----------
        prefix : str
            Beginning of the names to look at.
        older_than_s : float
            Age from which a write counts as abandoned. One that goes on would fail: choose more than the
            longest write can take.
        dry_run : bool
            Whether to list them only.

        Returns
        -------
        list of Upload
            What was (or would be) removed. Ages go by the storage's clock and this machine's.
        """
        found = self._try("list unfinished writes of", prefix, partial(self._backend.uploads, prefix))
        stale = [upload for upload in found if upload.age_s > older_than_s]
        for upload in () if dry_run else stale:
            self._abort(upload.name, upload.id)
        return stale

    def local_path(self, name: str) -> Path | None:
        """Return the file that holds an object, for memory-mapping; ``None`` where storage is not local.

        It must not be written to.
        """
        return self._backend.local_path(_checked(name))

    def _put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        token = secrets.token_hex(16)
        request = partial(
            self._backend.put, _checked(name), data, token, if_absent=if_absent, if_version=if_version
        )
        try:
            return self._try("write", name, request)
        except ConditionFailedError:
            return None

    def _stat(self, name: str) -> Stat | None:
        return self._try("look up", name, partial(self._backend.stat, _checked(name)))

    def _existing(self, name: str) -> Stat:
        stat = self._stat(name)
        if stat is None:
            raise self._missing(name)
        return stat

    def _read_range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        def request() -> bytes:
            data = self._backend.read_range(name, start, stop, etag)
            if len(data) != stop - start:
                raise TransientStorageError(f"{len(data)} of {stop - start} bytes came")
            return data

        try:
            return self._try("read", name, request)
        except (ConditionFailedError, ObjectMissingError) as error:
            raise StorageError(f"{self.url}/{name} was replaced or deleted while it was read") from error

    def _abort(self, name: str, upload: str) -> None:
        self._try("abort the write of", name, partial(self._backend.abort, name, upload))

    def _missing(self, name: str) -> ObjectMissingError:
        return ObjectMissingError(f"There is no {name!r} in {self.url}")

    def _try(self, action: str, name: str, request: Callable[[], T]) -> T:
        """Make a request, and again while that may help."""
        options, url = self._options, f"{self.url}/{name}"

        def log_failure(state: tenacity.RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            _log.info("storage request failed", action=action, url=url, why=str(error))

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientStorageError),
            stop=tenacity.stop_after_attempt(options.attempts),
            wait=tenacity.wait_random_exponential(options.first_wait_s, options.max_wait_s),
            before_sleep=log_failure,
            reraise=True,
        )
        try:
            return attempts(request)
        except TransientStorageError as error:
            raise StorageError(
                f"Cannot {action} {url}: {options.attempts} attempts failed, the last one so: {error}. "
                "Is the storage overloaded or out of reach?"
            ) from error


def _checked(name: str) -> str:
    _check_name(name, f"The object name {name!r}")
    return name


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[U], T], items: Iterable[U], ahead: int
) -> Iterator[T]:
    """Yield the function's results in order, with at most ``ahead`` calls begun and not yet yielded."""
    pending: deque[Future[T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


class _RangeReader(io.RawIOBase):
    """A file whose bytes are fetched when they are read."""

    def __init__(self, storage: Storage, name: str, stat: Stat) -> None:
        self._storage = storage
        self._name = name
        self._stat = stat
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stat.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        pieces = []
        while piece := self._next(self._storage._options.part_bytes):
            pieces.append(piece)
        return b"".join(pieces)

    def _next(self, size: int) -> bytes:
        start = self._position
        stop = min(start + min(size, self._storage._options.part_bytes), self._stat.size_bytes)
        if start >= stop:
            return b""
        data = self._storage._read_range(self._name, start, stop, self._stat.etag)
        self._position = stop
        return data


class _PartWriter(io.BufferedIOBase):
    """Cuts what is written into parts, and sends them while more is written.

    Nothing is requested before the first part is full: what fits into one part is put at once at the end.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._backend = storage._backend
        self._name = name
        self._token = secrets.token_hex(16)
        self._buffer = bytearray()
        self._sent_bytes = 0
        self._upload: str | None = None
        self._parts: list[Future[str]] = []
        self._pool = ThreadPoolExecutor(storage._options.parallel_parts, "part")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._sent_bytes + len(self._buffer)

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("write to closed file")
        with memoryview(data) as view:
            if view.nbytes:
                self._buffer += view.cast("B")
            while len(self._buffer) >= (size := self._part_bytes()):
                self._send(size)
            return view.nbytes

    def publish(self) -> None:
        """Write what is left and make the object appear."""
        if self._upload is None:
            request = partial(self._backend.put, self._name, bytes(self._buffer), self._token)
            self._storage._try("write", self._name, request)
        else:
            if self._buffer:
                self._send(len(self._buffer))
            parts = [part.result() for part in self._parts]
            complete = partial(self._backend.complete, self._name, self._upload, self._token, parts)
            self._storage._try("complete", self._name, complete)
        self._pool.shutdown()

    def discard(self) -> None:
        """Remove what was sent. There is an error already, which this must not hide."""
        self._pool.shutdown(cancel_futures=True)  # a part that arrived after the abort would stay
        if self._upload is not None:
            try:
                self._storage._abort(self._name, self._upload)
            except StorageError as error:
                _log.warning("parts of a failed write are left", name=self._name, why=str(error))

    def _part_bytes(self) -> int:
        return self._storage._options.part_bytes << (len(self._parts) // _PARTS_OF_ONE_SIZE)

    def _send(self, size: int) -> None:
        """Send the first bytes of the buffer as a part, once there are not too many on their way."""
        if self._upload is None:
            begin = partial(self._backend.begin, self._name, self._token)
            self._upload = self._storage._try("begin", self._name, begin)
        ahead = self._storage._options.parallel_parts
        if len(self._parts) >= ahead:
            self._parts[-ahead].result()
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
        del self._buffer[:size]
        number = len(self._parts) + 1
        put = partial(self._backend.put_part, self._name, self._upload, number, self._sent_bytes, data)
        self._sent_bytes += size
        self._parts.append(self._pool.submit(self._storage._try, "write a part of", self._name, put))
