"""The work folder beside an output: what an interrupted run leaves for the next one, one run at a time."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hippoindex.cluster.ledger import Lease
from hippoindex.cluster.storage import open_storage
from hippoindex.errors import HippoIndexError, UsageError
from hippoindex.pipeline.artifact import Index, open_index

LEASE = "lease.json"
LEASE_TTL_S = 30.0
"""A run that gives no sign of life for so long may be replaced by another one."""


@dataclass(frozen=True)
class Work:
    """The work folder of a run that nobody else can use now.

    Attributes
    ----------
    folder : Path
    lease : Lease
    """

    folder: Path
    lease: Lease

    def check(self) -> None:
        """Make sure, before publishing, that this is still so.

        Raises
        ------
        LeaseLostError
        """
        self.lease.check()

    @property
    def worth_keeping(self) -> bool:
        """Whether the next run would find anything here."""
        return any(path.is_file() and LEASE not in path.name for path in self.folder.rglob("*"))

    def remove(self, part: str = "") -> None:
        """Remove the folder, or a part of it and then the folder if no other run has left anything there."""
        if part:
            shutil.rmtree(self.folder / part)
            if any(path.is_dir() for path in self.folder.iterdir()):
                return
        self.lease.abandon()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def exclusive(output: Path, source: Index | None = None) -> Iterator[Work]:
    """Take the work folder of an output for this run alone.

    Parameters
    ----------
    output : Path
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
    HippoIndexError
        If the machine fails the work, such as by a full disk.
    """
    folder = output.with_name(output.name + ".work")
    folder.mkdir(parents=True, exist_ok=True)
    with Lease.acquire(open_storage(folder), " ".join(sys.argv), LEASE_TTL_S, name=LEASE) as lease:
        if source is not None and open_index(source.path).manifest != source.manifest:
            raise UsageError(f"{source.path} was changed by another run in the meantime: start again")
        work = Work(folder, lease)
        try:
            yield work
        except HippoIndexError:
            if not work.worth_keeping:
                work.remove()
            raise
        except OSError as error:
            raise HippoIndexError(
                f"The work on {output} was stopped: {error}. What was done is kept in {folder}: mend the "
                "cause, such as a full disk, and run again"
            ) from error
