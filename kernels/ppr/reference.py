"""The reference: float64 power iteration with scipy, to 1e-12."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.restart import normalised_restart
from hippoindex.kernels.ppr.result import PPRResult


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
