"""The exact join: tiles of the upper triangle by GEMM, candidates rechecked in float64.

A tile's float32 products only nominate pairs within a margin of the threshold; the cosine of every nominated
pair is computed anew in float64 from the stored vectors. The result therefore depends neither on the tile's
shape nor on how many threads the BLAS library uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.kernels.simjoin.reference import Pairs, check_arguments

MARGIN = 1e-3
TILE_ROWS = 1024
RECHECK_PAIRS = 1 << 16


def exact(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    memory_bytes: int = 256 * 2**20,
    on_progress: Callable[[float], None] | None = None,
) -> Pairs:
    """Return all pairs with cosine >= threshold that survive the per-node cap.

    Parameters and result as for :func:`hippoindex.kernels.simjoin.reference.reference`.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
    threshold, max_neighbors, searches
        See the reference.
    memory_bytes : int
        Budget of one tile of products with its mask.
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
    x = np.asarray(vectors)
    may_search = check_arguments(x, threshold, max_neighbors, searches)
    single = np.ascontiguousarray(x, dtype=np.float32)
    first, second, cosine = [], [], []
    for i, j in _candidates(single, threshold - MARGIN, memory_bytes, on_progress):
        exact_cosine = _cosines(x, i, j)
        keep = exact_cosine >= threshold
        first.append(i[keep])
        second.append(j[keep])
        cosine.append(exact_cosine[keep])
    if not first:
        none = np.empty(0, dtype=np.int64)
        return Pairs(none, none, np.empty(0, dtype=np.float32))
    return cap(
        np.concatenate(first), np.concatenate(second), np.concatenate(cosine), max_neighbors, may_search
    )


def _candidates(
    x: NDArray[np.float32], floor: float, memory_bytes: int, on_progress: Callable[[float], None] | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield row numbers ``i < j`` with float32 product >= floor, tile by tile over the upper triangle."""
    n = len(x)
    tile_columns = max(TILE_ROWS, memory_bytes // (5 * TILE_ROWS))  # 4 bytes of product, 1 of mask
    for top in range(0, n, TILE_ROWS):
        rows = x[top : top + TILE_ROWS]
        for left in range(top, n, tile_columns):
            products = rows @ x[left : left + tile_columns].T  # (TILE_ROWS, tile_columns)
            near = np.flatnonzero(products >= floor)  # on the flat tile: several times faster than np.nonzero
            i, j = near // products.shape[1] + top, near % products.shape[1] + left
            upper = i < j
            yield i[upper], j[upper]
        if on_progress is not None:
            rest = (n - min(n, top + TILE_ROWS)) / n
            on_progress(1.0 - rest * rest)


def _cosines(x: NDArray, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.float64]:
    """Products of rows in float64, summed in a fixed order, shape (len(i),)."""
    out = np.empty(len(i))
    for start in range(0, len(i), RECHECK_PAIRS):
        part = slice(start, start + RECHECK_PAIRS)
        out[part] = (x[i[part]].astype(np.float64) * x[j[part]].astype(np.float64)).sum(axis=1)
    return out


def cap(
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    cosine: NDArray[np.float64],
    max_neighbors: int,
    searches: NDArray[np.bool_],
) -> Pairs:
    """Apply the per-node cap to distinct pairs ``first < second`` and sort them.

    Parameters
    ----------
    first, second : ndarray of int64, shape (P,)
    cosine : ndarray of float64, shape (P,)
    max_neighbors : int
    searches : ndarray of bool, shape (N,)

    Returns
    -------
    Pairs
    """
    pair = np.tile(np.arange(len(first)), 2)
    node, other = np.r_[first, second], np.r_[second, first]
    order = np.lexsort((other, -np.tile(cosine, 2), node))
    node, pair = node[order], pair[order]
    start = np.searchsorted(node, node)  # where this node's neighbours begin
    keeps = (np.arange(len(node)) - start < max_neighbors) & searches[node]
    kept = np.unique(pair[keeps])
    first, second, cosine = first[kept], second[kept], cosine[kept]
    order = np.lexsort((second, first))
    return Pairs(first[order], second[order], cosine[order].astype(np.float32))
