"""What is beside an output while a run makes it: its work, kept for the next run; one run at a time.

Beside ``DIR`` is ``DIR.work``, beside ``s3://bucket/index`` ``s3://bucket/index.work``.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hippoindex.cluster.atomic import atomic_directory
from hippoindex.cluster.ledger import Lease
from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.cluster.storage_backend import Content
from hippoindex.errors import HippoIndexError, UsageError
from hippoindex.pipeline import remote
from hippoindex.pipeline.artifact import MANIFEST, Index, open_index
from hippoindex.pipeline.models import cache_root
from hippoindex.pipeline.remote import is_remote

LEASE = "lease.json"
LEASE_TTL_S = 30.0
"""A run that gives no sign of life for so long may be replaced by another one."""


@dataclass(frozen=True)
class Work:
    """The work of a run that nobody else can use now.

    Attributes
    ----------
    output : str
        Folder or S3 prefix that it is for.
    storage : Storage
        Where shards and the lease are.
    folder : Path
        Folder of this machine for everything else; that of ``storage`` where it is local.
    lease : Lease
    held : Content or None
        Manifest on S3 when the run began.
    """

    output: str
    storage: Storage
    folder: Path
    lease: Lease
    held: Content | None

    def clear_parts(self) -> None:
        """Remove the parts of writes that were killed."""
        self.storage.remove_stale_uploads(older_than_s=0)
        if is_remote(self.output):
            open_storage(self.output).remove_stale_uploads(older_than_s=0)

    @property
    def assembled(self) -> Path:
        """An empty folder in which to put an index together."""
        folder = self.folder / "assembled"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True)
        return folder

    def publish(self, folder: Path, *, replace: bool) -> None:
        """Make a folder the output, in one step.

        Parameters
        ----------
        folder : Path
            In :attr:`folder`; it is gone afterwards.
        replace : bool
            Whether an index that is there may be replaced.

        Raises
        ------
        LeaseLostError
            If this run has lost its lease. Nothing is published then.
        UsageError
            If there is an index that must not be replaced, or another one than when the run began.
        """
        self.lease.check()
        if is_remote(self.output):
            remote.publish(open_storage(self.output), folder, self.held if replace else None)
            return
        with atomic_directory(self.output, replace=replace) as target:
            folder.replace(target)  # a folder may take the place of an empty one

    @property
    def worth_keeping(self) -> bool:
        """Whether the next run would find anything here."""
        return any(entry.name != LEASE for entry in self.storage.entries())

    def remove(self, part: str = "") -> None:
        """Remove all of it, or a part of the folder and then the rest if no other run has left anything."""
        if part:
            shutil.rmtree(self.folder / part, ignore_errors=True)
            if self.worth_keeping:
                return
        self.lease.abandon()
        self.storage.delete_all("")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def exclusive(output: str | Path, source: Index | None = None) -> Iterator[Work]:
    """Take the work of an output for this run alone.

    Parameters
    ----------
    output : str or Path
    source : Index, optional
        What the run starts from.

    Yields
    ------
    Work

    Raises
    ------
    LeaseHeldError
        If another run works on this output.
    UsageError
        If another run has replaced ``source`` since it was opened.
    StorageError
        If S3 cannot be reached or written to, or does not honour conditions.
    HippoIndexError
        If the machine fails the work, such as by a full disk.
    """
    storage, folder = open_storage(work_url(output)), work_folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    if is_remote(output):
        storage.check()
    with Lease.acquire(storage, " ".join(sys.argv), LEASE_TTL_S, name=LEASE) as lease:
        held = open_storage(output).read(MANIFEST) if is_remote(output) else None
        if source is not None and not _is_current(source, held):
            raise UsageError(f"{source.url} was changed by another run in the meantime: start again")
        work = Work(str(output), storage, folder, lease, held)
        try:
            yield work
        except HippoIndexError:
            if not work.worth_keeping:
                work.remove()
            raise
        except OSError as error:
            raise HippoIndexError(
                f"The work on {output} was stopped: {error}. What was done is kept in {storage.url}: "
                "mend the cause, such as a full disk, and run again"
            ) from error


def work_url(output: str | Path) -> str:
    """Return where the work on an output is kept."""
    return f"{str(output).rstrip('/')}.work" if is_remote(output) else str(work_folder(output))


def work_folder(output: str | Path) -> Path:
    """Return the folder of this machine for the work on an output; in the cache where that is on S3."""
    if is_remote(output):
        url = str(output).rstrip("/")
        return cache_root() / "work" / hashlib.sha256(url.encode()).hexdigest()[:16]
    path = Path(output)
    return path.with_name(path.name + ".work")


def _is_current(source: Index, held: Content | None) -> bool:
    if is_remote(source.url):
        return held is not None and held.data == (source.path / MANIFEST).read_bytes()
    return open_index(source.path).manifest == source.manifest
