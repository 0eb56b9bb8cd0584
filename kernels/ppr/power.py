"""Batched power iteration: CSR times a dense block of B columns, in float32, on all cores.

The block's width is a run-time value on purpose: with a compile-time width numba's code was three times
slower. Sums over rows run in a fixed order, so a result does not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.reference import PPRResult, normalised_restart

CHUNK_ROWS = 1024
BLOCKS_HELD = 4  # restart as given, scaled restart, current and next block


def block_width(n_nodes: int, n_columns: int, memory_bytes: int) -> int:
    """Return how many float32 columns of one PPR block fit a memory budget.

    Parameters
    ----------
    n_nodes : int
    n_columns : int
        Columns wanted; never more are returned.
    memory_bytes : int

    Returns
    -------
    int

    Raises
    ------
    KernelError
        If not even one column fits; the message says how much one needs.
    """
    column_bytes = BLOCKS_HELD * 4 * max(n_nodes, 1)
    width = min(n_columns, memory_bytes // column_bytes)
    if width < 1 <= n_columns:
        raise KernelError(
            f"One PPR column over {n_nodes} nodes needs {column_bytes} bytes; the budget is {memory_bytes}"
        )
    return int(width)


def power(
    graph: Graph, restart: ArrayLike, damping: float = 0.5, tolerance: float = 1e-6, max_iterations: int = 200
) -> PPRResult:
    """Solve Personalized PageRank for a block of restart vectors.

    Same equation and error bound as :func:`hippoindex.kernels.ppr.reference.reference`; the block stops when
    every column is within ``tolerance``.

    Parameters
    ----------
    graph : Graph
    restart : array_like, shape (N, B)
        Not negative, finite, every column with a positive sum.
    damping : float
    tolerance : float
        L1 error to reach. Rounding in float32 stops the bound at about ``2e-7 * damping / (1 - damping)``.
    max_iterations : int

    Returns
    -------
    PPRResult
        float32 scores.

    Raises
    ------
    KernelError
        If the restart or the damping is not as described.
    """
    s = normalised_restart(graph, restart, damping, np.float32)  # (N, B)
    degrees = graph.degrees
    isolated = np.flatnonzero(degrees == 0)
    inverse = np.zeros(graph.n_nodes, dtype=np.float32)
    np.divide(1.0, degrees, out=inverse, where=degrees > 0, casting="same_kind")
    x, y = s.copy(), np.empty_like(s)
    partial = np.zeros((-(-graph.n_nodes // CHUNK_ROWS), s.shape[1]))
    bound = np.full(s.shape[1], np.inf)
    iterations = 0
    while iterations < max_iterations and np.any(bound > tolerance):
        lost = x[isolated].sum(axis=0, dtype=np.float64).astype(np.float32)  # (B,)
        _step(
            graph.indptr, graph.indices, graph.weights, inverse, x, s, lost, np.float32(damping), y, partial
        )
        bound = damping / (1 - damping) * partial.sum(axis=0)
        x, y = y, x
        iterations += 1
    return PPRResult(x, bound, np.full(s.shape[1], iterations, dtype=np.int64), bound <= tolerance)


@numba.njit(parallel=True, cache=True, error_model="numpy", fastmath={"contract"})
def _step(
    indptr: NDArray,
    indices: NDArray,
    weights: NDArray,
    inverse: NDArray,
    x: NDArray,
    restart: NDArray,
    lost: NDArray,
    damping: Any,
    y: NDArray,
    partial: NDArray,
) -> None:
    """Set ``y = d (W D^-1 x + s lost) + (1 - d) s`` and ``partial[chunk] = sum |y - x|`` over its rows."""
    n, width = x.shape
    one = np.float32(1)
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        total = np.empty(width, np.float32)
        change = np.zeros(width, np.float64)
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            total[:] = np.float32(0)
            for edge in range(indptr[row], indptr[row + 1]):
                column = indices[edge]
                weight = weights[edge] * inverse[column]
                source = x[column]
                for b in range(width):
                    total[b] += weight * source[b]
            for b in range(width):
                s = restart[row, b]
                value = damping * (total[b] + s * lost[b]) + (one - damping) * s
                change[b] += abs(value - x[row, b])
                y[row, b] = value
        partial[chunk] = change
