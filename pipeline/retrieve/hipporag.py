"""HippoRAG 1 and 2 with every design choice of the papers' ablations.

They differ in how a question finds seeds, in whether passages are nodes, and in little else: every option is
open to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.kernels import ppr
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, joined, min_max, top_k
from hippoindex.pipeline.retrieve.baselines import dense, dense_scores
from hippoindex.pipeline.retrieve.seeds import linked_seeds, nearest_phrases, seed_matrix
from hippoindex.pipeline.retrieve.walk import (
    blocks,
    choose_solver,
    push_goal,
    solver_text,
    sparse_solver,
    walk_from_seeds_and_passages,
    walk_phrases,
)

HIPPORAG2_PHRASES = 5


@dataclass(frozen=True)
class Design:
    """What a method does unless the configuration says otherwise.

    Attributes
    ----------
    linking : str
        See :func:`linked_seeds`.
    passage_nodes : bool
        Whether passages are walked, and ranked by the probability of their own node.
    phrase_top_k : int
        Phrases kept of the nearest facts'.
    """

    linking: str
    passage_nodes: bool
    phrase_top_k: int = HIPPORAG2_PHRASES

    def changed(self, config: RetrieveConfig) -> Design:
        """Return the design with what the configuration sets."""
        return Design(
            config.linking or self.linking,
            self.passage_nodes if config.passage_nodes is None else config.passage_nodes,
            config.phrase_top_k or self.phrase_top_k,
        )

    def differences(self, own: Design) -> list[str]:
        """Return what makes the method another one than its name says, as settings."""
        found = [] if self.linking == own.linking else [f"linking={self.linking}"]
        if self.passage_nodes != own.passage_nodes:
            found.append(f"passage_nodes={str(self.passage_nodes).lower()}")
        return found


HIPPORAG1 = Design("ner-to-node", passage_nodes=False)
HIPPORAG2 = Design("query-to-fact", passage_nodes=True)


def hipporag1(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as HippoRAG (NeurIPS 2024): walk the phrase graph from the question's entities.

    A passage's score is the sum of the probabilities of its phrases.
    """
    return _rank(index, queries, config, HIPPORAG1)


def hipporag2(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank as HippoRAG 2 (ICML 2025): seeds are the phrases of the nearest facts.

    Every passage node restarts with ``passage_weight`` x min-max scaled cosine; passages are ranked by the
    probability of their own node. Recognition memory is ``queries.fact_filter``.
    """
    return _rank(index, queries, config, HIPPORAG2)


def hipporag_seeds(index: Index, queries: QueryBatch, config: RetrieveConfig, design: Design) -> list[Seeds]:
    """Return the seeds of a design that is as the configuration says."""
    return linked_seeds(index, queries, design.linking, config, design.phrase_top_k)


def _rank(index: Index, queries: QueryBatch, config: RetrieveConfig, own: Design) -> Ranking:
    """Walk for the questions that have seeds; rank the others by their dense scores and count them."""
    design = own.changed(config)
    with queries.clock.part("seeds"):
        seeds = seed_matrix(hipporag_seeds(index, queries, config, design), index.n_phrases)
    seeded = np.diff(seeds.indptr) > 0
    numbers, others = np.flatnonzero(seeded), np.flatnonzero(~seeded)
    parts = []
    if len(numbers):
        parts.append(_walk(index, queries.take(numbers), seeds[numbers], config, design))
    if len(others):
        parts.append(dense(index, queries.take(others), config))
    order = np.argsort(np.concatenate([numbers, others]), kind="stable")
    ranking = joined(parts)
    certified = parts[0].certified_k if len(numbers) else np.empty(0, np.int64)
    if certified is not None:  # cosines are not bounded but computed
        full = np.full(len(others), ranking.rows.shape[1], dtype=np.int64)
        certified = np.concatenate([certified, full])[order]
    is_off = design.linking == "query-to-fact" and queries.fact_filter is None
    notes = [*design.differences(own), *(["recognition memory off"] if is_off else [])]
    return Ranking(
        ranking.rows[order],
        ranking.scores[order],
        parts[0].solver,
        certified,
        ~seeded,
        ", ".join(notes),
        "off" if is_off else None,
    )


def _walk(
    index: Index, queries: QueryBatch, seeds: sp.csr_array, config: RetrieveConfig, design: Design
) -> Ranking:
    by_nodes = design.passage_nodes and config.walk == "ppr"
    if not by_nodes:
        solver = f"{sparse_solver(config)} over phrases" if config.walk == "ppr" else ""
    else:
        solver = choose_solver(index, config)
        wide = sp.csr_array((seeds.data, seeds.indices, seeds.indptr), (len(queries), index.graph.n_nodes))
        if solver == "push" and config.ties == "first" and config.ensemble_cosine is None:
            return _rank_by_push(index, queries, wide, config)
    rankings = []
    for block in blocks(index, len(queries), config):
        part = queries.take(np.arange(block.start, block.stop))
        if by_nodes:
            weights = np.full(len(part), config.passage_weight)
            scores = walk_from_seeds_and_passages(index, wide[block], weights, part.vectors, config, solver)
        else:
            scores = walk_phrases(index, seeds[block], config)
            if design.passage_nodes:
                scores = scores + config.passage_weight * min_max(dense_scores(index, part.vectors))
        rankings.append(top_k(_ensembled(index, part, scores, config), config.top_k, config.ties))
    return joined(rankings, solver=solver_text(solver, config) if by_nodes else solver)


def _ensembled(
    index: Index, queries: QueryBatch, scores: NDArray[np.float32], config: RetrieveConfig
) -> NDArray[np.float32]:
    """Average with dense scores where an entity is far from every phrase (NeurIPS 2024, appendix)."""
    if config.ensemble_cosine is None:
        return scores
    least = [min(cosines, default=-1.0) for _, cosines in nearest_phrases(index, queries)]
    unsure = np.array(least) <= config.ensemble_cosine
    mixed = scores.copy()
    dense_part = min_max(dense_scores(index, queries.vectors[unsure]))
    mixed[unsure] = 0.5 * (min_max(scores[unsure]) + dense_part)
    return mixed


def _rank_by_push(index: Index, queries: QueryBatch, seeds: sp.csr_array, config: RetrieveConfig) -> Ranking:
    found = ppr.affine.rank(
        index.pusher(config.damping),
        index.dense_restart,
        queries.vectors,
        config.passage_weight,
        seeds,
        config.top_k,
        push_goal(config),
    )
    ranking = Ranking(found.nodes - index.n_phrases, found.scores)
    solver = f"{solver_text('push', config)}, passages precomputed"
    return replace(ranking, solver=solver, certified_k=found.certified_k)
