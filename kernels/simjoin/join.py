"""The join as a pipeline calls it: the cheaper method, its recall measured, what it took reported."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import structlog
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.exact import by_tiles, exact_plan
from hippoindex.kernels.simjoin.ivf import (
    PROBE_SAMPLE,
    TARGET_RECALL,
    by_kept_lists,
    by_lists,
    check_target,
    expected_cost,
    ivf_plan,
    kept_cost,
)
from hippoindex.kernels.simjoin.lists import KeptLists
from hippoindex.kernels.simjoin.problem import (
    MEMORY_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    Problem,
    Progress,
    pose,
)
from hippoindex.kernels.simjoin.recall import SAMPLE, Recall, recall_of
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.rows import as_mask, as_rows
from hippoindex.kernels.simjoin.sketch import NODE_COST, Plan
from hippoindex.kernels.simjoin.threads import n_threads, one_blas_thread
from hippoindex.kernels.spec import REGISTRY

CHEAP_COST = 5e11
"""An exact join of no more multiplications, about 5 s on two cores, is not worth an approximation."""
LEAST_SAMPLE, SAMPLED_SHARE = 100, 0.02
"""An append measures its recall on this share of the new rows, at least on so many."""
OWN = ("auto", "exact", "ivf")
"""Methods with a model of their cost, which take new rows into a known join."""
CALIBRATION_RANK = 64
CALIBRATION_RUNS = 3

log = structlog.get_logger("hippoindex")


@dataclass(frozen=True, eq=False)
class JoinResult:
    """Pairs, and how they were found.

    Attributes
    ----------
    pairs : Pairs
    method : str
        ``"exact"``, ``"ivf"``, or the backend that was asked for.
    recall : Recall
        Measured on a sample; after an append, of the new rows.
    estimate_s : float or None
        Seconds expected before the join; ``None`` for backends without a model of their cost.
    seconds_s : float
        Seconds it took, without measuring the recall.
    details : dict
        ``nodes`` (distinct vectors), ``multiplications_per_s`` (measured before), ``recall_s`` (seconds to
        measure the recall), ``rank`` (length of the sketches), and for ``ivf`` also ``lists``, ``probes``,
        ``sample_pairs`` and ``compared``.
    lists : KeptLists or None
        What the next append takes; ``None`` if all was compared with all.
    """

    pairs: Pairs
    method: str
    recall: Recall
    estimate_s: float | None
    seconds_s: float
    details: dict[str, int | float]
    lists: KeptLists | None = None


def join(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    method: str = "auto",
    target_recall: float = TARGET_RECALL,
    known: Pairs | None = None,
    new: ArrayLike | None = None,
    lists: KeptLists | None = None,
    sample: int | None = None,
    seed: int = 0,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: Progress | None = None,
) -> JoinResult:
    """Find all pairs with cosine >= threshold that survive the per-node cap, and measure the recall.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        L2-normalised rows; float16, float32 or float64; may be a memory map, which is read in blocks.
    threshold, max_neighbors, searches
        As for :func:`hippoindex.kernels.simjoin.reference.reference`.
    method : str
        ``"auto"``, ``"exact"``, ``"ivf"`` or another backend of :data:`hippoindex.kernels.simjoin.spec`.
        ``auto`` is exact where that takes few multiplications or fewer than ``ivf``: the choice depends on
        the vectors alone, not on how fast the machine is.
    target_recall : float
        For ``ivf``: share of the pairs to find; with 1 ``auto`` is exact.
    known : Pairs, optional
        The join of the rows that are not new, in the present numbering, with the same threshold and a cap not
        lower. It is trusted: its cosines are read again only where float32 cannot tell whether a pair counts.
    new : array_like of bool, shape (N,), optional
        Rows to join with all. The result is that of joining everything, which other backends than ``exact``
        and ``ivf`` do. Only these rows are checked: the others were when they were joined.
    lists : KeptLists, optional
        What the join of the rows that are not new has kept, in the present numbering
        (:meth:`~hippoindex.kernels.simjoin.lists.KeptLists.placed`). ``auto`` and ``ivf`` then compare new
        rows by them, in time for what is new; with more than twice the rows that they were trained for, new
        ones are made. ``exact`` and other backends do not use them.
    sample : int, optional
        Rows on which the recall is measured; by default 1,000, of an append at most 2 % of the new rows but
        not fewer than 100. ``ivf`` chooses its probes on 4,000 others.
    seed : int
        Of all samples and of k-means.
    memory_bytes : int
        Working memory to aim at, besides the vectors and the pairs found.
    on_progress : callable, optional
        Called with the share of the work done, 0 to 1.

    Returns
    -------
    JoinResult

    Raises
    ------
    KernelError
        If the arguments are not as described; the message names the row.
    """
    if sample is not None and sample < 1:
        raise KernelError(f"sample is at least 1; got {sample}")
    check_target(target_recall)
    if lists is not None and new is None:
        raise KernelError(
            "lists come together with known (pairs of the old rows) and new (which are not old)"
        )
    started = time.perf_counter()
    x = as_rows(vectors)
    if method in OWN:
        problem = pose(x, threshold, max_neighbors, searches, known, new, memory_bytes)
        done = _by_own(problem, method, target_recall, lists, seed, on_progress)
    else:
        done = _Done(REGISTRY["simjoin"].get(method).run(x, threshold, max_neighbors, searches), method)
    joined = time.perf_counter()
    recall = recall_of(
        x,
        done.pairs,
        threshold,
        max_neighbors,
        as_mask(searches, len(x), "searches"),
        _sample_size(new) if sample is None else sample,
        seed + 1,
        _sampled_among(new, len(x)),
    )
    details = {**done.details, "recall_s": time.perf_counter() - joined}
    log.info(
        "synonym join done",
        method=done.method,
        pairs=len(done.pairs.first),
        estimate_s=None if done.estimate_s is None else round(done.estimate_s, 1),
        took_s=round(joined - started, 1),
        recall=round(recall.estimate, 4),
        recall_low=round(recall.low, 4),
        recall_high=round(recall.high, 4),
        recall_near_threshold=round(recall.hard_estimate, 4),
        sampled_pairs=recall.pairs,
    )
    return JoinResult(done.pairs, done.method, recall, done.estimate_s, joined - started, details, done.lists)


def stacked(old: ArrayLike, added: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """Return old and added rows in one array and the mask of the added ones, as :func:`join` takes them.

    Parameters
    ----------
    old : array_like, shape (N, d)
    added : array_like, shape (M, d)

    Returns
    -------
    vectors : ndarray, shape (N + M, d)
    new : ndarray of bool, shape (N + M,)

    Raises
    ------
    KernelError
        If the dimensions differ.
    """
    first, second = as_rows(old), as_rows(added)
    if first.shape[1] != second.shape[1]:
        raise KernelError(
            f"The old vectors have dimension {first.shape[1]}, the added ones {second.shape[1]}; "
            "vectors of one model are needed"
        )
    return np.concatenate([first, second]), np.arange(len(first) + len(second)) >= len(first)


def multiplications_per_s() -> float:
    """Measure how many multiplications of a tile's GEMM all cores do in a second, in a few milliseconds."""
    rng = np.random.default_rng(0)
    a = rng.random((TILE_ROWS, CALIBRATION_RANK), dtype=np.float32)
    b = rng.random((TILE_COLUMNS, CALIBRATION_RANK), dtype=np.float32)
    out = np.empty((len(a), len(b)), np.float32)
    seconds = []
    with one_blas_thread():
        for _ in range(CALIBRATION_RUNS):
            started = time.perf_counter()
            np.matmul(a, b.T, out=out)
            seconds.append(time.perf_counter() - started)
    return out.size * CALIBRATION_RANK * n_threads() / float(min(seconds))


@dataclass(frozen=True, eq=False)
class _Done:
    """A join before its recall is measured; see :class:`JoinResult`."""

    pairs: Pairs
    method: str
    estimate_s: float | None = None
    details: dict[str, int | float] = field(default_factory=dict)
    lists: KeptLists | None = None


def _by_own(
    problem: Problem,
    method: str,
    target_recall: float,
    lists: KeptLists | None,
    seed: int,
    on_progress: Progress | None,
) -> _Done:
    rate = multiplications_per_s()
    lists, method = _usable(problem, method, target_recall, lists)
    if lists is not None:
        chosen, cost = "ivf", kept_cost(problem, lists)
    else:
        chosen, how, cost = _choose(problem, method, target_recall, seed)
    estimate_s = cost / rate
    log.info("synonym join starts", method=chosen, nodes=problem.n_nodes, estimate_s=round(estimate_s, 1))
    details: dict[str, int | float] = {"nodes": problem.n_nodes, "multiplications_per_s": rate}
    if lists is not None:
        found, effort, lists = by_kept_lists(problem, lists, on_progress)
        details |= asdict(effort)
    elif chosen == "exact":
        found = by_tiles(problem, how, on_progress)
        details["rank"] = problem.x.shape[1] if how.axes is None else how.axes.shape[1]
    else:
        found, effort, lists = by_lists(problem, how, target_recall, PROBE_SAMPLE, seed, on_progress)
        details |= asdict(effort)
    return _Done(problem.finish(found), chosen, estimate_s, details, lists)


def _usable(
    problem: Problem, method: str, target_recall: float, lists: KeptLists | None
) -> tuple[KeptLists | None, str]:
    """Return the kept lists if the join goes by them, and the method if it does not."""
    if lists is None or method == "exact":
        return None, method
    new = problem.asks[problem.groups.of_row]
    lists.check(problem.x.shape, new, problem.threshold, target_recall)
    if not lists.outgrown:
        return lists, method
    rows = {"rows": len(lists.owner), "trained_rows": lists.trained_rows}
    log.info("kept lists are outgrown: new ones are made", **rows)
    return None, "ivf"


def _sampled_among(new: ArrayLike | None, n: int) -> NDArray[np.bool_]:
    """Return the rows to measure the recall on: the new ones, or all where there are none."""
    mask = as_mask(new, n, "new")
    return mask if mask.any() else np.ones(n, dtype=bool)


def _sample_size(new: ArrayLike | None) -> int:
    """Return on how many rows the recall is measured if the caller does not say."""
    if new is None or not np.any(new):
        return SAMPLE
    return min(SAMPLE, max(LEAST_SAMPLE, math.ceil(SAMPLED_SHARE * np.count_nonzero(new))))


def _choose(
    problem: Problem, method: str, target_recall: float, seed: int
) -> tuple[Literal["exact", "ivf"], Plan, float]:
    """Return the method, its plan, and the multiplications it is expected to take."""
    n, asking = problem.n_nodes, int(problem.asks.sum())
    tiles = exact_plan(problem, seed)
    exact_cost = NODE_COST * n + asking * (n - asking / 2) * tiles.pair_cost
    if method == "exact" or (method == "auto" and (exact_cost <= CHEAP_COST or target_recall == 1.0)):
        return "exact", tiles, exact_cost
    lists = ivf_plan(problem, seed)
    ivf_cost = expected_cost(problem, lists, PROBE_SAMPLE)
    if method == "ivf" or ivf_cost < exact_cost:
        return "ivf", lists, ivf_cost
    return "exact", tiles, exact_cost
