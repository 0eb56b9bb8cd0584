"""The default method in float64, walk by walk, for benchmarks that change a walk as no option does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.pipeline.answer import open_retriever
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.base import min_max
from hippoindex.pipeline.retrieve.baselines import dense_scores
from hippoindex.pipeline.retrieve.fusion import first_step, hippoindex_seeds
from hippoindex.pipeline.retrieve.seeds import seed_matrix

STEPS = 20
"""Steps of a walk; with the default damping what lies beyond is a millionth of the whole."""

Walk = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Probabilities of all nodes from restarts, both of shape (N, C)."""


class Fusion64:
    """Questions asked of an index, up to where their walks begin.

    Parameters
    ----------
    index : Path
    queries : sequence of Query
    """

    def __init__(self, index: Path, queries: Sequence[Query]) -> None:
        self.retriever = open_retriever(index, ["retrieve.epsilon=null"])
        self.index, self.config = self.retriever.index, self.retriever.config
        self.queries = queries
        self.batch = self.retriever.encode(queries)
        seeds = hippoindex_seeds(self.index, self.batch, self.config)
        self.starts = [seed_matrix(part, self.index.graph.n_nodes).astype(np.float64) for part in seeds]
        self.dense = min_max(dense_scores(self.index, self.batch.vectors).astype(np.float64))  # (Q, passages)
        self.weights = self.index.graph.matrix(np.float64)

    def score(self, number: int, walk: Walk, more: float | NDArray[np.float64] = 0.0) -> NDArray[np.float64]:
        """Return the scores of all passages for one question.

        Parameters
        ----------
        number : int
        walk : Walk
        more : ndarray, shape (passages,)
            A further term, added before feedback.
        """
        config, n_phrases = self.config, self.index.n_phrases
        restarts = np.stack([start[[number]].toarray()[0] for start in self.starts], axis=1)  # (N, 2)
        restarts[n_phrases:, 0] += config.passage_weight * self.dense[number]
        facts, entities = walk(restarts)[n_phrases:].T
        total = self.log_term(facts) + config.entity_weight * self.log_term(entities)
        total = total + config.dense_weight * self.dense[number] + more
        total = total + self.of_pairs(number, total)
        best = np.argsort(-total, kind="stable")[: config.feedback_top_k]
        chances = np.exp(total[best] - total[best[0]])
        from_best = sp.csr_array(
            (chances / chances.sum(), best, [0, len(best)]), shape=(1, self.index.n_passages)
        )
        found = walk(first_step(self.index, from_best).toarray().T)[n_phrases:, 0]
        return total + config.feedback_weight * self.log_term(found)

    def of_pairs(self, number: int, total: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what passages gain by what they say of a question together with another."""
        config = self.config
        best = np.argsort(-total, kind="stable")[: config.pair_top_k]
        gained = np.zeros_like(total)
        shares = self.index.pairs.shares(self.batch.questions[number : number + 1], best[None])[0]
        gained[best] = config.pair_weight * shares.astype(np.float64) ** config.pair_exponent
        return gained

    def log_term(self, walked: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``log(p / max p + floor)`` along the last axis; 0 where nothing was reached."""
        greatest = walked.max(axis=-1, keepdims=True)
        shares = np.divide(walked, greatest, out=np.ones_like(walked), where=greatest > 0)
        return np.log(shares + self.config.floor)

    def walk(self, steps: Sequence[sp.csr_matrix]) -> Walk:
        """Return a walk whose first steps are by these transition matrices, and all others by the last."""

        def walked(restarts: NDArray[np.float64]) -> NDArray[np.float64]:
            damping = self.config.damping
            under_way, total = restarts, (1 - damping) * restarts
            for number in range(STEPS):
                under_way = damping * (steps[min(number, len(steps) - 1)] @ under_way)
                total += (1 - damping) * under_way
            return total

        return walked


def transition(weights: sp.csr_matrix) -> sp.csr_matrix:
    """Return ``W D^-1`` of a symmetric matrix."""
    degrees = weights @ np.ones(weights.shape[0])
    return sp.csr_matrix(
        (weights.data / degrees[weights.indices], weights.indices, weights.indptr), shape=weights.shape
    )
