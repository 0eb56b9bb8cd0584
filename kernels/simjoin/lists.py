"""Inverted lists: k-means on the sphere, the nearest lists of every node, and what is kept of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.problem import TILE_ROWS
from hippoindex.kernels.simjoin.sketch import Sketch
from hippoindex.kernels.simjoin.threads import in_threads
from hippoindex.kernels.simjoin.tile import add_rows, invert, top_columns

TRAIN_POINTS = 64
"""Training vectors per centroid; k-means is known to need 39 to 256."""
LEAST_POINTS = 39
ITERATIONS = 6
SORTED_PROBES = 64
"""Up to so many probes the nearest lists are found by insertion."""
GROWTH = 2
"""From so many times the rows on that they were found for, centroids are not kept: their lists are uneven."""


HALF_ROUNDING = 6e-4
"""More than a bound can lose if the sketch of one end is rounded to float16: 2^-11 of the norms' product."""
ORTHONORMAL = 1e-4
"""Largest entry of the axes' Gram matrix less the identity."""


@dataclass(frozen=True)
class Lists:
    """Nodes by nearest centroid.

    Attributes
    ----------
    owner : ndarray of int32, shape (G,)
        List of every node.
    asks : ndarray of bool, shape (G,)
        Nodes that probe lists.
    probes : ndarray of int32, shape (G, P)
        Nearest lists of the nodes that ask, the nearest of all first. The rows of the others are never
        touched: where few ask, hardly any of this array gets memory.
    n_lists : int
    """

    owner: NDArray[np.int32]
    asks: NDArray[np.bool_]
    probes: NDArray[np.int32]
    n_lists: int

    def members(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the nodes by list, ascending, and where each list begins: shapes (G,), (n_lists + 1,)."""
        return self._by_list(), _begins(self.owner, self.n_lists)

    def queries(self) -> tuple[NDArray, NDArray[np.int64]]:
        """Return the nodes that probe each list and where each begins; nodes of one list lie together."""
        order = self._by_list()
        order = order[self.asks[order]]
        everyone = len(order) == len(self.owner)
        begin = _begins((self.probes if everyone else self.probes[order]).ravel(), self.n_lists)
        nodes = np.empty(begin[-1], np.int32 if len(self.owner) < 2**31 else np.int64)
        invert(self.probes, order, begin[:-1].copy(), nodes)
        return nodes, begin

    def _by_list(self) -> NDArray[np.int64]:
        short = np.min_scalar_type(max(self.n_lists - 1, 0))  # 16 bits are sorted by radix
        return np.argsort(self.owner.astype(short), kind="stable")


@dataclass(frozen=True, eq=False)
class KeptLists:
    """What a join by lists leaves for appending to it: arrays and numbers, to be saved and mapped.

    Attributes
    ----------
    axes : ndarray of float32, shape (d, r)
        Orthonormal; vectors are sketched by them.
    centroids : ndarray of float32, shape (L, m)
        In the space of the first m axes, where vectors are normalised.
    owner : ndarray of int32, shape (N,)
        List of every row; -1 for rows that are new.
    sketches : ndarray of float16, shape (N - new rows, r + 1)
        Of the rows that are not new, in their order: coordinates on the axes, and the norm of the rest.
    probes : int
        Lists that a new row must probe for the target recall, where only the new rows do.
    target_recall, threshold : float
        Of the join.
    trained_rows : int
        Rows that there were when the centroids were found.
    """

    axes: NDArray[np.float32]
    centroids: NDArray[np.float32]
    owner: NDArray[np.int32]
    sketches: NDArray[np.float16]
    probes: int
    target_recall: float
    threshold: float
    trained_rows: int

    def placed(self, new: NDArray[np.bool_]) -> KeptLists:
        """Return the lists of more rows: those of the old ones, in their order, where ``new`` is false.

        Parameters
        ----------
        new : ndarray of bool, shape (M,)
            Has N false entries.

        Raises
        ------
        KernelError
        """
        n_old = len(new) - np.count_nonzero(new)
        if n_old != len(self.owner):
            raise KernelError(f"Lists are kept of {len(self.owner)} rows; {n_old} rows are not new")
        owner = np.full(len(new), -1, np.int32)
        owner[~new] = self.owner
        return replace(self, owner=owner)

    @property
    def outgrown(self) -> bool:
        """Whether there are so many more rows now that the centroids have to be found anew."""
        return len(self.owner) > GROWTH * self.trained_rows

    def check(
        self, vectors_shape: tuple[int, int], new: NDArray[np.bool_], threshold: float, target_recall: float
    ) -> None:
        """Check that the lists are of the old rows of a join.

        Parameters
        ----------
        vectors_shape : tuple of int
            Rows and dimension.
        new : ndarray of bool, shape (N,)
        threshold, target_recall : float
            Of the join.

        Raises
        ------
        KernelError
        """
        n, dimension = vectors_shape
        self._check_centroids(dimension)
        if self.threshold != threshold:
            raise KernelError(
                f"The kept lists are of a join at threshold {self.threshold}, not {threshold}; "
                "join all rows anew"
            )
        if self.target_recall < target_recall:
            raise KernelError(
                f"The kept lists are of a join with target_recall {self.target_recall}, less than "
                f"{target_recall}; join all rows anew"
            )
        if self.owner.shape != (n,):
            raise KernelError(f"The kept lists have owners of shape {self.owner.shape}; expected ({n},)")
        expected = (int(np.count_nonzero(~new)), self.axes.shape[1] + 1)
        shape, dtype = self.sketches.shape, self.sketches.dtype
        if shape != expected or dtype != np.float16:
            raise KernelError(
                f"The kept lists have sketches of shape {shape}, type {dtype}; expected {expected}, float16"
            )
        n_lists = len(self.centroids)
        wrong = np.flatnonzero(np.where(new, self.owner != -1, (self.owner < 0) | (self.owner >= n_lists)))
        if len(wrong):
            row = wrong[0]
            wanted = "-1, for it is new" if new[row] else f"0 to {n_lists - 1}"
            raise KernelError(
                f"Row {row} is on kept list {self.owner[row]} ({len(wrong)} such rows); expected {wanted}"
            )

    def _check_centroids(self, dimension: int) -> None:
        axes, centroids = self.axes, self.centroids
        if axes.ndim != 2 or len(axes) != dimension:
            raise KernelError(f"The kept lists have axes of shape {axes.shape}; expected ({dimension}, m)")
        if centroids.ndim != 2 or len(centroids) == 0 or not 1 <= centroids.shape[1] <= axes.shape[1]:
            raise KernelError(
                f"The kept lists have centroids of shape {centroids.shape}; expected (L, m) with m from 1 to "
                f"{axes.shape[1]}"
            )
        if not np.isfinite(centroids).all():
            raise KernelError("The kept lists have centroids that are not finite")
        if not np.abs(axes.T @ axes - np.eye(axes.shape[1])).max() < ORTHONORMAL:
            raise KernelError("The kept lists have axes that are not orthonormal")
        if not 1 <= self.probes <= len(centroids):
            raise KernelError(f"The kept lists ask for {self.probes} probes of {len(centroids)} lists")


def list_count(n: int) -> int:
    """Return how many lists to make of ``n`` nodes: 4 sqrt(n), but none too small to be trained."""
    return max(1, min(round(4 * math.sqrt(n)), n // LEAST_POINTS))


def training_size(n: int, n_lists: int) -> int:
    """Return how many of ``n`` nodes k-means looks at."""
    return min(n, TRAIN_POINTS * n_lists)


def train(sketches: Sketch, n: int, n_lists: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Find centroids by spherical k-means on a sample.

    Parameters
    ----------
    sketches : Sketch
    n : int
        Number of nodes.
    n_lists : int
        At most ``n``.
    rng : numpy.random.Generator

    Returns
    -------
    ndarray of float32, shape (n_lists, main_rank)
        L2-normalised.
    """
    size = training_size(n, n_lists)
    points = sketches.main(np.sort(rng.choice(n, size, replace=False)))
    centroids = points[rng.choice(size, n_lists, replace=False)]
    for _ in range(ITERATIONS):
        nearest, similarity = _nearest_of_points(points, centroids)
        sums = np.zeros(centroids.shape, np.float64)
        add_rows(points, nearest, sums)
        norm = np.sqrt(np.einsum("ij,ij->i", sums, sums))[:, None]
        empty = norm[:, 0] < 1e-6
        sums[empty] = points[
            np.argsort(similarity, kind="stable")[: empty.sum()]
        ]  # where centroids lack most
        norm[empty] = 1.0
        centroids = (sums / norm).astype(np.float32)
    return centroids


def assign(sketches: Sketch, centroids: NDArray[np.float32], asks: NDArray[np.bool_], n_probes: int) -> Lists:
    """Put every node on its nearest list and find the ``n_probes`` nearest of those that ask.

    Parameters
    ----------
    sketches : Sketch
    centroids : ndarray of float32, shape (L, main_rank)
    asks : ndarray of bool, shape (G,)
    n_probes : int

    Returns
    -------
    Lists
    """
    n = len(asks)
    probes = np.zeros((n, n_probes), np.int32)
    owner = np.empty(n, np.int32)

    def task(_: None, start: int) -> None:
        part = slice(start, start + TILE_ROWS)
        similarity = sketches.main(part) @ centroids.T
        asking = asks[part]
        own = np.empty((len(similarity), n_probes), np.int32)
        if asking.all():
            _nearest(similarity, own)
        else:
            top_columns(similarity, 1, own)
            best = np.empty((asking.sum(), n_probes), np.int32)
            _nearest(similarity[asking], best)
            own[asking] = best
        owner[part] = own[:, 0]
        probes[part][asking] = own[asking]

    for _ in in_threads(lambda: None, task, range(0, n, TILE_ROWS)):
        pass
    return Lists(owner, asks, probes, len(centroids))


def _nearest(similarity: NDArray[np.float32], out: NDArray[np.int32]) -> None:
    """Write the columns of the largest values of each row, the largest of all first."""
    count = out.shape[1]
    if count <= SORTED_PROBES:
        top_columns(similarity, count, out)
        return
    top_columns(similarity, 1, out)
    columns = np.argpartition(similarity, -count, axis=1)[:, -count:]
    place = (columns == out[:, :1]).argmax(axis=1)  # 0 too if a tie has left it out
    columns[np.arange(len(columns)), place] = columns[:, 0]
    out[:, 1:] = columns[:, 1:]


def _nearest_of_points(
    points: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    nearest = np.empty((len(points), 1), np.int32)
    similarity = np.empty(len(points), np.float32)

    def task(_: None, start: int) -> None:
        part = slice(start, start + TILE_ROWS)
        products = points[part] @ centroids.T
        top_columns(products, 1, nearest[part])
        similarity[part] = products[np.arange(len(products)), nearest[part, 0]]

    for _ in in_threads(lambda: None, task, range(0, len(points), TILE_ROWS)):
        pass
    return nearest[:, 0], similarity


def _begins(lists: NDArray[np.int32], n_lists: int) -> NDArray[np.int64]:
    begin = np.zeros(n_lists + 1, np.int64)
    np.cumsum(np.bincount(lists, minlength=n_lists), out=begin[1:])
    return begin
