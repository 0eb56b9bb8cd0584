"""The reference: brute force in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.kernels.simjoin.rows import check_arguments


class Pairs(NamedTuple):
    """Pairs of row numbers, each once with ``first < second``, sorted.

    Attributes
    ----------
    first, second : ndarray of int64, shape (P,)
    cosine : ndarray of float32, shape (P,)
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    cosine: NDArray[np.float32]


def reference(
    vectors: ArrayLike, threshold: float = 0.8, max_neighbors: int = 100, searches: ArrayLike | None = None
) -> Pairs:
    """Return all pairs with cosine >= threshold that survive the per-node cap.

    Every node that searches keeps its ``max_neighbors`` highest cosines (ties: the lower row number); a pair
    survives if either end keeps it. HippoRAG (section 2.2) joins phrases with cosine >= 0.8; its code starts
    no search from a phrase with fewer than 3 alphanumeric characters, which is what ``searches`` is for.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        L2-normalised rows; float16, float32 or float64.
    threshold : float
    max_neighbors : int
    searches : array_like of bool, shape (N,), optional
        Nodes that may keep neighbours; by default all. The others can still be found.

    Returns
    -------
    Pairs

    Raises
    ------
    KernelError
        If the arguments are not as described.
    """
    may_search = check_arguments(np.asarray(vectors), threshold, max_neighbors, searches)
    x = np.asarray(vectors, dtype=np.float64)
    cosines = np.stack([(x * row).sum(axis=1) for row in x]) if len(x) else x @ x.T
    kept: set[tuple[int, int]] = set()
    for node in np.flatnonzero(may_search).tolist():
        others = [j for j in range(len(x)) if j != node and cosines[node, j] >= threshold]
        others.sort(key=lambda j: (-cosines[node, j], j))
        kept.update((min(node, j), max(node, j)) for j in others[:max_neighbors])
    pairs = np.array(sorted(kept), dtype=np.int64).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    return Pairs(first, second, cosines[first, second].astype(np.float32))
