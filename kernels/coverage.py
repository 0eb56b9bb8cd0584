"""How much of a set of weighted words two passages have together."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray


class Cells(NamedTuple):
    """Rows of a sparse matrix without values: those of row i are ``indices[indptr[i] : indptr[i + 1]]``.

    Attributes
    ----------
    indptr : ndarray of int64, shape (rows + 1,)
    indices : ndarray of int
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.integer]


class Neighbours(NamedTuple):
    """Which passages make a pair: one holds a phrase, and that phrase is the title of the other.

    Attributes
    ----------
    holds : Cells
        Phrases of each passage.
    holders : Cells
        Passages of each phrase.
    titles : ndarray of int, shape (passages,)
        Phrase that is the title of each passage, -1 for none.
    titled : Cells
        Passages whose title each phrase is.
    title_words : Cells
        Words of the title of each passage. A pair by a title all of whose words are asked for does not count,
        unless it has no words.
    most_holders : int64
        A phrase with more holders makes no pair.
    """

    holds: Cells
    holders: Cells
    titles: NDArray[np.integer]
    titled: Cells
    title_words: Cells
    most_holders: np.int64


@numba.njit(nogil=True, cache=True, error_model="numpy")
def best_shares(
    asked: Cells,
    weights: NDArray,
    passages: NDArray,
    has: Cells,
    neighbours: Neighbours,
    shares: NDArray,
    partners: NDArray,
) -> None:
    """Write for each passage the greatest share of the words asked for that it has, or a pair that it is in.

    Parameters
    ----------
    asked : Cells
        Words of each question, ascending, at most 64.
    weights : ndarray of float64, shape (words,)
        Positive.
    passages : ndarray of int64, shape (Q, K)
        Those that are looked at, for each question.
    has : Cells
        Words of each passage, ascending.
    neighbours : Neighbours
    shares : ndarray of float32, shape (Q, K)
        Written; 0 for a question without words.
    partners : ndarray of int64, shape (Q, K)
        Written: the other passage of the pair, -1 where the passage has as much by itself.
    """
    n_passages = has.indptr.shape[0] - 1
    bits = np.empty(n_passages, np.uint64)  # bit w: has word w of the question
    known = np.full(n_passages, -1, np.int64)  # question for which bits were found
    for question in range(passages.shape[0]):
        words = asked.indices[asked.indptr[question] : asked.indptr[question + 1]]
        shares[question], partners[question] = 0, -1
        if words.shape[0] == 0:
            continue
        parts = weights[words] / weights[words].sum()
        for place in range(passages.shape[1]):
            found = _best_of(passages[question, place], question, words, parts, has, neighbours, bits, known)
            shares[question, place], partners[question, place] = found


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _best_of(
    passage: int,
    question: int,
    words: NDArray,
    parts: NDArray,
    has: Cells,
    neighbours: Neighbours,
    bits: NDArray,
    known: NDArray,
) -> tuple[float, int]:
    own = _bits_of(passage, question, words, has, bits, known)
    best, partner = _share_of(own, parts), -1
    holds, holders, titled = neighbours.holds, neighbours.holders, neighbours.titled
    for cell in range(holds.indptr[passage], holds.indptr[passage + 1]):
        phrase = holds.indices[cell]
        first, stop = titled.indptr[phrase], titled.indptr[phrase + 1]
        if first == stop or not joins(phrase, titled.indices[first], words, neighbours):
            continue
        for place in range(first, stop):
            other = titled.indices[place]
            share = _share_of(own | _bits_of(other, question, words, has, bits, known), parts)
            if share > best:
                best, partner = share, other
    title = neighbours.titles[passage]
    if title >= 0 and joins(title, passage, words, neighbours):
        for place in range(holders.indptr[title], holders.indptr[title + 1]):
            other = holders.indices[place]
            share = _share_of(own | _bits_of(other, question, words, has, bits, known), parts)
            if share > best:
                best, partner = share, other
    return best, partner


@numba.njit(nogil=True, cache=True, error_model="numpy")
def joins(phrase: int, titled: int, words: NDArray, neighbours: Neighbours) -> bool:
    """Return whether a phrase makes pairs for a question.

    Parameters
    ----------
    phrase : int
    titled : int
        A passage whose title it is.
    words : ndarray of int
        Of the question, ascending.
    neighbours : Neighbours

    Returns
    -------
    bool
        Whether few enough passages hold it, and its words are not all asked for.
    """
    holders, of_title = neighbours.holders, neighbours.title_words
    if holders.indptr[phrase + 1] - holders.indptr[phrase] > neighbours.most_holders:
        return False
    first, stop = of_title.indptr[titled], of_title.indptr[titled + 1]
    for cell in range(first, stop):
        word = of_title.indices[cell]
        place = np.searchsorted(words, word)
        if place == words.shape[0] or words[place] != word:
            return True
    return first == stop


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _bits_of(
    passage: int, question: int, words: NDArray, has: Cells, bits: NDArray, known: NDArray
) -> np.uint64:
    if known[passage] != question:
        known[passage] = question
        found = np.uint64(0)
        low, end = has.indptr[passage], has.indptr[passage + 1]
        for bit in range(words.shape[0]):
            high = end
            while low < high:
                middle = (low + high) >> 1
                if has.indices[middle] < words[bit]:
                    low = middle + 1
                else:
                    high = middle
            if low < end and has.indices[low] == words[bit]:
                found |= np.uint64(1) << np.uint64(bit)
        bits[passage] = found
    return bits[passage]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _share_of(bits: np.uint64, parts: NDArray) -> float:
    total = 0.0
    for bit in range(parts.shape[0]):
        if (bits >> np.uint64(bit)) & np.uint64(1):
            total += parts[bit]
    return total
