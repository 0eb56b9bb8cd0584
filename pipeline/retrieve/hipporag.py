"""The graph methods: HippoRAG 1, HippoRAG 2 and ours, which differ in seeds and in the graph they walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import structlog
from numpy.typing import NDArray

from hippoindex.errors import UsageError
from hippoindex.kernels import ppr
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, min_max, top_k
from hippoindex.pipeline.retrieve.baselines import dense, dense_scores
from hippoindex.pipeline.retrieve.seeds import entity_seeds, fact_seeds, with_entities

log = structlog.get_logger("hippoindex")

HIPPORAG2_PHRASES = 5


def hipporag1(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as HippoRAG (NeurIPS 2024): walk the phrase graph from the question's entities.

    A passage's score is the sum of the probabilities of its phrases. A question none of whose entities leads
    to a phrase is ranked by its dense scores.
    """
    if not index.n_phrases:
        return dense(index, queries, config)
    seeds = _matrix(entity_seeds(index, queries), index.n_phrases)
    holds = (index.occurrence > 0).astype(np.float32)  # (phrases, passages)
    seeded = np.diff(seeds.indptr) > 0
    solver = "power" if config.solver == "power" else "push"
    rankings = []
    for block in _blocks(index, len(queries), config):
        scores = np.empty((block.stop - block.start, index.n_passages), dtype=np.float32)
        with_seeds, without = np.flatnonzero(seeded[block]), np.flatnonzero(~seeded[block])
        if len(with_seeds):
            walked = _walk_phrases(index, seeds[block][with_seeds], config, solver)
            scores[with_seeds] = (walked @ holds).toarray() if solver == "push" else walked @ holds
        if len(without):
            scores[without] = dense_scores(index, queries.vectors[block][without])
        rankings.append(top_k(scores, config.top_k))
    return _joined(rankings, f"{solver} over phrases")


def _walk_phrases(index: Index, seeds: sp.csr_array, config: RetrieveConfig, solver: str) -> Any:
    """Return PPR scores over the phrase graph, shape (Q, phrases): sparse by push, dense by power."""
    if solver == "power":
        restart = seeds.toarray().T.astype(np.float32)
        return ppr.power(index.phrase_graph, restart, config.damping, config.tolerance).scores.T
    found = index.pusher(config.damping, phrases_only=True).solve(seeds, ppr.Goal(config.epsilon))
    return sp.csr_array((found.scores.astype(np.float32), found.nodes, found.indptr), shape=seeds.shape)


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


def choose_solver(index: Index, config: RetrieveConfig) -> str:
    """Return how a restart with weight on every passage is walked: ``"push"`` or ``"power"``.

    Raises
    ------
    UsageError
        If ``push`` is asked for and the index does not hold the passages' part for this damping.
    """
    stored = index.precomputed_damping
    if stored == config.damping:
        return "power" if config.solver == "power" else "push"
    lacking = (
        f"{index.path} holds no precomputed part of PPR"
        if stored is None
        else f"{index.path} holds the precomputed part of PPR for damping {stored}, not {config.damping}"
    )
    remedy = f"hippoindex precompute {index.path} --set retrieve.damping={config.damping}"
    if config.solver == "push":
        raise UsageError(f"retrieve.solver=push: {lacking}. Run: {remedy}")
    if config.solver == "auto":
        log.info("PPR by power iteration", why=lacking, faster=remedy)
    return "power"


def _rank_passage_nodes(
    index: Index, queries: QueryBatch, seeds: Sequence[Seeds], config: RetrieveConfig
) -> Ranking:
    start = _matrix(seeds, index.graph.n_nodes)
    unseeded = np.diff(start.indptr) == 0
    # passage_weight 0 and no seed: there is nothing else to walk from
    weights = np.where(unseeded & (config.passage_weight == 0), 1.0, config.passage_weight)
    if choose_solver(index, config) == "power":
        return _rank_by_power(index, queries, start, weights, config)
    found = ppr.affine.rank(
        index.pusher(config.damping),
        index.dense_restart,
        queries.vectors,
        weights,
        start,
        config.top_k,
        ppr.Goal(config.epsilon),
    )
    solver = f"push to {config.epsilon:g}, passages precomputed"
    return Ranking(found.nodes - index.n_phrases, found.scores, solver, found.certified_k)


def _rank_by_power(
    index: Index,
    queries: QueryBatch,
    seeds: sp.csr_array,
    weights: NDArray[np.float64],
    config: RetrieveConfig,
) -> Ranking:
    n_phrases = index.n_phrases
    rankings = []
    for block in _blocks(index, len(queries), config):
        restart = seeds[block].toarray().T.astype(np.float32)  # (N, block)
        scores = dense_scores(index, queries.vectors[block])  # (block, passages)
        restart[n_phrases:] += (weights[block, None] * min_max(scores)).T
        walked = ppr.power(index.graph, restart, config.damping, config.tolerance).scores
        rankings.append(top_k(walked[n_phrases:].T, config.top_k))
    return _joined(rankings, f"power to {config.tolerance:g}")


def _blocks(index: Index, n_queries: int, config: RetrieveConfig) -> list[slice]:
    width = max(ppr.block_width(index.graph.n_nodes, n_queries, config.memory_bytes), 1)
    return [slice(start, min(start + width, n_queries)) for start in range(0, n_queries, width)]


def _matrix(seeds: Sequence[Seeds], n_nodes: int) -> sp.csr_array:
    """Return the seeds of all questions, shape (Q, n_nodes)."""
    indptr = np.cumsum([0, *(len(seed.rows) for seed in seeds)])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *(seed.rows for seed in seeds)])
    weights = np.concatenate([np.empty(0), *(seed.weights for seed in seeds)])
    return sp.csr_array((weights, rows, indptr), shape=(len(seeds), n_nodes))


def _joined(rankings: Sequence[Ranking], solver: str) -> Ranking:
    return Ranking(
        np.concatenate([ranking.rows for ranking in rankings]),
        np.concatenate([ranking.scores for ranking in rankings]),
        solver,
    )
