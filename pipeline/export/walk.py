"""Going through the graph of an index edge by edge, and saying what each edge is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.blocks import BLOCK_CELLS, row_blocks, row_numbers

KINDS = ("fact", "synonym", "fact+synonym", "passage")
FACT, SYNONYM, BOTH, PASSAGE = range(len(KINDS))
LEAST_FACT = 0.5
"""A fact adds at least 1 to the weight of its pair, rounding takes away less than this."""


class EdgeBlock(NamedTuple):
    """Undirected edges, each once, sorted by source and target.

    Attributes
    ----------
    source, target : ndarray of int64, shape (E,)
        Node numbers, source < target.
    weight : ndarray of float32, shape (E,)
        As in ``graph/``.
    kind : ndarray of int8, shape (E,)
        Positions in :data:`KINDS`.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]
    kind: NDArray[np.int8]

    def kinds(self) -> pa.StringArray:
        """Return the names of the kinds."""
        return pa.DictionaryArray.from_arrays(pa.array(self.kind), pa.array(KINDS)).dictionary_decode()


def edges(index: Index, cells: int = BLOCK_CELLS) -> Iterator[EdgeBlock]:
    """Yield the edges of the graph in blocks of whole rows of the adjacency matrix.

    With ``graph.weights = hipporag`` a synonym edge takes the place of the facts of its pair, so that no edge
    is of both kinds.

    Parameters
    ----------
    index : Index
    cells : int
        Stored cells a block comes from; every edge has two.

    Yields
    ------
    EdgeBlock
    """
    indptr, indices, weights = (
        index.reader.array(f"graph/{name}") for name in ("indptr", "indices", "weights")
    )
    synonyms = _Synonyms(index)
    replaces = index.manifest.config["graph"]["weights"] == "hipporag"
    for start, stop in row_blocks(indptr, cells):
        block = slice(indptr[start], indptr[stop])
        source, target = row_numbers(indptr, start, stop), indices[block].astype(np.int64)
        once = source < target
        source, target, weight = source[once], target[once], np.asarray(weights[block])[once]
        kind = np.where(target < index.n_phrases, FACT, PASSAGE).astype(np.int8)
        position, cosine = synonyms.among(source, target, stop)
        is_both = (weight[position] - cosine > LEAST_FACT) & (not replaces)
        kind[position] = np.where(is_both, BOTH, SYNONYM)
        yield EdgeBlock(source, target, weight, kind)


class _Synonyms:
    """The synonym edges, read as far as they are asked for: they are in the order of the graph's rows."""

    def __init__(self, index: Index) -> None:
        self._ids = phrase_ids(index)
        self._n_nodes = index.n_phrases + index.n_passages
        self._batches = index.reader.batches("synonyms")
        self._keys = np.empty(0, dtype=np.int64)
        self._cosine = np.empty(0, dtype=np.float32)

    def among(
        self, source: NDArray[np.int64], target: NDArray[np.int64], stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return which of the edges are synonyms and their cosines, and let go of rows before ``stop``.

        Parameters
        ----------
        source, target : ndarray of int64, shape (E,)
            All edges of the next rows up to ``stop``, sorted.
        stop : int

        Returns
        -------
        position : ndarray of int64, shape (S,)
        cosine : ndarray of float32, shape (S,)
        """
        end = stop * self._n_nodes
        while not len(self._keys) or self._keys[-1] < end:
            batch = next(self._batches, None)
            if batch is None:
                break
            first, second = (rows_of(self._ids, batch[name]) for name in ("phrase_id", "other_id"))
            self._keys = np.concatenate([self._keys, first * self._n_nodes + second])
            self._cosine = np.concatenate([self._cosine, batch["cosine"].to_numpy()])
        cut = int(np.searchsorted(self._keys, end))
        keys, cosine = self._keys[:cut], self._cosine[:cut]
        self._keys, self._cosine = self._keys[cut:], self._cosine[cut:]
        return np.searchsorted(source * self._n_nodes + target, keys), cosine


def phrase_ids(index: Index) -> NDArray[np.uint64]:
    """Return the ids of the phrases in node order, shape (phrases,), without their texts."""
    ids: NDArray[np.uint64] = index.reader.table("phrases", ["phrase_id"])["phrase_id"].to_numpy()
    return ids


def rows_of(ids: NDArray[np.uint64], wanted: pa.Array) -> NDArray[np.int64]:
    """Return the rows of phrase ids, shape of ``wanted``; all must be there."""
    return np.searchsorted(ids, wanted.to_numpy()).astype(np.int64)
