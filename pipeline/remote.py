"""An index on an object store, which has no folders to exchange: published by its manifest alone.

A file of the index is an object that carries the beginning of its SHA-256 in its name, so that two versions
of an index never write to the same object. The manifest is put last, under a condition: before it everybody
reads the old version, after it the new one. Files of the old one stay until they are collected
(:mod:`hippoindex.pipeline.collect`).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from hippoindex.cluster.atomic import atomic_directory
from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.cluster.storage_backend import Content, ObjectMissingError
from hippoindex.errors import ArtifactError, UsageError
from hippoindex.pipeline.models import cache_root
from hippoindex.reader import MANIFEST, parse_manifest

log = structlog.get_logger("hippoindex")

BESIDE = ("SHA256SUMS", "report.html", "stats.json")
"""Files that a manifest does not list; their objects are found by the SHA-256 of the manifest."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGITS = 16
_PARALLEL_FILES = 4
_ATTEMPTS = 3


def is_remote(url: str | Path) -> bool:
    """Tell an object store from a folder."""
    return isinstance(url, str) and "://" in url


def object_name(name: str, sha256: str) -> str:
    """Return the object of a file: of ``graph/indptr.npy``, ``graph/indptr.<16 digits of SHA-256>.npy``."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}.{sha256[:_DIGITS]}{path.suffix}"))


def referenced(manifest: bytes, where: str) -> set[str]:
    """Return the names of all objects of an index."""
    return {MANIFEST, *object_names(manifest, _files(manifest, where)).values()}


def object_names(manifest: bytes, files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the object of every file of an index, of those beside the manifest too."""
    named = {name: object_name(name, entry["sha256"]) for name, entry in files.items()}
    folder = f"runs/{hashlib.sha256(manifest).hexdigest()[:_DIGITS]}"
    return named | {name: f"{folder}/{name}" for name in BESIDE}


def publish(storage: Storage, folder: Path, held: Content | None) -> None:
    """Publish a folder that holds an index.

    Parameters
    ----------
    storage : Storage
    folder : Path
    held : Content or None
        The manifest that it replaces; ``None`` where there must be none.

    Raises
    ------
    UsageError
        If there is another manifest now; nothing that a reader sees is changed then.
    StorageError
    """
    manifest = _manifest_of(folder)
    names = object_names(manifest, _files(manifest, str(folder / MANIFEST)))
    there = {entry.name: entry.size_bytes for entry in storage.entries()}

    def upload(name: str) -> None:
        file = folder / name
        if there.get(names[name]) != file.stat().st_size:  # of its content, if its name says so
            storage.upload(file, names[name])

    _all_at_once(upload, [name for name in names if name not in BESIDE])
    for name in BESIDE:
        if (folder / name).is_file():
            storage.upload(folder / name, names[name])
    version = (
        storage.replace(MANIFEST, manifest, held.version) if held else storage.create(MANIFEST, manifest)
    )
    if version is None:
        raise UsageError(
            f"{storage.url} was changed by another run in the meantime: nothing was published. Start again"
        )


def fetch(url: str) -> Path:
    """Bring an index into the cache, where files of one content are kept once.

    Parameters
    ----------
    url : str

    Returns
    -------
    Path
        Folder of the index as it is now; it is not changed when the index is.

    Raises
    ------
    ArtifactError
        If there is no index, or an object of it is missing or has another content than the manifest says.
    StorageError
    """
    storage = open_storage(url)
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(storage)
        try:
            return _fetched(storage, manifest.data)
        except ObjectMissingError as error:  # by a collection, if the index has been replaced since
            missing = error
            if read_manifest(storage).version == manifest.version:
                break
    raise ArtifactError(f"{url} is not complete: {missing}") from missing


def copy(source: str | Path, target: str | Path) -> None:
    """Copy an index: from a folder to S3, back, or from one place on S3 to another.

    Parameters
    ----------
    source, target : str or Path
        Folders or S3 prefixes; there must be nothing at the target.

    Raises
    ------
    ArtifactError
        If there is no index at the source, or it is not complete.
    UsageError
        If there is an index at the target, or its folder is not empty.
    """
    folder = fetch(str(source)) if is_remote(source) else Path(source)
    names = [*_files(_manifest_of(folder), str(folder / MANIFEST)), MANIFEST]
    if is_remote(target):
        publish(open_storage(target), folder, None)
        return
    with atomic_directory(target) as made:
        for name in [*names, *(name for name in BESIDE if (folder / name).is_file())]:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, made / name)


def _manifest_of(folder: Path) -> bytes:
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(f"{folder} is not an index: it has no {MANIFEST} (it is written last)")
    return (folder / MANIFEST).read_bytes()


def read_manifest(storage: Storage) -> Content:
    """Return the manifest of an index.

    Raises
    ------
    ArtifactError
        If there is none.
    """
    content = storage.read(MANIFEST)
    if content is None:
        raise ArtifactError(f"{storage.url} is not an index: it has no {MANIFEST} (it is written last)")
    return content


def _fetched(storage: Storage, manifest: bytes) -> Path:
    cache = cache_root() / "indexes"
    target = cache / hashlib.sha256(manifest).hexdigest()[:32]
    if target.is_dir():
        return target
    files = _files(manifest, f"{storage.url}/{MANIFEST}")
    names = object_names(manifest, files)
    there = {entry.name for entry in storage.entries()}
    contents = cache / "contents"
    contents.mkdir(parents=True, exist_ok=True)
    log.info(
        "index is fetched", index=storage.url, files=len(files), bytes=sum(e["bytes"] for e in files.values())
    )

    def bring(name: str) -> None:
        sha256 = files[name]["sha256"]
        if not (contents / sha256).is_file():
            # A folder that was copied to the store file by file has the plain names.
            _download(storage, names[name] if names[name] in there else name, contents / sha256)

    one_of_each = {entry["sha256"]: name for name, entry in files.items()}
    _all_at_once(bring, one_of_each.values())
    with atomic_directory(target, replace=True) as folder:
        for name, entry in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).hardlink_to(contents / entry["sha256"])
        (folder / MANIFEST).write_bytes(manifest)
        for name in BESIDE:
            content = storage.read(names[name]) or storage.read(name)
            if content is not None:
                (folder / name).write_bytes(content.data)
    return target


def _files(manifest: bytes, where: str) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = parse_manifest(manifest, where)["files"]
    for name, entry in files.items():
        if not _SHA256.fullmatch(str(entry.get("sha256"))):
            raise ArtifactError(f"{where} does not say which SHA-256 {name} has")
    return files


def _download(storage: Storage, name: str, target: Path) -> None:
    """Download an object whose SHA-256 is the name of the target."""
    partial = target.with_name(f"{target.name}.part")
    storage.download(name, partial)
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != target.name:
        partial.unlink()
        raise ArtifactError(
            f"{storage.url}/{name} has the SHA-256 {found}, the manifest says {target.name}: restore or "
            "rebuild"
        )
    partial.replace(target)


def _all_at_once(function: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        for _ in pool.map(function, names):
            pass
