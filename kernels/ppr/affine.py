r"""HippoRAG 2's dense restart without a dense PPR.

HippoRAG 2 (ICML 2025, section 3.2) gives every passage the restart weight ``w * minmax(E q)``, with the
passage vectors E (M, d) and the query q. That is affine in q, and :math:`\Pi` is linear, so with

.. math:: Z = (\Pi E)_{passages}, \quad z_1 = (\Pi 1)_{passages}, \quad a = \frac{w}{\max - \min}, \quad
          b = a \min

the scores of passages are, up to a factor that is common to all of them,

.. math:: a \, Z q - b \, z_1 + \Pi \, \text{(phrase seeds)}.

Z and z1 are computed once, d + 1 columns of :func:`hippoindex.kernels.ppr.power.propagate`; a query is two
matrix-vector products and a push. Where all passages are equally near (max = min) every one restarts with w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.power import propagate
from hippoindex.kernels.ppr.push import Goal, Pusher
from hippoindex.kernels.ppr.restart import check_cells
from hippoindex.kernels.ppr.result import Ranked, SparseResult, empty_ranking
from hippoindex.kernels.ppr.top import largest

CHUNK_PASSAGES = 8192
BLOCK_QUERIES = 64


class Columns(NamedTuple):
    """A block of precomputed columns.

    Attributes
    ----------
    first : int
        Column of Z at which the block begins; the column after the last of E is z1.
    values : ndarray of float32, shape (M, B)
    residual : ndarray of float64, shape (B,)
        L1 error of each column over all nodes, as a share of the L1 norm of what was propagated.
    iterations : ndarray of int64, shape (B,)
    """

    first: int
    values: NDArray[np.float32]
    residual: NDArray[np.float64]
    iterations: NDArray[np.int64]


def precompute_bytes(n_nodes: int, n_passages: int, n_columns: int) -> int:
    """Return what one block of :func:`precompute` holds beside the graph, in bytes."""
    return 4 * n_columns * (2 * n_nodes + 2 * n_passages)


def precompute(
    graph: Graph,
    vectors: NDArray[np.floating],
    first_node: int,
    damping: float = 0.5,
    tolerance: float = 1e-6,
    *,
    block_columns: int = 32,
    memory_bytes: int | None = None,
    start: int = 0,
) -> Iterator[Columns]:
    """Yield the columns of Z, and z1 last, in blocks.

    A column's bytes do not depend on ``block_columns``, so blocks may be written as they come and the work
    taken up at any of them.

    Parameters
    ----------
    graph : Graph
    vectors : ndarray of float16 or float32, shape (M, d)
        E; may be a memory map, of which one block of columns is read at a time.
    first_node : int
        The passages are nodes ``first_node .. first_node + M - 1``.
    damping, tolerance : float
        See :func:`hippoindex.kernels.ppr.power.propagate`.
    block_columns : int
    memory_bytes : int, optional
        Budget of one block.
    start : int
        First column to compute.

    Yields
    ------
    Columns

    Raises
    ------
    KernelError
        If a block does not fit the budget (the message says how much it needs), or an argument is not as
        described.
    """
    m, d = vectors.shape
    needed = precompute_bytes(graph.n_nodes, m, block_columns)
    if block_columns < 1 or start < 0:
        raise KernelError(f"block_columns {block_columns} must be positive, start {start} not negative")
    if memory_bytes is not None and needed > memory_bytes:
        raise KernelError(
            f"A block of {block_columns} columns over {graph.n_nodes} nodes needs {needed} bytes; the budget "
            f"is {memory_bytes}"
        )
    for first in range(start, d + 1, block_columns):
        stop = min(first + block_columns, d + 1)
        block = np.ones((m, stop - first), dtype=np.float32)  # the column after E's last is all ones
        block[:, : min(stop, d) - first] = vectors[:, first : min(stop, d)]
        result = propagate(graph, block, first_node, damping, tolerance)
        values = result.scores[first_node : first_node + m].copy()  # a view would keep the other nodes' rows
        columns = Columns(first, values, result.residual, result.iterations)
        del block, result
        yield columns


@dataclass(frozen=True, eq=False)
class DenseRestart:
    """The precomputed dense restart of one graph and one damping.

    Attributes
    ----------
    vectors : ndarray of float16 or float32, shape (M, d)
        E, the passages' L2-normalised vectors.
    z : ndarray of float16 or float32, shape (M, d)
    z1 : ndarray of float32, shape (M,)
    """

    vectors: NDArray[np.floating]
    z: NDArray[np.floating]
    z1: NDArray[np.float32]

    def validate(self) -> None:
        """Check shapes.

        Raises
        ------
        KernelError
        """
        if self.vectors.ndim != 2 or not len(self.vectors):
            raise KernelError(f"vectors have shape {self.vectors.shape}; expected (M, d), M at least 1")
        if self.z.shape != self.vectors.shape or self.z1.shape != self.z.shape[:1]:
            raise KernelError(
                f"vectors {self.vectors.shape}, z {self.z.shape} and z1 {self.z1.shape} do not fit together"
            )


def rank(
    pusher: Pusher,
    dense: DenseRestart,
    queries: NDArray[np.floating],
    weight: ArrayLike,
    seeds: sp.csr_array,
    top_k: int,
    goal: Goal = Goal(),  # noqa: B008 - immutable
) -> Ranked:
    """Rank passages for queries whose restart is ``weight * minmax(E q)`` on passages plus sparse seeds.

    Equal to ranking by PPR with that restart, within the error of the stored columns and of the push.

    Parameters
    ----------
    pusher : Pusher
        Its candidates are the passages.
    dense : DenseRestart
    queries : ndarray of float, shape (Q, d)
    weight : array_like of float, shape (Q,) or ()
        Weight of the nearest passage; not negative.
    seeds : scipy.sparse.csr_array, shape (Q, N)
        Not scaled; a row may be empty where its weight is positive.
    top_k : int
    goal : Goal
        Of the push, relative to each row's seeds.

    Returns
    -------
    Ranked
        Nodes are node numbers. Scores are probabilities as ``power`` gives them. ``residual`` and
        ``certified_k`` cover the push; the stored columns have their own residual.

    Raises
    ------
    KernelError
        If shapes do not fit, a value is negative or not finite where it may not be, or a query has neither
        seeds nor a positive weight.
    """
    weights = np.asarray(weight, dtype=np.float64)
    _check_shapes(pusher, dense, queries, weights, seeds, top_k)
    weights = np.broadcast_to(weights, (len(queries),))
    masses = np.asarray(seeds.sum(axis=1), dtype=np.float64).ravel()
    _check_values(queries, weights, seeds, masses)
    low, high = pusher.candidates
    graph, damping = pusher.graph, pusher.damping
    isolated = np.zeros(graph.n_nodes, dtype=bool)
    isolated[graph.isolated] = True
    lost_seeds = seeds @ isolated.astype(np.float64)  # (Q,)
    pushed = _push_seeded(pusher, seeds, masses, goal)
    nodes, scores, certified = empty_ranking(len(queries), min(top_k, high - low))
    factors = np.empty(len(queries))
    for start in range(0, len(queries), BLOCK_QUERIES):
        part = slice(start, start + BLOCK_QUERIES)
        block, spread, lost = _dense_part(dense, queries[part], weights[part], isolated[low:high])
        factors[part] = 1.0 / (masses[part] + spread - damping * (lost_seeds[part] + lost))
        _add_and_rank(
            block,
            (pushed.indptr[start:], pushed.nodes, pushed.scores),
            low,
            masses[part],
            pushed.epsilon[part],
            pushed.residual[part],
            graph.degrees[low:high],
            nodes[part],
            scores[part],
            certified[part],
        )
    return Ranked(
        nodes,
        scores * factors[:, None],
        pushed.residual * masses * factors,
        pushed.iterations,
        pushed.converged,
        certified,
        pushed.edges_touched,
        "affine",
    )


def scores(
    pusher: Pusher,
    dense: DenseRestart,
    queries: NDArray[np.floating],
    weight: ArrayLike,
    seeds: sp.csr_array,
    epsilon: float,
    cosines: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return the scores by which :func:`rank` ranks, of every passage.

    Parameters
    ----------
    pusher, dense, queries, weight, seeds
        See :func:`rank`.
    epsilon : float
        Where the push stops, see :class:`~hippoindex.kernels.ppr.push.Goal`.
    cosines : ndarray of float32, shape (Q, M), optional
        ``queries @ dense.vectors.T`` where the caller has it.

    Returns
    -------
    ndarray of float32, shape (Q, M)
        Lower bounds up to the error of the stored columns; rounding can leave a zero slightly negative.

    Raises
    ------
    KernelError
        As :func:`rank`.
    """
    weights = np.asarray(weight, dtype=np.float64)
    _check_shapes(pusher, dense, queries, weights, seeds, 1)
    weights = np.broadcast_to(weights, (len(queries),))
    masses = np.asarray(seeds.sum(axis=1), dtype=np.float64).ravel()
    _check_values(queries, weights, seeds, masses)
    low, high = pusher.candidates
    isolated = np.zeros(pusher.graph.n_nodes, dtype=bool)
    isolated[pusher.graph.isolated] = True
    lost_seeds = seeds @ isolated.astype(np.float64)  # (Q,)
    found = np.empty((len(queries), high - low), dtype=np.float32)
    if cosines is not None and cosines.shape != found.shape:
        raise KernelError(
            f"cosines {cosines.shape} do not fit {found.shape[0]} queries and {found.shape[1]} passages"
        )
    for start in range(0, len(queries), BLOCK_QUERIES):
        part = slice(start, start + BLOCK_QUERIES)
        known = None if cosines is None else cosines[part]
        block, spread, lost = _dense_part(dense, queries[part], weights[part], isolated[low:high], known)
        seeded = np.flatnonzero(masses[part] > 0)
        pusher.add_scores(
            block,
            seeded,
            seeds[start + seeded],
            epsilon,
            scales=masses[start + seeded],
            return_lost=False,
        )
        factors = 1.0 / (masses[part] + spread - pusher.damping * (lost_seeds[part] + lost))
        np.multiply(block, factors[:, None].astype(np.float32), out=found[part])
    return found


def _check_shapes(
    pusher: Pusher,
    dense: DenseRestart,
    queries: NDArray[np.floating],
    weights: NDArray[np.float64],
    seeds: sp.csr_array,
    top_k: int,
) -> None:
    dense.validate()
    low, high = pusher.candidates
    if high - low != len(dense.vectors) or queries.shape[1:] != dense.vectors.shape[1:]:
        raise KernelError(
            f"{high - low} candidates and queries {queries.shape} do not fit vectors {dense.vectors.shape}"
        )
    expected = (len(queries), pusher.graph.n_nodes)
    if seeds.shape != expected or weights.shape not in ((), expected[:1]):
        raise KernelError(
            f"seeds {seeds.shape} and weights {weights.shape} do not fit {expected[0]} queries over "
            f"{expected[1]} nodes"
        )
    if top_k < 1:
        raise KernelError(f"top_k must be at least 1; got {top_k}")


def _check_values(
    queries: NDArray[np.floating],
    weights: NDArray[np.float64],
    seeds: sp.csr_array,
    masses: NDArray[np.float64],
) -> None:
    check_cells(seeds)
    bad = np.flatnonzero(~np.isfinite(queries).all(axis=1))
    if len(bad):
        raise KernelError(f"query {bad[0]} holds a non-finite value")
    bad = np.flatnonzero(~(np.isfinite(weights + masses) & (weights >= 0) & (weights + masses > 0)))
    if len(bad):
        raise KernelError(
            f"query {bad[0]} has weight {weights[bad[0]]} and seeds of sum {masses[bad[0]]}: it needs "
            "seeds or a positive weight, finite and not negative"
        )


def _push_seeded(
    pusher: Pusher, seeds: sp.csr_array, masses: NDArray[np.float64], goal: Goal
) -> SparseResult:
    """Push the rows that have seeds; the others get nothing, which is exact."""
    seeded = np.flatnonzero(masses > 0)
    found = pusher.solve(seeds[seeded], goal, return_lost=False)
    lengths = np.zeros(len(masses), dtype=np.int64)
    lengths[seeded] = np.diff(found.indptr)
    columns: dict[str, NDArray] = {}
    for name in ("residual", "iterations", "converged", "certified_k", "epsilon", "edges_touched"):
        values = getattr(found, name)
        columns[name] = np.full(len(masses), name == "converged", dtype=values.dtype)
        columns[name][seeded] = values
    reasons = np.full(len(masses), "epsilon", dtype=object)
    reasons[seeded] = found.stopped_by
    indptr = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return SparseResult(indptr, found.nodes, found.scores, **columns, stopped_by=tuple(reasons))


def _dense_part(
    dense: DenseRestart,
    queries: NDArray[np.floating],
    weights: NDArray[np.float64],
    isolated: NDArray[np.bool_],
    cosines: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
    """Return ``a Z q - b z1`` (B, M), the restart mass of all passages and that of isolated ones (B,)."""
    q = np.ascontiguousarray(queries, dtype=np.float32)
    walked = _products(q, dense.z)  # (B, M)
    cosines = _products(q, dense.vectors) if cosines is None else cosines
    least, greatest = cosines.min(axis=1).astype(np.float64), cosines.max(axis=1).astype(np.float64)
    equal = greatest == least  # every passage has min-max score 1, as in HippoRAG's code
    a = np.divide(weights, greatest - least, out=np.zeros_like(weights), where=~equal)
    b = np.where(equal, -weights, a * least)
    walked *= a.astype(np.float32)[:, None]
    walked -= b.astype(np.float32)[:, None] * dense.z1
    sums = np.stack(
        [cosines.sum(axis=1, dtype=np.float64), cosines[:, isolated].sum(axis=1, dtype=np.float64)]
    )
    mass = a * sums - b * np.array([[len(isolated)], [isolated.sum()]])  # (2, B)
    return walked, mass[0], mass[1]


def _products(queries: NDArray[np.float32], vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return ``queries @ vectors.T`` in float32, shape (B, M); half precision is widened chunk by chunk."""
    if vectors.dtype == np.float32:
        return queries @ vectors.T
    out = np.empty((len(queries), len(vectors)), dtype=np.float32)
    for start in range(0, len(vectors), CHUNK_PASSAGES):
        chunk = vectors[start : start + CHUNK_PASSAGES].astype(np.float32)
        out[:, start : start + CHUNK_PASSAGES] = queries @ chunk.T
    return out


@numba.njit(parallel=True, cache=True, error_model="numpy")
def _add_and_rank(
    block: NDArray,
    pushed: tuple[NDArray, NDArray, NDArray],
    low: int,
    masses: NDArray,
    rho: NDArray,
    missing: NDArray,
    degrees: NDArray,
    nodes: NDArray,
    scores: NDArray,
    certified: NDArray,
) -> None:
    """Add each row's push to its dense scores and write its best passages, and how many are proven."""
    indptr, reached, values = pushed
    m, k = block.shape[1], nodes.shape[1]
    keys = np.arange(m)
    for q in numba.prange(block.shape[0]):
        row = block[q]
        for i in range(indptr[q], indptr[q + 1]):
            row[reached[i] - low] += np.float32(masses[q] * values[i])
        best = largest(row, keys, k)
        for i in range(k):
            nodes[q, i] = best[i] + low
            scores[q, i] = row[best[i]]
        certified[q] = _certified(row, best, degrees, masses[q] * rho[q], masses[q] * missing[q])


@numba.njit(cache=True, error_model="numpy")
def _certified(row: NDArray, best: NDArray, degrees: NDArray, rho: float, missing: float) -> int:
    """Return the largest k whose first k of ``best`` no other passage can overtake."""
    listed = np.zeros(row.shape[0], np.bool_)
    listed[best] = True
    rest = -np.inf
    for v in range(row.shape[0]):
        if not listed[v]:
            rest = max(rest, row[v] + min(degrees[v] * rho, missing))
    for k in range(best.shape[0], 0, -1):
        v = best[k - 1]
        if row[v] >= rest:
            return k
        rest = max(rest, row[v] + min(degrees[v] * rho, missing))
    return 0
