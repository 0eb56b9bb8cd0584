"""The index on disk: writing, opening, checking. ``docs/artifact.md`` is its specification."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import scipy.sparse as sp
from numpy.typing import DTypeLike, NDArray
from pydantic import Field

from hippoindex.errors import ArtifactError, UsageError
from hippoindex.kernels.coverage import Cells
from hippoindex.kernels.nearest import NearestRows
from hippoindex.kernels.ppr import Graph, Pusher
from hippoindex.kernels.ppr.affine import DenseRestart
from hippoindex.kernels.simjoin import KeptLists
from hippoindex.pipeline.config import Section
from hippoindex.pipeline.normalise import phrase_id
from hippoindex.pipeline.pairs import PassagePairs
from hippoindex.pipeline.remote import fetch, is_remote
from hippoindex.reader import MANIFEST as MANIFEST
from hippoindex.reader import SCHEMA_VERSION as SCHEMA_VERSION
from hippoindex.reader import Reader, check_sizes, load_manifest

CHECKSUMS = "SHA256SUMS"
TIMED = ("report.html", "stats.json")
"""Files that hold times, and so differ between two runs on the same input."""
UNCOVERED = frozenset({MANIFEST, CHECKSUMS, *TIMED})
"""Files that the manifest does not list."""
ROWS_PER_FILE = 1_000_000
VECTOR_ROWS = 1 << 16
KEPT_VECTORS_BYTES = 512 * 2**20
VECTOR_KINDS = ("passages", "phrases", "facts")
TRANSITION = "ppr/transition.npy"
LIST_ARRAYS = ("axes", "centroids", "owner", "sketches")


class FileEntry(Section):
    """Size and SHA-256 of a file of the index."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Counts(Section):
    """What went in and what came out. :meth:`check` says how they add up."""

    files: int
    records: int
    documents: int
    duplicates: int
    quarantined_records: int
    passages_made: int
    quarantined_passages: int
    passages: int
    passages_without_extraction: int
    passages_without_triples: int
    triples_extracted: int
    triples_rejected: int
    triples: int
    facts: int
    phrases: int
    fact_edges: int
    synonym_edges: int
    passage_edges: int
    graph_edges: int

    def check(self) -> None:
        """Raise :class:`ArtifactError` unless nothing was lost on the way."""
        sums = {
            "records = documents + duplicates + quarantined_records": (
                self.records,
                self.documents + self.duplicates + self.quarantined_records,
            ),
            "passages_made = passages + quarantined_passages": (
                self.passages_made,
                self.passages + self.quarantined_passages,
            ),
            "triples_extracted = triples + triples_rejected": (
                self.triples_extracted,
                self.triples + self.triples_rejected,
            ),
        }
        for rule, (left, right) in sums.items():
            if left != right:
                raise ArtifactError(f"Counts do not add up: {rule} is {left} = {right}")


class Manifest(Section):
    """``manifest.json``: everything but times. Two runs on the same input write the same bytes."""

    schema_version: int
    generator: str
    corpus_fingerprint: str
    parent: str | None
    config: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    counts: Counts
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Index:
    """An opened index. Tables and arrays are read when first used; arrays are memory-mapped.

    Attributes
    ----------
    path : Path
        Folder of its files.
    manifest : Manifest
    url : str
        Where it was opened: that folder, or an S3 prefix whose files were fetched into it.
    """

    path: Path
    manifest: Manifest
    url: str

    @cached_property
    def reader(self) -> Reader:
        """The same files, for going through them in blocks; it keeps nothing in memory."""
        return Reader(self.path, self.manifest.model_dump())

    @cached_property
    def passages(self) -> pa.Table:
        """Passages in node order, ``schemas.PASSAGE``."""
        return self._table("passages")

    @cached_property
    def documents(self) -> pa.Table:
        """Documents that were read, in order, ``schemas.DOCUMENT``."""
        return self._table("documents")

    @cached_property
    def extractions(self) -> pa.Table:
        """What was extracted from each passage, row by row, ``schemas.EXTRACTION``."""
        return self._table("extractions")

    @cached_property
    def phrases(self) -> pa.Table:
        """Phrases in node order, ``schemas.PHRASE``."""
        return self._table("phrases")

    @cached_property
    def facts(self) -> pa.Table:
        """Facts, ``schemas.FACT``."""
        return self._table("facts")

    @cached_property
    def synonyms(self) -> pa.Table:
        """Synonym edges, ``schemas.SYNONYM``."""
        return self._table("synonyms")

    @cached_property
    def quarantine(self) -> pa.Table:
        """What could not be processed, ``schemas.QUARANTINE``."""
        return self._table("quarantine")

    @cached_property
    def graph(self) -> Graph:
        """The whole graph: phrase nodes first, then passage nodes."""
        graph = Graph(*(self._array(f"graph/{name}.npy") for name in ("indptr", "indices", "weights")))
        return graph.with_transition(self._array(TRANSITION)) if TRANSITION in self.manifest.files else graph

    @property
    def precomputed_damping(self) -> float | None:
        """The damping for which ``ppr/`` holds the passages' part of PPR; ``None`` where there is none."""
        damping = self.manifest.stages.get("precompute", {}).get("damping")
        return None if damping is None else float(damping)

    @cached_property
    def dense_restart(self) -> DenseRestart:
        """The precomputed passages' part of PPR, memory-mapped; see :attr:`precomputed_damping`."""
        return DenseRestart(
            self.float_vectors("passages"), self._widened(self._array("ppr/z.npy")), self._array("ppr/z1.npy")
        )

    @property
    def synonym_lists(self) -> KeptLists | None:
        """What the synonym join has kept for appending, memory-mapped; ``None`` where it compared all."""
        kept = self.manifest.stages["synonyms"].get("kept_lists")
        if kept is None:
            return None
        arrays: dict[str, Any] = {name: self._array(f"lists/{name}.npy") for name in LIST_ARRAYS}
        return KeptLists(**arrays, **kept)

    def pusher(self, damping: float, *, phrases_only: bool = False, synonyms: bool = True) -> Pusher:
        """Return what pushes over the graph; it is made once and keeps its memory.

        Parameters
        ----------
        damping : float
        phrases_only : bool
            Whether to walk phrases alone and rank them, instead of the whole graph and its passages.
        synonyms : bool
            Whether to follow synonym edges.
        """
        key = damping, phrases_only, synonyms
        if key not in self._pushers:
            graph = self.walked_graph(phrases_only=phrases_only, synonyms=synonyms)
            candidates = None if phrases_only else (self.n_phrases, graph.n_nodes)
            self._pushers[key] = Pusher(graph, damping, candidates=candidates)
        return self._pushers[key]

    @cached_property
    def _pushers(self) -> dict[tuple[float, bool, bool], Pusher]:
        return {}

    def walked_graph(self, *, phrases_only: bool = False, synonyms: bool = True) -> Graph:
        """Return the whole graph or the phrases' alone, with or without synonym edges."""
        if synonyms:
            return self.phrase_graph if phrases_only else self.graph
        graph = self._graph_without_synonyms
        return graph.head(self.n_phrases) if phrases_only else graph

    @cached_property
    def _graph_without_synonyms(self) -> Graph:
        """Facts and mentions alone, with the weights that ``graph.weights`` gives them."""
        doubled = 2.0 if self.manifest.config["graph"]["weights"] == "hipporag" else 1.0
        subjects, objects = self.fact_ends.T
        mentions = slice(self.graph.indptr[self.n_phrases], None)
        passages = np.arange(self.n_phrases, self.graph.n_nodes)
        return Graph.from_edges(
            self.graph.n_nodes,
            np.concatenate([subjects, self.graph.indices[mentions]]),
            np.concatenate([objects, passages.repeat(np.diff(self.graph.indptr[self.n_phrases :]))]),
            np.concatenate([doubled * self.facts["count"].to_numpy(), self.graph.weights[mentions]]),
        )

    @cached_property
    def phrase_graph(self) -> Graph:
        """The graph of phrases alone, as HippoRAG 1 walks it."""
        return self.graph.head(self.n_phrases)

    @cached_property
    def occurrence(self) -> sp.csr_matrix:
        """Mentions of phrases in passages, shape (phrases, passages), int32."""
        indptr, indices, counts = (
            self._array(f"occurrence/{n}.npy") for n in ("indptr", "indices", "counts")
        )
        return sp.csr_matrix((counts, indices, indptr), shape=(self.n_phrases, self.n_passages))

    @cached_property
    def held(self) -> sp.csr_matrix:
        """1 where a passage holds a phrase, shape (phrases, passages), float32."""
        return (self.occurrence > 0).astype(np.float32)

    @cached_property
    def mentions_of_passages(self) -> tuple[sp.csr_array, NDArray[np.float64]]:
        """1 where a passage holds a phrase, shape (passages, phrases), float64, and the number of them."""
        held: Any = self.held.T.tocsr().astype(np.float64)
        return sp.csr_array(held), np.diff(held.indptr).astype(np.float64)

    @cached_property
    def held_per_fact(self) -> sp.csr_matrix:
        """Distinct facts of a passage that have a phrase as an end, shape (phrases, passages), float32."""
        holders = self.facts["passage_ids"].combine_chunks()
        facts = np.repeat(np.arange(len(holders)), holders.value_lengths().to_numpy())
        rows = {name: row for row, name in enumerate(self.passages["passage_id"].to_pylist())}
        columns = np.array([rows[name] for name in holders.flatten().to_pylist()], dtype=np.int64)
        subjects, objects = self.fact_ends[facts].T
        apart = subjects != objects
        phrases = np.concatenate([subjects, objects[apart]])
        ones = np.ones(len(phrases), dtype=np.float32)
        passages = np.concatenate([columns, columns[apart]])
        return sp.csr_matrix((ones, (phrases, passages)), shape=(self.n_phrases, self.n_passages))

    @property
    def titles(self) -> NDArray[np.integer]:
        """Phrase row of the title of each passage, -1 where it holds no such phrase, shape (passages,)."""
        return self._array("graph/titles.npy")

    @cached_property
    def words(self) -> pa.Table:
        """Words of the passages, ``schemas.WORD``."""
        return self._table("words")

    @cached_property
    def passage_words(self) -> Cells:
        """Rows of :attr:`words` of each passage, ascending."""
        return Cells(self._array("passage_words/indptr.npy"), self._array("passage_words/indices.npy"))

    @cached_property
    def pairs(self) -> PassagePairs:
        """The passages that name each other, and the words that they have.

        Raises
        ------
        ArtifactError
            If the index was built by a version that did not store words.
        """
        if "words" not in self.reader.tables:
            raise ArtifactError(
                f"{self.path} does not hold the words of its passages: build it again, or set "
                "retrieve.pair_weight=0"
            )
        graph = self.graph
        return PassagePairs(
            self.words,
            self.passage_words,
            Cells(graph.indptr[self.n_phrases :], graph.indices),
            Cells(self._array("occurrence/indptr.npy"), self._array("occurrence/indices.npy")),
            self.titles,
            self.phrases["phrase"],
        )

    @cached_property
    def passage_counts(self) -> NDArray[np.int32]:
        """Passages that hold each phrase, shape (phrases,), at least 1."""
        return self.phrases["passage_count"].to_numpy()

    def phrase_rows(self, phrases: Sequence[str]) -> NDArray[np.int64]:
        """Return the row of each normalised phrase, -1 where it is not in the index."""
        ids = self.phrases["phrase_id"].to_numpy()
        wanted = np.array([phrase_id(phrase) for phrase in phrases], dtype=np.uint64)
        rows = np.searchsorted(ids, wanted)
        found = np.zeros(len(wanted), dtype=bool)
        inside = rows < len(ids)
        found[inside] = ids[rows[inside]] == wanted[inside]
        return np.where(found, rows, -1).astype(np.int64)

    @cached_property
    def fact_ends(self) -> NDArray[np.int64]:
        """Phrase rows of subject and object of each fact, shape (facts, 2)."""
        ids = self.phrases["phrase_id"].to_numpy()
        ends = [np.searchsorted(ids, self.facts[name].to_numpy()) for name in ("subject_id", "object_id")]
        return np.stack(ends, axis=1).astype(np.int64)

    @property
    def n_phrases(self) -> int:
        """Number of phrase nodes."""
        return self.manifest.counts.phrases

    @property
    def n_passages(self) -> int:
        """Number of passage nodes."""
        return self.manifest.counts.passages

    def vectors(self, kind: str) -> NDArray[np.floating]:
        """Return the vectors of "passages", "phrases" or "facts", shape (rows, dimension), memory-mapped."""
        if kind not in VECTOR_KINDS:
            raise UsageError(
                f"There are no vectors of {kind!r}; there are those of {', '.join(VECTOR_KINDS)}"
            )
        return self._array(f"vectors/{kind}.npy")

    def float_vectors(self, kind: str) -> NDArray[np.float32]:
        """Return the vectors of a kind in float32; they are kept where they take at most 512 MiB."""
        if kind not in self._float_vectors:
            wide = self.vectors(kind).astype(np.float32, copy=False)
            if wide.nbytes > KEPT_VECTORS_BYTES:
                return wide
            self._float_vectors[kind] = wide
        return self._float_vectors[kind]

    def nearest_rows(self, kind: str) -> NearestRows:
        """Return what finds the nearest vectors of a kind; it is made once and keeps its memory."""
        if kind not in self._nearest_rows:
            self._nearest_rows[kind] = NearestRows(self.vectors(kind))
        return self._nearest_rows[kind]

    @cached_property
    def _nearest_rows(self) -> dict[str, NearestRows]:
        return {}

    @cached_property
    def _float_vectors(self) -> dict[str, NDArray[np.float32]]:
        return {}

    def verify(self) -> None:
        """Check everything that :func:`hippoindex.pipeline.verify.verify_index` checks.

        Raises
        ------
        ArtifactError
            Naming the first fault, and how many more there are.
        """
        from hippoindex.pipeline.verify import verify_index

        verify_index(self.path).require_sound()

    def _table(self, name: str) -> pa.Table:
        return self.reader.table(name).combine_chunks()

    @staticmethod
    def _widened(array: NDArray) -> NDArray:
        """Return an array in float32 unless that would take too much memory."""
        return array.astype(np.float32, copy=False) if 4 * array.size <= KEPT_VECTORS_BYTES else array

    def _array(self, name: str) -> NDArray:
        return self.reader.array(name.removesuffix(".npy"))


def open_index(path: str | Path) -> Index:
    """Open an index. One on S3 is fetched into the cache first, what was fetched before excepted.

    Parameters
    ----------
    path : str or Path
        Folder, or ``s3://bucket/prefix``.

    Returns
    -------
    Index

    Raises
    ------
    ArtifactError
        If there is no complete index of this schema version, or a file is missing, has another size, or lies
        outside the index.
    """
    folder = fetch(str(path)) if is_remote(path) else Path(path)
    content = load_manifest(folder)
    manifest = parse_manifest(folder, content)
    check_sizes(folder, content["files"])
    return Index(folder, manifest, str(path))


def parse_manifest(folder: Path, content: Mapping[str, Any]) -> Manifest:
    """Return the content of a manifest, which :func:`hippoindex.reader.load_manifest` has read, as one.

    Raises
    ------
    ArtifactError
        If a field is missing, unknown or of another type.
    """
    try:
        return Manifest.model_validate(content)
    except pydantic.ValidationError as error:
        raise ArtifactError(
            f"{folder / MANIFEST} is not a manifest of version {SCHEMA_VERSION}: {error}"
        ) from error


class TableWriter:
    """Context manager that writes a table of any length as ``part-NNNNN.parquet`` files.

    A part has :data:`ROWS_PER_FILE` rows, the last one what is left; a table without rows has one part. The
    bytes do not depend on how the table is cut into what is appended. Parts are written in another thread,
    one at a time.

    Parameters
    ----------
    folder : Path
        It is made.
    schema : pyarrow.Schema
        Of what is appended.
    finish : callable, optional
        Turns the rows of a part into what is written.
    """

    def __init__(
        self, folder: Path, schema: pa.Schema, finish: Callable[[pa.Table], pa.Table] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._schema = schema
        self._finish = finish
        self._waiting: list[pa.Table] = []
        self._n_waiting = 0
        self._n_parts = 0
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._background:
            if kind is None:
                if self._n_waiting or not self._n_parts:
                    self._write(self._n_waiting)
                self._wait()

    def append(self, table: pa.Table) -> None:
        """Append rows."""
        self._waiting.append(table)
        self._n_waiting += table.num_rows
        while self._n_waiting >= ROWS_PER_FILE:
            self._write(ROWS_PER_FILE)

    def flush(self) -> None:
        """Begin to write what is left; nothing may be appended then, and the end of ``with`` waits for it."""
        if self._n_waiting:
            self._write(self._n_waiting)

    def _write(self, n_rows: int) -> None:
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        part = table.slice(0, n_rows).combine_chunks()  # else bytes depend on how it was made
        self._waiting = [table.slice(n_rows)]
        self._n_waiting -= n_rows
        self._wait()
        file = self._folder / f"part-{self._n_parts:05d}.parquet"
        self._writing = self._background.submit(self._write_part, part, file)
        self._n_parts += 1

    def _write_part(self, part: pa.Table, file: Path) -> None:
        finished = part if self._finish is None else self._finish(part)
        pq.write_table(finished, file, compression="zstd")

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None


def write_parquet(table: pa.Table, folder: Path) -> None:
    """Write a table as ``part-NNNNN.parquet`` files of at most ``ROWS_PER_FILE`` rows (at least one file)."""
    with TableWriter(folder, table.schema) as writer:
        writer.append(table)


class ArrayWriter:
    """Context manager that writes an ``.npy`` whose length is known at the end; its bytes are ``np.save``'s.

    Parameters
    ----------
    file : Path
    dtype : dtype
    row_shape : tuple of int
        Shape of an element.

    Attributes
    ----------
    dtype : numpy.dtype
    n_rows : int
        Elements appended so far.
    """

    def __init__(self, file: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.dtype = np.dtype(dtype)
        self.n_rows = 0
        self._row_shape = row_shape
        self._file = file.open("w+b")
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()  # numpy leaves room for a longer first axis

    def append(self, array: NDArray) -> None:
        """Append elements, shape (n, *row_shape)."""
        self._file.write(np.ascontiguousarray(array, self.dtype).data)
        self.n_rows += len(array)

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.n_rows, *self._row_shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


def write_arrays(folder: Path, **arrays: NDArray) -> None:
    """Write each array as ``<name>.npy``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def new_array(file: Path, shape: tuple[int, ...], dtype: str) -> np.memmap[Any, Any]:
    """Return a new ``.npy``, memory-mapped for writing; its room on the disk is taken beforehand.

    Raises
    ------
    OSError
        If there is not enough. Without this, the process would be killed by a signal when it writes.
    """
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.dtype(dtype), shape=shape)
    if hasattr(os, "posix_fallocate"):
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def write_vectors(
    file: Path,
    parts: Iterable[pa.Table],
    dimension: int,
    dtype: str,
    places: NDArray[np.int64],
    held: NDArray[np.floating] | None = None,
) -> None:
    """Stream vectors into one ``.npy`` of shape (rows, dimension).

    Parameters
    ----------
    file : Path
    parts : iterable of pyarrow.Table
        With a column ``vector``: the rows that are not held, in order.
    dimension : int
    dtype : str
    places : ndarray of int64, shape (rows,)
        Row of ``held`` that each row is, -1 where it is none.
    held : ndarray, shape (H, dimension), optional

    Raises
    ------
    ArtifactError
        If there are more or fewer vectors than rows, or those held have another dimension.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if len(places) == 0:
        np.save(file, np.empty((0, dimension), dtype=dtype), allow_pickle=False)
        return
    out = new_array(file, (len(places), dimension), dtype)
    source = np.empty((0, dimension), dtype=dtype) if held is None else held
    if source.shape[1:] != (dimension,):
        raise ArtifactError(
            f"{file.name}: the index holds vectors of dimension {source.shape[1]}, not {dimension}"
        )
    known, fresh = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
    for start in range(0, len(known), VECTOR_ROWS):
        rows = known[start : start + VECTOR_ROWS]
        out[rows] = source[places[rows]]
    row = 0
    for part in parts:
        values = part["vector"].combine_chunks().flatten().to_numpy().reshape(-1, dimension)
        out[fresh[row : row + len(values)]] = values
        row += len(values)
    out.flush()
    if row != len(fresh):
        raise ArtifactError(f"{file.name}: {row} vectors for {len(fresh)} rows")


def write_manifest(folder: Path, **fields: Any) -> Manifest:
    """List and hash what lies in ``folder``, write ``manifest.json`` and return it. Call this last."""
    files = {name: file_entry(folder / name) for name in covered_files(folder)}
    manifest = Manifest(schema_version=SCHEMA_VERSION, files=files, **fields)
    manifest.counts.check()
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def write_checksums(folder: Path) -> None:
    """Write ``SHA256SUMS`` over all other files, for ``sha256sum --check``. Call this after everything else.

    Digests of the files that the manifest lists are taken from there.
    """
    digests = {name: entry["sha256"] for name, entry in load_manifest(folder)["files"].items()}
    for name in (MANIFEST, *TIMED):
        if (folder / name).is_file():
            digests[name] = file_entry(folder / name).sha256
    (folder / CHECKSUMS).write_text(checksums_text(digests), encoding="ascii")


def checksums_text(digests: Mapping[str, str]) -> str:
    """Return the content of ``SHA256SUMS``: digest and path of each file, sorted by path."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write :func:`json_text`."""
    file.write_text(json_text(content), encoding="utf-8")


def json_text(content: Mapping[str, Any]) -> str:
    """Return JSON with sorted keys, two spaces and a final newline."""
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def file_entry(file: Path) -> FileEntry:
    """Return size and SHA-256 of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return FileEntry(bytes=file.stat().st_size, sha256=digest.hexdigest())


def covered_files(folder: Path) -> Iterator[str]:
    """Yield the paths of the files in a folder that a manifest lists, sorted."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in UNCOVERED:
            yield name
