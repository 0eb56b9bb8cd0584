"""Batched power iteration: CSR times a dense block of B columns, in float32, on all cores.

The block's width is a run-time value on purpose: with a compile-time width numba's code was three times
slower. Sums over rows run in a fixed order and every column stops by its own bound, so a column's bytes
depend neither on the number of threads nor on which columns it was solved with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.lines import (
    AHEAD_EDGES,
    LINE_BYTES,
    LINE_FLOATS,
    aligned_copy,
    aligned_zeros,
    prefetch,
)
from hippoindex.kernels.ppr.restart import check_damping, l1_norms, normalised_restart, return_factor
from hippoindex.kernels.ppr.result import PPRResult

CHUNK_ROWS = 1024
BLOCKS_HELD = 4  # restart as given, scaled restart, current and next block

Step = Callable[[Any, Any, NDArray[np.bool_]], NDArray[np.float64]]
"""``step(x, y, active)`` writes the next iterate of every active column of ``x`` into ``y``, copies the
others, and returns the L1 change of each column, shape (B,), in host memory."""


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

    Same equation and error bound as :func:`hippoindex.kernels.ppr.reference.reference`. The mass of isolated
    nodes is returned in closed form, see :func:`hippoindex.kernels.ppr.restart.return_factor`.

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
    factor = return_factor(l1_norms(s[graph.isolated]), damping)  # (B,)
    x, bound, iterations = iterate(
        cpu_step(graph, s, 0, damping),
        aligned_copy(s),
        aligned_zeros(s.shape, np.float32),
        damping,
        tolerance / factor,
        max_iterations,
    )
    if np.any(factor != 1.0):
        x *= factor.astype(np.float32)
    return PPRResult(x, bound * factor, iterations, bound * factor <= tolerance)


def propagate(
    graph: Graph,
    restart: NDArray[np.float32],
    first_node: int,
    damping: float = 0.5,
    tolerance: float = 1e-6,
    max_iterations: int = 200,
) -> PPRResult:
    r"""Apply the linear operator :math:`\Pi = (1 - d) (I - d W D^{-1})^{-1}` to a block of any sign.

    :math:`\Pi s` is Personalized PageRank for a restart :math:`s` without mass on isolated nodes; the mass
    that walks lose there is not returned. Unlike PPR it is linear in the restart.

    Parameters
    ----------
    graph : Graph
    restart : ndarray of float32, shape (M, B)
        Rows of the nodes ``first_node .. first_node + M - 1``; all other nodes have 0. Finite, not scaled.
    first_node : int
    damping : float
    tolerance : float
        L1 error to reach, as a share of each column's L1 norm.
    max_iterations : int

    Returns
    -------
    PPRResult
        float32 values of all nodes, not scaled; residuals are L1 errors as shares of the columns' L1 norms.

    Raises
    ------
    KernelError
        If the restart or the damping is not as described.
    """
    check_block(graph, restart, first_node, damping)
    norm = l1_norms(restart)
    x = aligned_zeros((graph.n_nodes, restart.shape[1]), np.float32)
    x[first_node : first_node + len(restart)] = restart
    step = cpu_step(graph, restart, first_node, damping)
    y = aligned_zeros(x.shape, np.float32)
    x, bound, iterations = iterate(step, x, y, damping, tolerance * norm, max_iterations)
    residual = np.divide(bound, norm, out=np.zeros_like(bound), where=norm > 0)
    return PPRResult(x, residual, iterations, residual <= tolerance)


def check_block(graph: Graph, restart: NDArray[np.float32], first_node: int, damping: float) -> None:
    """Check the arguments of :func:`propagate`.

    Raises
    ------
    KernelError
    """
    check_damping(damping)
    if restart.ndim != 2 or restart.dtype != np.float32 or not np.all(np.isfinite(restart)):
        raise KernelError("restart must be a finite float32 array of shape (M, B)")
    if first_node < 0 or first_node + len(restart) > graph.n_nodes:
        raise KernelError(
            f"restart rows are nodes {first_node}..{first_node + len(restart) - 1} of {graph.n_nodes}"
        )


def iterate(
    step: Step,
    x: Any,
    y: Any,
    damping: float,
    tolerance: NDArray[np.float64] | float,
    max_iterations: int,
) -> tuple[Any, NDArray[np.float64], NDArray[np.int64]]:
    """Iterate blocks of any array library until every column is within its tolerance.

    Parameters
    ----------
    step : callable
        See :data:`Step`.
    x, y : array, shape (N, B)
        Where to start, and working space; both are overwritten.
    damping : float
    tolerance : float or ndarray, shape (B,)
        L1 error at which a column is left as it is.
    max_iterations : int

    Returns
    -------
    x : array, shape (N, B)
    bound : ndarray of float64, shape (B,)
        ``d / (1 - d)`` times the last L1 change of each column, which bounds its L1 error.
    iterations : ndarray of int64, shape (B,)
    """
    width = x.shape[1]
    bound, iterations = np.full(width, np.inf), np.zeros(width, dtype=np.int64)
    active = np.ones(width, dtype=bool)
    for _ in range(max_iterations):
        change = step(x, y, active)
        bound[active] = damping / (1 - damping) * change[active]
        iterations[active] += 1
        x, y = y, x
        active = bound > tolerance
        if not active.any():
            break
    return x, bound, iterations


def cpu_step(graph: Graph, restart: NDArray[np.float32], first_node: int, damping: float) -> Step:
    """Return ``x -> d W D^-1 x + (1 - d) s`` compiled for the CPU, with ``s`` as in :func:`propagate`."""
    partial = np.zeros((-(-graph.n_nodes // CHUNK_ROWS), restart.shape[1]))
    arrays = graph.indptr, graph.indices, graph.transition

    def step(x: Any, y: Any, active: NDArray[np.bool_]) -> NDArray[np.float64]:
        _step(*arrays, x, restart, first_node, np.float32(damping), active, y, partial)
        return l1_norms(partial)

    return step


@numba.njit(parallel=True, cache=True, error_model="numpy", fastmath={"contract"})
def _step(
    indptr: NDArray,
    indices: NDArray,
    transition: NDArray,
    x: NDArray,
    restart: NDArray,
    first_node: int,
    damping: Any,
    active: NDArray,
    y: NDArray,
    partial: NDArray,
) -> None:
    """Set ``y = d T x + (1 - d) s`` in active columns and ``partial[chunk] = sum |y - x|`` over its rows."""
    n, width = x.shape
    last, lines = indices.shape[0] - 1, (width + LINE_FLOATS - 1) // LINE_FLOATS
    stay = np.float32(1) - damping
    for chunk in numba.prange((n + CHUNK_ROWS - 1) // CHUNK_ROWS):
        total = np.empty(width, np.float32)
        change = np.zeros(width, np.float64)
        for row in range(chunk * CHUNK_ROWS, min(n, (chunk + 1) * CHUNK_ROWS)):
            total[:] = np.float32(0)
            for cell in range(indptr[row], indptr[row + 1]):
                soon = indices[min(cell + AHEAD_EDGES, last)]
                for line in range(lines):
                    prefetch(x, soon, line * LINE_BYTES)
                weight = transition[cell]
                source = x[indices[cell]]
                for b in range(width):
                    total[b] += weight * source[b]
            for b in range(width):
                total[b] *= damping
            if first_node <= row < first_node + restart.shape[0]:
                for b in range(width):
                    total[b] += stay * restart[row - first_node, b]
            for b in range(width):
                value = total[b] if active[b] else x[row, b]
                change[b] += abs(value - x[row, b])
                y[row, b] = value
        partial[chunk] = change
