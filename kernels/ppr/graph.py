"""The graph type of the PPR kernels: a symmetric weighted CSR matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError

INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected weighted graph of N nodes as a symmetric CSR matrix without self-loops.

    Attributes
    ----------
    indptr : ndarray of int64, shape (N + 1,)
    indices : ndarray of int32, shape (E,)
        int64 where there are more than 2**31 - 1 nodes. Sorted within a row. Every undirected edge stands
        twice, once in each row.
    weights : ndarray of float32, shape (E,)
        Finite and not negative.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.integer]
    weights: NDArray[np.float32]

    @property
    def n_nodes(self) -> int:
        """Number of nodes N."""
        return len(self.indptr) - 1

    @property
    def n_edges(self) -> int:
        """Number of undirected edges, E / 2."""
        return len(self.indices) // 2

    @cached_property
    def degrees(self) -> NDArray[np.float64]:
        """Weighted degrees, shape (N,); 0 for isolated nodes."""
        return np.asarray(self.matrix(np.float64).sum(axis=1), dtype=np.float64).ravel()

    def matrix(self, dtype: type[np.floating] = np.float32) -> sp.csr_matrix:
        """Return the adjacency matrix as scipy CSR, shape (N, N); arrays are shared where dtypes allow."""
        shape = (self.n_nodes, self.n_nodes)
        return sp.csr_matrix((self.weights.astype(dtype, copy=False), self.indices, self.indptr), shape=shape)

    def head(self, n_nodes: int) -> Graph:
        """Return the subgraph of the first ``n_nodes`` nodes."""
        part = self.matrix()[:n_nodes, :n_nodes]
        return Graph(
            part.indptr.astype(np.int64),
            part.indices.astype(self.indices.dtype),
            part.data.astype(np.float32),
        )

    @classmethod
    def from_edges(cls, n_nodes: int, sources: ArrayLike, targets: ArrayLike, weights: ArrayLike) -> Graph:
        """Build a graph from undirected edges in any direction and order.

        Parallel edges are summed in float64, in the order given; self-loops are dropped.

        Parameters
        ----------
        n_nodes : int
        sources, targets : array_like of int, shape (M,)
        weights : array_like of float, shape (M,)

        Returns
        -------
        Graph

        Raises
        ------
        KernelError
            If lengths differ, a node number is out of range, or a weight is negative or not finite.
        """
        a, b = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
        w = np.asarray(weights, dtype=np.float64)
        _check_edges(n_nodes, a, b, w)
        apart = a != b
        low, high, w = np.minimum(a, b)[apart], np.maximum(a, b)[apart], w[apart]
        order = np.lexsort((high, low))  # stable: parallel edges keep the order given
        low, high, w = low[order], high[order], w[order]
        first = np.flatnonzero(np.r_[True, (low[1:] != low[:-1]) | (high[1:] != high[:-1])])[: len(low)]
        if len(low):
            low, high, w = low[first], high[first], np.add.reduceat(w, first)
        rows, columns = np.r_[low, high], np.r_[high, low]
        order = np.lexsort((columns, rows))
        indptr = np.r_[0, np.cumsum(np.bincount(rows, minlength=n_nodes))].astype(np.int64)
        index_type = np.int32 if n_nodes <= INT32_MAX else np.int64
        return cls(indptr, columns[order].astype(index_type), np.r_[w, w][order].astype(np.float32))

    def validate(self) -> None:
        """Check every promise of this class.

        Raises
        ------
        KernelError
            Naming the first offending row.
        """
        n, ends = self.n_nodes, self.indptr
        if n < 0 or ends[0] != 0 or ends[-1] != len(self.indices) or len(self.weights) != len(self.indices):
            raise KernelError(
                "Graph: indptr must start with 0 and end with the length of indices and weights"
            )
        _fail_first(np.flatnonzero(np.diff(ends) < 0), "indptr decreases")
        rows = np.repeat(np.arange(n), np.diff(ends))
        _fail_rows(rows, (self.indices < 0) | (self.indices >= n), f"a column is outside 0..{n - 1}")
        _fail_rows(rows, self.indices == rows, "there is a self-loop")
        unsorted = np.r_[False, (rows[1:] == rows[:-1]) & (self.indices[1:] <= self.indices[:-1])][
            : len(rows)
        ]
        _fail_rows(rows, unsorted, "columns are not sorted or repeat")
        _fail_rows(
            rows, ~np.isfinite(self.weights) | (self.weights < 0), "a weight is negative or not finite"
        )
        matrix = self.matrix()
        transposed = matrix.T.tocsr()
        same = np.array_equal(transposed.indptr, ends) and np.array_equal(transposed.indices, self.indices)
        if not same or not np.array_equal(transposed.data, self.weights):
            difference = sp.coo_matrix(abs(matrix - transposed)).row
            row = (
                int(difference.min())
                if len(difference)
                else int(np.flatnonzero(transposed.indptr != ends)[0]) - 1
            )
            raise KernelError(f"Graph: row {row} is not symmetric")


def _check_edges(n: int, a: NDArray[np.int64], b: NDArray[np.int64], w: NDArray[np.float64]) -> None:
    if not (len(a) == len(b) == len(w)):
        raise KernelError(
            f"Edges: {len(a)} sources, {len(b)} targets and {len(w)} weights; they must be as many"
        )
    bad = np.flatnonzero((a < 0) | (b < 0) | (a >= n) | (b >= n))
    if len(bad):
        raise KernelError(f"Edge {bad[0]} joins nodes {a[bad[0]]} and {b[bad[0]]}; nodes are 0..{n - 1}")
    bad = np.flatnonzero(~np.isfinite(w) | (w < 0))
    if len(bad):
        raise KernelError(f"Edge {bad[0]} has weight {w[bad[0]]}; weights are finite and not negative")


def _fail_first(offending: NDArray[np.intp], what: str) -> None:
    if len(offending):
        raise KernelError(f"Graph: row {offending[0]}: {what}")


def _fail_rows(rows: NDArray[np.intp], mask: NDArray[np.bool_], what: str) -> None:
    _fail_first(rows[np.flatnonzero(mask)[:1]], what)
