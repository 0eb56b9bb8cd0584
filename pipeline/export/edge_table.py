"""``parquet-edges``: the graph as one table of edges, for Spark, Polars, DuckDB or cuGraph."""

from __future__ import annotations

from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.export.walk import edges
from hippoindex.pipeline.progress import Advance

SCHEMA = pa.schema(
    [
        pa.field("source", pa.int64(), nullable=False),
        pa.field("target", pa.int64(), nullable=False),
        pa.field("weight", pa.float32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
    ]
)


def write(index: Index, file: BinaryIO, advance: Advance) -> None:
    """Write one row per undirected edge, sorted, source < target; ends are node numbers."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for block in edges(index):
            columns = [pa.array(values) for values in block[:3]]
            writer.write_table(pa.table([*columns, block.kinds()], schema=SCHEMA))
            advance(len(block.source))
