"""The k largest of many values, without sorting them all."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numpy.typing import NDArray

_SCANNED = 64
"""Values whose greatest is found at once."""
_HEAP_K = 48
"""Beyond so many, a partition by numpy, which compares many values at once, is faster than a heap."""
_SHARED_VALUES = 1 << 22
"""From so many values on, rows are shared out among threads."""


@numba.njit(nogil=True, cache=True, error_model="numpy")
def largest(values: NDArray, keys: NDArray, k: int) -> NDArray[np.int64]:
    """Return the positions of the k largest values, largest first; equal values by key.

    Parameters
    ----------
    values : ndarray of float, shape (M,)
        Without NaN.
    keys : ndarray of int, shape (M,)
        Distinct.
    k : int

    Returns
    -------
    ndarray of int64, shape (min(k, M),)
    """
    m = values.shape[0]
    k = min(k, m)
    heap = np.empty(k, np.int64)  # the worst of the kept is at the root
    for i in range(k):
        heap[i] = i
    for root in range(k // 2 - 1, -1, -1):
        _sink(heap, k, root, values, keys)
    if k > 0:
        for start in range(k, m, _SCANNED):
            stop = min(start + _SCANNED, m)
            if _greatest(values[start:stop]) < values[heap[0]]:
                continue
            for i in range(start, stop):
                if _worse(heap[0], i, values, keys):
                    heap[0] = i
                    _sink(heap, k, 0, values, keys)
    for size in range(k - 1, 0, -1):
        heap[0], heap[size] = heap[size], heap[0]
        _sink(heap, size, 0, values, keys)
    return heap


def largest_of_rows(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Return the columns of the k largest values of each row, largest first; equal values in column order.

    Parameters
    ----------
    values : ndarray of float, shape (Q, M)
        Without NaN.
    k : int

    Returns
    -------
    ndarray of int64, shape (Q, min(k, M))
    """
    columns = np.empty((values.shape[0], min(k, values.shape[1])), np.int64)
    fill = _fill_rows if columns.shape[1] <= _HEAP_K else _fill_rows_by_partition
    if values.size < _SHARED_VALUES:
        fill(values, columns, 0, len(columns))
        return columns
    threads = numba.get_num_threads()
    ends = np.linspace(0, len(columns), threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(fill, values, columns, *part) for part in itertools.pairwise(ends)]:
            future.result()
    return columns


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _fill_rows(values: NDArray, columns: NDArray, first: int, stop: int) -> None:
    keys = np.arange(values.shape[1])
    for row in range(first, stop):
        columns[row] = largest(values[row], keys, columns.shape[1])


def _fill_rows_by_partition(values: NDArray, columns: NDArray, first: int, stop: int) -> None:
    place = values.shape[1] - columns.shape[1]
    for row in range(first, stop):
        least = np.partition(values[row], place)[place]
        _take_from(values[row], least, columns[row])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _take_from(values: NDArray, least: float, out: NDArray) -> None:
    """Write the positions of the largest values, the last of which is ``least``; of equal ones the first."""
    ties = out.shape[0] - np.sum(values > least)
    taken = 0
    for i in range(values.shape[0]):
        if values[i] < least or (values[i] == least and ties == 0):
            continue
        ties -= values[i] == least
        out[taken] = i
        taken += 1
    out[:] = out[np.argsort(-values[out], kind="mergesort")]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nnan", "nsz", "reassoc"})
def _greatest(values: NDArray) -> float:
    greatest = values[0]
    for value in values:
        greatest = max(greatest, value)
    return greatest


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _worse(a: int, b: int, values: NDArray, keys: NDArray) -> bool:
    return values[a] < values[b] or (values[a] == values[b] and keys[a] > keys[b])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sink(heap: NDArray, size: int, root: int, values: NDArray, keys: NDArray) -> None:
    """Move the entry at ``root`` down until no child is worse."""
    while True:
        worst = root
        for child in (2 * root + 1, 2 * root + 2):
            if child < size and _worse(heap[child], heap[worst], values, keys):
                worst = child
        if worst == root:
            return
        heap[root], heap[worst] = heap[worst], heap[root]
        root = worst
