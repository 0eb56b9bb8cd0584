"""Compiled loops over CSR arrays: building a symmetric graph from edges, and checking one.

Memory is a small multiple of the result: 100 million undirected edges are built in about 6 GB.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS = 4096
SHORT_ROW = 32

FINE, DECREASES, OUTSIDE, SELF_LOOP, UNSORTED, BAD_WEIGHT, ASYMMETRIC = range(7)
"""What :func:`first_offence` found; numbers grow with the order of the checks within a row."""


@numba.njit(cache=True, error_model="numpy")
def scatter(
    n_nodes: int, a: NDArray, b: NDArray, w: NDArray, columns: NDArray, values: NDArray
) -> NDArray[np.int64]:
    """Write every edge that is no self-loop into the rows of both its ends, in the order given.

    Parameters
    ----------
    n_nodes : int
    a, b : ndarray of int, shape (M,)
    w : ndarray of float, shape (M,)
    columns : ndarray of int, shape (2 M,)
        Written.
    values : ndarray of float64, shape (2 M,)
        Written.

    Returns
    -------
    ndarray of int64, shape (n_nodes + 1,)
        Where rows begin; the last entry is the number of written cells.
    """
    ends = np.zeros(n_nodes + 1, np.int64)
    for i in range(a.shape[0]):
        if a[i] != b[i]:
            ends[a[i] + 1] += 1
            ends[b[i] + 1] += 1
    for row in range(n_nodes):
        ends[row + 1] += ends[row]
    free = ends[:-1].copy()
    for i in range(a.shape[0]):
        if a[i] != b[i]:
            for row, column in ((a[i], b[i]), (b[i], a[i])):
                columns[free[row]] = column
                values[free[row]] = w[i]
                free[row] += 1
    return ends


@numba.njit(parallel=True, cache=True, error_model="numpy")
def merge_rows(ends: NDArray, columns: NDArray, values: NDArray) -> NDArray[np.int64]:
    """Sort each row by column and sum equal columns in the order given, at the row's beginning.

    Returns
    -------
    ndarray of int64, shape (n_nodes,)
        Distinct columns of each row.
    """
    n = ends.shape[0] - 1
    kept = np.zeros(n, np.int64)
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            start, stop = ends[row], ends[row + 1]
            _sort(columns[start:stop], values[start:stop])
            last = start - 1
            for i in range(start, stop):
                if last >= start and columns[i] == columns[last]:
                    values[last] += values[i]
                else:
                    last += 1
                    columns[last] = columns[i]
                    values[last] = values[i]
            kept[row] = last + 1 - start
    return kept


@numba.njit(cache=True, error_model="numpy")
def _sort(columns: NDArray, values: NDArray) -> None:
    """Sort by column, stable: short rows in place, long ones through a permutation."""
    if columns.shape[0] > SHORT_ROW:
        order = np.argsort(columns, kind="mergesort")
        columns[:] = columns[order]
        values[:] = values[order]
        return
    for i in range(1, columns.shape[0]):
        column, value = columns[i], values[i]
        j = i
        while j > 0 and columns[j - 1] > column:
            columns[j] = columns[j - 1]
            values[j] = values[j - 1]
            j -= 1
        columns[j] = column
        values[j] = value


@numba.njit(parallel=True, cache=True, error_model="numpy")
def compact(
    ends: NDArray, indptr: NDArray, columns: NDArray, values: NDArray, indices: NDArray, weights: NDArray
) -> None:
    """Copy the first cells of every row, as :func:`merge_rows` left them, into a CSR without gaps."""
    n = indptr.shape[0] - 1
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            source = ends[row]
            for cell in range(indptr[row], indptr[row + 1]):
                indices[cell] = columns[source]
                weights[cell] = values[source]
                source += 1


@numba.njit(parallel=True, cache=True, error_model="numpy")
def row_sums(indptr: NDArray, weights: NDArray) -> NDArray[np.float64]:
    """Return the sum of each row in float64, summed from left to right, shape (N,)."""
    n = indptr.shape[0] - 1
    sums = np.zeros(n, np.float64)
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            total = 0.0
            for cell in range(indptr[row], indptr[row + 1]):
                total += weights[cell]
            sums[row] = total
    return sums


@numba.njit(parallel=True, cache=True, error_model="numpy")
def scaled_by_column(indptr: NDArray, indices: NDArray, weights: NDArray, scale: NDArray) -> NDArray:
    """Return ``weights * scale[indices]``, computed in float64 and stored as float32, shape (E,)."""
    n = indptr.shape[0] - 1
    out = np.empty(weights.shape[0], np.float32)
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        low, high = indptr[chunk * CHUNK_ROWS], indptr[min(n, (chunk + 1) * CHUNK_ROWS)]
        for cell in range(low, high):
            out[cell] = np.float64(weights[cell]) * scale[indices[cell]]
    return out


@numba.njit(cache=True, error_model="numpy")
def first_offence(indptr: NDArray, indices: NDArray, weights: NDArray) -> tuple[int, int]:
    """Check rows in order and return the kind of the first offence with its row, or (``FINE``, 0).

    Symmetry takes one pass: going through the rows in order, the cell (u, v) with v > u must be met by the
    next unread cell of row v, whose cells left of the diagonal are so read from left to right.
    """
    n = indptr.shape[0] - 1
    for row in range(n):
        if indptr[row + 1] < indptr[row]:
            return DECREASES, row
    for row in range(n):
        kind = _offence_within(row, n, indptr, indices, weights)
        if kind != FINE:
            return kind, row
    unread = indptr[:-1].copy()
    for row in range(n):
        if unread[row] < indptr[row + 1] and indices[unread[row]] < row:
            return ASYMMETRIC, row  # a cell left of the diagonal that no earlier row has met
        for cell in range(unread[row], indptr[row + 1]):
            other = indices[cell]
            mirror = unread[other]
            if mirror >= indptr[other + 1] or indices[mirror] != row or weights[mirror] != weights[cell]:
                return ASYMMETRIC, row
            unread[other] += 1
    return FINE, 0


@numba.njit(cache=True, error_model="numpy")
def _offence_within(row: int, n: int, indptr: NDArray, indices: NDArray, weights: NDArray) -> int:
    before = np.int64(-1)
    for cell in range(indptr[row], indptr[row + 1]):
        column = np.int64(indices[cell])
        if column < 0 or column >= n:
            return OUTSIDE
        if column == row:
            return SELF_LOOP
        if column <= before:
            return UNSORTED
        if not (np.isfinite(weights[cell]) and weights[cell] >= 0):
            return BAD_WEIGHT
        before = column
    return FINE
