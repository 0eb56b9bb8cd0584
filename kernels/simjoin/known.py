"""Pairs that are known before the join: what they leave open, and how new ones are put among them.

Their float32 cosines say nearly everything. Only where these cannot tell whether a pair counts, the vectors
are read again, so that an append takes time for what is new.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.simjoin.duplicates import Found, cosines
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.threads import in_threads
from hippoindex.kernels.simjoin.tile import best_of_each

ROUNDING = 2.0**-23
"""More than a cosine can change when it is rounded to float32."""
BLOCK_PAIRS = 1 << 16


def in_order(pairs: Pairs, n: int) -> Pairs:
    """Return pairs of ``n`` rows sorted, each once; if they are already, as they are."""
    keys = pairs.first * n + pairs.second
    if (keys[1:] > keys[:-1]).all():
        return pairs
    _, once = np.unique(keys, return_index=True)
    return Pairs(pairs.first[once], pairs.second[once], pairs.cosine[once])


def floors(known: Pairs, searches: NDArray[np.bool_], max_neighbors: int) -> NDArray[np.float64]:
    """Return below which cosine rows keep no further pair, shape (N,).

    Parameters
    ----------
    known : Pairs
        Each once.
    searches : ndarray of bool, shape (N,)
        Rows that keep pairs.
    max_neighbors : int

    Returns
    -------
    ndarray of float64, shape (N,)
        Minus infinity for rows with fewer than ``max_neighbors`` known pairs.
    """
    first, second, cosine = known
    full = _with_at_least(max_neighbors, first, second, searches)
    near = full[first] | full[second]
    out = np.full(len(searches), -np.inf)
    _rank((first[near], second[near], cosine[near].astype(np.float64)), full, max_neighbors, out)
    return out - ROUNDING


def with_known(
    found: Found,
    known: Pairs,
    x: NDArray[np.floating],
    threshold: float,
    searches: NDArray[np.bool_],
    max_neighbors: int,
) -> Found:
    """Put pairs of rows among the known ones, both sorted and each once, and apply the cap.

    Returns
    -------
    tuple
        Sorted. The cosines of known pairs are exact to float32.
    """
    n = len(searches)
    first, second, cosine, old = _merged(found, _above(known, x, threshold), n)
    full = _with_at_least(max_neighbors + 1, first, second, searches)
    others = searches & ~full  # they keep all
    kept = others[first] | others[second]
    near = np.flatnonzero(full[first] | full[second])  # the cap ranks these
    known_near = near[old[near]]
    cosine[known_near] = _exact(x, first[known_near], second[known_near])
    kept[near] |= _rank((first[near], second[near], cosine[near]), full, max_neighbors, np.empty(n))
    return first[kept], second[kept], cosine[kept]


def _with_at_least(
    count: int, first: NDArray[np.int64], second: NDArray[np.int64], searches: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Tell which searching rows are ends of at least so many pairs, shape (N,)."""
    n = len(searches)
    return searches & (np.bincount(first, minlength=n) + np.bincount(second, minlength=n) >= count)


def _rank(
    pairs: Found, searches: NDArray[np.bool_], max_neighbors: int, floors: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Do as :func:`~hippoindex.kernels.simjoin.tile.best_of_each` in time for the pairs, not for all rows."""
    first, second, cosine = pairs
    taking_part = np.zeros(len(searches), dtype=bool)
    taking_part[first] = taking_part[second] = True
    rows = np.flatnonzero(taking_part)
    number = np.cumsum(taking_part) - 1
    of_rows = floors[rows]
    kept = best_of_each(number[first], number[second], cosine, searches[rows], max_neighbors, of_rows)
    floors[rows] = of_rows
    return kept


def _above(known: Pairs, x: NDArray[np.floating], threshold: float) -> Found:
    """Leave out what is below the threshold."""
    cosine = known.cosine.astype(np.float64)
    unsure = np.flatnonzero(np.abs(cosine - threshold) <= ROUNDING)
    sharp = cosine.copy()
    sharp[unsure] = _exact(x, known.first[unsure], known.second[unsure])
    above = sharp >= threshold
    return known.first[above], known.second[above], cosine[above]


def _merged(
    found: Found, known: Found, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Merge sorted pairs, each once, and mark the known ones."""
    keys, added = known[0] * n + known[1], found[0] * n + found[1]
    place = np.searchsorted(keys, added)
    apart = np.append(keys, -1)[place] != added
    place = place[apart]
    first, second, cosine = (np.insert(old, place, new[apart]) for old, new in zip(known, found, strict=True))
    return first, second, cosine, np.insert(np.ones(len(keys), dtype=bool), place, False)


def _exact(
    x: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Float64 cosines of pairs of rows, shape (P,)."""
    each = np.arange(len(x))
    out = np.empty(len(first))

    def task(_: None, start: int) -> None:
        part = slice(start, start + BLOCK_PAIRS)
        out[part] = cosines(x, first[part], second[part], each)

    if len(first) <= BLOCK_PAIRS:
        task(None, 0)
        return out
    for _ in in_threads(lambda: None, task, range(0, len(first), BLOCK_PAIRS)):
        pass
    return out
