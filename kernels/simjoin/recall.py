"""How much of the exact join a result holds, measured on a sample of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.duplicates import Groups
from hippoindex.kernels.simjoin.problem import MEMORY_BYTES, Problem, scan_all
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.rows import as_mask, as_rows, check_arguments
from hippoindex.kernels.simjoin.sketch import whole

SAMPLE = 1000
HARD_WIDTH = 0.05
CONFIDENCE_95 = 1.959964


@dataclass(frozen=True)
class Recall:
    """Share of the exact join's pairs that were found, of the pairs that sampled phrases keep.

    Attributes
    ----------
    estimate, low, high : float
        With its 95 % Wilson interval; 1 and the interval (0, 1) if the sample has no pairs.
    pairs, phrases : int
        Size of the sample: pairs, and the phrases that keep them or keep none.
    hard_estimate, hard_low, hard_high, hard_pairs
        The same of the pairs with a cosine less than 0.05 above the threshold.
    """

    estimate: float
    low: float
    high: float
    pairs: int
    phrases: int
    hard_estimate: float
    hard_low: float
    hard_high: float
    hard_pairs: int


def measure_recall(
    vectors: ArrayLike,
    pairs: Pairs,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
    *,
    among: ArrayLike | None = None,
) -> Recall:
    """Compare a join's result with the exact neighbours of randomly drawn rows.

    The drawn rows are compared with all rows in full width: neither sketches, lists nor groups of equal rows
    are used, so that their faults would show.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
    pairs : Pairs
        Sorted, as every join returns them.
    threshold, max_neighbors, searches
        As given to the join.
    sample : int
        Searching rows to draw.
    seed : int
    among : array_like of bool, shape (N,), optional
        Rows to draw from; by default all.

    Returns
    -------
    Recall

    Raises
    ------
    KernelError
        If an argument is not as described.
    """
    if sample < 1:
        raise KernelError(f"sample is at least 1; got {sample}")
    x = as_rows(vectors)
    mask = check_arguments(x, threshold, max_neighbors, searches)
    return recall_of(x, pairs, threshold, max_neighbors, mask, sample, seed, as_mask(among, len(x), "among"))


def recall_of(
    x: NDArray[np.floating],
    pairs: Pairs,
    threshold: float,
    max_neighbors: int,
    searches: NDArray[np.bool_],
    sample: int,
    seed: int,
    among: NDArray[np.bool_],
) -> Recall:
    """Do as :func:`measure_recall` with arguments that are checked already."""
    candidates = np.flatnonzero(searches & among)
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(candidates, min(sample, len(candidates)), replace=False))
    asks = np.zeros(len(x), dtype=bool)
    asks[drawn] = True
    each = np.arange(len(x))
    alone = Groups(each, each)
    problem = Problem(x, alone, threshold, max_neighbors, searches, None, asks, MEMORY_BYTES)
    first, second, cosine = scan_all(problem, whole(x, each), asks, asks)
    found = _contains(pairs, first, second, len(x))
    node = np.where(asks[first], first, second)
    hard = cosine < threshold + HARD_WIDTH
    return Recall(
        *interval(found, node), len(found), len(drawn), *interval(found[hard], node[hard]), int(hard.sum())
    )


def interval(
    found: NDArray[np.bool_], node: NDArray[np.int64], z: float = CONFIDENCE_95
) -> tuple[float, float, float]:
    """Return a share and its Wilson interval for pairs that are drawn node by node.

    The number of pairs is divided by the design effect: the variance of the ratio estimator over nodes
    (Cochran, "Sampling Techniques", 1977, chapter 9A) against that of independent pairs, at least 1. If all
    or none were found that variance is unknown, and every node counts once.

    Parameters
    ----------
    found : ndarray of bool, shape (P,)
    node : ndarray of int64, shape (P,)
        The drawn node of every pair.
    z : float
        Normal quantile of the interval.

    Returns
    -------
    estimate, low, high : float
    """
    n = len(found)
    if n == 0:
        return 1.0, 0.0, 1.0
    share = float(found.mean())
    _, of_pair = np.unique(node, return_inverse=True)
    size = np.bincount(of_pair)
    if share in (0.0, 1.0):
        effective = float(len(size))
    else:
        surprise = np.bincount(of_pair, weights=found) - share * size
        effective = n / max(1.0, float((surprise**2).sum()) / (n * share * (1.0 - share)))
    scale = 1 + z * z / effective
    centre = (share + z * z / (2 * effective)) / scale
    half = z * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2) / scale
    return share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def _contains(pairs: Pairs, first: NDArray[np.int64], second: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    """Tell which of the given pairs are among the sorted ones."""
    if len(pairs.first) == 0:
        return np.zeros(len(first), dtype=bool)
    keys = pairs.first * n + pairs.second
    wanted = first * n + second
    return keys[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)] == wanted
