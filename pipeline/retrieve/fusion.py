r"""``hippoindex``: three walks and the dense score, multiplied.

A passage that answers a question is near what the question says (its facts), near whom it names (its
entities), resembles it, and is near the other passages that do so. These are four opinions; one that finds a
passage impossible should not be outvoted by one that finds it certain, so they are multiplied (a logarithmic
opinion pool). With the probabilities :math:`p` of Personalized PageRank over one graph,

.. math:: s(v) = \log \hat p_{facts}(v) + a \log \hat p_{entities}(v) + b \, \operatorname{minmax}(E q)_v
          + c \log \hat p_{feedback}(v), \qquad \hat p(v) = p(v) / \max p + \rho

- :math:`p_{facts}` restarts at the phrases of the nearest facts, at the entities, and with little weight at
  every passage; it alone is what ``entity_weight = dense_weight = feedback_weight = 0`` ranks by.
- :math:`p_{entities}` restarts at the entities alone, weighted by node specificity.
- :math:`p_{feedback}` restarts where a walk from the best passages so far is after its first step: the sum
  :math:`s` without its last term is a log probability up to a constant, so its k best passages have the
  weights :math:`\operatorname{softmax}(s)`, and each hands its weight to its phrases in equal parts. That is
  how a passage is reached which shares nothing with the question but with the passage of its first hop. (By
  the weights of edges half of it would go back to the titles of those passages.)

With ``pair_weight`` :math:`g`, those of the ``pair_top_k`` passages that are best before feedback gain
:math:`g h(v)^r` with ``pair_exponent`` :math:`r = 3`, where :math:`h` is the share of the question's words
that a passage has together with one whose title it names or that names its title: see
:class:`hippoindex.pipeline.pairs.PassagePairs`. By the exponent, the half of a question that many passages
have by chance counts little, and nearly all of it much.

The floor :math:`\rho` is what a passage keeps that a walk does not reach. The walks count alike (a = c = 1);
b, g, r and :math:`\rho` were chosen by cross-validation, see ``docs/decisions/0010-fusion.md`` and
``docs/decisions/0014-pairs.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.kernels.ppr.top import largest_of_rows
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, joined, min_max, top_k
from hippoindex.pipeline.retrieve.baselines import dense, dense_scores
from hippoindex.pipeline.retrieve.seeds import (
    entity_seeds,
    fact_seeds,
    nearest_phrases,
    seed_matrix,
    with_entities,
)
from hippoindex.pipeline.retrieve.walk import (
    Scores,
    choose_solver,
    solver_text,
    walk_from_seeds,
    walk_from_seeds_and_passages,
)

BLOCK_QUERIES = 64
EPSILON = 3e-6
"""Where pushes stop by default. Recall was the same at 1e-8 on every set."""
ARRAYS = 10
"""Arrays of one number per question and passage that are alive at once, about."""


class Scored(NamedTuple):
    """The parts of the score of some questions.

    Attributes
    ----------
    first : int
        Number of the first of them.
    total : ndarray of float32, shape (B, passages)
    terms : dict of str to ndarray of float32, shape (B, passages)
        What sums to ``total``: "facts", "entities", "dense", "pairs", "feedback"; those of weight 0 are left
        out.
    walks : dict of str to ndarray of float32, shape (B, passages)
        The probabilities behind "facts", "entities" and "feedback".
    feedback : list of (ndarray of int64, ndarray of float64)
        Of each question, the passages that the walk "feedback" comes from, and their weights; they sum to 1.
    solver : str
    """

    first: int
    total: Scores
    terms: dict[str, Scores]
    walks: dict[str, Scores]
    feedback: list[tuple[NDArray[np.int64], NDArray[np.float64]]]
    solver: str


class QuestionSeeds(NamedTuple):
    """Where the first two walks of each question restart."""

    facts: list[Seeds]
    entities: list[Seeds]


def hippoindex(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank by the product of three walks and the dense score; see the module."""
    if not len(queries) or not index.n_passages:
        return dense(index, queries, config)
    config = with_epsilon(config)
    with queries.clock.part("seeds"):
        seeds = hippoindex_seeds(index, queries, config)
    rankings, solver = [], ""
    for scored in score(index, queries, seeds, config):
        rankings.append(top_k(scored.total, config.top_k, config.ties))
        solver = scored.solver
    without = [not len(facts.rows) and not len(named.rows) for facts, named in zip(*seeds, strict=True)]
    recognition = "off" if queries.fact_filter is None else None
    return joined(rankings, solver=solver, fell_back=np.array(without), recognition=recognition)


def with_epsilon(config: RetrieveConfig) -> RetrieveConfig:
    """Return the configuration with the accuracy that the floor leaves visible, unless it sets one."""
    return config if config.epsilon else config.model_copy(update={"epsilon": EPSILON})


def hippoindex_seeds(index: Index, queries: QueryBatch, config: RetrieveConfig) -> QuestionSeeds:
    """Return the seeds: all phrases of the nearest facts with those of near entities, and the entities."""
    nearest = nearest_phrases(index, queries)
    facts = fact_seeds(index, queries, config, config.phrase_top_k)
    return QuestionSeeds(
        with_entities(index, queries, facts, config, nearest),
        entity_seeds(index, queries, config, nearest),
    )


def score(
    index: Index, queries: QueryBatch, seeds: QuestionSeeds, config: RetrieveConfig
) -> Iterator[Scored]:
    """Score every passage, some questions at a time.

    Parameters
    ----------
    index : Index
        With at least one passage.
    queries : QueryBatch
    seeds : QuestionSeeds
    config : RetrieveConfig

    Yields
    ------
    Scored
    """
    n_nodes = index.graph.n_nodes
    facts, entities = (seed_matrix(part, n_nodes) for part in seeds)
    solver = choose_solver(index, config)
    bytes_each = 4 * (ARRAYS * index.n_passages + (2 * n_nodes if solver == "power" else 0))
    width = int(np.clip(config.memory_bytes // bytes_each, 1, BLOCK_QUERIES))
    for start in range(0, len(queries), width):
        part = slice(start, min(start + width, len(queries)))
        restarts = {"facts": facts[part], "entities": entities[part]}
        asked = queries.questions[part]
        yield _score_block(index, start, asked, queries.vectors[part], restarts, config, solver)


def _score_block(
    index: Index,
    first: int,
    questions: Sequence[str],
    vectors: NDArray[np.float32],
    restarts: dict[str, sp.csr_array],
    config: RetrieveConfig,
    solver: str,
) -> Scored:
    unseeded = np.diff(restarts["facts"].indptr) == 0
    # passage_weight 0 and no seed: there is nothing else to walk from
    weights = np.where(unseeded & (config.passage_weight == 0), 1.0, config.passage_weight)
    near = dense_scores(index, vectors)
    walks = {
        "facts": walk_from_seeds_and_passages(
            index, restarts["facts"], weights, vectors, config, solver, near
        )
    }
    terms = {"facts": _log(walks["facts"], 1.0, config.floor)}
    if config.entity_weight:
        walks["entities"] = walk_from_seeds(index, restarts["entities"], config)
        terms["entities"] = _log(walks["entities"], config.entity_weight, config.floor)
    if config.dense_weight:
        terms["dense"] = np.float32(config.dense_weight) * min_max(near)
    total = functools.reduce(np.add, terms.values())
    if config.pair_weight:
        terms["pairs"] = _of_pairs(index, questions, total, config)
        total = total + terms["pairs"]
    found = []
    if config.feedback_weight:
        best, weights = _best_passages(total, config.feedback_top_k)
        found = list(zip(best, weights, strict=True))
        ends = np.arange(0, best.size + 1, best.shape[1])
        starts = sp.csr_array((weights.ravel(), best.ravel(), ends), total.shape)
        walks["feedback"] = walk_from_seeds(index, first_step(index, starts), config)
        terms["feedback"] = _log(walks["feedback"], config.feedback_weight, config.floor)
        total = total + terms["feedback"]
    return Scored(first, total, terms, walks, found, solver_text(solver, config))


def _log(walked: Scores, weight: float, floor: float) -> Scores:
    """Return ``weight * log(p / max p + floor)``; 0 for a question that has no such walk."""
    greatest = walked.max(axis=1, keepdims=True)
    scaled = np.divide(walked, greatest, out=np.ones_like(walked), where=greatest > 0)
    np.maximum(scaled, 0, out=scaled)  # rounding leaves some just below
    scaled += np.float32(floor)
    np.log(scaled, out=scaled)
    scaled *= np.float32(weight)
    return scaled


def _of_pairs(index: Index, questions: Sequence[str], total: Scores, config: RetrieveConfig) -> Scores:
    """Return ``pair_weight * share ** pair_exponent`` of the best passages so far, 0 of the others."""
    best = largest_of_rows(np.ascontiguousarray(total), config.pair_top_k)
    shares = index.pairs.shares(questions, best)
    term = np.zeros_like(total)
    np.put_along_axis(term, best, np.float32(config.pair_weight) * shares**config.pair_exponent, axis=1)
    return term


def _best_passages(total: Scores, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the k best passages of each question, and the softmax of their scores, shapes (B, k)."""
    best = largest_of_rows(np.ascontiguousarray(total), k)
    logits = np.take_along_axis(total, best, axis=1).astype(np.float64)
    weights = np.exp(logits - logits[:, :1])
    return best, weights / weights.sum(axis=1, keepdims=True)


def first_step(index: Index, starts: sp.csr_array) -> sp.csr_array:
    """Return where walks from passages are after one step to any of their phrases, all alike.

    Those from passages without phrases are gone.

    Parameters
    ----------
    index : Index
    starts : scipy.sparse.csr_array, shape (B, passages)

    Returns
    -------
    scipy.sparse.csr_array, shape (B, N)
    """
    held, degrees = index.mentions_of_passages
    inverse = np.divide(1.0, degrees, out=np.zeros_like(degrees), where=degrees > 0)
    steps: sp.csr_array = starts @ sp.diags_array(inverse) @ held
    steps.sort_indices()
    return sp.csr_array((steps.data, steps.indices, steps.indptr), (starts.shape[0], index.graph.n_nodes))
