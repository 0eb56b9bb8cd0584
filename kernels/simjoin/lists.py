"""Inverted lists: spherical k-means over a sample, and the nearest lists of every node."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.simjoin.problem import TILE_ROWS
from hippoindex.kernels.simjoin.sketch import Sketch
from hippoindex.kernels.simjoin.threads import in_threads
from hippoindex.kernels.simjoin.tile import add_rows, invert, top_columns

TRAIN_POINTS = 64
"""Training vectors per centroid; k-means is known to need 39 to 256."""
LEAST_POINTS = 39
ITERATIONS = 6


@dataclass(frozen=True)
class Lists:
    """Nodes by nearest centroid.

    Attributes
    ----------
    owner : ndarray of int32, shape (G,)
        List of every node.
    probes : ndarray of int32, shape (G, P)
        Nearest lists of the nodes that ask, nearest first; -1 for the others.
    n_lists : int
    """

    owner: NDArray[np.int32]
    probes: NDArray[np.int32]
    n_lists: int

    def members(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the nodes by list, ascending, and where each list begins: shapes (G,), (n_lists + 1,)."""
        return np.argsort(self.owner, kind="stable"), _begins(self.owner, self.n_lists)

    def queries(self) -> tuple[NDArray, NDArray[np.int64]]:
        """Return the nodes that probe each list and where each begins; nodes of one list lie together."""
        begin = _begins(self.probes[self.probes >= 0], self.n_lists)
        nodes = np.empty(begin[-1], np.int32 if len(self.owner) < 2**31 else np.int64)
        invert(self.probes, np.argsort(self.owner, kind="stable"), begin[:-1].copy(), nodes)
        return nodes, begin


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
    probes = np.full((n, n_probes), -1, np.int32)
    owner = np.empty(n, np.int32)

    def task(_: None, start: int) -> None:
        part = slice(start, start + TILE_ROWS)
        similarity = sketches.main(part) @ centroids.T
        asking = asks[part]
        own = np.empty((len(similarity), n_probes), np.int32)
        if asking.all():
            top_columns(similarity, n_probes, own)
        else:
            top_columns(similarity, 1, own)
            best = np.empty((asking.sum(), n_probes), np.int32)
            top_columns(similarity[asking], n_probes, best)
            own[asking] = best
        owner[part] = own[:, 0]
        probes[part][asking] = own[asking]

    for _ in in_threads(lambda: None, task, range(0, n, TILE_ROWS)):
        pass
    return Lists(owner, probes, len(centroids))


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
