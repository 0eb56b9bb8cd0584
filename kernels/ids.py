"""Compiled loops over 64-bit ids: putting them in order, and finding their ranks.

Ids are hashes and so spread evenly over their range: one look at the leading bits brings an id to within a
few places of where it belongs. Nothing depends on that but the speed.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

IDS_PER_BUCKET = 4
SHORT_BUCKET = 48
CHUNK = 1 << 14


def stable_order(ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Sort ids; equal ones keep their order.

    Parameters
    ----------
    ids : ndarray of uint64, shape (M,)

    Returns
    -------
    order : ndarray of int64, shape (M,)
    ids[order] : ndarray of uint64, shape (M,)
    """
    if not len(ids):
        return np.empty(0, np.int64), ids
    least = ids.min()
    return _order(ids, least, _shift(int(ids.max() - least), len(ids)))


def ranks(sorted_ids: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the place of each wanted id among sorted ids, -1 where it is none of them.

    Parameters
    ----------
    sorted_ids : ndarray of uint64, shape (N,)
        Distinct, ascending.
    wanted : ndarray of uint64, shape (M,)

    Returns
    -------
    ndarray of int64, shape (M,)
    """
    if not len(sorted_ids):
        return np.full(len(wanted), -1, np.int64)
    least = sorted_ids[0]
    shift = _shift(int(sorted_ids[-1] - least), len(sorted_ids))
    return _ranks(sorted_ids, _bucket_starts(sorted_ids, least, shift), least, shift, wanted)


def _shift(span: int, count: int) -> np.uint64:
    """Bits to drop of an id so that about :data:`IDS_PER_BUCKET` evenly spread ids share a bucket."""
    buckets = max(1, count // IDS_PER_BUCKET)
    return np.uint64(max(0, span.bit_length() - buckets.bit_length()))


@numba.njit(cache=True, error_model="numpy")
def _order(ids: NDArray, least: np.uint64, shift: np.uint64) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    ends = _bucket_starts(ids, least, shift)
    free = ends[:-1].copy()
    order, placed = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.uint64)
    for place in range(ids.shape[0]):
        bucket = np.int64((ids[place] - least) >> shift)
        order[free[bucket]] = place
        placed[free[bucket]] = ids[place]
        free[bucket] += 1
    for number, stop in enumerate(ends[1:]):
        _sort_bucket(order[ends[number] : stop], placed[ends[number] : stop])
    return order, placed


@numba.njit(cache=True, error_model="numpy")
def _sort_bucket(order: NDArray, ids: NDArray) -> None:
    """Sort by id, stable: few by insertion, many by merging."""
    if ids.shape[0] > SHORT_BUCKET:
        places = np.argsort(ids, kind="mergesort")
        order[:] = order[places]
        ids[:] = ids[places]
        return
    for i in range(1, ids.shape[0]):
        free = i
        place, moved = order[free], ids[free]
        while free > 0 and ids[free - 1] > moved:
            order[free] = order[free - 1]
            ids[free] = ids[free - 1]
            free -= 1
        order[free] = place
        ids[free] = moved


@numba.njit(cache=True, error_model="numpy")
def _bucket_starts(ids: NDArray, least: np.uint64, shift: np.uint64) -> NDArray[np.int64]:
    n_buckets = np.int64((ids.max() - least) >> shift) + 1
    starts = np.zeros(n_buckets + 1, np.int64)
    for i in range(ids.shape[0]):
        starts[np.int64((ids[i] - least) >> shift) + 1] += 1
    for bucket in range(n_buckets):
        starts[bucket + 1] += starts[bucket]
    return starts


@numba.njit(parallel=True, cache=True, error_model="numpy")
def _ranks(
    sorted_ids: NDArray, starts: NDArray, least: np.uint64, shift: np.uint64, wanted: NDArray
) -> NDArray[np.int64]:
    places = np.empty(wanted.shape[0], np.int64)
    n_chunks = (wanted.shape[0] + CHUNK - 1) // CHUNK
    for chunk in numba.prange(n_chunks):
        for i in range(chunk * CHUNK, min(wanted.shape[0], (chunk + 1) * CHUNK)):
            places[i] = _rank(sorted_ids, starts, least, shift, wanted[i])
    return places


@numba.njit(cache=True, error_model="numpy")
def _rank(sorted_ids: NDArray, starts: NDArray, least: np.uint64, shift: np.uint64, wanted: np.uint64) -> int:
    if wanted < least or wanted > sorted_ids[-1]:
        return -1
    bucket = np.int64((wanted - least) >> shift)
    low, high = starts[bucket], starts[bucket + 1]
    while low < high:
        middle = (low + high) // 2
        if sorted_ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < sorted_ids.shape[0] and sorted_ids[low] == wanted else -1
