"""What the solvers return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PPRResult:
    """Scores of all nodes and how good they are.

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


@dataclass(frozen=True, eq=False)
class SparseResult:
    """The nodes that a solver reached for each of Q restarts, best first, and how good their scores are.

    Attributes
    ----------
    indptr : ndarray of int64, shape (Q + 1,)
        Restart q has the entries ``indptr[q] .. indptr[q + 1] - 1`` of ``nodes`` and ``scores``.
    nodes : ndarray of int64, shape (T,)
        By falling score; equal scores by node number.
    scores : ndarray of float64, shape (T,)
        Lower bounds of the true scores.
    residual : ndarray of float64, shape (Q,)
        L1 error over all nodes: exactly the mass that is still to be spread.
    iterations : ndarray of int64, shape (Q,)
        Rounds over the frontier.
    converged : ndarray of bool, shape (Q,)
        Whether the goal was reached before the work limit.
    certified_k : ndarray of int64, shape (Q,)
        The first so many nodes are proven to be the best candidates, as a set.
    epsilon : ndarray of float64, shape (Q,)
        No node holds more unspread mass than ``epsilon`` times its degree.
    edges_touched : ndarray of int64, shape (Q,)
        Stored edges that were walked, with repetitions.
    stopped_by : tuple of str, length Q
        ``"epsilon"``, ``"tolerance"``, ``"certified"`` or ``"work limit"``.
    """

    indptr: NDArray[np.int64]
    nodes: NDArray[np.int64]
    scores: NDArray[np.float64]
    residual: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    certified_k: NDArray[np.int64]
    epsilon: NDArray[np.float64]
    edges_touched: NDArray[np.int64]
    stopped_by: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def row(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return nodes and scores of one restart."""
        part = slice(self.indptr[number], self.indptr[number + 1])
        return self.nodes[part], self.scores[part]


@dataclass(frozen=True, eq=False)
class Ranked:
    """The k best candidates of each of Q restarts.

    Attributes
    ----------
    nodes : ndarray of int64, shape (Q, k)
        By falling score, equal scores by node number; -1 where fewer candidates were reached.
    scores : ndarray of float64, shape (Q, k)
        0 where there is no node.
    residual : ndarray of float64, shape (Q,)
        Upper bound of the L1 error over all nodes.
    iterations : ndarray of int64, shape (Q,)
    converged : ndarray of bool, shape (Q,)
    certified_k : ndarray of int64, shape (Q,)
        The first so many nodes are proven to be the best candidates, as a set.
    edges_touched : ndarray of int64, shape (Q,)
        Stored edges that were walked for the restart, with repetitions.
    method : str
        The solver: ``"push"``, ``"power"`` or ``"affine"``.
    """

    nodes: NDArray[np.int64]
    scores: NDArray[np.float64]
    residual: NDArray[np.float64]
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    certified_k: NDArray[np.int64]
    edges_touched: NDArray[np.int64]
    method: str


def empty_ranking(
    n_restarts: int, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return nodes (Q, k), scores (Q, k) and certified_k (Q,) with nothing in them."""
    return (
        np.full((n_restarts, k), -1, dtype=np.int64),
        np.zeros((n_restarts, k)),
        np.zeros(n_restarts, dtype=np.int64),
    )
