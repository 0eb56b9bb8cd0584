"""The graph of an index: phrase nodes first, passage nodes after, one symmetric weighted CSR."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline.config import GraphConfig


@dataclass(frozen=True)
class EdgeCounts:
    """Distinct undirected edges by kind. A fact and a synonym edge of the same pair are one graph edge."""

    fact_edges: int
    synonym_edges: int
    passage_edges: int
    graph_edges: int


def build_graph(
    fact_ends: NDArray[np.int64],
    fact_counts: NDArray[np.integer],
    occurrence: sp.csr_matrix,
    synonyms: Pairs,
    config: GraphConfig,
) -> tuple[Graph, EdgeCounts]:
    """Join fact, synonym and passage edges.

    Weights of the pair (a, b), with ``n`` its number of extractions in both directions:

    - ``plain``: ``n`` + cosine of the synonym edge, passage edge 1;
    - ``hipporag``: ``2 n``, or ``2 cosine`` where there is a synonym edge, passage edge 1. The authors' code
      stores fact and synonym edges in both directions as parallel edges of an undirected graph, and a synonym
      edge overwrites the count.

    Parameters
    ----------
    fact_ends : ndarray of int64, shape (F, 2)
        Phrase rows of subject and object; equal ends (self-loops) are dropped.
    fact_counts : ndarray of int, shape (F,)
        Extractions of each fact.
    occurrence : scipy.sparse.csr_matrix, shape (phrases, passages)
    synonyms : Pairs
        Of phrase rows.
    config : GraphConfig

    Returns
    -------
    Graph
        Of ``phrases + passages`` nodes.
    EdgeCounts
    """
    n_phrases, n_passages = occurrence.shape
    facts = Graph.from_edges(n_phrases, fact_ends[:, 0], fact_ends[:, 1], fact_counts)
    fact_edges = sp.triu(facts.matrix(np.float64), format="coo")
    low, high, weight = fact_edges.row, fact_edges.col, fact_edges.data
    cosine = synonyms.cosine.astype(np.float64)
    if config.weights == "hipporag":
        is_synonym = np.isin(low * np.int64(n_phrases) + high, synonyms.first * n_phrases + synonyms.second)
        low, high, weight = low[~is_synonym], high[~is_synonym], 2.0 * weight[~is_synonym]
        cosine = 2.0 * cosine
    mentions = occurrence.tocoo()
    graph = Graph.from_edges(
        n_phrases + n_passages,
        np.concatenate([low, synonyms.first, mentions.row]),
        np.concatenate([high, synonyms.second, mentions.col.astype(np.int64) + n_phrases]),
        np.concatenate([weight, cosine, np.ones(mentions.nnz)]),
    )
    counts = EdgeCounts(facts.n_edges, len(synonyms.first), mentions.nnz, graph.n_edges)
    return graph, counts
