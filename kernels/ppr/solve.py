"""Personalized PageRank for thousands of restarts, by the solver that suits them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.sparse as sp
import structlog
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.power import block_width, power
from hippoindex.kernels.ppr.push import Goal, Pusher
from hippoindex.kernels.ppr.restart import SparseRestarts, candidate_range, check_damping, sparse_restarts
from hippoindex.kernels.ppr.result import PPRResult, Ranked, SparseResult, empty_ranking
from hippoindex.kernels.ppr.top import largest

log = structlog.get_logger("hippoindex")

SPARSE_SHARE = 0.01
"""``auto`` pushes where restarts hold at most this share of the nodes."""


def solve(
    graph: Graph,
    restarts: SparseRestarts,
    method: Literal["auto", "push", "power"] = "auto",
    *,
    top_k: int = 100,
    candidates: tuple[int, int] | None = None,
    damping: float = 0.5,
    goal: Goal = Goal(),  # noqa: B008 - immutable
    tolerance: float = 1e-6,
    memory_bytes: int = 2**30,
) -> Ranked:
    """Return the best candidates of each restart.

    Parameters
    ----------
    graph : Graph
    restarts : sparse array, shape (Q, N)
        Not negative, finite, every row with a positive sum.
    method : {"auto", "push", "power"}
        ``auto`` pushes where restarts hold at most 1 % of the nodes on average, and logs what it chose.
    top_k : int
    candidates : (int, int), optional
        Rank only nodes ``start .. stop - 1``; by default all.
    damping : float
        Probability of continuing.
    goal : Goal
        When ``push`` stops.
    tolerance : float
        L1 error at which ``power`` stops.
    memory_bytes : int
        Budget of one block of ``power``, or of what ``push`` holds for its threads.

    Returns
    -------
    Ranked

    Raises
    ------
    KernelError
        If an argument is not as described, or the budget is too small; the message says what is needed.
    """
    check_damping(damping)
    low, high = candidate_range(graph, candidates)
    if top_k < 1:
        raise KernelError(f"top_k must be at least 1; got {top_k}")
    matrix = sparse_restarts(graph, restarts)
    chosen = choose_method(method, matrix)
    if chosen == "power":
        return _by_power(graph, matrix, top_k, (low, high), damping, tolerance, memory_bytes)
    pusher = Pusher(graph, damping, candidates=(low, high), memory_bytes=memory_bytes)
    return ranked(pusher.solve(matrix, goal, top_k=top_k), min(top_k, high - low))


def choose_method(method: str, restarts: sp.csr_array) -> str:
    """Return the method that was asked for, or with ``auto`` the one that suits the restarts.

    Raises
    ------
    KernelError
        If there is no such method.
    """
    if method in ("push", "power"):
        return method
    if method != "auto":
        raise KernelError(f"There is no method {method!r}; there are auto, push and power")
    n_restarts, n_nodes = restarts.shape
    share = restarts.nnz / max(n_restarts * n_nodes, 1)
    chosen = "push" if share <= SPARSE_SHARE else "power"
    log.info("PPR solver chosen", method=chosen, restart_share=float(f"{share:.2g}"), nodes=n_nodes)
    return chosen


def ranked(result: SparseResult, k: int) -> Ranked:
    """Return the first k nodes of a sparse result as a rectangle.

    Where more nodes than k are proven as a set, it is not known which k of them are the best: none is.
    """
    nodes, scores, _ = empty_ranking(len(result), k)
    for number in range(len(result)):
        found, values = result.row(number)
        nodes[number, : len(found)] = found[:k]
        scores[number, : len(found)] = values[:k]
    return Ranked(
        nodes,
        scores,
        result.residual,
        result.iterations,
        result.converged,
        np.where(result.certified_k <= k, result.certified_k, 0),
        result.edges_touched,
        "push",
    )


def _by_power(
    graph: Graph,
    matrix: sp.csr_array,
    top_k: int,
    candidates: tuple[int, int],
    damping: float,
    tolerance: float,
    memory_bytes: int,
) -> Ranked:
    n_restarts, (low, high) = matrix.shape[0], candidates
    nodes, scores, certified = empty_ranking(n_restarts, min(top_k, high - low))
    residual, iterations = np.zeros(n_restarts), np.zeros(n_restarts, dtype=np.int64)
    width = max(block_width(graph.n_nodes, n_restarts, memory_bytes), 1)
    for start in range(0, n_restarts, width):
        part = slice(start, min(start + width, n_restarts))
        result = power(graph, matrix[part].toarray().T.astype(np.float32), damping, tolerance)
        residual[part], iterations[part] = result.residual, result.iterations
        for number in range(part.start, part.stop):
            nodes[number], scores[number], certified[number] = _best_of_column(
                result, number - start, low, high, nodes.shape[1]
            )
    edges = iterations * len(graph.indices)
    return Ranked(nodes, scores, residual, iterations, residual <= tolerance, certified, edges, "power")


def _best_of_column(
    result: PPRResult, column: int, low: int, high: int, k: int
) -> tuple[NDArray[np.int64], NDArray[np.floating], int]:
    """Return the k best candidates of a column, their scores, and how many of them are proven.

    What no walk reached is -1. Two nodes can be wrong by the residual together, not each: k nodes are the
    best where the gap to the next score is at least the residual.
    """
    values = np.ascontiguousarray(result.scores[low:high, column])
    order = largest(values, np.arange(len(values)), k + 1)
    gaps = values[order[:-1]].astype(np.float64) - values[order[1:]]
    proven = np.flatnonzero(gaps >= result.residual[column])
    reached = values[order[:k]] > 0
    everyone = k if k == len(values) and reached.all() else 0
    nodes = np.where(reached, order[:k] + low, -1)
    certified = max(int(proven[-1]) + 1 if len(proven) else 0, everyone)
    return nodes, values[order[:k]], min(certified, int(reached.sum()))
