"""Which words each passage has, in the index: for what two passages say together of a question."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.blocks import row_blocks, row_numbers
from hippoindex.pipeline.normalise import words
from hippoindex.pipeline.progress import Advance

VERSION = 1
BATCH_ROWS = 4096


def passage_words(title: str, text: str) -> list[str]:
    """Return the distinct words of a passage, those of its title included."""
    return words(f"{title}\n{text}")


def write_words(passages: pa.Table, folder: Path, advance: Advance) -> None:
    """Write ``words/``, and into ``passage_words/`` which passage has which, as CSR.

    Parameters
    ----------
    passages : pyarrow.Table
        With ``title`` and ``text``.
    folder : Path
        Of the index.
    advance : callable
        Called with the number of passages that are done.
    """
    arrays = folder / "passage_words"
    numbers: dict[str, int] = {}
    lengths: list[int] = []
    with artifact.ArrayWriter(arrays / "indices.npy", np.int32) as writer:
        for batch in passages.select(["title", "text"]).to_batches(max_chunksize=BATCH_ROWS):
            columns = (batch[name].to_pylist() for name in ("title", "text"))
            rows = [
                [numbers.setdefault(word, len(numbers)) for word in passage_words(title, text)]
                for title, text in zip(*columns, strict=True)
            ]
            lengths += map(len, rows)
            writer.append(np.fromiter(itertools.chain.from_iterable(rows), np.int32))
            advance(len(rows))
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    artifact.write_arrays(arrays, indptr=indptr)
    order = sorted(numbers)
    counts = _sort_rows(arrays / "indices.npy", indptr, np.array([numbers[word] for word in order], np.int64))
    table = pa.table([pa.array(order, pa.string()), pa.array(counts)], schema=schemas.WORD)
    artifact.write_parquet(table, folder / "words")


def _sort_rows(file: Path, indptr: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int32]:
    """Put ranks in ``order`` in place of numbers, ascending within a row; return how often each one comes."""
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order))
    counts = np.zeros(len(order), np.int32)
    indices = np.load(file, mmap_mode="r+", allow_pickle=False)
    for start, stop in row_blocks(indptr):
        cells = slice(indptr[start], indptr[stop])
        ranked = ranks[indices[cells]]
        indices[cells] = ranked[np.lexsort((ranked, row_numbers(indptr, start, stop)))]
        counts += np.bincount(ranked, minlength=len(counts)).astype(np.int32)
    indices.flush()
    return counts
