"""Merge: the phrases and facts of all shards get their numbers, in a bounded amount of memory.

What has equal ids is brought together by cutting the range of ids into partitions: shards are read block by
block, each block is sorted, and its rows go to the runs of their partitions. A partition fits in memory; as
partitions follow each other in the order of ids, whatever is made of one is appended to the files of the
result. With one partition nothing is written in between. The result does not depend on the cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hippoindex.errors import HippoIndexError
from hippoindex.kernels import ids as id_kernels
from hippoindex.kernels.ppr.graph import index_type
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.blocks import row_blocks
from hippoindex.pipeline.graph import Occurrence
from hippoindex.pipeline.resolve import RESOLVED
from hippoindex.pipeline.stage import read_table
from hippoindex.reader import Reader

TABLES = ("phrases", "facts", "occurrence")
"""Folders of a resolution that are folders of an index."""
ENDS = "ends"
WORKING_COPIES = 6
"""Memory that grouping a partition takes, in sizes of what is grouped."""
MAX_PARTITION_BYTES = 2**30
"""The offsets of a column of strings have 32 bits."""
MAX_PARTITIONS = 128
"""Each has four files open."""
BLOCK_SHARE = 16
"""Blocks are this part of the budget."""
MAX_BLOCK_BYTES, MAX_BLOCK_SHARDS = 2**26, 4096
HELD_CELL_BYTES, HELD_ROW_BYTES = 16, 64
"""Estimates for what an index holds: of a cell of the occurrence matrix, of a phrase or a fact."""

_FACT_COLUMNS = ("subject_id", "predicate", "object_id")
_ID = pa.field("id", pa.uint64(), nullable=False)
_PHRASE_VALUES = [schemas.PHRASE.field("phrase")]
_FACT_VALUES = [schemas.FACT.field(name) for name in _FACT_COLUMNS]
_CELL = pa.schema(
    [_ID, pa.field("passage", pa.int32(), nullable=False), pa.field("count", pa.int32(), nullable=False)]
)
_NUMBERED_FACT = pa.schema(
    [*list(schemas.FACT)[:-1], pa.field("passage_ids", pa.list_(pa.int32()), nullable=False)]
)
"""A fact with the numbers of its passages in place of their ids."""


@dataclass(frozen=True, eq=False)
class Resolution:
    """Everything numbered, in files: row numbers are node numbers.

    Attributes
    ----------
    tables : Reader
        Over ``phrases/``, ``facts/`` and ``occurrence/`` as they lie in an index.
    n_phrases, n_facts, n_passages : int
    n_triples : int
        Extractions of facts, repetitions included.
    """

    tables: Reader
    n_phrases: int
    n_facts: int
    n_passages: int
    n_triples: int

    @cached_property
    def phrases(self) -> pa.Table:
        """``schemas.PHRASE``, sorted by id, in memory; row = node number."""
        return self.tables.table("phrases").combine_chunks()

    @property
    def facts(self) -> pa.Table:
        """``schemas.FACT``, sorted by id; all of it is read."""
        return self.tables.table("facts").combine_chunks()

    @property
    def fact_ids(self) -> pa.ChunkedArray:
        """Ids of the facts, in order."""
        return self.tables.table("facts", ["fact_id"])["fact_id"]

    @property
    def fact_ends(self) -> NDArray[np.integer]:
        """Phrase rows of subject and object, memory-mapped, shape (facts, 2); not of an index."""
        return self._end_array("ends")

    @property
    def fact_counts(self) -> NDArray[np.int32]:
        """Extractions of each fact, memory-mapped, shape (facts,); not of an index."""
        return self._end_array("counts")

    @property
    def occurrence(self) -> Occurrence:
        """Which passages hold which phrases, memory-mapped (HippoRAG's P, section 2.3)."""
        indptr, indices = (self.tables.array(f"occurrence/{name}") for name in ("indptr", "indices"))
        return Occurrence(indptr, indices, self.n_passages)

    def fact_texts(self) -> Iterator[pa.Array]:
        """Yield "subject predicate object" of the facts, the text that is embedded, some at a time."""
        names, ends, start = self.phrases["phrase"], self.fact_ends, 0
        for batch in self.tables.batches("facts", ["predicate"]):
            rows = ends[start : start + batch.num_rows]
            subject, obj = (_dense(names.take(pa.array(rows[:, end]))) for end in (0, 1))
            yield pc.binary_join_element_wise(subject, batch["predicate"], obj, " ")
            start += batch.num_rows

    def move(self, folder: Path) -> None:
        """Move the files to where an index is assembled, on the same disk. Nothing can be read any more."""
        for name in TABLES:
            (self.tables.path / name).replace(folder / name)

    def _end_array(self, name: str) -> NDArray:
        array: NDArray = np.load(self.tables.path / ENDS / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return array


def merge(shards: Sequence[Path], passage_ids: pa.Array, folder: Path, *, memory_bytes: int) -> Resolution:
    """Give the phrases and facts of all shards their numbers.

    Parameters
    ----------
    shards : sequence of Path
        Of schema ``RESOLVED``, in passage order.
    passage_ids : pyarrow.Array of string
        Passage ids in node order; the shards' rows are these, in this order.
    folder : Path
        Written to; what is in it goes.
    memory_bytes : int
        Working memory to aim at, beside 8 bytes per phrase, the passage ids, and a part of ``facts/``
        (:data:`artifact.ROWS_PER_FILE` rows). It changes no byte.

    Returns
    -------
    Resolution

    Raises
    ------
    HippoIndexError
        If two different phrases or facts have the same 64-bit id, or the shards are of other passages.
    """
    size = sum(shard.stat().st_size for shard in shards)
    with _Merger(folder, passage_ids, size, memory_bytes) as merger:
        first = 0
        for table in _blocks(shards, min(memory_bytes // BLOCK_SHARE, MAX_BLOCK_BYTES)):
            if not _dense(table["passage_id"]).equals(passage_ids.slice(first, table.num_rows)):
                raise HippoIndexError("Resolved shards do not hold the passages of the index in their order")
            merger.add(table, first)
            first += table.num_rows
            del table  # before the next one is read
            pa.default_memory_pool().release_unused()
        if first != len(passage_ids):
            raise HippoIndexError("Resolved shards do not hold the passages of the index in their order")
        return merger.finish()


def combine(
    old: Resolution, new: Resolution, passage_ids: pa.Array, folder: Path, *, memory_bytes: int
) -> Resolution:
    """Join the resolutions of two sets of passages; the result is that of :func:`merge` over both.

    Parameters
    ----------
    old, new : Resolution
        The passages of ``new`` follow those of ``old``; none is in both.
    passage_ids : pyarrow.Array of string
        Of both, in node order.
    folder, memory_bytes
        As for :func:`merge`.

    Returns
    -------
    Resolution

    Raises
    ------
    HippoIndexError
        If two different phrases or facts have the same 64-bit id.
    """
    size = sum(
        HELD_CELL_BYTES * len(part.occurrence.indices) + HELD_ROW_BYTES * (part.n_phrases + part.n_facts)
        for part in (old, new)
    )
    with _Merger(folder, passage_ids, size, memory_bytes) as merger:
        merger.add_held(old, 0)
        merger.add_held(new, old.n_passages)
        return merger.finish()


class _Merger:
    """Takes shards or resolutions in passage order, and writes what they are together.

    Parameters
    ----------
    folder : Path
    passage_ids : pyarrow.Array
    n_bytes : int
        About what is going to be added.
    memory_bytes : int
    """

    def __init__(self, folder: Path, passage_ids: pa.Array, n_bytes: int, memory_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._passage_ids = passage_ids
        wanted = max(-(-n_bytes * WORKING_COPIES // memory_bytes), -(-n_bytes // MAX_PARTITION_BYTES))
        bits = (min(max(wanted, 1), MAX_PARTITIONS) - 1).bit_length()
        self._phrases = _Groups("phrases", _PHRASE_VALUES, folder / "runs", bits)
        self._facts = _Groups("facts", _FACT_VALUES, folder / "runs", bits)

    def __enter__(self) -> _Merger:
        return self

    def __exit__(self, *_: object) -> None:
        self._phrases.close()
        self._facts.close()
        shutil.rmtree(self._folder / "runs", ignore_errors=True)

    def add(self, table: pa.Table, first_passage: int) -> None:
        """Add rows of schema ``RESOLVED``; the passages are numbered from ``first_passage`` on."""
        mentions = {name: _dense(table[name]) for name in ("phrase_ids", "phrases", "counts", "facts")}
        ids, texts, counts, facts = (values.flatten() for values in mentions.values())
        holders = pc.list_parent_indices(mentions["phrase_ids"]).to_numpy() + first_passage
        with ThreadPoolExecutor(1) as beside:
            adding = beside.submit(self._add_facts, mentions["facts"], facts, first_passage)
            self._phrases.add(ids.to_numpy(), holders.astype(np.int32), counts.to_numpy(), [texts])
            adding.result()

    def _add_facts(self, lists: pa.Array, facts: pa.StructArray, first_passage: int) -> None:
        holders = pc.list_parent_indices(lists).to_numpy() + first_passage
        values = [facts.field(name) for name in _FACT_COLUMNS]
        once = np.ones(len(facts), np.int32)
        self._facts.add(facts.field("fact_id").to_numpy(), holders.astype(np.int32), once, values)

    def add_held(self, held: Resolution, first_passage: int) -> None:
        """Add a resolution; its passages are numbered from ``first_passage`` on."""
        for batch in held.tables.batches("phrases", ["phrase_id", "phrase"]):
            self._phrases.add_rows(batch["phrase_id"].to_numpy(), [batch["phrase"]])
        ids = held.phrases["phrase_id"].to_numpy()
        indptr, indices, _ = held.occurrence
        counts = held.tables.array("occurrence/counts")
        for start, stop in row_blocks(indptr):
            cells = slice(indptr[start], indptr[stop])
            repeated = np.repeat(ids[start:stop], np.diff(indptr[start : stop + 1]))
            self._phrases.add_cells(repeated, indices[cells] + np.int32(first_passage), counts[cells])
        known = self._passage_ids.slice(first_passage, held.n_passages)
        for batch in held.tables.batches("facts", rows=artifact.ROWS_PER_FILE):
            self._add_held_facts(batch, known, first_passage)

    def _add_held_facts(self, facts: pa.RecordBatch, known: pa.Array, first_passage: int) -> None:
        """Add facts of an index. How often each passage states one is not known: the first counts for all."""
        ids = facts["fact_id"].to_numpy()
        self._facts.add_rows(ids, [facts[name] for name in _FACT_COLUMNS])
        holders = pc.index_in(facts["passage_ids"].flatten(), value_set=known)
        if holders.null_count:
            raise HippoIndexError("A fact of the index names a passage that is not in it: build it anew")
        lengths = pc.list_value_length(facts["passage_ids"]).to_numpy()
        counts = np.zeros(len(holders), np.int32)
        counts[np.cumsum(lengths) - lengths] = facts["count"].to_numpy()
        self._facts.add_cells(np.repeat(ids, lengths), holders.to_numpy() + np.int32(first_passage), counts)

    def finish(self) -> Resolution:
        """Write the tables and arrays."""
        with artifact.TableWriter(self._folder / "phrases", schemas.PHRASE) as phrases:
            ids = self._write_phrases(phrases)
            phrases.flush()
            n_facts, n_triples = self._write_facts(ids)
        pa.default_memory_pool().release_unused()
        names: dict[str, Any] = {
            file.relative_to(self._folder).as_posix(): {}
            for table in TABLES
            for file in (self._folder / table).iterdir()
        }
        tables = Reader(self._folder, {"files": names})
        return Resolution(tables, len(ids), n_facts, len(self._passage_ids), n_triples)

    def _write_phrases(self, table: artifact.TableWriter) -> NDArray[np.uint64]:
        """Write phrases and the occurrence matrix; return the phrases' ids."""
        ids = [np.empty(0, np.uint64)]
        folder = self._folder / "occurrence"
        with ExitStack() as stack:
            indptr, indices, counts = (
                stack.enter_context(artifact.ArrayWriter(folder / f"{name}.npy", dtype))
                for name, dtype in (("indptr", np.int64), ("indices", np.int32), ("counts", np.int32))
            )
            indptr.append(np.zeros(1, np.int64))
            for group in self._phrases.partitions():
                passage_counts = np.diff(group.starts).astype(np.int32)
                table.append(
                    pa.table([pa.array(group.ids), *group.values, pa.array(passage_counts)], schemas.PHRASE)
                )
                indptr.append(indices.n_rows + group.starts[1:])
                indices.append(group.passages)
                counts.append(group.counts)
                ids.append(group.ids)
        return np.concatenate(ids)

    def _write_facts(self, phrase_ids: NDArray[np.uint64]) -> tuple[int, int]:
        """Write facts, their ends and counts; return their number and that of their extractions."""
        n_triples = 0
        folder = self._folder / ENDS
        with (
            artifact.TableWriter(self._folder / "facts", _NUMBERED_FACT, self._with_passage_ids) as table,
            artifact.ArrayWriter(folder / "ends.npy", index_type(len(phrase_ids)), (2,)) as ends,
            artifact.ArrayWriter(folder / "counts.npy", np.int32) as counts,
        ):
            for group in self._facts.partitions():
                totals = np.add.reduceat(group.counts, group.starts[:-1], dtype=np.int64).astype(np.int32)
                holders = pa.ListArray.from_arrays(group.starts.astype(np.int32), pa.array(group.passages))
                columns = [pa.array(group.ids), *group.values, pa.array(totals), holders]
                table.append(pa.table(columns, _NUMBERED_FACT))
                ends.append(_ends(phrase_ids, group.values[0], group.values[2]))
                counts.append(totals)
                n_triples += int(totals.sum(dtype=np.int64))
            n_facts = counts.n_rows
        return n_facts, n_triples

    def _with_passage_ids(self, part: pa.Table) -> pa.Table:
        holders = _dense(part["passage_ids"])
        names = self._passage_ids.take(holders.flatten())
        lengths = pc.list_value_length(holders).to_numpy()
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        lists = pa.ListArray.from_arrays(pa.array(offsets), names)
        return pa.table([*part.columns[:-1], lists], schemas.FACT)


def _ends(phrase_ids: NDArray[np.uint64], subjects: pa.Array, objects: pa.Array) -> NDArray[np.int64]:
    """Return the phrase rows of facts, shape (facts, 2)."""
    ends = [id_kernels.ranks(phrase_ids, side.to_numpy()) for side in (subjects, objects)]
    pairs = np.stack(ends, axis=1)
    if pairs.size and pairs.min() < 0:
        raise HippoIndexError("A fact names a phrase that no passage holds: a resolved shard is damaged")
    return pairs


class _Group(NamedTuple):
    """What has ids of one partition, sorted by id.

    Attributes
    ----------
    ids : ndarray of uint64, shape (n,)
        Distinct.
    values : list of pyarrow.Array, each of length n
    starts : ndarray of int64, shape (n + 1,)
        Where the cells of each id begin.
    passages, counts : ndarray of int32, shape (cells,)
        Passages ascend among those of one id.
    """

    ids: NDArray[np.uint64]
    values: list[pa.Array]
    starts: NDArray[np.int64]
    passages: NDArray[np.int32]
    counts: NDArray[np.int32]


class _Groups:
    """Rows (what an id stands for) and cells (in which passages it is), brought together by id.

    Parameters
    ----------
    what : str
        Phrases or facts.
    values : list of pyarrow.Field
        Columns of a row beside its id.
    folder : Path
        For runs, where there are several partitions.
    bits : int
        There are ``2**bits`` partitions.
    """

    def __init__(self, what: str, values: list[pa.Field], folder: Path, bits: int) -> None:
        self._what = what
        self._edges = np.arange(1, 2**bits, dtype=np.uint64) << np.uint64(64 - bits) if bits else None
        row = pa.schema([_ID, *values])
        if bits:
            folder.mkdir(exist_ok=True)

        def runs(kind: str, schema: pa.Schema) -> list[_Run]:
            files = (folder / f"{what}-{number:03d}.{kind}" if bits else None for number in range(2**bits))
            return [_Run(schema, file) for file in files]

        self._rows, self._cells = runs("rows", row), runs("cells", _CELL)

    def add(
        self,
        ids: NDArray[np.uint64],
        passages: NDArray[np.int32],
        counts: NDArray[np.int32],
        values: list[pa.Array],
    ) -> None:
        """Add mentions in passage order, the same passage in one call alone."""
        order, ids = id_kernels.stable_order(ids)
        groups = id_kernels.groups(ids, order)
        self.add_rows(groups.ids, self._first_of_each(groups, values))
        self.add_cells(*id_kernels.cells(ids, passages[order], counts[order]))

    def add_rows(self, ids: NDArray[np.uint64], values: list[pa.Array]) -> None:
        """Add rows with ascending distinct ids."""
        self._append(self._rows, ids, [pa.array(ids), *values])

    def add_cells(
        self, ids: NDArray[np.uint64], passages: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> None:
        """Add cells with ascending ids; passages ascend among those of one id."""
        self._append(self._cells, ids, [pa.array(ids), pa.array(passages), pa.array(counts)])

    def _append(self, runs: list[_Run], ids: NDArray[np.uint64], columns: list[pa.Array]) -> None:
        batch = pa.record_batch(columns, schema=runs[0].schema)
        if self._edges is None:
            runs[0].append(batch)
            return
        bounds = [0, *np.searchsorted(ids, self._edges).tolist(), len(ids)]
        for run, start, stop in zip(runs, bounds[:-1], bounds[1:], strict=True):
            if start < stop:
                run.append(batch.slice(start, stop - start))

    def partitions(self) -> Iterator[_Group]:
        """Yield what was added, in the order of ids; it is gone then."""
        for rows, cells in zip(self._rows, self._cells, strict=True):
            group = self._group(rows.take(), cells.take())
            if len(group.ids):
                yield group

    def _group(self, rows: pa.Table, cells: pa.Table) -> _Group:
        ids, values = rows["id"].to_numpy(), [_dense(rows[name]) for name in rows.column_names[1:]]
        if not id_kernels.ascending(ids):  # more than one run
            order, ids = id_kernels.stable_order(ids)
            groups = id_kernels.groups(ids, order)
            ids, values = groups.ids, self._first_of_each(groups, values)
        cell_ids, passages, counts = (cells[name].to_numpy() for name in cells.column_names)
        if not id_kernels.ascending(cell_ids, strictly=False):
            order, cell_ids = id_kernels.stable_order(cell_ids)
            passages, counts = passages[order], counts[order]
        starts = np.append(np.flatnonzero(id_kernels.begins(cell_ids)), len(cell_ids))
        if not np.array_equal(cell_ids[starts[:-1]], ids):
            raise HippoIndexError(
                f"There are {self._what} without a passage: the index is damaged, build it anew"
            )
        return _Group(ids, values, starts, passages, counts)

    def _first_of_each(self, groups: id_kernels.Groups, values: list[pa.Array]) -> list[pa.Array]:
        """Return the values of the first row of each group; the others must have the same."""
        others, firsts = pa.array(groups.others), pa.array(groups.first_of_others)
        for column in values if len(others) else ():
            differs = pc.not_equal(column.take(others), column.take(firsts))
            where = pc.index(differs, True).as_py()
            if where >= 0:
                a, b = (column[places[where].as_py()].as_py() for places in (firsts, others))
                raise HippoIndexError(f"Two different {self._what} have the same 64-bit id: {a!r} and {b!r}")
        places = pa.array(groups.firsts)
        return [column.take(places) for column in values]

    def close(self) -> None:
        """Close all files."""
        for run in (*self._rows, *self._cells):
            run.close()


class _Run:
    """Batches of one partition: in a file, or in memory where there is none."""

    def __init__(self, schema: pa.Schema, file: Path | None) -> None:
        self.schema = schema
        self._file = file
        self._batches: list[pa.RecordBatch] = []
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        if self._file is None:
            self._batches.append(batch)
            return
        if self._writer is None:
            self._sink = pa.OSFile(str(self._file), "wb")
            self._writer = pa.ipc.new_stream(self._sink, self.schema)
        self._writer.write_batch(batch)

    def take(self) -> pa.Table:
        """Return all batches in one; the run is empty then."""
        self.close()
        batches, self._batches = self._batches, []
        if self._file is not None and self._file.is_file():
            with pa.memory_map(str(self._file)) as source:
                table = pa.ipc.open_stream(source).read_all().combine_chunks()
            self._file.unlink()
            return table
        return pa.Table.from_batches(batches, schema=self.schema).combine_chunks()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None


def _blocks(shards: Sequence[Path], n_bytes: int) -> Iterator[pa.Table]:
    """Yield the rows of shards, as many whole shards together as have so many bytes, or one."""
    waiting: list[Path] = []
    size = 0
    for shard in shards:
        if waiting and (size + shard.stat().st_size > n_bytes or len(waiting) == MAX_BLOCK_SHARDS):
            yield _read(waiting)
            waiting, size = [], 0
        waiting.append(shard)
        size += shard.stat().st_size
    if waiting:
        yield _read(waiting)


def _read(shards: list[Path]) -> pa.Table:
    return pa.concat_tables([RESOLVED.empty_table(), *map(read_table, shards)]).combine_chunks()


def _dense(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array, copied only where it has several chunks."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
