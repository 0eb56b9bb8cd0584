"""What both joins share: a checked problem, the tiles' worker, and the way from groups back to rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.best import FRESH_PAIRS, BestPairs
from hippoindex.kernels.simjoin.duplicates import Found, Groups, capped, expand, group_equal_rows
from hippoindex.kernels.simjoin.known import floors, in_order, with_known
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.rows import as_mask, as_rows, check_arguments
from hippoindex.kernels.simjoin.sketch import Sketch
from hippoindex.kernels.simjoin.threads import in_threads, n_threads
from hippoindex.kernels.simjoin.tile import bits, nominate, recheck

MEMORY_BYTES = 2**30
TILE_ROWS = 1024
TILE_COLUMNS = 2048
BANDS_PER_THREAD = 4
MARGIN = 1e-3
"""Bounds that come this near to the threshold are rechecked in float64."""

Progress = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked join over groups of equal rows.

    Attributes
    ----------
    x : ndarray, shape (N, d)
    groups : Groups
        The join's nodes. If pairs are known, only new rows are grouped.
    threshold : float
    max_neighbors : int
    searches : ndarray of bool, shape (N,)
        Rows that keep pairs.
    known : Pairs or None
        Pairs of the rows that are not new.
    asks : ndarray of bool, shape (G,)
        Nodes that are joined with all; the pairs of the others are known.
    memory_bytes : int
    """

    x: NDArray[np.floating]
    groups: Groups
    threshold: float
    max_neighbors: int
    searches: NDArray[np.bool_]
    known: Pairs | None
    asks: NDArray[np.bool_]
    memory_bytes: int

    @property
    def n_nodes(self) -> int:
        """Number of groups."""
        return len(self.groups.first_row)

    @property
    def slack(self) -> float:
        """Bound of the rounding error of a product of sketches in float32."""
        return 8.0 * (self.x.shape[1] + 16) * 2.0**-24

    def node_searches(self) -> NDArray[np.bool_]:
        """Nodes that keep pairs, shape (G,)."""
        return self.groups.any_of(self.searches)

    def best(self, searches: NDArray[np.bool_]) -> BestPairs:
        """Return an empty collection of pairs of nodes, with the floors that the known pairs set."""
        fresh = min(FRESH_PAIRS, max(self.memory_bytes // 64, 1 << 16))
        best = BestPairs(searches, self.max_neighbors, fresh)
        if self.known is not None:
            known = floors(self.known, self.searches, self.max_neighbors)
            np.maximum(best.floors, known[self.groups.first_row], out=best.floors)
        return best

    def finish(self, found: Found) -> Pairs:
        """Turn the capped pairs of nodes into those of rows, add what is known, and cap again."""
        pairs = expand(found, self.groups, self.x, self.threshold, self.max_neighbors, self.searches)
        if self.known is not None:
            pairs = with_known(pairs, self.known, self.x, self.threshold, self.searches, self.max_neighbors)
        elif self.n_nodes < len(self.x):
            pairs = capped(pairs, self.searches, self.max_neighbors)
        return Pairs(pairs[0], pairs[1], pairs[2].astype(np.float32))


def pose(
    vectors: ArrayLike,
    threshold: float,
    max_neighbors: int,
    searches: ArrayLike | None,
    known: Pairs | None,
    new: ArrayLike | None,
    memory_bytes: int,
) -> Problem:
    """Check the arguments of a join and group equal rows; of rows that are not new, neither.

    Raises
    ------
    KernelError
        If an argument is not as described, or only one of ``known`` and ``new`` is given.
    """
    x = as_rows(vectors)
    if (known is None) != (new is None):
        raise KernelError("known (pairs of the old rows) and new (which rows are not old) come together")
    added = None if new is None else as_mask(new, len(x), "new")
    mask = check_arguments(x, threshold, max_neighbors, searches, added)
    if known is not None:
        known = _checked(known, len(x))
    groups = group_equal_rows(x, added)
    asks = groups.any_of(as_mask(added, len(x), "new"))
    return Problem(x, groups, threshold, max_neighbors, mask, known, asks, memory_bytes)


def _checked(known: Pairs, n: int) -> Pairs:
    first, second = np.asarray(known.first, np.int64), np.asarray(known.second, np.int64)
    cosine = np.asarray(known.cosine, np.float32)
    if not first.shape == second.shape == cosine.shape or first.ndim != 1:
        shapes = f"{first.shape}, {second.shape} and {cosine.shape}"
        raise KernelError(f"known pairs have shapes {shapes}; expected three times (P,)")
    off = np.flatnonzero((first < 0) | (first >= second) | (second >= n))
    if len(off):
        pair = (int(first[off[0]]), int(second[off[0]]))
        raise KernelError(f"Known pair {off[0]} is {pair}; expected 0 <= first < second < {n}")
    return in_order(Pairs(first, second, cosine), n)


class Worker:
    """Scans tiles: one per thread, with its own buffers.

    Parameters
    ----------
    problem : Problem
    asks : ndarray of bool, shape (G,)
        Nodes that are rows of tiles.
    best : BestPairs
        Takes what is found.
    owner, probes : ndarray
        Lists of the nodes, see :func:`hippoindex.kernels.simjoin.tile.nominate`.
    rounding : float
        How much too low a bound can be because the sketches were rounded.
    """

    def __init__(
        self,
        problem: Problem,
        asks: NDArray[np.bool_],
        best: BestPairs,
        owner: NDArray[np.int32] | None = None,
        probes: NDArray[np.int32] | None = None,
        rounding: float = 0.0,
    ) -> None:
        self._problem, self._asks, self._best = problem, asks, best
        self._slack = problem.slack + rounding
        self._owner = np.zeros(0, np.int32) if owner is None else owner
        self._probes = np.zeros((0, 0), np.int32) if probes is None else probes
        self._bounds = np.empty(TILE_ROWS * TILE_COLUMNS, np.float32)
        self._first, self._second = (np.empty(16 * TILE_COLUMNS, np.int64) for _ in range(2))
        self._cosine = np.empty(16 * TILE_COLUMNS)

    def scan(
        self,
        rows: NDArray[np.int64],
        row_sketches: NDArray[np.float32],
        columns: NDArray[np.int64],
        column_sketches: NDArray[np.float32],
    ) -> None:
        """Find the pairs of one tile, at most ``TILE_ROWS`` by ``TILE_COLUMNS``."""
        problem, floors = self._problem, self._best.floors
        shape = (len(rows), len(columns))
        bounds = self._bounds[: shape[0] * shape[1]].reshape(shape)
        np.matmul(row_sketches, column_sketches.T, out=bounds)
        least = problem.threshold - max(MARGIN, self._slack)
        first, second, cosine = self._first, self._second, self._cosine
        position = 0
        while position < len(rows):
            count, position = nominate(
                bounds,
                rows,
                columns,
                least,
                floors,
                self._slack,
                self._asks,
                self._owner,
                self._probes,
                position,
                first,
                second,
            )
            count = recheck(
                bits(problem.x),
                problem.groups.first_row,
                problem.threshold,
                floors,
                first,
                second,
                count,
                cosine,
            )
            self._best.add(first[:count], second[:count], cosine[:count])


def scan_all(
    problem: Problem,
    sketches: Sketch,
    asks: NDArray[np.bool_],
    searches: NDArray[np.bool_],
    on_progress: Progress | None = None,
) -> Found:
    """Join the nodes that ask with all nodes, exactly.

    Parameters
    ----------
    problem : Problem
    sketches : Sketch
    asks, searches : ndarray of bool, shape (G,)
    on_progress : callable, optional

    Returns
    -------
    tuple
        Capped pairs of nodes.
    """
    best = problem.best(searches)
    n, asking = problem.n_nodes, np.flatnonzero(asks)
    everyone = np.arange(n)
    half = len(asking) == n  # then only the upper triangle is scanned

    def task(worker: Worker, band: tuple[int, int, int]) -> int:
        top, left, right = band
        rows = asking[top : top + TILE_ROWS]
        row_sketches = sketches.take(slice(top, top + TILE_ROWS) if half else rows)
        for start in range(left, right, TILE_COLUMNS):
            part = slice(start, min(start + TILE_COLUMNS, right))
            worker.scan(rows, row_sketches, everyone[part], sketches.take(part))
        return len(rows) * (right - left)

    bands = _bands(len(asking), n, half)
    total = sum(min(TILE_ROWS, len(asking) - top) * (right - left) for top, left, right in bands)
    done = 0
    for size in in_threads(lambda: Worker(problem, asks, best), task, bands):
        done += size
        if on_progress is not None:
            on_progress(done / total)
    return best.arrays()


def _bands(n_rows: int, n: int, half: bool) -> list[tuple[int, int, int]]:
    """Divide a scan among threads: where the rows of a band begin, and its columns' begin and end."""
    tops = range(0, n_rows, TILE_ROWS)
    parts = -(-BANDS_PER_THREAD * n_threads() // max(len(tops), 1))
    width = TILE_COLUMNS * -(-n // (TILE_COLUMNS * parts))
    return [(top, left, min(left + width, n)) for top in tops for left in range(top if half else 0, n, width)]
