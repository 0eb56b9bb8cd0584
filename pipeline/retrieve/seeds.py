"""From a question to the phrases where its walk starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import Fact, QueryBatch, Seeds

LINKED_PHRASES = 5
"""Phrases that ``query-to-node`` seeds with, as many as HippoRAG 2 keeps of its facts'."""

Nearest = Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]


def nearest_phrases(index: Index, queries: QueryBatch) -> Nearest:
    """Return, for each question, the nearest phrase row of each entity and its cosine, shapes (entities,).

    An entity that is a phrase of the index is nearest to itself.
    """
    counts = [len(rows) if index.n_phrases else 0 for rows in queries.entity_rows]
    rows = np.concatenate([np.empty(0, np.int64), *queries.entity_rows])[: sum(counts)]
    cosines = np.ones(len(rows), dtype=np.float32)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown):
        names = [name for entities in queries.entities for name in entities]
        first: dict[str, int] = {}
        which = [first.setdefault(names[number], len(first)) for number in unknown.tolist()]
        vectors = np.concatenate(queries.entity_vectors)[unknown]
        _, once = np.unique(which, return_index=True)  # one of each name
        found = index.nearest_rows("phrases").find(vectors[once], 1)
        rows[unknown] = found.rows[which, 0]
        cosines[unknown] = found.products[which, 0].clip(-1.0, 1.0)
    ends = np.cumsum(counts)[:-1]
    return list(zip(np.split(rows, ends), np.split(cosines, ends), strict=True))


def linked_seeds(
    index: Index, queries: QueryBatch, linking: str, config: RetrieveConfig, phrase_top_k: int | None
) -> list[Seeds]:
    """Return the seeds of each question by one of the ways of HippoRAG 2's ablation (ICML 2025, table 4).

    Parameters
    ----------
    index : Index
    queries : QueryBatch
    linking : {"ner-to-node", "query-to-node", "query-to-fact"}
    config : RetrieveConfig
    phrase_top_k : int or None
        Phrases kept with ``query-to-fact``.
    """
    if linking == "ner-to-node":
        return entity_seeds(index, queries, config)
    if linking == "query-to-node":
        return node_seeds(index, queries, config)
    return fact_seeds(index, queries, config, phrase_top_k)


def entity_seeds(
    index: Index, queries: QueryBatch, config: RetrieveConfig, nearest: Nearest | None = None
) -> list[Seeds]:
    """Seeds of HippoRAG 1: the nearest phrase of each entity, weighted by node specificity.

    Node specificity (NeurIPS 2024, section 2.3) is 1 / number of passages that hold the phrase.
    """
    found = nearest_phrases(index, queries) if nearest is None else nearest
    seeds = []
    for entities, (rows, _) in zip(queries.entities, found, strict=True):
        # without any phrase in the index, no entity has a nearest one
        weights = {
            int(row): (1.0 / _holders(index, int(row), config), entity)
            for row, entity in zip(rows, entities, strict=False)
        }
        seeds.append(_seeds(weights))
    return seeds


def node_seeds(index: Index, queries: QueryBatch, config: RetrieveConfig) -> list[Seeds]:
    """Seeds of ``query-to-node``: the phrases nearest to the whole question.

    Weight: cosine, min-max scaled over all phrases, / number of passages that hold the phrase.
    """
    if not index.n_phrases:
        return [_seeds({}) for _ in queries.questions]
    found = index.nearest_rows("phrases").find(queries.linking_vectors, config.phrase_top_k or LINKED_PHRASES)
    seeds = []
    for nearest, cosines, least in zip(*found, strict=True):
        scores = zip(nearest.tolist(), _scaled(cosines, least).tolist(), strict=True)
        weights = {phrase: (score / _holders(index, phrase, config), "") for phrase, score in scores}
        seeds.append(_seeds(weights))
    return seeds


def fact_seeds(
    index: Index, queries: QueryBatch, config: RetrieveConfig, phrase_top_k: int | None
) -> list[Seeds]:
    """Seeds of HippoRAG 2 (ICML 2025, section 3.2).

    The ``fact_top_k`` facts nearest to the question, scores min-max scaled over all facts, less those that
    recognition memory drops, give each of their phrases the mean of score / number of passages that hold it.
    The ``phrase_top_k`` best phrases are kept, with ``None`` all of them.
    """
    if not len(index.facts):
        return [_seeds({}) for _ in queries.questions]
    best, cosines, least = index.nearest_rows("facts").find(queries.linking_vectors, config.fact_top_k)
    scores = map(_scaled, cosines, least)
    kept = _recognised(index, queries, list(best))
    return [
        _phrases_of_facts(index, scaled[positions], rows[positions], phrase_top_k, config)
        for rows, scaled, positions in zip(best, scores, kept, strict=True)
    ]


def _scaled(cosines: NDArray[np.float32], least: np.float32) -> NDArray[np.float32]:
    """Scale the greatest cosines of a question by the least and the greatest of all, as ``min_max`` does."""
    greatest = cosines[0]
    return (cosines - least) / (greatest - least) if greatest > least else np.ones_like(cosines)


def _recognised(
    index: Index, queries: QueryBatch, best: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """Return the positions of the facts that recognition memory keeps; all of them where there is none.

    All questions go to it at once: it may ask a language model about each.
    """
    if queries.fact_filter is None:
        return [np.arange(len(rows)) for rows in best]
    facts = [[fact_of(index, int(row)) for row in rows] for rows in best]
    kept = []
    for rows, answer in zip(best, queries.fact_filter(queries.questions, facts), strict=True):
        positions = list(dict.fromkeys(answer))
        if any(not 0 <= position < len(rows) for position in positions):
            raise UsageError(f"The fact filter kept the positions {positions} of {len(rows)} facts")
        queries.recognised.update(
            questions=1,
            facts=len(rows),
            kept_facts=len(positions),
            questions_without_facts=int(not positions),
        )
        kept.append(np.array(positions, dtype=np.int64))
    return kept


def _phrases_of_facts(
    index: Index,
    scores: NDArray[np.floating],
    facts: NDArray[np.int64],
    kept: int | None,
    config: RetrieveConfig,
) -> Seeds:
    weights: dict[int, list[float]] = defaultdict(list)
    origin: dict[int, int] = {}
    for fact, score in zip(facts.tolist(), scores.tolist(), strict=True):
        for phrase in index.fact_ends[fact].tolist():
            weights[phrase].append(score / _holders(index, phrase, config))
            origin.setdefault(phrase, fact)
    means = {phrase: sum(values) / len(values) for phrase, values in weights.items()}
    best = sorted(means, key=lambda phrase: (-means[phrase], phrase))[:kept]
    return _seeds({phrase: (means[phrase], origin[phrase]) for phrase in best})


def with_entities(
    index: Index,
    queries: QueryBatch,
    seeds: Iterable[Seeds],
    config: RetrieveConfig,
    nearest: Nearest | None = None,
) -> list[Seeds]:
    """Add to each question's seeds the nearest phrase of each entity whose cosine is above the least one.

    Weight: cosine / number of passages that hold the phrase; the greater weight of a phrase counts.
    """
    joined = []
    found = nearest_phrases(index, queries) if nearest is None else nearest
    for entities, (rows, cosines), known in zip(queries.entities, found, seeds, strict=True):
        weights: dict[int, tuple[float, int | str]] = {
            int(row): (float(weight), origin)
            for row, weight, origin in zip(known.rows, known.weights, known.origins, strict=True)
        }
        for entity, row, cosine in zip(entities, rows.tolist(), cosines.tolist(), strict=False):
            weight = cosine / _holders(index, row, config)
            if cosine > config.entity_min_cosine and weight > weights.get(row, (0.0, ""))[0]:
                weights[row] = (weight, entity)
        joined.append(_seeds(weights))
    return joined


def seed_matrix(seeds: Sequence[Seeds], n_nodes: int) -> sp.csr_array:
    """Return the seeds of all questions, shape (Q, n_nodes)."""
    indptr = np.cumsum([0, *(len(seed.rows) for seed in seeds)])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *(seed.rows for seed in seeds)])
    weights = np.concatenate([np.empty(0), *(seed.weights for seed in seeds)])
    return sp.csr_array((weights, rows, indptr), shape=(len(seeds), n_nodes))


def fact_of(index: Index, fact: int) -> Fact:
    """Return a fact row in words."""
    phrases = index.phrases["phrase"]
    subject, obj = (phrases[end].as_py() for end in index.fact_ends[fact].tolist())
    return Fact(subject, index.facts["predicate"][fact].as_py(), obj)


def origin_text(index: Index, origin: int | str) -> str:
    """Return where a seed comes from in words; see :class:`Seeds`."""
    if isinstance(origin, int):
        return f"fact {fact_text(index, origin)}"
    return f"entity {origin}" if origin else "question"


def fact_text(index: Index, fact: int) -> str:
    """Return "subject | predicate | object" of a fact row."""
    return " | ".join(fact_of(index, fact))


def _holders(index: Index, phrase: int, config: RetrieveConfig) -> float:
    """Return by what a phrase's weight is divided: the number of passages that hold it, or 1."""
    return float(index.passage_counts[phrase]) if config.node_specificity else 1.0


def _seeds(weights: Mapping[int, tuple[float, int | str]]) -> Seeds:
    kept = {row: value for row, value in sorted(weights.items()) if value[0] > 0}
    return Seeds(
        np.array(list(kept), dtype=np.int64),
        np.array([weight for weight, _ in kept.values()], dtype=np.float64),
        [origin for _, origin in kept.values()],
    )
