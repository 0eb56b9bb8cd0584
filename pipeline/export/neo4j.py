"""``neo4j-csv``: nodes and relationships as ``neo4j-admin database import`` reads them.

Relationships of type ``EDGE`` are the graph that is walked, undirected, each once. Those of type ``FACT`` are
what was extracted, from subject to object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.export.walk import edges, phrase_ids, rows_of
from hippoindex.pipeline.progress import Advance

HEADERS = {
    "phrases": "node:ID,phrase_id,phrase,passage_count:int,:LABEL",
    "passages": "node:ID,passage_id,doc_id,title,text,:LABEL",
    "edges": ":START_ID,:END_ID,weight:float,kind,:TYPE",
    "facts": ":START_ID,:END_ID,fact_id,predicate,count:int,:TYPE",
}
OPTIONS = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")


def write(index: Index, folder: Path, advance: Advance) -> None:
    """Write ``phrases.csv``, ``passages.csv``, ``edges.csv`` and ``facts.csv``.

    The id of a node is its number. Ids of phrases and facts are text, for they exceed Neo4j's integers.
    """
    for name, rows in {
        "phrases": _phrases(index),
        "passages": _passages(index),
        "edges": _edges(index),
        "facts": _facts(index),
    }.items():
        _write(folder / f"{name}.csv", HEADERS[name], rows, advance)


def _write(file: Path, header: str, blocks: Iterable[list[pa.Array]], advance: Advance) -> None:
    names = header.split(",")
    with file.open("wb") as stream:
        stream.write(f"{header}\n".encode())
        for columns in blocks:
            batch = pa.RecordBatch.from_arrays(columns, names)
            pyarrow.csv.write_csv(batch, stream, OPTIONS)
            advance(batch.num_rows)


def _phrases(index: Index) -> Iterator[list[pa.Array]]:
    first = 0
    for batch in index.reader.batches("phrases"):
        ids = batch["phrase_id"].cast(pa.string())
        columns = [ids, batch["phrase"], batch["passage_count"]]
        yield [_numbers(first, len(batch)), *columns, _constant("Phrase", len(batch))]
        first += len(batch)


def _passages(index: Index) -> Iterator[list[pa.Array]]:
    first = index.n_phrases
    for batch in index.reader.batches("passages", ["passage_id", "doc_id", "title", "text"]):
        yield [_numbers(first, len(batch)), *batch.columns, _constant("Passage", len(batch))]
        first += len(batch)


def _edges(index: Index) -> Iterator[list[pa.Array]]:
    for block in edges(index):
        columns = [pa.array(values) for values in block[:3]]
        yield [*columns, block.kinds(), _constant("EDGE", len(block.source))]


def _facts(index: Index) -> Iterator[list[pa.Array]]:
    ids = phrase_ids(index)
    for batch in index.reader.batches("facts", ["fact_id", "subject_id", "predicate", "object_id", "count"]):
        ends = [pa.array(rows_of(ids, batch[name])) for name in ("subject_id", "object_id")]
        fact = batch["fact_id"].cast(pa.string())
        yield [*ends, fact, batch["predicate"], batch["count"], _constant("FACT", len(batch))]


def _numbers(first: int, rows: int) -> pa.Array:
    return pa.array(np.arange(first, first + rows, dtype=np.int64))


def _constant(value: str, rows: int) -> pa.Array:
    return pa.repeat(value, rows)
