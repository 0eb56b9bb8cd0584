"""Compiled loops that fill the rows of an index's graph, a block of rows at a time.

Edges are read from front to back, once for a block; what is kept in memory are the block's cells.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.ppr.csr import CHUNK_ROWS


@numba.njit(cache=True, error_model="numpy")
def count_ends(a: NDArray, b: NDArray, degrees: NDArray) -> int:
    """Add the ends of edges that are no self-loops to the degrees of their nodes.

    Parameters
    ----------
    a, b : ndarray of int, shape (M,)
    degrees : ndarray of int64, shape (N,)
        Added to.

    Returns
    -------
    int
        The first edge one of whose ends is no node, or -1.
    """
    n = degrees.shape[0]
    for i in range(a.shape[0]):
        if a[i] < 0 or b[i] < 0 or a[i] >= n or b[i] >= n:
            return i
        if a[i] != b[i]:
            degrees[a[i]] += 1
            degrees[b[i]] += 1
    return -1


@numba.njit(cache=True, error_model="numpy")
def place_edges(
    a: NDArray, b: NDArray, w: NDArray, low: int, free: NDArray, columns: NDArray, values: NDArray
) -> None:
    """Write edges into those of their two rows that are in the block, in the order given.

    Parameters
    ----------
    a, b : ndarray of int, shape (M,)
    w : ndarray of int or float, shape (M,)
    low : int
        First row of the block.
    free : ndarray of int64, shape (rows of the block,)
        Next free cell of each row; moved on.
    columns : ndarray of int, shape (cells,)
        Written.
    values : ndarray of float64, shape (cells,)
        Written.
    """
    n = free.shape[0]
    for i in range(a.shape[0]):
        row, other = a[i] - low, b[i] - low
        if row == other:
            continue
        if 0 <= row < n:
            columns[free[row]] = b[i]
            values[free[row]] = w[i]
            free[row] += 1
        if 0 <= other < n:
            columns[free[other]] = a[i]
            values[free[other]] = w[i]
            free[other] += 1


@numba.njit(cache=True, error_model="numpy")
def count_columns(indices: NDArray, counts: NDArray) -> None:
    """Add the cells of every column of a CSR matrix to ``counts``, shape (columns,)."""
    for cell in range(indices.shape[0]):
        counts[indices[cell]] += 1


@numba.njit(cache=True, error_model="numpy")
def place_transposed(indptr: NDArray, indices: NDArray, low: int, free: NDArray, columns: NDArray) -> None:
    """Write the row numbers of a CSR matrix into a block of rows of its transpose, ascending.

    Parameters
    ----------
    indptr, indices : ndarray
        CSR matrix.
    low : int
        First row of the block.
    free : ndarray of int64, shape (rows of the block,)
        Next free cell of each row; moved on.
    columns : ndarray of int, shape (cells,)
        Written.
    """
    n = free.shape[0]
    for row in range(indptr.shape[0] - 1):
        for cell in range(indptr[row], indptr[row + 1]):
            place = indices[cell] - low
            if 0 <= place < n:
                columns[free[place]] = row
                free[place] += 1


@numba.njit(parallel=True, cache=True, error_model="numpy")
def count_joined(
    low: int,
    fact_starts: NDArray,
    fact_columns: NDArray,
    fact_kept: NDArray,
    synonym_starts: NDArray,
    synonym_columns: NDArray,
    synonym_kept: NDArray,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the phrase cells of each row of a block.

    Parameters
    ----------
    low : int
        First row of the block.
    fact_starts, synonym_starts : ndarray of int64, shape (rows + 1,)
    fact_columns, synonym_columns : ndarray of int
        The first cells of each row are distinct and ascending.
    fact_kept, synonym_kept : ndarray of int64, shape (rows,)
        Their number.

    Returns
    -------
    joined : ndarray of int64, shape (rows,)
        Distinct columns of facts and synonyms together.
    upper : ndarray of int64, shape (rows,)
        Fact edges to a higher row: every fact edge is one of these in one row.
    """
    n = fact_kept.shape[0]
    joined, upper = np.empty(n, np.int64), np.zeros(n, np.int64)
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            fact, fact_stop = fact_starts[row], fact_starts[row] + fact_kept[row]
            synonym, synonym_stop = synonym_starts[row], synonym_starts[row] + synonym_kept[row]
            joined[row] = fact_kept[row] + synonym_kept[row]
            for cell in range(fact, fact_stop):
                upper[row] += fact_columns[cell] > low + row
                while synonym < synonym_stop and synonym_columns[synonym] < fact_columns[cell]:
                    synonym += 1
                if synonym < synonym_stop and synonym_columns[synonym] == fact_columns[cell]:
                    joined[row] -= 1
    return joined, upper


@numba.njit(parallel=True, cache=True, error_model="numpy")
def join_rows(
    starts: NDArray,
    facts: tuple[NDArray, NDArray, NDArray, NDArray],
    synonyms: tuple[NDArray, NDArray, NDArray, NDArray],
    overwrite: bool,
    mention_starts: NDArray,
    mentions: NDArray,
    first_passage: int,
    columns: NDArray,
    weights: NDArray,
) -> None:
    """Write the rows of a block of phrases: facts and synonyms by column, then passages with weight 1.

    Parameters
    ----------
    starts : ndarray of int64, shape (rows + 1,)
        Where the rows begin in what is written.
    facts, synonyms : tuple of ndarray
        Starts, columns, values and kept cells, as for :func:`count_joined`.
    overwrite : bool
        Whether a synonym takes the place of a fact and both count twice (``hipporag``), instead of being
        added to it (``plain``).
    mention_starts : ndarray of int64, shape (rows + 1,)
        Rows of ``mentions``.
    mentions : ndarray of int
        Passages.
    first_passage : int
        Node number of passage 0.
    columns : ndarray of int
        Written.
    weights : ndarray of float32
        Written.
    """
    n = starts.shape[0] - 1
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            out = _join(row, starts[row], facts, synonyms, overwrite, columns, weights)
            for cell in range(mention_starts[row], mention_starts[row + 1]):
                columns[out] = first_passage + mentions[cell]
                weights[out] = 1.0
                out += 1


@numba.njit(cache=True, error_model="numpy")
def _join(
    row: int,
    out: int,
    facts: tuple[NDArray, NDArray, NDArray, NDArray],
    synonyms: tuple[NDArray, NDArray, NDArray, NDArray],
    overwrite: bool,
    columns: NDArray,
    weights: NDArray,
) -> int:
    fact_starts, fact_columns, counts, fact_kept = facts
    synonym_starts, synonym_columns, cosines, synonym_kept = synonyms
    fact, fact_stop = fact_starts[row], fact_starts[row] + fact_kept[row]
    synonym, synonym_stop = synonym_starts[row], synonym_starts[row] + synonym_kept[row]
    scale = 2.0 if overwrite else 1.0
    while fact < fact_stop or synonym < synonym_stop:
        has_fact = fact < fact_stop and (
            synonym == synonym_stop or fact_columns[fact] <= synonym_columns[synonym]
        )
        has_synonym = synonym < synonym_stop and (
            fact == fact_stop or synonym_columns[synonym] <= fact_columns[fact]
        )
        weight = 0.0
        if has_fact:
            columns[out] = fact_columns[fact]
            if not (overwrite and has_synonym):
                weight = scale * np.float64(np.float32(counts[fact]))
        if has_synonym:
            columns[out] = synonym_columns[synonym]
            weight += scale * cosines[synonym]
        weights[out] = weight
        fact += has_fact
        synonym += has_synonym
        out += 1
    return out


@numba.njit(cache=True, error_model="numpy")
def held_titles(
    indptr: NDArray, indices: NDArray, candidates: NDArray, first_passage: int, titles: NDArray
) -> None:
    """Write the first candidate of each passage that is its neighbour, -1 where none is.

    Parameters
    ----------
    indptr, indices : ndarray of int
        Of the graph; columns ascend within a row.
    candidates : ndarray of int, shape (passages, T)
        Phrases by which each passage's title may be called; -1 is none.
    first_passage : int
        Node number of passage 0.
    titles : ndarray of int, shape (passages,)
        Written.
    """
    for passage in range(candidates.shape[0]):
        node = first_passage + passage
        held = indices[indptr[node] : indptr[node + 1]]
        titles[passage] = -1
        for phrase in candidates[passage]:
            place = np.searchsorted(held, phrase)
            if phrase >= 0 and place < held.shape[0] and held[place] == phrase:
                titles[passage] = phrase
                break


@numba.njit(cache=True, error_model="numpy")
def weigh_titles(
    indptr: NDArray, indices: NDArray, weights: NDArray, titles: NDArray, first_passage: int, factor: float
) -> None:
    """Give the edge between a passage with m phrases and its title's phrase the weight ``1 + factor * m``.

    Parameters
    ----------
    indptr, indices : ndarray of int
        Of the graph; columns ascend within a row.
    weights : ndarray of float32
        Written, both cells of an edge.
    titles : ndarray of int, shape (passages,)
        A neighbour of each passage; -1 is none.
    first_passage : int
        Node number of passage 0.
    factor : float
    """
    for passage in range(titles.shape[0]):
        phrase = titles[passage]
        if phrase < 0:
            continue
        node = first_passage + passage
        held = indices[indptr[node] : indptr[node + 1]]
        holders = indices[indptr[phrase] : indptr[phrase + 1]]
        weight = np.float32(1.0 + factor * held.shape[0])
        weights[indptr[node] + np.searchsorted(held, phrase)] = weight
        weights[indptr[phrase] + np.searchsorted(holders, node)] = weight
