r"""Forward push: Personalized PageRank for sparse restarts, in time independent of the graph's size.

Every node holds a share :math:`p` of finished walks and a residual :math:`r` of walks that are still under
way (Andersen, Chung and Lang, 2006). A push at u finishes the part :math:`1 - d` of :math:`r_u` and hands the
rest to the neighbours. It leaves :math:`\pi = p + \Pi r` untouched, so what is missing is known exactly.
Pushing stops when :math:`r_u \le \epsilon \deg(u)` everywhere. A push finishes at least
:math:`(1 - d) \epsilon \deg(u)` for :math:`\deg(u)` of work, and there is only 1 to finish: the work is at
most :math:`1 / ((1 - d) \epsilon)` in units of degree.

What is returned is :math:`p + (1 - d) r`, as walks also end where they are. Its L1 error is :math:`d \sum r`,
and a node v lacks at most

.. math:: \min(\deg(v) \rho - (1 - d) r_v, \; d \sum r), \qquad \rho = \max_u r_u / \deg(u)

because on an undirected graph :math:`\Pi_{vu} / \deg(v) = \Pi_{uv} / \deg(u)`. With these bounds the first k
nodes are certified where the k-th score is not below what any other node can still reach.

The state is kept as :math:`y = r / \deg`, so that pushing along an edge reads and writes one number of the
neighbour and compares it with a constant.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph, index_type
from hippoindex.kernels.ppr.lines import AHEAD_EDGES, LINE_BYTES, aligned_zeros, prefetch
from hippoindex.kernels.ppr.restart import (
    SparseRestarts,
    candidate_range,
    check_damping,
    normalised_restart,
    return_factor,
    sparse_restarts,
)
from hippoindex.kernels.ppr.result import PPRResult, SparseResult
from hippoindex.kernels.ppr.top import largest

VISITED = 1e-300
"""Residual of a node that was pushed: nothing, but distinct from a node never reached."""
NO_DEGREE = 1e-290
"""Stands for the degree of an isolated node, so that whatever it holds is above every epsilon and pushed."""
EPSILON_STEP = 0.25
"""Factor by which epsilon is lowered until a goal is reached."""
LEAST_EPSILON = 1e-18
CERTIFIED_UP_TO = 100
"""Nodes considered for ``certified_k``, at least, where no ``top_k`` is given."""
AHEAD_NODES = 4
"""How many pushes ahead a node's edges are asked for; the place where they begin, twice as many."""
HUBS = 1024
ADDED_AT_ONCE = 4
"""Restarts that one thread takes at a time where scores are added."""
PASSES = 50
"""The default work limit, in passes over all stored edges."""


class Goal(NamedTuple):
    """When to stop pushing.

    Attributes
    ----------
    epsilon : float
        Stop when no node holds a residual above ``epsilon`` times its degree. With one of the next two it is
        where to begin: it is lowered until they are met.
    tolerance : float or None
        L1 error to reach.
    certify_k : int or None
        How many of the best candidates must be proven, at most ``top_k``. Equal scores cannot be told
        apart: then only ``max_edges`` ends the work, or that there is nothing left to push.
    max_edges : int or None
        Stored edges after whose visit a restart is given up; by default 50 times those of the graph.
    """

    epsilon: float = 1e-7
    tolerance: float | None = None
    certify_k: int | None = None
    max_edges: int | None = None


def push(
    graph: Graph,
    restarts: SparseRestarts,
    damping: float = 0.5,
    goal: Goal = Goal(),  # noqa: B008 - immutable
    *,
    top_k: int | None = None,
    candidates: tuple[int, int] | None = None,
) -> SparseResult:
    """Solve Personalized PageRank for sparse restarts; see :class:`Pusher`, which keeps its memory.

    Parameters
    ----------
    graph : Graph
    restarts : sparse array, shape (Q, N)
        Not negative, finite, every row with a positive sum.
    damping, goal, top_k, candidates
        See :class:`Pusher`.

    Returns
    -------
    SparseResult

    Raises
    ------
    KernelError
        If an argument is not as described.
    """
    return Pusher(graph, damping, candidates=candidates).solve(restarts, goal, top_k=top_k)


def push_columns(
    graph: Graph, restart: ArrayLike, damping: float = 0.5, tolerance: float = 1e-6, max_iterations: int = 200
) -> PPRResult:
    """Solve for a dense block as :func:`hippoindex.kernels.ppr.power.power` does, by forward push.

    For comparison with the other solvers; where restarts are dense ``power`` is the faster one.

    Parameters
    ----------
    graph : Graph
    restart : array_like, shape (N, B)
    damping, tolerance : float
    max_iterations : int
        The work limit, in passes over all stored edges.

    Returns
    -------
    PPRResult
        float32 scores.

    Raises
    ------
    KernelError
        If the restart or the damping is not as described.
    """
    s = normalised_restart(graph, restart, damping, np.float64)
    goal = Goal(tolerance=tolerance, max_edges=max(max_iterations * len(graph.indices), 1))
    result = push(graph, sp.csr_array(s.T), damping, goal)
    scores = sp.csr_array((result.scores, result.nodes, result.indptr), shape=s.T.shape)
    dense = scores.toarray().T.astype(np.float32)
    return PPRResult(dense, result.residual, result.iterations, result.converged)


class Pusher:
    """Forward push on one graph, with memory that is reused from call to call, one call at a time.

    Cells of the graph are float32, sums are float64. Restarts are solved in parallel; a result depends
    neither on the number of threads nor on what it was solved with.

    Parameters
    ----------
    graph : Graph
    damping : float
        Probability of continuing.
    candidates : (int, int), optional
        Return only nodes ``start .. stop - 1``; by default all.
    threads : int, optional
        By default as many as numba uses.
    memory_bytes : int, optional
        Budget for what is held beside the graph; fewer threads are used where it is small.

    Raises
    ------
    KernelError
        If the graph is empty, the damping is no probability, the candidates are no range of nodes, or the
        budget does not hold one thread's memory.
    """

    def __init__(
        self,
        graph: Graph,
        damping: float = 0.5,
        *,
        candidates: tuple[int, int] | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        check_damping(damping)
        self.graph, self.damping = graph, damping
        self.candidates = candidate_range(graph, candidates)
        self._threads = _threads_within(memory_bytes, graph.n_nodes, threads or numba.get_num_threads())
        self._degrees = np.where(graph.degrees > 0, graph.degrees, NO_DEGREE)
        self._hubs = _largest_degrees(self._degrees, *self.candidates)
        self._states: list[_State] = []

    def solve(
        self,
        restarts: SparseRestarts,
        goal: Goal = Goal(),  # noqa: B008 - immutable
        *,
        top_k: int | None = None,
        return_lost: bool = True,
    ) -> SparseResult:
        """Solve for many restarts.

        Parameters
        ----------
        restarts : sparse array, shape (Q, N)
            Not negative, finite, every row with a positive sum.
        goal : Goal
            When to stop.
        top_k : int, optional
            Return only so many nodes of each restart; by default every candidate that was reached.
        return_lost : bool
            Whether mass that walks lose on isolated nodes goes back to the restart. Without, the result is
            linear in the restart.

        Returns
        -------
        SparseResult

        Raises
        ------
        KernelError
            If an argument is not as described.
        """
        matrix = sparse_restarts(self.graph, restarts)
        _check_goal(goal, top_k)
        rows: dict[int, _Row] = {}
        numbers = itertools.count()

        def work(state: _State) -> None:
            while (number := next(numbers)) < matrix.shape[0]:
                part = slice(matrix.indptr[number], matrix.indptr[number + 1])
                seeds, weights = matrix.indices[part].astype(np.int64), matrix.data[part]
                rows[number] = self._solve_one(state, seeds, weights, goal, top_k, return_lost)

        self._in_threads(work, matrix.shape[0])
        return _joined(rows[number] for number in range(matrix.shape[0]))

    def add_scores(
        self,
        out: NDArray[np.float32],
        rows: NDArray[np.int64],
        restarts: SparseRestarts,
        epsilon: float,
        *,
        scales: NDArray[np.float64] | None = None,
        return_lost: bool = True,
    ) -> None:
        """Add the scores of all candidates to rows of a dense block, without ranking or proving anything.

        What is added are the scores that :meth:`solve` returns for ``Goal(epsilon)``.

        Parameters
        ----------
        out : ndarray of float32, shape (B, candidates), C-contiguous
        rows : ndarray of int64, shape (Q,)
            Distinct rows of ``out``, one for each restart.
        restarts : sparse array, shape (Q, N)
            Not negative, finite, every row with a positive sum.
        epsilon : float
            See :class:`Goal`.
        scales : ndarray of float64, shape (Q,), optional
            What the scores of each restart are multiplied by; by default 1.
        return_lost : bool
            See :meth:`solve`.

        Raises
        ------
        KernelError
            If an argument is not as described.
        """
        matrix = sparse_restarts(self.graph, restarts)
        _check_goal(Goal(epsilon), None)
        low, high = self.candidates
        if (
            out.dtype != np.float32
            or out.ndim != 2
            or out.shape[1] != high - low
            or not out.flags.c_contiguous
        ):
            raise KernelError(
                f"out is {out.dtype} of shape {out.shape}; expected C-contiguous float32 (B, {high - low})"
            )
        distinct = np.unique(rows)
        if len(distinct) != matrix.shape[0] or np.any((distinct < 0) | (distinct >= len(out))):
            raise KernelError(f"{len(distinct)} rows of {len(out)} do not fit {matrix.shape[0]} restarts")
        factors = np.ones(len(rows)) if scales is None else np.asarray(scales, dtype=np.float64)
        lost = np.zeros(len(rows))
        if return_lost and len(self.graph.isolated):
            lost = matrix @ (self.graph.degrees == 0).astype(np.float64)
        returned = return_factor(lost, self.damping)
        arrays = self.graph.indptr, self.graph.indices, self.graph.transition
        max_edges = max(PASSES * len(self.graph.indices), 1)
        seeds = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data
        starts = iter(range(0, len(rows), ADDED_AT_ONCE))
        taking = threading.Lock()

        def work(state: _State) -> None:
            while True:
                with taking:
                    start = next(starts, None)
                if start is None:
                    return
                stop = min(start + ADDED_AT_ONCE, len(rows))
                _add_rows(
                    start,
                    stop,
                    seeds,
                    arrays,
                    self.damping,
                    epsilon,
                    max_edges,
                    state,
                    self.candidates,
                    out,
                    rows,
                    (returned, factors),
                )

        self._in_threads(work, -(-len(rows) // ADDED_AT_ONCE))

    def _in_threads(self, work: Callable[[_State], None], n_restarts: int) -> None:
        threads = max(1, min(self._threads, n_restarts))
        while len(self._states) < threads:
            self._states.append(_new_state(self._degrees))
        if threads == 1:
            work(self._states[0])
            return
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, state) for state in self._states[:threads]]:
                future.result()

    def _solve_one(
        self,
        state: _State,
        seeds: NDArray[np.int64],
        weights: NDArray[np.float64],
        goal: Goal,
        top_k: int | None,
        return_lost: bool,
    ) -> _Row:
        lost = weights[self.graph.degrees[seeds] == 0].sum() if return_lost else 0.0
        factor = float(return_factor(lost, self.damping))
        arrays = self.graph.indptr, self.graph.indices, self.graph.transition
        max_edges = PASSES * len(self.graph.indices) if goal.max_edges is None else goal.max_edges
        wanted = min(goal.certify_k or 0, self.candidates[1] - self.candidates[0])
        epsilon, plain = goal.epsilon, goal.tolerance is None and goal.certify_k is None
        try:
            _seed(seeds, weights, epsilon, state)
            while True:
                within = _spread(*arrays, self.damping, epsilon, max(max_edges, 1), state)
                row = self._rank(state, factor, top_k, max(wanted, CERTIFIED_UP_TO), last=plain)
                reason = _reason(row, goal, wanted, within)
                if not reason and (not within or epsilon <= LEAST_EPSILON):
                    reason = "work limit"
                if reason:
                    return row._replace(stopped_by=reason)
                epsilon = max(epsilon * EPSILON_STEP, LEAST_EPSILON)
                _requeue(epsilon, state)
        finally:
            _clear(state)

    def _rank(
        self, state: _State, factor: float, top_k: int | None, certify_up_to: int, *, last: bool
    ) -> _Row:
        """Rank the candidates that were reached; with ``last`` the state is cleared on the way."""
        rounds, edges = int(state.counts[ROUNDS]), int(state.counts[EDGES])
        beyond = _largest_unreached(self._hubs, state)  # a degree
        found = np.empty((int(state.counts[TOUCHED]), 4))
        count, rho, held, closed = _gather(*self.candidates, state, found, last)
        missing = self.damping * held
        nodes, lower, upper = _bounds(found[:count], self.damping, rho, missing)
        unreached = 0.0 if closed else factor * min(beyond * rho, missing)
        lower *= factor  # first, as this makes some equal
        upper *= factor
        order = np.lexsort((nodes, -lower)) if top_k is None else largest(lower, nodes, top_k)
        return _Row(
            nodes[order],
            lower[order],
            missing * factor,
            rounds,
            _certified(order[: certify_up_to if top_k is None else top_k], lower, upper, unreached),
            closed,
            rho,
            edges,
        )


TOUCHED, QUEUED, SIDE, EDGES, ROUNDS = range(5)
"""Cells of a state's counts: touched nodes, frontier nodes, which of the two frontiers, counters."""
Y, P, DEGREE = range(3)
"""Columns of a state's nodes."""


class _State(NamedTuple):
    """State of one restart at a time; it is cleared in time proportional to what was touched.

    Attributes
    ----------
    nodes : ndarray of float64, shape (N, 4)
        ``Y``, which is residual / degree and 0 where a node was never reached; ``P``, the pushed residuals /
        degree, summed; ``DEGREE``; and nothing. They are read together: a push waits for memory.
    frontiers : ndarray of int, shape (2, N + 1)
        One cell more than nodes: the loops write a node before they know whether it counts.
    touched : ndarray of int, shape (N + 1,)
    counts : ndarray of int64, shape (5,)
    """

    nodes: NDArray[np.float64]
    frontiers: NDArray[np.integer]
    touched: NDArray[np.integer]
    counts: NDArray[np.int64]


def _new_state(degrees: NDArray[np.float64]) -> _State:
    n_nodes, kind = len(degrees), index_type(len(degrees))
    nodes = aligned_zeros((n_nodes, 4), np.float64)
    nodes[:, DEGREE] = degrees
    return _State(
        nodes,
        np.empty((2, n_nodes + 1), dtype=kind),
        np.empty(n_nodes + 1, dtype=kind),
        np.zeros(5, dtype=np.int64),
    )


class _Row(NamedTuple):
    """One restart's part of a :class:`SparseResult`."""

    nodes: NDArray[np.int64]
    scores: NDArray[np.float64]
    residual: float
    rounds: int
    certified_k: int
    closed: bool
    epsilon: float
    edges: int
    stopped_by: str = ""


def _reason(row: _Row, goal: Goal, wanted: int, within: bool) -> str:
    """Return which goal is reached, or nothing."""
    if goal.tolerance is None and goal.certify_k is None:
        return "epsilon" if within else ""
    exact = goal.tolerance is None or row.residual <= goal.tolerance
    proven = row.certified_k >= wanted or (row.closed and row.certified_k == len(row.nodes))
    if exact and proven:
        return "tolerance" if goal.certify_k is None else "certified"
    return ""


def _joined(rows: Iterable[_Row]) -> SparseResult:
    found = list(rows)
    empty = np.empty(0)
    column = {name: [getattr(row, name) for row in found] for name in _Row._fields}
    stopped_by = tuple(column["stopped_by"])
    return SparseResult(
        indptr=np.cumsum([0, *(len(nodes) for nodes in column["nodes"])], dtype=np.int64),
        nodes=np.concatenate([empty.astype(np.int64), *column["nodes"]]),
        scores=np.concatenate([empty, *column["scores"]]),
        residual=np.array(column["residual"], dtype=np.float64),
        iterations=np.array(column["rounds"], dtype=np.int64),
        converged=np.array([reason != "work limit" for reason in stopped_by], dtype=bool),
        certified_k=np.array(column["certified_k"], dtype=np.int64),
        epsilon=np.array(column["epsilon"], dtype=np.float64),
        edges_touched=np.array(column["edges"], dtype=np.int64),
        stopped_by=stopped_by,
    )


def bytes_needed(n_nodes: int, threads: int) -> int:
    """Return how much a :class:`Pusher` holds beside the graph, in bytes."""
    return n_nodes * (8 + threads * (32 + 3 * np.dtype(index_type(n_nodes)).itemsize))


def _threads_within(memory_bytes: int | None, n_nodes: int, threads: int) -> int:
    if memory_bytes is None:
        return threads
    while threads > 1 and bytes_needed(n_nodes, threads) > memory_bytes:
        threads -= 1
    if bytes_needed(n_nodes, threads) > memory_bytes:
        raise KernelError(
            f"Push over {n_nodes} nodes needs {bytes_needed(n_nodes, 1)} bytes; the budget is {memory_bytes}"
        )
    return threads


def _check_goal(goal: Goal, top_k: int | None) -> None:
    if not goal.epsilon > 0 or not np.isfinite(goal.epsilon):
        raise KernelError(f"epsilon must be positive; got {goal.epsilon}")
    if goal.tolerance is not None and not goal.tolerance > 0:
        raise KernelError(f"tolerance must be positive; got {goal.tolerance}")
    for name, value in (("certify_k", goal.certify_k), ("max_edges", goal.max_edges), ("top_k", top_k)):
        if value is not None and value < 1:
            raise KernelError(f"{name} must be at least 1; got {value}")
    if top_k is not None and (goal.certify_k or 0) > top_k:
        raise KernelError(f"certify_k {goal.certify_k} is more than top_k {top_k}: raise top_k")


def _largest_degrees(degrees: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    """Return the candidates with the largest degrees, largest first."""
    part = degrees[low:high]
    kept = np.argpartition(-part, HUBS - 1)[:HUBS] if len(part) > HUBS else np.arange(len(part))
    return kept[np.argsort(-part[kept], kind="stable")] + low


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _seed(seeds: NDArray, weights: NDArray, epsilon: float, state: _State) -> None:
    """Give distinct seeds their residuals; one that underflows still counts as reached."""
    queued = 0
    for i in range(seeds.shape[0]):
        node = seeds[i]
        state.nodes[node, Y] = max(weights[i] / state.nodes[node, DEGREE], VISITED)
        state.touched[i] = node
        state.frontiers[0, queued] = node
        queued += state.nodes[node, Y] > epsilon
    state.counts[TOUCHED], state.counts[QUEUED] = seeds.shape[0], queued


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _spread(
    indptr: NDArray,
    indices: NDArray,
    transition: NDArray,
    damping: float,
    epsilon: float,
    max_edges: int,
    state: _State,
) -> bool:
    """Push round by round until the frontier is empty; return whether it was within ``max_edges``."""
    nodes, touched, counts = state.nodes, state.touched, state.counts
    n_touched, edges = counts[TOUCHED], counts[EDGES]
    side, queued = counts[SIDE], counts[QUEUED]
    within, last = True, indices.shape[0] - 1
    while queued > 0 and within:
        now, later = state.frontiers[side], state.frontiers[1 - side]
        waiting = 0
        for i in range(queued):
            if edges >= max_edges:
                within = False
                break
            begins = now[min(i + 2 * AHEAD_NODES, queued - 1)]
            prefetch(indptr, begins, 0)
            prefetch(nodes, begins, 0)
            edge = indptr[now[min(i + AHEAD_NODES, queued - 1)]]
            for line in range(2):
                prefetch(indices, edge, line * LINE_BYTES)
                prefetch(transition, edge, line * LINE_BYTES)
            node = now[i]
            handed = damping * nodes[node, Y]
            nodes[node, P] += nodes[node, Y]
            nodes[node, Y] = VISITED
            start, stop = indptr[node], indptr[node + 1]
            edges += stop - start
            for cell in range(start, stop):
                prefetch(nodes, indices[min(cell + AHEAD_EDGES, last)], 0)
                other = indices[cell]
                before = nodes[other, Y]
                after = before + handed * transition[cell]
                nodes[other, Y] = after
                # without branches, which a processor would guess wrongly every other time
                later[waiting] = other
                waiting += (before <= epsilon) & (after > epsilon)
                touched[n_touched] = other
                n_touched += (before == 0.0) & (after > 0.0)  # an edge may have weight 0
        counts[ROUNDS] += 1
        queued = waiting
        side = 1 - side
    counts[TOUCHED], counts[EDGES] = n_touched, edges
    counts[SIDE], counts[QUEUED] = side, queued
    return within


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _add_rows(
    start: int,
    stop: int,
    restarts: tuple[NDArray, NDArray, NDArray],
    graph: tuple[NDArray, NDArray, NDArray],
    damping: float,
    epsilon: float,
    max_edges: int,
    state: _State,
    candidates: tuple[int, int],
    out: NDArray,
    rows: NDArray,
    factors: tuple[NDArray, NDArray],
) -> None:
    """Push restarts ``start .. stop - 1`` one by one and add their scores; the state is clear at the end."""
    starts, seeds, weights = restarts
    indptr, indices, transition = graph
    low, high = candidates
    returned, scales = factors
    for number in range(start, stop):
        first, end = starts[number], starts[number + 1]
        _seed(seeds[first:end], weights[first:end], epsilon, state)
        _spread(indptr, indices, transition, damping, epsilon, max_edges, state)
        row = out[rows[number]]
        last = state.counts[TOUCHED] - 1
        for i in range(last + 1):
            prefetch(state.nodes, state.touched[min(i + AHEAD_EDGES, last)], 0)
            node = state.touched[i]
            if low <= node < high:
                y, p, degree = state.nodes[node, Y], state.nodes[node, P], state.nodes[node, DEGREE]
                score = (1.0 - damping) * degree * (p + y) * returned[number]
                row[node - low] += np.float32(scales[number] * score)
            state.nodes[node, Y] = 0.0
            state.nodes[node, P] = 0.0
        state.counts[:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _requeue(epsilon: float, state: _State) -> None:
    """Put every touched node above a lowered epsilon into the frontier."""
    queued = 0
    for i in range(state.counts[TOUCHED]):
        node = state.touched[i]
        state.frontiers[0, queued] = node
        queued += state.nodes[node, Y] > epsilon
    state.counts[SIDE], state.counts[QUEUED] = 0, queued


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _largest_unreached(hubs: NDArray, state: _State) -> float:
    """Return the largest degree, or a bound of it, of a candidate that was never reached."""
    for i in range(hubs.shape[0]):
        if state.nodes[hubs[i], Y] == 0.0:
            return state.nodes[hubs[i], DEGREE]
    return state.nodes[hubs[-1], DEGREE] if hubs.shape[0] > 0 else 0.0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _gather(
    low: int, high: int, state: _State, found: NDArray, clear: bool
) -> tuple[int, float, float, bool]:
    """Write number, y, p and degree of the touched candidates, and clear the state if that is wanted.

    Returns
    -------
    count : int
        Candidates written.
    rho : float
        Largest residual / degree.
    held : float
        Sum of residuals.
    closed : bool
        Whether every node that was reached was pushed: then there is nothing beyond them.
    """
    count, rho, held, closed = 0, 0.0, 0.0, True
    last = state.counts[TOUCHED] - 1
    for i in range(last + 1):
        prefetch(state.nodes, state.touched[min(i + AHEAD_EDGES, last)], 0)
        node = state.touched[i]
        y, p, degree = state.nodes[node, Y], state.nodes[node, P], state.nodes[node, DEGREE]
        rho = max(rho, y)
        held += y * degree
        closed &= p > 0.0
        if low <= node < high:
            found[count, 0], found[count, 1], found[count, 2], found[count, 3] = node, y, p, degree
            count += 1
        if clear:
            state.nodes[node, Y] = 0.0
            state.nodes[node, P] = 0.0
    if clear:
        state.counts[:] = 0
    return count, rho, held, closed


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _bounds(
    found: NDArray, damping: float, rho: float, missing: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes, and the least and the greatest score that each may have."""
    count = found.shape[0]
    nodes, lower, upper = np.empty(count, np.int64), np.empty(count), np.empty(count)
    for i in range(count):
        y, p, degree = found[i, 1], found[i, 2], found[i, 3]
        nodes[i] = np.int64(found[i, 0])
        lower[i] = (1.0 - damping) * degree * (p + y)
        upper[i] = lower[i] + min(degree * (rho - (1.0 - damping) * y), missing)
    return nodes, lower, upper


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _certified(order: NDArray, lower: NDArray, upper: NDArray, unreached: float) -> int:
    """Return the largest k whose first k of ``order`` are a set of best candidates. Changes ``upper``."""
    ceiling = upper[order].copy()
    upper[order] = 0.0
    rest = unreached
    for i in range(upper.shape[0]):
        rest = max(rest, upper[i])
    for k in range(order.shape[0], 0, -1):
        if lower[order[k - 1]] >= rest:
            return k
        rest = max(rest, ceiling[k - 1])
    return 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _clear(state: _State) -> None:
    for i in range(state.counts[TOUCHED]):
        state.nodes[state.touched[i], Y] = 0.0
        state.nodes[state.touched[i], P] = 0.0
    state.counts[:] = 0
