"""Passages that name each other, and how much of a question two of them say together."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np
import pyarrow as pa
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.kernels.coverage import best_shares

MOST_HOLDERS = 100
"""A title that more passages hold joins none of them: it is no sign that two belong together."""
MOST_WORDS = 64
"""Words of a question that count, the rarest; they are the bits of a number."""


class PassagePairs:
    """Pairs of a passage that holds a phrase and one whose title that phrase is.

    Parameters
    ----------
    passages : pyarrow.Table
        With ``title`` and ``text``.
    titles : ndarray of int64, shape (passages,)
        Phrase row of the title, -1 for none.
    held : scipy.sparse matrix, shape (phrases, passages)
        Nonzero where a passage holds a phrase.
    phrases : pyarrow.Table
        With ``phrase``.
    """

    def __init__(
        self, passages: pa.Table, titles: NDArray[np.int64], held: sp.csr_matrix, phrases: pa.Table
    ) -> None:
        self.n_passages = passages.num_rows
        columns = (passages[name].to_pylist() for name in ("title", "text"))
        self._passages = _Postings(words([f"{title}\n{text}" for title, text in zip(*columns, strict=True)]))
        rows, number = np.unique(titles, return_inverse=True)
        self._titles = _Postings(words([phrases["phrase"][row].as_py() if row >= 0 else "" for row in rows]))
        self._title_lengths = self._titles.lengths
        titled = np.flatnonzero(titles >= 0)
        titled = titled[np.diff(held.indptr)[titles[titled]] <= MOST_HOLDERS]
        matrix = sp.csr_matrix((np.ones(len(titled)), (titles[titled], titled)), held.shape)
        joined = (held.T.astype(np.float64) @ matrix).tocoo()
        apart = joined.row != joined.col
        self.first, self.second = joined.row[apart], joined.col[apart]
        self._title = number[self.second]

    def shares(self, questions: Sequence[str]) -> NDArray[np.float32]:
        """Return how much of each question every passage says, by itself or in its best pair.

        Words weigh their inverse document frequency; a pair has those of either passage. A pair by a title
        that consists of words of the question does not count: it does not bring in anything new.

        Parameters
        ----------
        questions : sequence of str

        Returns
        -------
        ndarray of float32, shape (Q, passages)
            From 0 to 1; 0 for a question without any word of the passages.
        """
        found = np.zeros((len(questions), self.n_passages), dtype=np.float32)
        for row, asked in zip(found, words(questions), strict=True):
            self._share(list(dict.fromkeys(asked)), row)
        return found

    def _share(self, asked: list[str], out: NDArray[np.float32]) -> None:
        holders = [self._passages.of(word) for word in asked]
        holders = sorted((rows for rows in holders if len(rows)), key=len)[:MOST_WORDS]
        if not holders:
            return
        bits = np.zeros(self.n_passages, np.uint64)
        for number, rows in enumerate(holders):
            bits[rows] |= np.uint64(1 << number)
        counts = np.array([len(rows) for rows in holders])
        weights = np.log1p((self.n_passages - counts + 0.5) / (counts + 0.5))
        named = np.zeros(len(self._title_lengths), np.int64)
        for word in asked:
            named[self._titles.of(word)] += 1
        usable = (named < self._title_lengths) | (self._title_lengths == 0)
        best_shares(bits, weights / weights.sum(), self.first, self.second, usable[self._title], out)


class _Postings:
    """Which texts hold a word."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        distinct = [list(dict.fromkeys(text)) for text in texts]
        self.lengths = np.array([len(text) for text in distinct], dtype=np.int64)
        self._numbers: dict[str, int] = {}
        flat = [self._numbers.setdefault(word, len(self._numbers)) for text in distinct for word in text]
        order = np.argsort(np.array(flat, dtype=np.int64), kind="stable")
        self._texts = np.repeat(np.arange(len(distinct)), self.lengths)[order]
        self._ends = np.cumsum(np.bincount(np.array(flat, np.int64), minlength=len(self._numbers)))

    def of(self, word: str) -> NDArray[np.int64]:
        """Return the texts that hold a word, ascending."""
        number = self._numbers.get(word)
        if number is None:
            return self._texts[:0]
        return self._texts[self._ends[number - 1] if number else 0 : self._ends[number]]


def words(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of each text as BM25 counts them: lower case, without English stop words."""
    found: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )
    return found
