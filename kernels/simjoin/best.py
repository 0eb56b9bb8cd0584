"""The pairs found so far, cut down to what the per-node cap can still keep."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.tile import best_of_each

FRESH_PAIRS = 1 << 22


class BestPairs:
    """Collects pairs from several threads and keeps those that one of their ends keeps.

    Memory holds the kept pairs and half as many fresh ones again, however many are offered: whenever enough
    fresh pairs are there, the cap is applied. That loses nothing, because a pair that is kept among all pairs
    is kept among fewer. It also raises ``floors``, below which nothing need be offered.

    Parameters
    ----------
    searches : ndarray of bool, shape (N,)
        Nodes that keep pairs.
    max_neighbors : int
    fresh_pairs : int
        Least number of pairs between two cuts.

    Attributes
    ----------
    floors : ndarray of float64, shape (N,)
        What a cosine must reach for the node to keep the pair: the least of ``max_neighbors`` kept so far,
        minus infinity while there are fewer, infinity for a node that keeps none.
    """

    def __init__(
        self, searches: NDArray[np.bool_], max_neighbors: int, fresh_pairs: int = FRESH_PAIRS
    ) -> None:
        self.floors = np.where(searches, -np.inf, np.inf)
        self._searches, self._max_neighbors, self._least_fresh = searches, max_neighbors, fresh_pairs
        self._number = np.int32 if len(searches) < 2**31 else np.int64
        self._chunks: list[tuple[NDArray, NDArray, NDArray]] = []
        self._fresh = self._kept = 0
        self._lock = threading.Lock()

    def add(self, first: NDArray[np.int64], second: NDArray[np.int64], cosine: NDArray[np.float64]) -> None:
        """Take pairs that were not taken before; ``first < second`` in each. The arrays are copied."""
        if len(first) == 0:
            return
        chunk = (first.astype(self._number), second.astype(self._number), cosine.copy())
        with self._lock:
            self._chunks.append(chunk)
            self._fresh += len(first)
            if self._fresh >= max(self._least_fresh, self._kept // 2):
                self._cut()

    @property
    def held(self) -> int:
        """Number of pairs in memory."""
        return self._kept + self._fresh

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return ``first``, ``second`` and the float64 cosine of the kept pairs, sorted."""
        with self._lock:
            self._cut()
            first, second, cosine = self._chunks[0]
        order = np.argsort(first.astype(np.int64) * len(self._searches) + second)
        return first[order].astype(np.int64), second[order].astype(np.int64), cosine[order]

    def pairs(self) -> Pairs:
        """Return the kept pairs."""
        first, second, cosine = self.arrays()
        return Pairs(first, second, cosine.astype(np.float32))

    def _cut(self) -> None:
        none = np.empty(0, self._number)
        columns = zip(*self._chunks, strict=True) if self._chunks else ((none,), (none,), (np.empty(0),))
        first, second, cosine = (np.concatenate(column) for column in columns)
        self._chunks.clear()
        kept = best_of_each(first, second, cosine, self._searches, self._max_neighbors, self.floors)
        self._chunks.append((first[kept], second[kept], cosine[kept]))
        self._fresh, self._kept = 0, int(kept.sum())
