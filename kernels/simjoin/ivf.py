"""The approximate join: nodes are compared only with the members of their nearest lists.

As in faiss's big-batch search, the nodes that probe a list are gathered, so that every list is a few GEMMs. A
pair is found if either end probes the other's list. How many lists to probe is read off a sample whose exact
pairs are known: a pair needs as many probes as the nearer of the two ranks says.

Lists can be kept, and with them the sketches of their members: then new rows are put on them, and of the old
rows only those are read whose pairs are rechecked. Only one end of a pair probes there, which takes more
probes; they are read off the same sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.duplicates import Found
from hippoindex.kernels.simjoin.lists import (
    HALF_ROUNDING,
    ITERATIONS,
    KeptLists,
    Lists,
    assign,
    list_count,
    train,
    training_size,
)
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
from hippoindex.kernels.simjoin.sketch import NODE_COST, SCAN_COST, Plan, Sketch, allocate, build, plan
from hippoindex.kernels.simjoin.threads import in_threads, n_threads

TARGET_RECALL = 0.99
PROBE_SAMPLE = 4000
CERTAINTY = 1.645
"""The sample must say with 95 % certainty that a number of probes reaches the target."""
USUAL_PROBES = 32
RANKING_COST = 120.0
"""Multiplications that take as long as ranking one list for a node."""
COPY_COST = 10_000.0
"""Multiplications that take as long as copying the kept sketch of a row."""
COPIED_ROWS = 4096
BATCH_ROWS = 1024
BATCHES_PER_THREAD = 8
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
        Exact pairs from which the number of probes was read; 0 if all lists or kept ones were probed.
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
    found, _, _ = by_lists(problem, ivf_plan(problem, seed), target_recall, sample, seed, on_progress)
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
) -> tuple[Found, Effort, KeptLists | None]:
    """Join the nodes that ask by inverted lists.

    Returns
    -------
    found : tuple
        Capped pairs of nodes.
    effort : Effort
    kept : KeptLists or None
        ``None`` if there was nothing to leave out and no list was made.
    """
    n = problem.n_nodes
    rng = np.random.default_rng(seed)
    n_lists = list_count(n)
    sketches = build(problem.x, problem.groups.first_row, how, problem.memory_bytes // 2)
    centroids = train(sketches, n, n_lists, rng) if n else np.zeros((n_lists, sketches.main_rank), np.float32)
    needed = _probes_needed(problem, sketches, centroids, target_recall, sample, rng)
    if target_recall < 1.0 and needed.both > n_lists * (0.5 if problem.asks.all() else 1.0):
        # there is nothing to leave out (one dense cloud of vectors): comparing all with all takes less
        found = scan_all(problem, sketches, problem.asks, problem.node_searches(), on_progress)
        compared = n * int(problem.asks.sum())
        return found, Effort(n_lists, n_lists, needed.sample_pairs, sketches.rank, compared), None
    lists = assign(sketches, centroids, problem.asks, needed.both)
    found, compared = _scan_lists(problem, sketches, sketches, lists, on_progress)
    effort = Effort(n_lists, needed.both, needed.sample_pairs, sketches.rank, compared)
    axes = how.axes
    if axes is None:
        axes = np.eye(problem.x.shape[1], dtype=np.float32)
        whole = Plan(axes, how.main_rank, how.pair_cost)
        sketches = build(problem.x, problem.groups.first_row, whole, problem.memory_bytes // 2)
    kept = KeptLists(
        axes,
        centroids,
        lists.owner[problem.groups.of_row],
        _halves(sketches.values, problem.groups.of_row, problem.memory_bytes // 4),
        needed.alone,
        target_recall,
        problem.threshold,
        len(problem.x),
    )
    return found, effort, kept


def by_kept_lists(
    problem: Problem, kept: KeptLists, on_progress: Progress | None = None
) -> tuple[Found, Effort, KeptLists]:
    """Join the nodes that ask, which are new, with the members of the kept lists that they probe.

    Returns
    -------
    found : tuple
        Capped pairs of nodes.
    effort : Effort
    kept : KeptLists
        With the new rows on them.
    """
    n, first_row, of_row = problem.n_nodes, problem.groups.first_row, problem.groups.of_row
    asking = np.flatnonzero(problem.asks)
    axes = np.ascontiguousarray(kept.axes)
    how = Plan(axes, kept.centroids.shape[1], 0.0)
    added = build(problem.x, first_row[asking], how, problem.memory_bytes // 2)
    nearest = assign(added, kept.centroids, np.ones(len(asking), dtype=bool), kept.probes)
    owner = kept.owner[first_row]
    owner[asking] = nearest.owner
    probes = np.zeros((n, kept.probes), np.int32)
    probes[asking] = nearest.probes
    place = np.zeros(n, np.int64)
    place[asking] = np.arange(len(asking))
    new = problem.asks[of_row]
    halves = _halves(added.values, place[of_row[new]], problem.memory_bytes // 4)
    sketches = _woven(kept.sketches, halves, new, problem.memory_bytes // 4)
    members = Sketch(sketches, added.rank, added.main_rank, first_row)
    lists = Lists(owner, problem.asks, probes, nearest.n_lists)
    queries = replace(added, rows=place)
    found, compared = _scan_lists(problem, queries, members, lists, on_progress, HALF_ROUNDING)
    effort = Effort(lists.n_lists, kept.probes, 0, added.rank, compared)
    return found, effort, replace(kept, owner=owner[of_row], sketches=sketches)


def _halves(values: NDArray[np.floating], rows: NDArray[np.int64], memory_bytes: int) -> NDArray[np.float16]:
    """Return rows in float16."""
    out: NDArray[np.float16] = allocate((len(rows), values.shape[1]), np.float16, memory_bytes)

    def task(_: None, start: int) -> None:
        out[start : start + COPIED_ROWS] = values[rows[start : start + COPIED_ROWS]]

    for _ in in_threads(lambda: None, task, range(0, len(rows), COPIED_ROWS)):
        pass
    return out


def _woven(
    old: NDArray[np.float16], added: NDArray[np.float16], new: NDArray[np.bool_], memory_bytes: int
) -> NDArray[np.float16]:
    """Return rows in one array: those of ``added`` where ``new`` is true, those of ``old`` elsewhere."""
    out: NDArray[np.float16] = allocate((len(new), old.shape[1]), np.float16, memory_bytes)
    n_added = np.concatenate([[0], np.cumsum(new)])  # up to a row

    def task(_: None, start: int) -> None:
        stop = min(start + COPIED_ROWS, len(new))
        low, high, fresh = n_added[start], n_added[stop], new[start:stop]
        if low == high:
            out[start:stop] = old[start - low : stop - low]
            return
        out[start:stop][fresh] = added[low:high]
        out[start:stop][~fresh] = old[start - low : stop - high]

    for _ in in_threads(lambda: None, task, range(0, len(new), COPIED_ROWS)):
        pass
    return out


def kept_cost(problem: Problem, kept: KeptLists) -> float:
    """Return the multiplications that :func:`by_kept_lists` takes."""
    n, asking, rank = problem.n_nodes, int(problem.asks.sum()), kept.axes.shape[1]
    n_lists = len(kept.centroids)
    to_lists = asking * n_lists * (rank + RANKING_COST)
    compared = asking * n * kept.probes / n_lists
    return NODE_COST * asking + COPY_COST * n + to_lists + compared * (rank + SCAN_COST)


class _Needed(NamedTuple):
    """How many lists to probe.

    Attributes
    ----------
    both : int
        If all nodes probe that ask.
    alone : int
        If of every pair one end does.
    sample_pairs : int
        Exact pairs from which this was read.
    """

    both: int
    alone: int
    sample_pairs: int


def _probes_needed(
    problem: Problem,
    sketches: Sketch,
    centroids: NDArray[np.float32],
    target_recall: float,
    sample: int,
    rng: np.random.Generator,
) -> _Needed:
    """Find out how many probes reach the target on a sample."""
    n_lists = len(centroids)
    if target_recall == 1.0 or n_lists == 1:
        return _Needed(n_lists, n_lists, 0)
    searches = problem.node_searches()
    candidates = np.flatnonzero(searches & problem.asks)
    drawn = np.zeros(problem.n_nodes, dtype=bool)
    drawn[rng.choice(candidates, min(sample, len(candidates)), replace=False)] = True
    first, second, _ = scan_all(problem, sketches, drawn, drawn)
    if len(first) == 0:
        return _Needed(min(USUAL_PROBES, n_lists), min(USUAL_PROBES, n_lists), 0)
    node = np.where(drawn[first], first, second)
    other = first + second - node
    forth, back = _ranks(sketches, centroids, node, other), _ranks(sketches, centroids, other, node)
    either = np.where(problem.asks[other], np.minimum(forth, back), forth)
    both, alone = (_reaching(target_recall, rank, node) for rank in (either, forth))
    return _Needed(both, alone, len(first))


def _reaching(target_recall: float, rank: NDArray[np.int64], node: NDArray[np.int64]) -> int:
    """Return the number of probes that reaches the target; ``rank`` says how many each pair takes."""
    least = np.sort(rank)[math.ceil(target_recall * len(rank)) - 1]  # fewer reach the target not even here
    for probes in np.unique(rank[rank >= least]).tolist():
        _, low, _ = interval(rank <= probes, node, z=CERTAINTY)
        if low >= target_recall:
            return int(probes)
    return int(rank.max())


def _ranks(
    sketches: Sketch, centroids: NDArray[np.float32], node: NDArray[np.int64], other: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many lists each node must probe to reach the other's."""
    out = np.empty(len(node), np.int64)

    def task(_: None, start: int) -> None:
        part = slice(start, start + TILE_ROWS)
        owner = (sketches.main(other[part]) @ centroids.T).argmax(axis=1)
        similarity = sketches.main(node[part]) @ centroids.T
        reached = similarity[np.arange(len(owner)), owner][:, None]
        out[part] = 1 + np.count_nonzero(similarity > reached, axis=1)

    for _ in in_threads(lambda: None, task, range(0, len(node), TILE_ROWS)):
        pass
    return out


def _scan_lists(
    problem: Problem,
    of_queries: Sketch,
    of_members: Sketch,
    lists: Lists,
    on_progress: Progress | None,
    rounding: float = 0.0,
) -> tuple[Found, int]:
    """Compare the nodes that ask with the members of the lists they probe, and count what is compared.

    ``rounding`` is what bounds lose by sketches that were rounded.
    """
    best = problem.best(problem.node_searches())
    members, member_begin = lists.members()
    queries, query_begin = lists.queries()
    work = np.diff(member_begin) * np.diff(query_begin)

    def scan(worker: Worker, number: int, answering: NDArray[np.int64], of_answering: NDArray) -> None:
        asking = queries[query_begin[number] : query_begin[number + 1]]
        for left in range(0, len(answering), TILE_COLUMNS):
            part = slice(left, left + TILE_COLUMNS)
            for top in range(0, len(asking), TILE_ROWS):
                rows = asking[top : top + TILE_ROWS].astype(np.int64)
                worker.scan(rows, of_queries.take(rows), answering[part], of_answering[part])

    def task(worker: Worker, numbers: NDArray[np.int64]) -> int:
        each = [members[member_begin[number] : member_begin[number + 1]] for number in numbers]
        sketches = of_members.take(np.concatenate(each))
        start = 0
        for number, answering in zip(numbers.tolist(), each, strict=True):
            scan(worker, number, answering, sketches[start : start + len(answering)])
            start += len(answering)
        return int(work[numbers].sum())

    def make() -> Worker:
        return Worker(problem, problem.asks, best, lists.owner, lists.probes, rounding)

    total, done = int(work.sum()), 0
    for size in in_threads(make, task, _batches(np.diff(member_begin), work)):
        done += size
        if on_progress is not None:
            on_progress(1.0 if done == total else PREPARATION + (1 - PREPARATION) * done / max(total, 1))
    return best.arrays(), total


def _batches(sizes: NDArray[np.int64], work: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Divide the lists that are probed into batches of some members each, those with the most work first."""
    probed = np.flatnonzero(work)
    if len(probed) == 0:
        return []
    end = np.cumsum(sizes[probed])
    rows = min(BATCH_ROWS, -(-int(end[-1]) // (BATCHES_PER_THREAD * n_threads())))
    batches = np.split(probed, np.flatnonzero(np.diff(end // rows)) + 1)
    return sorted(batches, key=lambda batch: -int(work[batch].sum()))
