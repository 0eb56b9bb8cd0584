"""Passages that name each other, and how much of a question two of them say together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hippoindex.kernels.coverage import Cells, Neighbours, best_shares, joins
from hippoindex.pipeline.normalise import words

MOST_HOLDERS = 100
"""A title that more passages hold joins none of them: it is no sign that two belong together."""
MOST_WORDS = 64
"""Words of a question that count, the rarest; they are the bits of a number."""


class Told(NamedTuple):
    """What a passage says of a question.

    Attributes
    ----------
    share : float
        Of the question's words, by itself or with the other passage.
    words : tuple of str
        Those that it has itself.
    partner : int
        The other passage, -1 where it says as much by itself.
    phrase : int
        Phrase row of the title that joins the two, -1 without another passage.
    partner_words : tuple of str
        Further words, which the other passage has.
    """

    share: float
    words: tuple[str, ...]
    partner: int
    phrase: int
    partner_words: tuple[str, ...]


class PassagePairs:
    """Pairs of a passage that holds a phrase and one whose title that phrase is.

    Parameters
    ----------
    vocabulary : pyarrow.Table
        ``schemas.WORD``.
    has : Cells
        Rows of ``vocabulary`` of each passage, ascending.
    holds : Cells
        Phrases of each passage.
    holders : Cells
        Passages of each phrase.
    titles : ndarray of int, shape (passages,)
        Phrase row of the title, -1 for none.
    phrases : pyarrow.ChunkedArray of string
    """

    def __init__(
        self,
        vocabulary: pa.Table,
        has: Cells,
        holds: Cells,
        holders: Cells,
        titles: NDArray[np.integer],
        phrases: pa.ChunkedArray,
    ) -> None:
        n_passages = len(titles)
        self._words = vocabulary["word"]
        self._rows = {word: row for row, word in enumerate(vocabulary["word"].to_pylist())}
        counts = vocabulary["passage_count"].to_numpy()
        self._weights = np.log1p((n_passages - counts + 0.5) / (counts + 0.5))
        self._has = has
        titled = np.flatnonzero(titles >= 0)
        self._neighbours = Neighbours(
            holds,
            holders,
            titles,
            _by_phrase(titled, titles[titled], len(phrases)),
            self._of_titles(titles, phrases.take(pa.array(titles[titled])).to_pylist()),
            np.int64(MOST_HOLDERS),
        )

    def shares(self, questions: Sequence[str], passages: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return how much of each question passages say, by themselves or in their best pair.

        Words weigh their inverse document frequency; a pair has those of either passage. A pair by a title
        that consists of words of the question does not count: it does not bring in anything new.

        Parameters
        ----------
        questions : sequence of str
        passages : ndarray of int64, shape (Q, K)
            Those that are looked at, for each question.

        Returns
        -------
        ndarray of float32, shape (Q, K)
            From 0 to 1; 0 for a question without any word of the passages.
        """
        return self._best(questions, passages)[0]

    def told(self, question: str, passages: NDArray[np.int64]) -> list[Told]:
        """Return what each of some passages says of a question, by itself or in its best pair.

        Parameters
        ----------
        question : str
        passages : ndarray of int64, shape (K,)

        Returns
        -------
        list of Told
        """
        shares, partners = self._best([question], passages[None])
        asked = self._asked(question)
        best = zip(passages.tolist(), shares[0].tolist(), partners[0].tolist(), strict=True)
        found = []
        for passage, share, partner in best:
            own = self._words_of(passage, asked)
            if partner < 0:
                found.append(Told(share, own, -1, -1, ()))
                continue
            others = tuple(word for word in self._words_of(partner, asked) if word not in own)
            found.append(Told(share, own, partner, self._joint(passage, partner, asked), others))
        return found

    def _joint(self, passage: int, partner: int, asked: NDArray[np.int64]) -> int:
        """Return the phrase that makes two passages a pair for a question."""
        titles, holds = self._neighbours.titles, self._neighbours.holds
        held = holds.indices[holds.indptr[passage] : holds.indptr[passage + 1]]
        title = titles[partner]
        is_held = title >= 0 and title in held and joins(title, partner, asked, self._neighbours)
        return int(title if is_held else titles[passage])

    def _words_of(self, passage: int, asked: NDArray[np.int64]) -> tuple[str, ...]:
        has = set(self._has.indices[self._has.indptr[passage] : self._has.indptr[passage + 1]].tolist())
        return tuple(self._words[word].as_py() for word in asked.tolist() if word in has)

    def _best(
        self, questions: Sequence[str], passages: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return shares and the other passages of the pairs, shapes (Q, K)."""
        asked = _cells([self._asked(question) for question in questions])
        shares = np.empty(passages.shape, dtype=np.float32)
        partners = np.empty(passages.shape, dtype=np.int64)
        best_shares(asked, self._weights, passages, self._has, self._neighbours, shares, partners)
        return shares, partners

    def _asked(self, question: str) -> NDArray[np.int64]:
        """Return the words of a question that passages have, ascending: the rarest :data:`MOST_WORDS`."""
        rows = np.array(self._known(question), np.int64)
        rarest = np.argsort(-self._weights[rows], kind="stable")[:MOST_WORDS]
        return np.sort(rows[rarest])

    def _known(self, text: str) -> list[int]:
        return [self._rows[word] for word in words(text) if word in self._rows]

    def _of_titles(self, titles: NDArray[np.integer], phrases: list[str]) -> Cells:
        """Return the words of the title of each passage; none for passages without a title."""
        rows: list[Sequence[int]] = [()] * len(titles)
        for passage, phrase in zip(np.flatnonzero(titles >= 0).tolist(), phrases, strict=True):
            rows[passage] = self._known(phrase)
        return _cells(rows)


def _by_phrase(passages: NDArray[np.int64], titles: NDArray[np.integer], n_phrases: int) -> Cells:
    """Return the passages whose title each phrase is."""
    ends = np.zeros(n_phrases + 1, np.int64)
    np.cumsum(np.bincount(titles, minlength=n_phrases), out=ends[1:])
    return Cells(ends, passages[np.argsort(titles, kind="stable")])


def _cells(rows: Sequence[Sequence[int] | NDArray[np.int64]]) -> Cells:
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=ends[1:])
    flat: Iterable[int] = itertools.chain.from_iterable(rows)
    return Cells(ends, np.fromiter(flat, np.int64, ends[-1]))
