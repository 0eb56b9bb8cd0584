"""The graph of an index: phrase nodes first, passage nodes after, one symmetric weighted CSR.

It is written row by row in blocks that fit a memory budget. A block of phrases takes one reading of the facts
and one of the synonyms, a block of passages one of the occurrence matrix; none of them is ever in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Graph, assemble, csr
from hippoindex.kernels.ppr.graph import index_type
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline.artifact import ArrayWriter
from hippoindex.pipeline.blocks import row_blocks
from hippoindex.pipeline.config import GraphConfig

CELL_BYTES = 32
"""Working memory of one cell of a block: column and value as read, as written, and of the sort."""
EDGES_AT_ONCE = 1 << 22


class Occurrence(NamedTuple):
    """Which passages hold which phrases, CSR.

    Attributes
    ----------
    indptr : ndarray of int64, shape (phrases + 1,)
    indices : ndarray of int32, shape (cells,)
        Passages, ascending within a row.
    n_passages : int
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    n_passages: int


@dataclass(frozen=True)
class EdgeCounts:
    """Distinct undirected edges by kind. A fact and a synonym edge of the same pair are one graph edge."""

    fact_edges: int
    synonym_edges: int
    passage_edges: int
    graph_edges: int


class _Edges(NamedTuple):
    """Undirected edges of phrases: ends (M, 2) or two arrays, and weights, possibly memory-mapped."""

    first: NDArray[np.integer]
    second: NDArray[np.integer]
    weights: NDArray[np.number]

    def chunks(self) -> list[_Edges]:
        parts = (slice(start, start + EDGES_AT_ONCE) for start in range(0, len(self.first), EDGES_AT_ONCE))
        return [_Edges(self.first[part], self.second[part], self.weights[part]) for part in parts]


def build_graph(
    folder: Path,
    fact_ends: NDArray[np.integer],
    fact_counts: NDArray[np.integer],
    occurrence: Occurrence,
    synonyms: Pairs,
    config: GraphConfig,
    titles: NDArray[np.integer] | None = None,
) -> tuple[Graph, EdgeCounts]:
    """Join fact, synonym and passage edges, and write the graph.

    The edge of a passage with m phrases to the phrase of its title weighs ``1 + config.title_weight * m``.
    Weights of the pair (a, b), with ``n`` its number of extractions in both directions:

    - ``plain``: ``n`` + cosine of the synonym edge, passage edge 1;
    - ``hipporag``: ``2 n``, or ``2 cosine`` where there is a synonym edge, passage edge 1. The authors' code
      stores fact and synonym edges in both directions as parallel edges of an undirected graph, and a synonym
      edge overwrites the count.

    Counts of a pair are summed as whole numbers and rounded to float32 before the cosine is added in float64.

    Parameters
    ----------
    folder : Path
        ``indptr.npy``, ``indices.npy``, ``weights.npy`` and ``titles.npy`` are written there; it is made.
    fact_ends : ndarray of int, shape (F, 2)
        Phrase rows of subject and object; equal ends (self-loops) are dropped.
    fact_counts : ndarray of int, shape (F,)
        Extractions of each fact.
    occurrence : Occurrence
    synonyms : Pairs
        Of phrase rows, each pair once.
    config : GraphConfig
        ``memory_bytes`` is the size of a block; it changes no byte. Beside a block there are about 40 bytes
        per phrase and 24 per passage.
    titles : ndarray of int, shape (passages, T), optional
        Phrase rows by which each passage's title may be called, -1 for none: the first that the passage holds
        counts. Without it no passage has a title.

    Returns
    -------
    Graph
        Of ``phrases + passages`` nodes, memory-mapped.
    EdgeCounts

    Raises
    ------
    KernelError
        If an end of a fact or a synonym is no phrase.
    """
    n_phrases = len(occurrence.indptr) - 1
    facts = _Edges(fact_ends[:, 0], fact_ends[:, 1], fact_counts)
    pairs = _Edges(synonyms.first, synonyms.second, synonyms.cosine)
    folder.mkdir(parents=True)
    with (
        ArrayWriter(folder / "indptr.npy", np.int64) as indptr,
        ArrayWriter(folder / "indices.npy", index_type(n_phrases + occurrence.n_passages)) as indices,
        ArrayWriter(folder / "weights.npy", np.float32) as weights,
    ):
        indptr.append(np.zeros(1, np.int64))
        cells = max(1, config.memory_bytes // CELL_BYTES)
        rows = _Rows(indptr, indices, weights)
        fact_edges = _write_phrases(rows, facts, pairs, occurrence, config.weights == "hipporag", cells)
        _write_passages(rows, occurrence, cells)
    candidates = np.full((occurrence.n_passages, 1), -1) if titles is None else titles
    _weigh_titles(folder, candidates, n_phrases, config.title_weight)
    graph = Graph(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices", "weights"))
    )
    counts = EdgeCounts(fact_edges, len(synonyms.first), len(occurrence.indices), graph.n_edges)
    return graph, counts


def _weigh_titles(folder: Path, candidates: NDArray[np.integer], n_phrases: int, weight: float) -> None:
    """Write which phrase is the title of each passage, and the weights of the edges between them."""
    indptr, indices = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices"))
    titles = np.empty(len(candidates), indices.dtype)
    assemble.held_titles(indptr, indices, candidates, n_phrases, titles)
    np.save(folder / "titles.npy", titles, allow_pickle=False)
    if weight:
        weights = np.load(folder / "weights.npy", mmap_mode="r+")
        assemble.weigh_titles(indptr, indices, weights, titles, n_phrases, weight)
        weights.flush()


@dataclass
class _Rows:
    """Where rows are appended to."""

    indptr: ArrayWriter
    indices: ArrayWriter
    weights: ArrayWriter
    cells: int = 0

    def append(self, ends: NDArray[np.int64], columns: NDArray, weights: NDArray[np.float32]) -> None:
        """Append rows that end at ``ends``, counted from their first cell."""
        self.indptr.append(self.cells + ends)
        self.indices.append(columns)
        self.weights.append(weights)
        self.cells += len(columns)


def _write_phrases(
    rows: _Rows, facts: _Edges, pairs: _Edges, occurrence: Occurrence, overwrite: bool, cells: int
) -> int:
    """Write the rows of phrases; return the number of distinct fact edges."""
    n_phrases = len(occurrence.indptr) - 1
    fact_starts, pair_starts = _starts(facts, n_phrases, "Fact"), _starts(pairs, n_phrases, "Synonym")
    fact_edges = 0
    for low, high in row_blocks(fact_starts + pair_starts + occurrence.indptr, cells):
        found = _gather(facts, fact_starts[low : high + 1], low, rows.indices.dtype)
        alike = _gather(pairs, pair_starts[low : high + 1], low, rows.indices.dtype)
        joined, upper = assemble.count_joined(low, *_without_values(found), *_without_values(alike))
        mention_starts = occurrence.indptr[low : high + 1]
        mentions = occurrence.indices[mention_starts[0] : mention_starts[-1]]
        starts = np.zeros(high - low + 1, np.int64)
        np.cumsum(joined + np.diff(mention_starts), out=starts[1:])
        columns = np.empty(starts[-1], rows.indices.dtype)
        weights = np.empty(starts[-1], np.float32)
        assemble.join_rows(
            starts,
            found,
            alike,
            overwrite,
            mention_starts - mention_starts[0],
            mentions,
            n_phrases,
            columns,
            weights,
        )
        rows.append(starts[1:], columns, weights)
        fact_edges += int(upper.sum())
    return fact_edges


def _starts(edges: _Edges, n_phrases: int, what: str) -> NDArray[np.int64]:
    """Return where each phrase's cells begin among those of all, shape (phrases + 1,)."""
    starts = np.zeros(n_phrases + 1, np.int64)
    for number, chunk in enumerate(edges.chunks()):
        bad = assemble.count_ends(chunk.first, chunk.second, starts[1:])
        if bad >= 0:
            raise KernelError(
                f"{what} {number * EDGES_AT_ONCE + bad} joins phrases {chunk.first[bad]} and "
                f"{chunk.second[bad]}; phrases are 0..{n_phrases - 1}"
            )
    np.cumsum(starts, out=starts)
    return starts


def _gather(
    edges: _Edges, starts: NDArray[np.int64], low: int, dtype: np.dtype
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Return starts, columns, values and distinct cells of the rows from ``low`` on."""
    starts = starts - starts[0]
    columns, values = np.empty(starts[-1], dtype), np.empty(starts[-1], np.float64)
    free = starts[:-1].copy()
    for chunk in edges.chunks() if len(columns) else ():
        assemble.place_edges(*chunk, low, free, columns, values)
    return starts, columns, values, csr.merge_rows(starts, columns, values)


def _without_values(rows: tuple[NDArray, NDArray, NDArray, NDArray]) -> tuple[NDArray, NDArray, NDArray]:
    return rows[0], rows[1], rows[3]


def _write_passages(rows: _Rows, occurrence: Occurrence, cells: int) -> None:
    """Write the rows of passages: their phrases."""
    starts = np.zeros(occurrence.n_passages + 1, np.int64)
    assemble.count_columns(occurrence.indices, starts[1:])
    np.cumsum(starts, out=starts)
    for low, high in row_blocks(starts, cells):
        part = starts[low : high + 1] - starts[low]
        columns = np.empty(part[-1], rows.indices.dtype)
        assemble.place_transposed(occurrence.indptr, occurrence.indices, low, part[:-1].copy(), columns)
        rows.append(part[1:], columns, np.ones(len(columns), np.float32))
