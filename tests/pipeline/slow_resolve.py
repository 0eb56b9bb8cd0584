"""The slow references of resolve, merge and graph: rows as dictionaries, whole tables, scipy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.graph import EdgeCounts
from hippoindex.pipeline.normalise import fact_id, normaliser, phrase_id
from hippoindex.pipeline.resolve import RESOLVED
from hippoindex.pipeline.stage import quarantine_table


def resolve(table: pa.Table, config: GraphConfig) -> tuple[pa.Table, pa.Table]:
    """What :class:`ResolveStage` makes of a shard, row by row; the rows and the quarantine."""
    quarantine: list[dict[str, object]] = []
    rows = [_resolve_row(row, config, quarantine) for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, schema=RESOLVED), quarantine_table(quarantine)


def _resolve_row(
    row: dict[str, Any], config: GraphConfig, quarantine: list[dict[str, object]]
) -> dict[str, Any]:
    normalise = normaliser(config.normalisation)
    mentions: Counter[str] = Counter()
    facts = []
    for triple in row["triples"]:
        subject, predicate, obj = (normalise(triple[key]) for key in ("subject", "predicate", "object"))
        if not subject or not obj:
            reason, raw = "an end of the triple is empty after normalisation", str(list(triple.values()))
            quarantine.append(
                schemas.quarantine_row("resolve", row["passage_id"], reason, raw, kind="triple")
            )
            continue
        mentions.update((subject, obj))
        ends = phrase_id(subject), phrase_id(obj)
        values = fact_id(ends[0], predicate, ends[1]), ends[0], predicate, ends[1]
        facts.append(dict(zip(("fact_id", "subject_id", "predicate", "object_id"), values, strict=True)))
    if config.ner_nodes:
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
class Whole:
    """A resolution in memory."""

    phrases: pa.Table
    facts: pa.Table
    fact_ends: np.ndarray
    occurrence: sp.csr_matrix
    n_triples: int


def merge(tables: Sequence[pa.Table], passage_ids: pa.Array) -> Whole:
    table = pa.concat_tables([RESOLVED.empty_table(), *tables])
    mention_ids = _flat(table["phrase_ids"]).to_numpy()
    mention_passages = pc.list_parent_indices(table["phrase_ids"].combine_chunks()).to_numpy()
    ids, first, mention_phrases = np.unique(mention_ids, return_index=True, return_inverse=True)
    counts = _flat(table["counts"]).to_numpy()
    occurrence = sp.csr_matrix(
        (counts, (mention_phrases, mention_passages)), shape=(len(ids), table.num_rows), dtype=np.int32
    )
    occurrence.sort_indices()
    texts = _flat(table["phrases"]).take(pa.array(first))
    passage_counts = pa.array(np.diff(occurrence.indptr).astype(np.int32))
    phrases = pa.table([pa.array(ids), texts, passage_counts], schema=schemas.PHRASE)
    facts, n_triples = _merge_facts(table["facts"], passage_ids)
    ends = [np.searchsorted(ids, facts[name].to_numpy()) for name in ("subject_id", "object_id")]
    return Whole(phrases, facts, np.stack(ends, axis=1).astype(np.int64), occurrence, n_triples)


def _merge_facts(column: pa.ChunkedArray, passage_ids: pa.Array) -> tuple[pa.Table, int]:
    records = _flat(column)
    passages = pc.list_parent_indices(column.combine_chunks()).to_numpy()
    extracted = records.field("fact_id").to_numpy()
    ids, first, inverse = np.unique(extracted, return_index=True, return_inverse=True)
    pairs = np.unique(np.stack([inverse, passages], axis=1), axis=0)  # (distinct fact, passage) pairs
    offsets = np.searchsorted(pairs[:, 0], np.arange(len(ids) + 1))
    holders = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), passage_ids.take(pa.array(pairs[:, 1])))
    columns = [records.field(name).take(pa.array(first)) for name in ("subject_id", "predicate", "object_id")]
    counts = np.bincount(inverse, minlength=len(ids)).astype(np.int32)
    table = pa.table([pa.array(ids), *columns, pa.array(counts), holders], schema=schemas.FACT)
    return table, len(extracted)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks().flatten()


def write(whole: Whole, folder: Path) -> None:
    """Write ``phrases/``, ``facts/`` and ``occurrence/``, a part after the other from whole tables."""
    for name in ("phrases", "facts"):
        table = getattr(whole, name)
        (folder / name).mkdir(parents=True)
        for number, start in enumerate(range(0, max(table.num_rows, 1), artifact.ROWS_PER_FILE)):
            part = table.slice(start, artifact.ROWS_PER_FILE).combine_chunks()
            file = folder / name / f"part-{number:05d}.parquet"
            pa.parquet.write_table(part, file, compression="zstd")
    matrix = whole.occurrence
    artifact.write_arrays(
        folder / "occurrence",
        indptr=matrix.indptr.astype(np.int64),
        indices=matrix.indices.astype(np.int32),
        counts=matrix.data,
    )


def build_graph(whole: Whole, synonyms: Pairs, config: GraphConfig) -> tuple[Graph, EdgeCounts]:
    n_phrases, n_passages = whole.occurrence.shape
    ends, counts = whole.fact_ends, whole.facts["count"].to_numpy()
    facts = Graph.from_edges(n_phrases, ends[:, 0], ends[:, 1], counts)
    fact_edges = sp.triu(facts.matrix(np.float64), format="coo")
    low, high, weight = fact_edges.row, fact_edges.col, fact_edges.data
    cosine = synonyms.cosine.astype(np.float64)
    if config.weights == "hipporag":
        is_synonym = np.isin(low * np.int64(n_phrases) + high, synonyms.first * n_phrases + synonyms.second)
        low, high, weight = low[~is_synonym], high[~is_synonym], 2.0 * weight[~is_synonym]
        cosine = 2.0 * cosine
    mentions = whole.occurrence.tocoo()
    graph = Graph.from_edges(
        n_phrases + n_passages,
        np.concatenate([low, synonyms.first, mentions.row]),
        np.concatenate([high, synonyms.second, mentions.col.astype(np.int64) + n_phrases]),
        np.concatenate([weight, cosine, np.ones(mentions.nnz)]),
    )
    return graph, EdgeCounts(facts.n_edges, len(synonyms.first), mentions.nnz, graph.n_edges)
