"""Which words each passage has, in the index: for what two passages say together of a question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def write_words(
    passages: pa.Table,
    folder: Path,
    advance: Advance,
    source: artifact.Index | None = None,
    places: NDArray[np.int64] | None = None,
) -> None:
    """Write ``words/``, and into ``passage_words/`` which passage has which, as CSR.

    Parameters
    ----------
    passages : pyarrow.Table
        With ``title`` and ``text``.
    folder : Path
        Of the index.
    advance : callable
        Called with the number of passages that are done.
    source : Index, optional
        The words of passages that it holds are taken from it.
    places : ndarray of int64, shape (passages,), optional
        Their rows there, -1 for those that it does not hold.
    """
    arrays = folder / "passage_words"
    known = _Known(source, places, passages.num_rows)
    numbers = known.numbers
    lengths: list[int] = []
    with artifact.ArrayWriter(arrays / "indices.npy", np.int32) as writer:
        for batch in passages.select(["title", "text"]).to_batches(max_chunksize=BATCH_ROWS):
            for row, held in enumerate(known.rows(len(lengths), batch.num_rows)):
                if held is None:
                    said = passage_words(batch["title"][row].as_py(), batch["text"][row].as_py())
                    held = np.array([numbers.setdefault(word, len(numbers)) for word in said], np.int32)
                lengths.append(len(held))
                writer.append(held)
            advance(batch.num_rows)
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    artifact.write_arrays(arrays, indptr=indptr)
    order, counts = _sort_rows(arrays / "indices.npy", indptr, numbers)
    table = pa.table([pa.array(order, pa.string()), pa.array(counts)], schema=schemas.WORD)
    artifact.write_parquet(table, folder / "words")


class _Known:
    """What an index holds of the words of passages.

    Attributes
    ----------
    numbers : dict of str to int
        Number of each of its words; more may be added.
    """

    def __init__(
        self, source: artifact.Index | None, places: NDArray[np.int64] | None, n_passages: int
    ) -> None:
        self.numbers: dict[str, int] = {}
        self._places = np.full(n_passages, -1)
        if source is not None and places is not None and _version_of(source) == VERSION:
            self._places = places
            self.numbers = {word: row for row, word in enumerate(source.words["word"].to_pylist())}
            self._indptr, self._indices = source.passage_words

    def rows(self, first: int, n_rows: int) -> Iterator[NDArray[np.integer] | None]:
        """Yield the words of passages from ``first`` on, ``None`` where they are not held."""
        for place in self._places[first : first + n_rows].tolist():
            yield None if place < 0 else self._indices[self._indptr[place] : self._indptr[place + 1]]


def _version_of(index: artifact.Index) -> int | None:
    """Return by which version of this code the words of an index were found, ``None`` if it has none."""
    version: int | None = index.manifest.stages.get("words", {}).get("version")
    return version


def _sort_rows(
    file: Path, indptr: NDArray[np.int64], numbers: Mapping[str, int]
) -> tuple[list[str], NDArray[np.int32]]:
    """Give the words that come numbers in their order; return them, and how often each one comes."""
    indices = np.load(file, mmap_mode="r+", allow_pickle=False)
    counts = np.zeros(len(numbers), np.int32)
    for start, stop in row_blocks(indptr):
        cells = indices[indptr[start] : indptr[stop]]
        counts += np.bincount(cells, minlength=len(counts)).astype(np.int32)
    order = sorted(word for word, number in numbers.items() if counts[number])
    held = np.array([numbers[word] for word in order], np.int64)
    ranks = np.full(len(numbers), -1, np.int32)
    ranks[held] = np.arange(len(order))
    for start, stop in row_blocks(indptr):
        cells = slice(indptr[start], indptr[stop])
        ranked = ranks[indices[cells]]
        indices[cells] = ranked[np.lexsort((ranked, row_numbers(indptr, start, stop)))]
    indices.flush()
    return order, counts[held]
