"""Garbage: what runs that were killed and versions that were replaced have left beside an index.

Nothing here is needed by an index or seen by a reader of its present version. A reader that has opened the
version before still needs that version's objects on S3, so what is young stays.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import MANIFEST
from hippoindex.pipeline.remote import is_remote, referenced
from hippoindex.pipeline.work import LEASE, exclusive, work_url

DAY_S = 86400.0
VERSION, WORK, PART = "replaced version", "unfinished work", "part of a killed write"
"""Kinds of garbage."""


@dataclass(frozen=True)
class Garbage:
    """Something that no manifest refers to.

    Attributes
    ----------
    kind : str
    name : str
        Path or URL.
    size_bytes : int
        0 where it is not known.
    age_s : float
    """

    kind: str
    name: str
    size_bytes: int
    age_s: float


def collect(
    output: str | Path, *, older_than_s: float = DAY_S, work: bool = False, remove: bool = False
) -> list[Garbage]:
    """Find, and on demand remove, what is left beside an index or where one was to be.

    Parameters
    ----------
    output : str or Path
        Folder or S3 prefix.
    older_than_s : float
        Least age.
    work : bool
        Whether the work of a run that failed counts: a next run would go on from it.
    remove : bool
        Whether to remove what is found.

    Returns
    -------
    list of Garbage

    Raises
    ------
    LeaseHeldError
        If a run works on this output.
    UsageError
        If there is nothing at all.
    """
    there = open_storage(output).exists(MANIFEST) or _any(open_storage(work_url(output)))
    if not there and not any(_abandoned_folders(output)):
        raise UsageError(f"There is neither an index at {output} nor work on one")
    with exclusive(output) as own:
        found = list(_beside(output, work=work))
        old = [garbage for garbage in found if garbage.age_s > older_than_s]
        for garbage in old if remove else ():
            _remove(output, garbage)
        if not own.worth_keeping:
            own.remove()
    return old


def record(output: str | Path, found: list[Garbage], *, removed: bool) -> dict[str, Any]:
    """Return what was found, for JSON."""
    size_bytes = sum(garbage.size_bytes for garbage in found)
    items = [asdict(garbage) for garbage in found]
    return {"output": str(output), "removed": removed, "size_bytes": size_bytes, "garbage": items}


def _beside(output: str | Path, *, work: bool) -> Iterator[Garbage]:
    if is_remote(output):
        yield from _unreferenced(open_storage(output))
    else:
        yield from _abandoned_folders(output)
    storage = open_storage(work_url(output))
    for place in (storage, open_storage(output)) if is_remote(output) else (storage,):
        for upload in place.remove_stale_uploads(older_than_s=0, dry_run=True):
            yield Garbage(PART, f"{place.url}/{upload.name}", 0, upload.age_s)
    if work:
        for entry in storage.entries():
            if entry.name != LEASE:
                yield Garbage(WORK, f"{storage.url}/{entry.name}", entry.size_bytes, entry.age_s)


def _unreferenced(storage: Storage) -> Iterator[Garbage]:
    """Yield objects that the manifest does not refer to."""
    manifest = storage.read(MANIFEST)
    kept = referenced(manifest.data, f"{storage.url}/{MANIFEST}") if manifest is not None else set()
    for entry in storage.entries():
        if entry.name not in kept:
            yield Garbage(VERSION, f"{storage.url}/{entry.name}", entry.size_bytes, entry.age_s)


def _abandoned_folders(output: str | Path) -> Iterator[Garbage]:
    """Yield folders that a run was killed in, between assembling an index and giving it its name."""
    if is_remote(output):
        return
    target = Path(output).absolute()
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in sorted(target.parent.iterdir()) if target.parent.is_dir() else ():
        if pattern.fullmatch(path.name) and path.is_dir():
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Garbage(VERSION, str(path), size_bytes, time.time() - path.stat().st_mtime)


def _remove(output: str | Path, garbage: Garbage) -> None:
    if garbage.kind == VERSION and not is_remote(output):
        shutil.rmtree(garbage.name)
        return
    work = open_storage(work_url(output))
    storage = work if garbage.name.startswith(f"{work.url}/") else open_storage(output)
    name = garbage.name.removeprefix(f"{storage.url}/")
    if garbage.kind == PART:
        storage.remove_stale_uploads(name, older_than_s=0)
    else:
        storage.delete(name)


def _any(storage: Storage) -> bool:
    return next(storage.entries(), None) is not None
