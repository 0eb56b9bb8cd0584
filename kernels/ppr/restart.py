"""Restart vectors: checked, scaled to sum 1, and what isolated nodes do to them."""

from __future__ import annotations

from typing import Any

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
        If the graph has no node, the shape is another, or a column holds a negative or non-finite value or
        nothing but zeros.
    """
    check_damping(damping)
    _check_not_empty(graph)
    s = np.asarray(restart)
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
        sums += rows.sum(axis=0, dtype=np.float64)
    if np.any(sums <= 0):
        raise KernelError(f"restart column {int(np.flatnonzero(sums <= 0)[0])} is all zeros")
    scaled = np.empty(s.shape, dtype=dtype)
    for start in range(0, len(s), CHUNK_ROWS):
        scaled[start : start + CHUNK_ROWS] = s[start : start + CHUNK_ROWS] / sums
    return scaled


def sparse_restarts(graph: Graph, restarts: SparseRestarts) -> sp.csr_array:
    """Check restarts of a sparse solver and return them as CSR with rows of sum 1, shape (Q, N).

    Raises
    ------
    KernelError
        If the graph has no node, the shape is another, or a row holds a negative or non-finite value or
        nothing but zeros.
    """
    _check_not_empty(graph)
    matrix: Any = sp.csr_array(restarts, dtype=np.float64, copy=True)  # type: ignore[arg-type] # stubs: 1-d
    if matrix.ndim != 2 or matrix.shape[1] != graph.n_nodes:
        raise KernelError(f"restarts have shape {matrix.shape}; expected (Q, {graph.n_nodes})")
    if matrix.nnz and not 0 <= matrix.indices.min() <= matrix.indices.max() < graph.n_nodes:
        raise KernelError(f"restarts: a node number is outside 0..{graph.n_nodes - 1}")
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    bad = np.flatnonzero(~(np.isfinite(matrix.data) & (matrix.data >= 0)))
    if len(bad):
        raise KernelError(
            f"restart {rows[bad[0]]} has weight {matrix.data[bad[0]]} at node {matrix.indices[bad[0]]}; "
            "weights are finite and not negative"
        )
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    sums = np.bincount(rows, weights=matrix.data, minlength=matrix.shape[0])
    if np.any(sums <= 0):
        raise KernelError(f"restart {int(np.flatnonzero(sums <= 0)[0])} is all zeros")
    matrix.data /= sums[rows]
    return matrix


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


def _check_not_empty(graph: Graph) -> None:
    if graph.n_nodes == 0:
        raise KernelError("The graph is empty: there is no node to walk from")
