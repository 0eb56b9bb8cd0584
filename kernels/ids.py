"""Compiled loops over 64-bit ids: putting them in order, and finding their ranks.

Ids are hashes and so spread evenly over their range: one look at the leading bits brings an id to within a
few places of where it belongs. Nothing depends on that but the speed.
"""

from __future__ import annotations

from typing import NamedTuple

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


def begins(sorted_ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether each of sorted ids is the first of its kind, shape (M,)."""
    new = np.ones(len(sorted_ids), bool)
    np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=new[1:])
    return new


def ascending(ids: NDArray[np.uint64], *, strictly: bool = True) -> bool:
    """Return whether ids ascend, ``strictly`` without repetitions."""
    compare = np.less if strictly else np.less_equal
    return bool(compare(ids[:-1], ids[1:]).all())


class Groups(NamedTuple):
    """Rows with equal ids.

    Attributes
    ----------
    ids : ndarray of uint64, shape (groups,)
    firsts : ndarray of int64, shape (groups,)
        The first row of each.
    others, first_of_others : ndarray of int64, shape (M - groups,)
        All other rows, and the first one of the group of each.
    """

    ids: NDArray[np.uint64]
    firsts: NDArray[np.int64]
    others: NDArray[np.int64]
    first_of_others: NDArray[np.int64]


def groups(sorted_ids: NDArray[np.uint64], order: NDArray[np.int64]) -> Groups:
    """Bring together the rows of equal ids, as :func:`stable_order` has sorted them."""
    return Groups(*_groups(sorted_ids, order))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _groups(
    sorted_ids: NDArray, order: NDArray
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    n = sorted_ids.shape[0]
    n_groups = 0
    for i in range(n):
        n_groups += i == 0 or sorted_ids[i] != sorted_ids[i - 1]
    ids, firsts = np.empty(n_groups, np.uint64), np.empty(n_groups, np.int64)
    others, first_of_others = np.empty(n - n_groups, np.int64), np.empty(n - n_groups, np.int64)
    group = -1
    for i in range(n):
        if i == 0 or sorted_ids[i] != sorted_ids[i - 1]:
            group += 1
            ids[group], firsts[group] = sorted_ids[i], order[i]
        else:
            others[i - 1 - group], first_of_others[i - 1 - group] = order[i], firsts[group]
    return ids, firsts, others, first_of_others


@numba.njit(cache=True, nogil=True, error_model="numpy")
def cells(
    sorted_ids: NDArray[np.uint64], passages: NDArray[np.int32], counts: NDArray[np.int32]
) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]:
    """Sum the counts of each id in each passage.

    Parameters
    ----------
    sorted_ids : ndarray of uint64, shape (M,)
    passages : ndarray of int32, shape (M,)
        Ascending among those of one id.
    counts : ndarray of int32, shape (M,)

    Returns
    -------
    ids : ndarray of uint64, shape (cells,)
    passages, counts : ndarray of int32, shape (cells,)
    """
    n = sorted_ids.shape[0]
    ids, places, sums = np.empty(n, np.uint64), np.empty(n, np.int32), np.empty(n, np.int32)
    last = -1
    for i in range(n):
        if last >= 0 and sorted_ids[i] == ids[last] and passages[i] == places[last]:
            sums[last] += counts[i]
        else:
            last += 1
            ids[last], places[last], sums[last] = sorted_ids[i], passages[i], counts[i]
    return ids[: last + 1], places[: last + 1], sums[: last + 1]


def _shift(span: int, count: int) -> np.uint64:
    """Bits to drop of an id so that about :data:`IDS_PER_BUCKET` evenly spread ids share a bucket."""
    buckets = max(1, count // IDS_PER_BUCKET)
    return np.uint64(max(0, span.bit_length() - buckets.bit_length()))


@numba.njit(cache=True, nogil=True, error_model="numpy")
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
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
