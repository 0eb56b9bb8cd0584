"""Reading an index with nothing but numpy and pyarrow; ``docs/artifact.md`` says what is in it.

A manifest may come from anywhere, so what it says is checked before a file is opened: its names are plain
paths inside the index, and no link leads out of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hippoindex.errors import ArtifactError, UsageError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TABLES = ("documents", "passages", "extractions", "phrases", "facts", "synonyms", "words", "quarantine")
BATCH_ROWS = 1 << 16

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_PLAIN_PATH = re.compile(rf"{_PART}(?:/{_PART})*")


@dataclass(frozen=True)
class Reader:
    """An opened index. Nothing is read before it is asked for, and nothing is kept.

    Attributes
    ----------
    path : Path
    manifest : dict
        Content of ``manifest.json``.
    """

    path: Path
    manifest: dict[str, Any] = field(repr=False)

    @property
    def tables(self) -> list[str]:
        """Names that :meth:`table` takes."""
        return [name for name in TABLES if table_parts(self.manifest["files"], name)]

    @property
    def arrays(self) -> list[str]:
        """Names that :meth:`array` takes, such as ``graph/indptr``."""
        return sorted(name.removesuffix(".npy") for name in self.manifest["files"] if name.endswith(".npy"))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a table, or some of its columns, in row order.

        Parameters
        ----------
        name : str
            One of :data:`TABLES`.
        columns : sequence of str, optional

        Returns
        -------
        pyarrow.Table

        Raises
        ------
        UsageError
            If the index has no such table.
        """
        return pa.concat_tables([file.read(columns=columns) for file in self._parts(name)])

    def batches(
        self, name: str, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Yield a table in row order, at most ``rows`` rows at a time; see :meth:`table`."""
        for file in self._parts(name):
            yield from file.iter_batches(batch_size=rows, columns=columns)

    def array(self, name: str) -> NDArray:
        """Return an array, memory-mapped and read-only.

        Parameters
        ----------
        name : str
            Its file without the ending: "graph/indptr", "vectors/passages".

        Returns
        -------
        ndarray

        Raises
        ------
        UsageError
            If the index has no such array.
        """
        file = f"{name}.npy"
        if file not in self.manifest["files"]:
            raise UsageError(f"{self.path} has no array {name!r}; it has {', '.join(self.arrays)}")
        array: NDArray = np.load(self.path / file, mmap_mode="r", allow_pickle=False)
        return array

    def _parts(self, name: str) -> Iterator[pq.ParquetFile]:
        parts = table_parts(self.manifest["files"], name)
        if name not in TABLES or not parts:
            raise UsageError(f"{self.path} has no table {name!r}; it has {', '.join(self.tables)}")
        for part in parts:
            with pq.ParquetFile(self.path / part, memory_map=True) as file:
                yield file


def open_reader(path: str | Path) -> Reader:
    """Open an index for reading; also called ``hippoindex.open``.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Reader

    Raises
    ------
    ArtifactError
        If there is no complete index of this schema version, or a file is missing, has another size, or lies
        outside the index.
    UsageError
        If it is the URL of an object store.
    """
    if "://" in str(path):
        raise UsageError(f"Only folders are read here. Fetch the index first: hippoindex copy {path} FOLDER")
    folder = Path(path)
    manifest = load_manifest(folder)
    check_sizes(folder, manifest["files"])
    return Reader(folder, manifest)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json`` and check its schema version and every path in it.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    dict

    Raises
    ------
    ArtifactError
        If there is none, it is no manifest, is of another version, or names a file outside the index.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ArtifactError(f"{folder} is not an index: it has no {MANIFEST} (it is written last)")
    _check_inside(folder, MANIFEST)
    content = parse_manifest(file.read_bytes(), str(file))
    for name in content["files"]:
        _check_inside(folder, name)
    return content


def parse_manifest(data: bytes, where: str) -> dict[str, Any]:
    """Read the content of a ``manifest.json`` and check its schema version and every path in it.

    Parameters
    ----------
    data : bytes
    where : str
        What it was read from, for messages.

    Returns
    -------
    dict

    Raises
    ------
    ArtifactError
        As :func:`load_manifest`.
    """
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where} is not valid JSON: {error}") from error
    _check_version(where, content.get("schema_version") if isinstance(content, dict) else None)
    files = content.get("files")
    if not isinstance(files, dict):
        raise ArtifactError(f"{where} is not a manifest: it lists no files")
    for name, entry in files.items():
        if not _PLAIN_PATH.fullmatch(name):
            raise ArtifactError(f"{where} lists {name!r}, which is no plain path inside the index")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise ArtifactError(f"{where} does not say how many bytes {name} has")
    return content


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise :class:`ArtifactError` unless every listed file is there and has its size."""
    for name, entry in files.items():
        member = folder / name
        if not member.is_file() or member.stat().st_size != entry["bytes"]:
            raise ArtifactError(
                f"{member} is missing or does not have {entry['bytes']} bytes: restore or rebuild"
            )


def table_parts(files: Iterable[str], table: str) -> list[str]:
    """Return those of the files that are parts of a table, in the order in which they are read."""
    return sorted(name for name in files if name.startswith(f"{table}/") and name.endswith(".parquet"))


def _check_version(where: str, found: object) -> None:
    if type(found) is int and found == SCHEMA_VERSION:
        return
    newer = type(found) is int and found > SCHEMA_VERSION
    advice = "install a newer hippoindex" if newer else "it is damaged, or made by another program"
    raise ArtifactError(f"{where} has schema version {found}; this version reads {SCHEMA_VERSION}: {advice}")


def _check_inside(folder: Path, name: str) -> None:
    try:
        inside = (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ArtifactError(f"{folder / name} is a link that leads nowhere: {error}") from error
    if not inside:
        raise ArtifactError(f"{folder / name} is a link that leads out of the index")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return content
