"""Resolve: surface forms become phrases and facts with their ids, passage by passage.

A phrase's id is the 64-bit hash of its normalised text and its number the rank of that id among all ids
(``pipeline/merge.py``), so no string dictionary has to be shared and the numbering does not depend on the
order or the number of workers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.normalise import Normalise, fact_ids, normaliser, phrase_id
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table

SURFACES_KEPT = 1 << 16
"""Surface forms whose normalised text a worker remembers."""

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
        normalise = functools.lru_cache(SURFACES_KEPT)(normaliser(self.config.normalisation))

        def process(table: pa.Table) -> StageOutput:
            return self._resolve(table, normalise)

        return process

    def _resolve(self, table: pa.Table, normalise: Normalise) -> StageOutput:
        columns = {name: table[name].combine_chunks() for name in ("triples", "entities")}
        triples, entities = (column.flatten() for column in columns.values())
        triple_rows, entity_rows = (pc.list_parent_indices(c).to_numpy() for c in columns.values())
        ends = [triples.field(name) for name in ("subject", "predicate", "object")]
        texts, ranks = _normalised(pa.concat_arrays([*ends, entities]), normalise)
        subject, predicate, obj = ranks[: 3 * len(triples)].reshape(3, -1)
        entity = ranks[3 * len(triples) :]
        whole = (subject > 0) & (obj > 0)  # rank 0 is the empty text
        rejected = self._rejected(np.flatnonzero(~whole), triples, table["passage_id"], triple_rows)
        subject, predicate, obj, triple_rows = (a[whole] for a in (subject, predicate, obj, triple_rows))
        mentions, rows = [subject, obj], [triple_rows, triple_rows]
        if self.config.ner_nodes:
            mentions.append(entity[entity > 0])
            rows.append(entity_rows[entity > 0])
        cells, counts = np.unique(
            np.concatenate(rows) * len(texts) + np.concatenate(mentions), return_counts=True
        )
        held_by, phrases = np.divmod(cells, len(texts))
        ids = np.zeros(len(texts), np.uint64)
        for rank in np.unique(phrases).tolist():
            ids[rank] = phrase_id(texts[rank])
        facts = self._facts(texts, ids, subject, predicate, obj)
        by_mention = functools.partial(_lists, held_by, table.num_rows)
        resolved = [
            table["passage_id"],
            by_mention(pa.array(ids[phrases])),
            by_mention(pa.array(texts, pa.string()).take(pa.array(phrases))),
            by_mention(pa.array(counts.astype(np.int32))),
            _lists(triple_rows, table.num_rows, facts),
        ]
        return StageOutput(pa.table(resolved, schema=RESOLVED), quarantine_table(rejected))

    def _rejected(
        self, places: NDArray[np.int64], triples: pa.Array, passage_ids: pa.Array, rows: NDArray[np.int64]
    ) -> list[dict[str, object]]:
        reason = "an end of the triple is empty after normalisation"
        return [
            schemas.quarantine_row(
                self.name,
                passage_ids[int(rows[place])].as_py(),
                reason,
                str(list(triples[place].as_py().values())),
                kind="triple",
            )
            for place in places.tolist()
        ]

    def _facts(
        self,
        texts: list[str],
        ids: NDArray[np.uint64],
        subject: NDArray[np.int64],
        predicate: NDArray[np.int64],
        obj: NDArray[np.int64],
    ) -> pa.Array:
        """Return ``RESOLVED_FACT`` of triples whose ends and predicates are places of ``texts``."""
        predicates = pa.array(texts, pa.string()).take(pa.array(predicate))
        ends = ids[subject], ids[obj]
        columns = [fact_ids(*ends, predicates.to_pylist()), ends[0], predicates, ends[1]]
        arrays = [column if isinstance(column, pa.Array) else pa.array(column) for column in columns]
        return pa.StructArray.from_arrays(arrays, fields=list(RESOLVED_FACT))


def _normalised(surfaces: pa.Array, normalise: Normalise) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct normalised texts, sorted, the empty one first, and each surface form's place."""
    encoded = surfaces.dictionary_encode()
    normal = [normalise(surface) for surface in encoded.dictionary.to_pylist()]
    texts = sorted({"", *normal})
    place = {text: rank for rank, text in enumerate(texts)}
    ranks = np.array([place[text] for text in normal], np.int64)
    return texts, ranks[encoded.indices.to_numpy()]


def _lists(rows: NDArray[np.int64], n_rows: int, values: pa.Array) -> pa.Array:
    """Return values as lists, one a row; ``rows`` says in which each is, ascending."""
    offsets = np.searchsorted(rows, np.arange(n_rows + 1)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
