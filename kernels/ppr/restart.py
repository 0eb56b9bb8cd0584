"""Restart vectors: checked, scaled to sum 1, and what isolated nodes do to them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph

SparseRestarts = sp.sparray | sp.spmatrix | ArrayLike
"""One restart a row, shape (Q, N): any scipy sparse array, or a dense one."""

CHUNK_ROWS = 1 << 16


def check_damping(damping: float) -> None:
    """Refuse a damping that is no probability of continuing.

    Raises
    ------
    KernelError
    """
    if not 0.0 < damping < 1.0:
        raise KernelError(f"damping is the probability of continuing, between 0 and 1; got {damping}")


def normalised_restart(graph: Graph, restart: ArrayLike, damping: float, dtype: type[np.floating]) -> NDArray:
    """Check the arguments of a dense solver and return the restart with columns of sum 1, shape (N, B).

    Raises
    ------
    KernelError
        If the graph has no node, the shape is another, or a column holds a negative or non-finite value,
        nothing but zeros, or values whose sum overflows.
    """
    check_damping(damping)
    _check_not_empty(graph)
    s = np.asarray(restart)
    s = s if s.dtype in (np.float32, np.float64) else s.astype(np.float64)
    if s.ndim != 2 or s.shape[0] != graph.n_nodes:
        raise KernelError(f"restart has shape {s.shape}; expected ({graph.n_nodes}, B)")
    sums = np.zeros(s.shape[1])
    for start in range(0, len(s), CHUNK_ROWS):  # in chunks: a mask of the whole block is memory not planned
        rows = s[start : start + CHUNK_ROWS]
        if not np.all(np.isfinite(rows)) or np.any(rows < 0):
            row, column = np.argwhere(~(np.isfinite(rows) & (rows >= 0)))[0]
            raise KernelError(
                f"restart holds a negative or non-finite value in row {start + row}, column {column}"
            )
        sums += l1_norms(rows)
    _check_sums(sums, "restart column")
    scaled = np.empty(s.shape, dtype=dtype)
    for start in range(0, len(s), CHUNK_ROWS):
        scaled[start : start + CHUNK_ROWS] = s[start : start + CHUNK_ROWS] / sums
    return scaled


def sparse_restarts(graph: Graph, restarts: SparseRestarts) -> sp.csr_array:
    """Check restarts of a sparse solver and return them as CSR with rows of sum 1, shape (Q, N).

    Raises
    ------
    KernelError
        If the graph has no node, the shape is another, or a row holds a node outside the graph, a negative
        or non-finite value, nothing but zeros, or values whose sum overflows.
    """
    _check_not_empty(graph)
    matrix: Any = sp.csr_array(restarts, dtype=np.float64, copy=True)  # type: ignore[arg-type] # stubs: 1-d
    if matrix.ndim != 2 or matrix.shape[1] != graph.n_nodes:
        raise KernelError(f"restarts have shape {matrix.shape}; expected (Q, {graph.n_nodes})")
    check_cells(matrix)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    sums = np.bincount(rows, weights=matrix.data, minlength=matrix.shape[0]).astype(np.float64)
    _check_sums(sums, "restart")
    matrix.data /= sums[rows]
    return matrix


def check_cells(matrix: sp.csr_array) -> None:
    """Check every stored cell of sparse restarts, shape (Q, N).

    Raises
    ------
    KernelError
        Naming the first row that holds a node outside the graph, or a negative or non-finite value.
    """
    nodes, weights = matrix.indices, matrix.data
    outside = (nodes < 0) | (nodes >= matrix.shape[1])
    bad = np.flatnonzero(outside | ~(np.isfinite(weights) & (weights >= 0)))
    if not len(bad):
        return
    row = int(np.searchsorted(matrix.indptr, bad[0], side="right")) - 1
    if outside[bad[0]]:
        raise KernelError(f"restart {row} names node {nodes[bad[0]]}; nodes are 0..{matrix.shape[1] - 1}")
    raise KernelError(
        f"restart {row} has weight {weights[bad[0]]} at node {nodes[bad[0]]}; "
        "weights are finite and not negative"
    )


@numba.njit(cache=True, error_model="numpy")
def l1_norms(block: NDArray) -> NDArray[np.float64]:
    """Return the sum of absolute values of each column in float64, shape (B,).

    Added row by row: numpy's order depends on the number of columns, and with it the last bits of the sums.
    """
    norms = np.zeros(block.shape[1], np.float64)
    for row in range(block.shape[0]):
        for column in range(block.shape[1]):
            norms[column] += abs(block[row, column])
    return norms


def candidate_range(graph: Graph, candidates: tuple[int, int] | None) -> tuple[int, int]:
    """Return the range of nodes that may be ranked; by default all.

    Raises
    ------
    KernelError
        If the graph has no node, or the range leaves it.
    """
    _check_not_empty(graph)
    low, high = candidates or (0, graph.n_nodes)
    if not 0 <= low <= high <= graph.n_nodes:
        raise KernelError(f"candidates {low}..{high - 1} are no range of the nodes 0..{graph.n_nodes - 1}")
    return low, high


def return_factor(isolated_mass: NDArray[np.float64] | float, damping: float) -> NDArray[np.float64]:
    r"""Return what scores are multiplied by when walks lost on isolated nodes start again.

    With :math:`m` the restart's share on isolated nodes, a walk is lost with probability :math:`d m` at its
    first step and only then, so :math:`1 / (1 - d m)` starts are made on average. The PPR that returns the
    mass (as igraph does) is that number times the one that loses it.

    Parameters
    ----------
    isolated_mass : ndarray of float64, shape (B,)
    damping : float

    Returns
    -------
    ndarray of float64, shape (B,)
    """
    return np.asarray(1.0 / (1.0 - damping * np.asarray(isolated_mass, dtype=np.float64)))


def _check_sums(sums: NDArray[np.float64], name: str) -> None:
    bad = np.flatnonzero(~((sums > 0) & np.isfinite(sums)))
    if len(bad):
        what = "is all zeros" if sums[bad[0]] == 0 else "has weights whose sum overflows; scale them down"
        raise KernelError(f"{name} {bad[0]} {what}")


def _check_not_empty(graph: Graph) -> None:
    if graph.n_nodes == 0:
        raise KernelError("The graph is empty: there is no node to walk from")
