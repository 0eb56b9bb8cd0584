"""The graph type of the PPR kernels: a symmetric weighted CSR matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import csr

INT32_MAX = np.iinfo(np.int32).max

OFFENCES = {
    csr.DECREASES: "indptr decreases",
    csr.OUTSIDE: "a column is outside the graph",
    csr.SELF_LOOP: "there is a self-loop",
    csr.UNSORTED: "columns are not sorted or repeat",
    csr.BAD_WEIGHT: "a weight is negative or not finite",
    csr.ASYMMETRIC: "it is not symmetric",
}


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected weighted graph of N nodes as a symmetric CSR matrix without self-loops.

    The arrays may be memory maps: nothing is copied, and processes that map the same files share them.

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
        return csr.row_sums(self.indptr, self.weights)

    @cached_property
    def isolated(self) -> NDArray[np.int64]:
        """Nodes of weighted degree 0."""
        return np.flatnonzero(self.degrees == 0)

    @cached_property
    def transition(self) -> NDArray[np.float32]:
        """Weight / degree of the column for every stored edge, shape (E,): the cells of W D^-1."""
        degrees = self.degrees
        inverse = np.divide(1.0, degrees, out=np.zeros_like(degrees), where=degrees > 0)
        return csr.scaled_by_column(self.indptr, self.indices, self.weights, inverse)

    def with_transition(self, transition: NDArray[np.float32]) -> Graph:
        """Return this graph with stored transition cells, as :attr:`transition` gave them once.

        Raises
        ------
        KernelError
            If there are not as many as stored edges.
        """
        if transition.shape != self.weights.shape or transition.dtype != np.float32:
            raise KernelError(
                f"transition has shape {transition.shape} and type {transition.dtype}; expected "
                f"{self.weights.shape} of float32"
            )
        graph = Graph(self.indptr, self.indices, self.weights)
        graph.__dict__["transition"] = transition  # what cached_property would have stored
        return graph

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
            If lengths differ, a node number is out of range or no integer, a weight is negative or not
            finite, or a sum of weights overflows float32.
        """
        a, b, w = _integers(sources, "sources"), _integers(targets, "targets"), np.asarray(weights)
        w = w if w.dtype in (np.float32, np.float64) else w.astype(np.float64)
        _check_edges(n_nodes, a, b, w)
        if a.dtype != b.dtype:
            a, b = a.astype(np.int64), b.astype(np.int64)
        columns = np.empty(2 * len(a), dtype=index_type(n_nodes))
        values = np.empty(2 * len(a), dtype=np.float64)
        ends = csr.scatter(n_nodes, a, b, w, columns, values)
        indptr = np.zeros(n_nodes + 1, dtype=np.int64)
        np.cumsum(csr.merge_rows(ends, columns, values), out=indptr[1:])
        indices = np.empty(indptr[-1], dtype=columns.dtype)
        summed = np.empty(indptr[-1], dtype=np.float32)
        csr.compact(ends, indptr, columns, values, indices, summed)
        over = np.flatnonzero(np.isinf(summed))
        if len(over):
            row = int(np.searchsorted(indptr, over[0], side="right")) - 1
            raise KernelError(f"Edges {row} - {indices[over[0]]}: the sum of their weights overflows float32")
        return cls(indptr, indices, summed)

    def validate(self) -> None:
        """Check every promise of this class, in one pass over the edges.

        Raises
        ------
        KernelError
            Naming the first offending row.
        """
        ends = self.indptr
        if ends.dtype != np.int64 or self.weights.dtype != np.float32:
            raise KernelError(
                f"Graph: indptr is {ends.dtype}, weights are {self.weights.dtype}; expected int64 and float32"
            )
        if self.indices.dtype not in (np.int32, np.int64):
            raise KernelError(f"Graph: indices are {self.indices.dtype}; expected int32 or int64")
        if not len(ends) or ends[0] != 0 or not ends[-1] == len(self.indices) == len(self.weights):
            raise KernelError(
                "Graph: indptr must start with 0 and end with the length of indices and weights"
            )
        kind, row = csr.first_offence(ends, self.indices, self.weights)
        if kind != csr.FINE:
            raise KernelError(f"Graph: row {row}: {OFFENCES[kind]}")


def index_type(n_nodes: int) -> type[np.signedinteger]:
    """Return the type that holds the node numbers of a graph: int32 while they fit."""
    return np.int32 if n_nodes <= INT32_MAX else np.int64


def _integers(values: ArrayLike, name: str) -> NDArray[np.integer]:
    """Return node numbers as int32 or int64, copied only where they are neither."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise KernelError(f"Edges: {name} are {array.dtype}; node numbers are integers")
    if array.dtype in (np.int32, np.int64):
        return array
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise KernelError(f"Edges: {name} hold {array.max()}, which is no node number")
    return array.astype(np.int64)


def _check_edges(n: int, a: NDArray[np.integer], b: NDArray[np.integer], w: NDArray[np.floating]) -> None:
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
