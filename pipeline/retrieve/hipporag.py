"""The graph methods: HippoRAG 1, HippoRAG 2 and ours, which differ in seeds and in the graph they walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels import ppr
from hippoindex.kernels.ppr import Graph
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, min_max, top_k
from hippoindex.pipeline.retrieve.baselines import dense, dense_scores
from hippoindex.pipeline.retrieve.seeds import entity_seeds, fact_seeds, with_entities

HIPPORAG2_PHRASES = 5


def hipporag1(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as HippoRAG (NeurIPS 2024): walk the phrase graph from the question's entities.

    A passage's score is the sum of the probabilities of its phrases. A question none of whose entities leads
    to a phrase is ranked by its dense scores.
    """
    if not index.n_phrases:
        return dense(index, queries, config)
    holds = (index.occurrence > 0).astype(np.float32).T.tocsr()  # (passages, phrases)
    seeds = entity_seeds(index, queries)
    rankings = []
    for block in _blocks(index.n_phrases, len(queries), config):
        restart = np.zeros((index.n_phrases, block.stop - block.start), dtype=np.float32)
        unseeded = _place(restart, seeds[block])
        restart[:, unseeded] = 1  # any walk will do, its scores are not used
        scores = (holds @ _walk(index.phrase_graph, restart, config)).T  # (block, passages)
        scores[unseeded] = dense_scores(index, queries.vectors[block][unseeded])
        rankings.append(top_k(scores, config.top_k))
    return _joined(rankings)


def hipporag2(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as HippoRAG 2 (ICML 2025) without recognition memory: seeds are the phrases of the nearest facts.

    Every passage node restarts with ``passage_weight`` x min-max scaled cosine; passages are ranked by the
    probability of their own node.
    """
    return _rank_passage_nodes(index, queries, hipporag2_seeds(index, queries, config), config)


def hipporag2_seeds(index: Index, queries: QueryBatch, config: RetrieveConfig) -> list[Seeds]:
    """Return the seeds of :func:`hipporag2`: the best phrases of the nearest facts."""
    phrase_top_k = config.phrase_top_k or HIPPORAG2_PHRASES
    return fact_seeds(index, queries, config.fact_top_k, phrase_top_k)


def hippoindex(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as :func:`hipporag2`, but seeded with all phrases of the nearest facts and with the entities."""
    return _rank_passage_nodes(index, queries, hippoindex_seeds(index, queries, config), config)


def hippoindex_seeds(index: Index, queries: QueryBatch, config: RetrieveConfig) -> list[Seeds]:
    """Return the seeds of :func:`hippoindex`: all phrases of the nearest facts, and those of the entities."""
    seeds = fact_seeds(index, queries, config.fact_top_k, config.phrase_top_k)
    return with_entities(index, queries, seeds, config)


SEEDS: dict[str, Callable[[Index, QueryBatch, RetrieveConfig], list[Seeds]]] = {
    "hipporag2": hipporag2_seeds,
    "hippoindex": hippoindex_seeds,
}


def _rank_passage_nodes(
    index: Index, queries: QueryBatch, seeds: Sequence[Seeds], config: RetrieveConfig
) -> Ranking:
    n_phrases = index.n_phrases
    rankings = []
    for block in _blocks(index.graph.n_nodes, len(queries), config):
        restart = np.zeros((index.graph.n_nodes, block.stop - block.start), dtype=np.float32)
        _place(restart, seeds[block])
        scores = dense_scores(index, queries.vectors[block])  # (block, passages)
        restart[n_phrases:] = config.passage_weight * min_max(scores).T
        without = restart.sum(axis=0) == 0  # passage_weight 0 and no seed: nothing to walk from
        restart[n_phrases:, without] = min_max(scores[without]).T
        rankings.append(top_k(_walk(index.graph, restart, config)[n_phrases:].T, config.top_k))
    return _joined(rankings)


def _blocks(n_nodes: int, n_queries: int, config: RetrieveConfig) -> list[slice]:
    width = max(ppr.block_width(n_nodes, n_queries, config.memory_bytes), 1)
    return [slice(start, min(start + width, n_queries)) for start in range(0, n_queries, width)]


def _place(restart: NDArray[np.float32], seeds: Sequence[Seeds]) -> NDArray[np.intp]:
    """Write each question's seeds into its column and return the columns of questions without any."""
    empty = []
    for column, seed in enumerate(seeds):
        restart[seed.rows, column] = seed.weights
        if not len(seed.rows):
            empty.append(column)
    return np.array(empty, dtype=np.intp)


def _walk(graph: Graph, restart: NDArray[np.float32], config: RetrieveConfig) -> NDArray[np.floating]:
    return ppr.power(graph, restart, config.damping, config.tolerance).scores


def _joined(rankings: Sequence[Ranking]) -> Ranking:
    return Ranking(
        np.concatenate([ranking.rows for ranking in rankings]),
        np.concatenate([ranking.scores for ranking in rankings]),
    )
