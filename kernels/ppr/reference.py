"""The reference: float64 power iteration with scipy, to 1e-12."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import Graph


@dataclass(frozen=True, eq=False)
class PPRResult:
    """Scores and how good they are.

    Attributes
    ----------
    scores : ndarray of float32 or float64, shape (N, B)
        Each column sums to 1.
    residual : ndarray of float64, shape (B,)
        Upper bound of the L1 error of each column, rounding apart.
    iterations : ndarray of int64, shape (B,)
    converged : ndarray of bool, shape (B,)
        Whether ``residual <= tolerance``.
    """

    scores: NDArray[np.floating]
    residual: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]


def reference(
    graph: Graph,
    restart: ArrayLike,
    damping: float = 0.5,
    tolerance: float = 1e-12,
    max_iterations: int = 10_000,
) -> PPRResult:
    r"""Solve Personalized PageRank by power iteration.

    .. math:: x = d (W D^{-1} x + s \, \delta(x)) + (1 - d) s

    with :math:`d` the probability of continuing (HippoRAG, section 2.3: 0.5), :math:`s` the restart vector
    scaled to sum 1, and :math:`\delta(x)` the mass on isolated nodes, which goes back to the restart as in
    igraph's ``personalized_pagerank``. The error after k steps is at most
    :math:`\frac{d}{1-d} \lVert x_k - x_{k-1} \rVert_1`.

    Parameters
    ----------
    graph : Graph
    restart : array_like, shape (N, B)
        Not negative, finite, every column with a positive sum.
    damping : float
    tolerance : float
        L1 error to reach.
    max_iterations : int

    Returns
    -------
    PPRResult
        float64.

    Raises
    ------
    KernelError
        If the restart or the damping is not as described.
    """
    s = normalised_restart(graph, restart, damping, np.float64)  # (N, B)
    degrees = graph.degrees
    isolated = degrees == 0
    step = graph.matrix(np.float64) @ sp.diags_array(
        np.where(isolated, 0.0, 1.0 / np.where(isolated, 1.0, degrees))
    )
    x = s.copy()
    residual = np.full(s.shape[1], np.inf)
    iterations = 0
    while iterations < max_iterations and np.any(residual > tolerance):
        new = damping * (step @ x + s * x[isolated].sum(axis=0)) + (1 - damping) * s
        residual = damping / (1 - damping) * np.abs(new - x).sum(axis=0)
        x = new
        iterations += 1
    return PPRResult(x, residual, np.full(s.shape[1], iterations, dtype=np.int64), residual <= tolerance)


def normalised_restart(graph: Graph, restart: ArrayLike, damping: float, dtype: type[np.floating]) -> NDArray:
    """Check the arguments of a solver and return the restart with columns of sum 1, shape (N, B)."""
    if not 0.0 < damping < 1.0:
        raise KernelError(f"damping is the probability of continuing, between 0 and 1; got {damping}")
    s = np.asarray(restart)
    if s.ndim != 2 or s.shape[0] != graph.n_nodes:
        raise KernelError(f"restart has shape {s.shape}; expected ({graph.n_nodes}, B)")
    if not np.all(np.isfinite(s)) or np.any(s < 0):
        raise KernelError("restart holds a negative or non-finite value")
    sums = s.sum(axis=0, dtype=np.float64)
    if np.any(sums <= 0):
        raise KernelError(f"restart column {int(np.flatnonzero(sums <= 0)[0])} is all zeros")
    return (s / sums).astype(dtype)
