"""The reference: brute force in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError


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
    survives if either end keeps it. HippoRAG (section 2.2) joins phrases with cosine >= 0.8.

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
    """
    x = np.asarray(vectors, dtype=np.float64)
    may_search = check_arguments(x, threshold, max_neighbors, searches)
    cosines = np.stack([(x * row).sum(axis=1) for row in x]) if len(x) else x @ x.T
    kept: set[tuple[int, int]] = set()
    for node in np.flatnonzero(may_search).tolist():
        others = [j for j in range(len(x)) if j != node and cosines[node, j] >= threshold]
        others.sort(key=lambda j: (-cosines[node, j], j))
        kept.update((min(node, j), max(node, j)) for j in others[:max_neighbors])
    pairs = np.array(sorted(kept), dtype=np.int64).reshape(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    return Pairs(first, second, cosines[first, second].astype(np.float32))


def check_arguments(
    vectors: NDArray, threshold: float, max_neighbors: int, searches: ArrayLike | None
) -> NDArray[np.bool_]:
    """Check what every backend demands of its arguments and return ``searches`` as an array, shape (N,).

    Raises
    ------
    KernelError
    """
    if vectors.ndim != 2:
        raise KernelError(f"vectors have shape {vectors.shape}; expected (N, d)")
    if not 0.0 < threshold <= 1.0:
        raise KernelError(f"threshold is a cosine above 0 and at most 1; got {threshold}")
    if max_neighbors < 1:
        raise KernelError(f"max_neighbors is at least 1; got {max_neighbors}")
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    off = np.flatnonzero(~(np.abs(norms - 1.0) <= 5e-3))
    if len(off):
        raise KernelError(f"Row {off[0]} has norm {norms[off[0]]:.4f}; rows must be L2-normalised")
    if searches is None:
        return np.ones(len(vectors), dtype=bool)
    mask = np.asarray(searches, dtype=bool)
    if mask.shape != (len(vectors),):
        raise KernelError(f"searches has shape {mask.shape}; expected ({len(vectors)},)")
    return mask
