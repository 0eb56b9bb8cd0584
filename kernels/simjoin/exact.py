"""The exact join: tiles of the upper triangle by GEMM, whatever may reach the threshold rechecked in float64.

A tile holds float32 upper bounds of cosines (:mod:`hippoindex.kernels.simjoin.sketch`); they only nominate
pairs. The cosine of every nominated pair is computed anew in float64 from the stored vectors, so the result
depends neither on the tile's shape nor on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hippoindex.kernels.simjoin.duplicates import Found
from hippoindex.kernels.simjoin.problem import MEMORY_BYTES, Problem, Progress, pose, scan_all
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.sketch import Plan, build, plan


def exact(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    known: Pairs | None = None,
    new: ArrayLike | None = None,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: Progress | None = None,
) -> Pairs:
    """Return all pairs with cosine >= threshold that survive the per-node cap.

    Result as of :func:`hippoindex.kernels.simjoin.reference.reference`.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        L2-normalised rows; float16, float32 or float64; may be a memory map, which is read in blocks.
    threshold, max_neighbors, searches
        See the reference.
    known : Pairs, optional
        The join of the rows that are not new, with the same threshold and at least this cap.
    new : array_like of bool, shape (N,), optional
        Rows to join with all; the result is that of joining everything.
    seed : int
        Draws the sample that sets the sketches' axes. It changes the time, not the result.
    memory_bytes : int
        Working memory to aim at, besides the vectors and the pairs found.
    on_progress : callable, optional
        Called with the share of the work done, 0 to 1.

    Returns
    -------
    Pairs

    Raises
    ------
    KernelError
        If the arguments are not as described.
    """
    problem = pose(vectors, threshold, max_neighbors, searches, known, new, memory_bytes)
    found = by_tiles(problem, exact_plan(problem, seed), on_progress)
    return problem.finish(found)


def exact_plan(problem: Problem, seed: int) -> Plan:
    """Plan sketches for a join that computes the bounds of all pairs."""
    rows = problem.groups.first_row
    return plan(problem.x, rows, problem.threshold, 1.0, np.random.default_rng(seed))


def by_tiles(problem: Problem, how: Plan, on_progress: Progress | None = None) -> Found:
    """Join the nodes that ask with all, and return the capped pairs of nodes."""
    sketches = build(problem.x, problem.groups.first_row, how, problem.memory_bytes // 2)
    return scan_all(problem, sketches, problem.asks, problem.node_searches(), on_progress)
