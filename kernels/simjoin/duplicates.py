"""Equal vectors are joined once: rows are grouped before a join and expanded after it.

A hub of 100,000 equal vectors has 5e9 pairs above any threshold; grouped it is one vector. The capped pairs
of the groups hold all that the capped pairs of the rows need: if a group is not among a node's
``max_neighbors`` best groups (ties by their lowest row), then each of those has a row that beats all of this
group's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.simjoin.best import BestPairs
from hippoindex.kernels.simjoin.threads import in_threads
from hippoindex.kernels.simjoin.tile import bits, hash_rows, recheck

BLOCK_ROWS = 1 << 14

Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
"""First, second and float64 cosine of pairs."""


@dataclass(frozen=True)
class Groups:
    """Rows with equal vectors.

    Attributes
    ----------
    first_row : ndarray of int64, shape (G,)
        Lowest row of every group, ascending.
    of_row : ndarray of int64, shape (N,)
        Group of every row.
    """

    first_row: NDArray[np.int64]
    of_row: NDArray[np.int64]

    def any_of(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Tell which groups have a row in the mask, shape (G,)."""
        out = np.zeros(len(self.first_row), dtype=bool)
        out[self.of_row[mask]] = True
        return out


def group_equal_rows(x: NDArray[np.floating], among: NDArray[np.bool_] | None = None) -> Groups:
    """Group the rows of ``x``, shape (N, d), that are equal bit by bit; rows not ``among`` stand alone."""
    each = np.arange(len(x))
    chosen = each if among is None else np.flatnonzero(among)
    hashes = _hashes(x, None if among is None else chosen)
    order = np.argsort(hashes, kind="stable")
    begins = np.r_[True, hashes[order][1:] != hashes[order][:-1]][: len(order)]
    leader = each.copy()
    lowest = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]  # of those with the same hash
    leader[chosen[order]] = chosen[lowest]
    followers = np.flatnonzero(leader != each)
    for start in range(0, len(followers), BLOCK_ROWS):
        rows = followers[start : start + BLOCK_ROWS]
        equal = (x[rows] == x[leader[rows]]).all(axis=1)
        leader[rows[~equal]] = rows[~equal]  # another vector with the same hash stands alone
    leads = leader == each
    return Groups(np.flatnonzero(leads), (np.cumsum(leads) - 1)[leader])


def expand(
    found: Found,
    groups: Groups,
    x: NDArray[np.floating],
    threshold: float,
    max_neighbors: int,
    searches: NDArray[np.bool_],
) -> Found:
    """Turn the capped pairs of groups into the pairs of rows that the rows may keep.

    Parameters
    ----------
    found : tuple
        Pairs of groups.
    groups : Groups
    x : ndarray, shape (N, d)
    threshold : float
    max_neighbors : int
    searches : ndarray of bool, shape (N,)
        Rows that keep pairs.

    Returns
    -------
    tuple
        Distinct pairs of rows, not yet capped.
    """
    if len(groups.first_row) == len(groups.of_row):
        return found
    members = np.argsort(groups.of_row, kind="stable")  # rows by group, ascending within
    size = np.bincount(groups.of_row)
    node, other, cosine = _directed(found, groups, x, threshold, size)
    # the first max_neighbors + 1 rows of every neighbouring group, in the order in which the node ranks them
    count = np.minimum(size[other], max_neighbors + 1)
    row = members[_ranges(np.cumsum(size)[other] - size[other], count)]
    node, cosine = np.repeat(node, count), np.repeat(cosine, count)
    best = _head(node, row, cosine, max_neighbors + 1)
    node, row, cosine = node[best], row[best], cosine[best]
    # every searching row of the node's group gets that list
    keepers = members[searches[members]]
    per_group = np.bincount(groups.of_row[keepers], minlength=len(size))
    begin = np.cumsum(per_group) - per_group
    keeper = keepers[_ranges(begin[node], per_group[node])]
    row, cosine = np.repeat(row, per_group[node]), np.repeat(cosine, per_group[node])
    apart = keeper != row
    low, high = np.minimum(keeper, row)[apart], np.maximum(keeper, row)[apart]
    return distinct(low, high, cosine[apart], len(groups.of_row))


def distinct(
    first: NDArray[np.int64], second: NDArray[np.int64], cosine: NDArray[np.float64], n: int
) -> Found:
    """Return each pair once, sorted; ``n`` is the number of nodes."""
    _, once = np.unique(first * n + second, return_index=True)
    return first[once], second[once], cosine[once]


def capped(found: Found, searches: NDArray[np.bool_], max_neighbors: int) -> Found:
    """Apply the per-node cap to distinct pairs, and sort them."""
    best = BestPairs(searches, max_neighbors)
    best.add(*found)
    return best.arrays()


def cosines(
    x: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Float64 products of the vectors of nodes, shape (P,); ``rows`` are the nodes' rows in ``x``."""
    out = np.empty(len(first))
    nowhere = np.full(len(rows), -np.inf)
    recheck(bits(x), rows, -np.inf, nowhere, first.copy(), second.copy(), len(first), out)
    return out


def _hashes(x: NDArray[np.floating], rows: NDArray[np.int64] | None) -> NDArray[np.uint64]:
    """Hash all or some rows, read in blocks."""
    hashes = np.empty(len(x) if rows is None else len(rows), np.uint64)

    def task(_: None, start: int) -> None:
        part = slice(start, start + BLOCK_ROWS)
        hash_rows(x[part if rows is None else rows[part]].view(np.uint16), hashes[part])

    for _ in in_threads(lambda: None, task, range(0, len(hashes), BLOCK_ROWS)):
        pass
    return hashes


def _directed(
    found: Found, groups: Groups, x: NDArray[np.floating], threshold: float, size: NDArray[np.int64]
) -> Found:
    """Both directions of the pairs of groups, and every group of several rows with itself."""
    first, second, cosine = found
    several = np.flatnonzero(size > 1)
    itself = cosines(x, several, several, groups.first_row)
    several, itself = several[itself >= threshold], itself[itself >= threshold]
    node = np.concatenate([first, second, several])
    other = np.concatenate([second, first, several])
    return node, other, np.concatenate([cosine, cosine, itself])


def _head(
    node: NDArray[np.int64], row: NDArray[np.int64], cosine: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """Positions of each node's best ``count`` entries, by node."""
    order = np.lexsort((row, -cosine, node))
    sorted_node = node[order]
    place = np.arange(len(node)) - np.searchsorted(sorted_node, sorted_node)
    return order[place < count]


def _ranges(start: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges ``start[k] .. start[k] + count[k] - 1``."""
    offset = np.cumsum(count) - count
    return np.arange(count.sum()) + np.repeat(start - offset, count)
