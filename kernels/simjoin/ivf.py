"""The approximate join: nodes are compared only with the members of their nearest lists.

As in faiss's big-batch search, the nodes that probe a list are gathered, so that every list is a few GEMMs. A
pair is found if either end probes the other's list. How many lists to probe is read off a sample whose exact
pairs are known: a pair needs as many probes as the nearer of the two ranks says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.duplicates import Found
from hippoindex.kernels.simjoin.lists import ITERATIONS, Lists, assign, list_count, train, training_size
from hippoindex.kernels.simjoin.problem import (
    MEMORY_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    Problem,
    Progress,
    Worker,
    pose,
    scan_all,
)
from hippoindex.kernels.simjoin.recall import interval
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.sketch import NODE_COST, SCAN_COST, Plan, Sketch, build, plan
from hippoindex.kernels.simjoin.threads import in_threads

TARGET_RECALL = 0.99
PROBE_SAMPLE = 4000
CERTAINTY = 1.645
"""The sample must say with 95 % certainty that a number of probes reaches the target."""
USUAL_PROBES = 32
RANKING_COST = 120.0
"""Multiplications that take as long as ranking one list for a node."""
PREPARATION = 0.3
"""Share of the work that is reported as done when the lists are there."""


@dataclass(frozen=True)
class Effort:
    """What an approximate join did.

    Attributes
    ----------
    lists, probes : int
        As many probes as lists: every node was compared with all.
    sample_pairs : int
        Exact pairs from which the number of probes was read.
    rank : int
        Length of the sketches.
    compared : int
        Bounds computed between nodes and members of lists.
    """

    lists: int
    probes: int
    sample_pairs: int
    rank: int
    compared: int


def ivf(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    target_recall: float = TARGET_RECALL,
    known: Pairs | None = None,
    new: ArrayLike | None = None,
    sample: int = PROBE_SAMPLE,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: Progress | None = None,
) -> Pairs:
    """Return most pairs with cosine >= threshold that survive the per-node cap.

    Every pair returned is right, and its cosine exact. On one machine the result depends on the arguments
    alone.

    Parameters
    ----------
    vectors, threshold, max_neighbors, searches, known, new
        As for :func:`hippoindex.kernels.simjoin.exact.exact`.
    target_recall : float
        Share of the pairs to find, above 0 and at most 1; 1 probes every list.
    sample : int
        Rows whose exact pairs decide how many lists are probed.
    seed : int
        Of the sample and of k-means.
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
    check_target(target_recall)
    problem = pose(vectors, threshold, max_neighbors, searches, known, new, memory_bytes)
    found, _ = by_lists(problem, ivf_plan(problem, seed), target_recall, sample, seed, on_progress)
    return problem.finish(found)


def check_target(target_recall: float) -> None:
    """Check a target recall.

    Raises
    ------
    KernelError
    """
    if not 0.0 < target_recall <= 1.0:
        raise KernelError(f"target_recall is above 0 and at most 1; got {target_recall}")


def ivf_plan(problem: Problem, seed: int) -> Plan:
    """Plan sketches for a join that compares nodes with the members of a few lists."""
    share = min(1.0, USUAL_PROBES / list_count(problem.n_nodes))
    rows = problem.groups.first_row
    return plan(problem.x, rows, problem.threshold, share, np.random.default_rng(seed))


def expected_cost(problem: Problem, how: Plan, sample: int) -> float:
    """Return the multiplications that :func:`by_lists` takes at the usual number of probes."""
    n, asking = problem.n_nodes, int(problem.asks.sum())
    n_lists = list_count(n)
    to_lists = (n + training_size(n, n_lists) * ITERATIONS) * n_lists * (how.main_rank + RANKING_COST)
    rank = problem.x.shape[1] if how.axes is None else how.axes.shape[1]
    of_sample = min(sample, asking) * n * (rank + SCAN_COST)
    return NODE_COST * n + to_lists + of_sample + asking * n * how.pair_cost


def by_lists(
    problem: Problem,
    how: Plan,
    target_recall: float,
    sample: int,
    seed: int,
    on_progress: Progress | None = None,
) -> tuple[Found, Effort]:
    """Join the nodes that ask by inverted lists.

    Returns
    -------
    found : tuple
        Capped pairs of nodes.
    effort : Effort
    """
    n = problem.n_nodes
    rng = np.random.default_rng(seed)
    n_lists = list_count(n)
    sketches = build(problem.x, problem.groups.first_row, how, problem.memory_bytes // 2)
    centroids = train(sketches, n, n_lists, rng) if n else np.empty((n_lists, sketches.main_rank), np.float32)
    probes, sample_pairs = _probes_needed(problem, sketches, centroids, target_recall, sample, rng)
    if target_recall < 1.0 and probes > n_lists * (0.5 if problem.asks.all() else 1.0):
        # there is nothing to leave out (one dense cloud of vectors): comparing all with all takes less
        found = scan_all(problem, sketches, problem.asks, problem.node_searches(), on_progress)
        return found, Effort(n_lists, n_lists, sample_pairs, sketches.rank, n * int(problem.asks.sum()))
    lists = assign(sketches, centroids, problem.asks, probes)
    found, compared = _scan_lists(problem, sketches, lists, on_progress)
    return found, Effort(n_lists, probes, sample_pairs, sketches.rank, compared)


def _probes_needed(
    problem: Problem,
    sketches: Sketch,
    centroids: NDArray[np.float32],
    target_recall: float,
    sample: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Return how many probes reach the target on a sample, and how many exact pairs the sample has."""
    n_lists = len(centroids)
    if target_recall == 1.0 or n_lists == 1:
        return n_lists, 0
    searches = problem.node_searches()
    candidates = np.flatnonzero(searches & problem.asks)
    drawn = np.zeros(problem.n_nodes, dtype=bool)
    drawn[rng.choice(candidates, min(sample, len(candidates)), replace=False)] = True
    first, second, _ = scan_all(problem, sketches, drawn, drawn)
    if len(first) == 0:
        return min(USUAL_PROBES, n_lists), 0
    rank = np.minimum(
        _ranks(sketches, centroids, problem.asks, first, second),
        _ranks(sketches, centroids, problem.asks, second, first),
    )
    node = np.where(drawn[first], first, second)
    for probes in np.unique(rank).tolist():
        _, low, _ = interval(rank <= probes, node, z=CERTAINTY)
        if low >= target_recall:
            return int(probes), len(first)
    return int(rank.max()), len(first)


def _ranks(
    sketches: Sketch,
    centroids: NDArray[np.float32],
    asks: NDArray[np.bool_],
    node: NDArray[np.int64],
    other: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return how many lists each node must probe to reach the other's; if it cannot ask, more than exist."""
    out = np.full(len(node), len(centroids) + 1)
    for start in range(0, len(node), TILE_ROWS):
        part = slice(start, start + TILE_ROWS)
        owner = (sketches.main(other[part]) @ centroids.T).argmax(axis=1)
        similarity = sketches.main(node[part]) @ centroids.T
        reached = similarity[np.arange(len(owner)), owner][:, None]
        out[part] = np.where(asks[node[part]], 1 + (similarity > reached).sum(axis=1), out[part])
    return out


def _scan_lists(
    problem: Problem, sketches: Sketch, lists: Lists, on_progress: Progress | None
) -> tuple[Found, int]:
    best = problem.best(problem.node_searches())
    members, member_begin = lists.members()
    queries, query_begin = lists.queries()
    work = np.diff(member_begin) * np.diff(query_begin)

    def task(worker: Worker, number: int) -> int:
        answering = members[member_begin[number] : member_begin[number + 1]]
        asking = queries[query_begin[number] : query_begin[number + 1]]
        for left in range(0, len(answering), TILE_COLUMNS):
            columns = answering[left : left + TILE_COLUMNS]
            column_sketches = sketches.take(columns)
            for top in range(0, len(asking), TILE_ROWS):
                rows = asking[top : top + TILE_ROWS].astype(np.int64)
                worker.scan(rows, sketches.take(rows), columns, column_sketches)
        return int(work[number])

    def make() -> Worker:
        return Worker(problem, problem.asks, best, lists.owner, lists.probes)

    total, done = int(work.sum()), 0
    for size in in_threads(make, task, np.argsort(-work, kind="stable").tolist()):
        done += size
        if on_progress is not None:
            on_progress(1.0 if done == total else PREPARATION + (1 - PREPARATION) * done / max(total, 1))
    return best.arrays(), total
