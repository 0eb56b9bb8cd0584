"""Resolve: surface forms become phrases, facts and the phrase x passage count matrix.

The sharded part (:class:`ResolveStage`) normalises and hashes; :func:`merge` numbers. A phrase's id is the
64-bit hash of its normalised text and its number the rank of that id among all ids, so no string dictionary
has to be shared and the numbering does not depend on the order or the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.errors import HippoIndexError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.normalise import Normalise, fact_id, normaliser, phrase_id
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table

RESOLVED_FACT = pa.struct(
    [
        pa.field("fact_id", pa.uint64(), nullable=False),
        pa.field("subject_id", pa.uint64(), nullable=False),
        pa.field("predicate", pa.string(), nullable=False),
        pa.field("object_id", pa.uint64(), nullable=False),
    ]
)

#: One row per passage: its distinct phrases with their number of mentions, and its facts with repetitions.
RESOLVED = pa.schema(
    [
        pa.field("passage_id", pa.string(), nullable=False),
        pa.field("phrase_ids", pa.list_(pa.uint64()), nullable=False),
        pa.field("phrases", pa.list_(pa.string()), nullable=False),
        pa.field("counts", pa.list_(pa.int32()), nullable=False),
        pa.field("facts", pa.list_(RESOLVED_FACT), nullable=False),
    ]
)


class _Fact(NamedTuple):
    fact_id: int
    subject_id: int
    predicate: str
    object_id: int


@dataclass(frozen=True)
class ResolveStage:
    """Normalise the phrases of every passage and give them their ids.

    A mention is an end of a triple or, with ``ner_nodes``, a named entity. A triple one of whose ends is
    nothing but punctuation is quarantined; an entity like that is no phrase.
    """

    config: GraphConfig

    name = "resolve"
    version = 1
    reads = schemas.EXTRACTION
    writes = RESOLVED

    def key_part(self) -> Mapping[str, Any]:
        """Return the settings that decide phrases: normalisation and whether entities are nodes."""
        return self.config.model_dump(include={"normalisation", "ner_nodes"})

    def open(self) -> Process:
        """Return the stage's function."""
        normalise = normaliser(self.config.normalisation)

        def process(table: pa.Table) -> StageOutput:
            quarantine: list[dict[str, object]] = []
            rows = [self._resolve(row, normalise, quarantine) for row in table.to_pylist()]
            return StageOutput(pa.Table.from_pylist(rows, schema=RESOLVED), quarantine_table(quarantine))

        return process

    def _resolve(
        self, row: dict[str, Any], normalise: Normalise, quarantine: list[dict[str, object]]
    ) -> dict[str, object]:
        mentions: Counter[str] = Counter()
        facts = []
        for triple in row["triples"]:
            subject, predicate, obj = (normalise(triple[key]) for key in ("subject", "predicate", "object"))
            if not subject or not obj:
                raw = str(list(triple.values()))
                reason = "an end of the triple is empty after normalisation"
                quarantine.append(
                    schemas.quarantine_row(self.name, row["passage_id"], reason, raw, kind="triple")
                )
                continue
            mentions.update((subject, obj))
            ends = phrase_id(subject), phrase_id(obj)
            facts.append(_Fact(fact_id(ends[0], predicate, ends[1]), ends[0], predicate, ends[1])._asdict())
        if self.config.ner_nodes:
            mentions.update(phrase for phrase in map(normalise, row["entities"]) if phrase)
        phrases = sorted(mentions)
        return {
            "passage_id": row["passage_id"],
            "phrase_ids": [phrase_id(phrase) for phrase in phrases],
            "phrases": phrases,
            "counts": [mentions[phrase] for phrase in phrases],
            "facts": facts,
        }


@dataclass(frozen=True, eq=False)
class Resolution:
    """Everything numbered: rows are node numbers.

    Attributes
    ----------
    phrases : pyarrow.Table
        ``schemas.PHRASE``, sorted by id; row = node number.
    facts : pyarrow.Table
        ``schemas.FACT``, sorted by id.
    fact_ends : ndarray of int64, shape (F, 2)
        Phrase rows of subject and object.
    occurrence : scipy.sparse.csr_matrix of int32, shape (phrases, passages)
        Number of mentions (HippoRAG's P, section 2.3).
    n_triples : int
        Extractions of facts, repetitions included.
    """

    phrases: pa.Table
    facts: pa.Table
    fact_ends: NDArray[np.int64]
    occurrence: sp.csr_matrix
    n_triples: int


def merge(tables: Sequence[pa.Table], passage_ids: pa.Array) -> Resolution:
    """Give the phrases and facts of all shards their numbers.

    Parameters
    ----------
    tables : sequence of pyarrow.Table
        Of schema ``RESOLVED``, in passage order.
    passage_ids : pyarrow.Array of string
        Passage ids in node order; the tables' rows are these, in this order.

    Returns
    -------
    Resolution

    Raises
    ------
    HippoIndexError
        If two different phrases or facts have the same 64-bit id.
    """
    table = pa.concat_tables(tables) if tables else RESOLVED.empty_table()
    if not table["passage_id"].combine_chunks().equals(passage_ids):
        raise HippoIndexError("Resolved shards do not hold the passages of the index in their order")
    mention_ids = _flat(table["phrase_ids"]).to_numpy()
    mention_passages = pc.list_parent_indices(table["phrase_ids"].combine_chunks()).to_numpy()
    ids, first, mention_phrases = np.unique(mention_ids, return_index=True, return_inverse=True)
    texts = _flat(table["phrases"])
    _refuse_collisions(mention_phrases, first, texts, "phrases")
    counts = _flat(table["counts"]).to_numpy()
    occurrence = sp.csr_matrix(
        (counts, (mention_phrases, mention_passages)), shape=(len(ids), table.num_rows), dtype=np.int32
    )
    occurrence.sort_indices()
    phrases = pa.table(
        [pa.array(ids), texts.take(pa.array(first)), pa.array(np.diff(occurrence.indptr).astype(np.int32))],
        schema=schemas.PHRASE,
    )
    facts, n_triples = _merge_facts(table["facts"], passage_ids)
    ends = [np.searchsorted(ids, facts[name].to_numpy()) for name in ("subject_id", "object_id")]
    return Resolution(phrases, facts, np.stack(ends, axis=1).astype(np.int64), occurrence, n_triples)


def combine(old: Resolution, new: Resolution) -> Resolution:
    """Join the resolutions of two sets of passages; the result is that of :func:`merge` over both.

    Parameters
    ----------
    old, new : Resolution
        The passages of ``new`` follow those of ``old``; none is in both.

    Returns
    -------
    Resolution

    Raises
    ------
    HippoIndexError
        If two different phrases or facts have the same 64-bit id.
    """
    table = pa.concat_tables([old.phrases, new.phrases]).combine_chunks()
    ids, first, place = np.unique(table["phrase_id"].to_numpy(), return_index=True, return_inverse=True)
    texts = table["phrase"].combine_chunks()
    _refuse_collisions(place, first, texts, "phrases")
    parts = []
    for matrix, rows in (
        (old.occurrence, place[: len(old.phrases)]),
        (new.occurrence, place[len(old.phrases) :]),
    ):
        cells = matrix.tocoo()
        parts.append(sp.csr_matrix((cells.data, (rows[cells.row], cells.col)), (len(ids), matrix.shape[1])))
    occurrence = sp.hstack(parts, format="csr", dtype=np.int32)
    occurrence.sort_indices()
    counts = pa.array(np.diff(occurrence.indptr).astype(np.int32))
    phrases = pa.table([pa.array(ids), texts.take(pa.array(first)), counts], schema=schemas.PHRASE)
    facts = _combined_facts(pa.concat_tables([old.facts, new.facts]).combine_chunks())
    ends = [np.searchsorted(ids, facts[name].to_numpy()) for name in ("subject_id", "object_id")]
    n_triples = old.n_triples + new.n_triples
    return Resolution(phrases, facts, np.stack(ends, axis=1).astype(np.int64), occurrence, n_triples)


def _combined_facts(table: pa.Table) -> pa.Table:
    """Make one row of the rows of each fact; passages keep their order."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    ids, first, place = np.unique(columns["fact_id"].to_numpy(), return_index=True, return_inverse=True)
    names = ("subject_id", "predicate", "object_id")
    for name in names:
        _refuse_collisions(place, first, columns[name], "facts")
    counts = np.bincount(place, weights=columns["count"].to_numpy(), minlength=len(ids)).astype(np.int32)
    holders = columns["passage_ids"]
    fact_of_holder = place[pc.list_parent_indices(holders).to_numpy()]
    offsets = np.zeros(len(ids) + 1, np.int32)
    np.cumsum(np.bincount(fact_of_holder, minlength=len(ids)), out=offsets[1:])
    order = pa.array(np.argsort(fact_of_holder, kind="stable"))
    lists = pa.ListArray.from_arrays(pa.array(offsets), holders.flatten().take(order))
    kept = [columns[name].take(pa.array(first)) for name in names]
    return pa.table([pa.array(ids), *kept, pa.array(counts), lists], schema=schemas.FACT)


def fact_texts(facts: pa.Table, fact_ends: NDArray[np.int64], phrases: pa.Array) -> pa.Array:
    """Return "subject predicate object" of every fact, the text that is embedded, shape (F,)."""
    subject, obj = (phrases.take(pa.array(fact_ends[:, end])) for end in (0, 1))
    return pc.binary_join_element_wise(subject, facts["predicate"].combine_chunks(), obj, " ")


def _merge_facts(column: pa.ChunkedArray, passage_ids: pa.Array) -> tuple[pa.Table, int]:
    records = _flat(column)
    passages = pc.list_parent_indices(column.combine_chunks()).to_numpy()
    extracted = records.field("fact_id").to_numpy()
    ids, first, inverse = np.unique(extracted, return_index=True, return_inverse=True)
    for name in ("subject_id", "predicate", "object_id"):
        _refuse_collisions(inverse, first, records.field(name), "facts")
    pairs = np.unique(np.stack([inverse, passages], axis=1), axis=0)  # (distinct fact, passage) pairs
    offsets = np.searchsorted(pairs[:, 0], np.arange(len(ids) + 1))
    holders = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), passage_ids.take(pa.array(pairs[:, 1])))
    columns = [records.field(name).take(pa.array(first)) for name in ("subject_id", "predicate", "object_id")]
    counts = np.bincount(inverse, minlength=len(ids)).astype(np.int32)
    table = pa.table([pa.array(ids), *columns, pa.array(counts), holders], schema=schemas.FACT)
    return table, len(extracted)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks().flatten()


def _refuse_collisions(group: NDArray, first: NDArray, values: pa.Array, what: str) -> None:
    """Every member of a group of equal ids must have the value of the group's first member."""
    differs = pc.not_equal(values, values.take(pa.array(first[group])))
    where = np.flatnonzero(differs.to_numpy(zero_copy_only=False))
    if len(where):
        a, b = values[int(where[0])].as_py(), values[int(first[group[where[0]]])].as_py()
        raise HippoIndexError(f"Two different {what} have the same 64-bit id: {a!r} and {b!r}")
