"""``faiss``: the vectors as indexes of FAISS, and the id of every row."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hippoindex.errors import HippoIndexError, MissingPackageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.artifact import VECTOR_KINDS, Index
from hippoindex.pipeline.blocks import blocks
from hippoindex.pipeline.progress import Advance

ID_FIELDS = {
    "passages": schemas.PASSAGE.field("passage_id"),
    "phrases": schemas.PHRASE.field("phrase_id"),
    "facts": schemas.FACT.field("fact_id"),
}
ROWS_AT = 8
"""Where FAISS's file says how many rows it has; how many floats follow is said in the last 8 bytes before."""


def write(index: Index, folder: Path, advance: Advance) -> None:
    """Write ``KIND.faiss``, an ``IndexFlatIP`` of float32, and ``KIND.ids.parquet`` for each kind of vectors.

    Row i of one is row i of the other: what a search returns is a row number.
    """
    faiss = _import_faiss()
    for kind in VECTOR_KINDS:
        _write_vectors(faiss, index, kind, folder / f"{kind}.faiss", advance)
        schema = pa.schema([ID_FIELDS[kind]])
        with pq.ParquetWriter(folder / f"{kind}.ids.parquet", schema, compression="zstd") as writer:
            for batch in index.reader.batches(kind, schema.names):
                writer.write_batch(batch)


def _write_vectors(faiss: Any, index: Index, kind: str, file: Path, advance: Advance) -> None:
    """Stream the vectors behind the header that FAISS itself gives an index of that many."""
    vectors = index.vectors(kind)
    n_rows, dimension = vectors.shape
    with file.open("wb") as stream:
        stream.write(_header(faiss, n_rows, dimension))
        for rows in blocks(n_rows, dimension):
            stream.write(vectors[rows].astype("<f4").tobytes())
            advance(rows.stop - rows.start)


def _header(faiss: Any, n_rows: int, dimension: int) -> bytes:
    """Return what stands before the vectors in the file of an ``IndexFlatIP``.

    FAISS writes an index from memory only, as float32. Here its file of no vectors is taken, and told of
    ``n_rows``; that this is how a file of one vector differs from it is checked with FAISS.
    """

    def told(rows: int) -> bytes:
        header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(dimension)).tobytes())
        struct.pack_into("<q", header, ROWS_AT, rows)
        struct.pack_into("<Q", header, len(header) - 8, rows * dimension)
        return bytes(header)

    one = faiss.IndexFlatIP(dimension)
    one.add(np.ones((1, dimension), dtype=np.float32))
    if faiss.serialize_index(one).tobytes() != told(1) + np.ones(dimension, dtype="<f4").tobytes():
        raise HippoIndexError(
            f"FAISS {faiss.__version__} writes IndexFlatIP in a way not known here: install an older version"
        )
    return told(n_rows)


def _import_faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise MissingPackageError("faiss", "--format faiss", "pip install faiss-cpu") from error
