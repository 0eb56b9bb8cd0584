"""From a question to the phrases where its walk starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.ppr.top import largest_of_rows
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Seeds, min_max

BLOCK_QUERIES = 64


def nearest_phrases(index: Index, queries: QueryBatch) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Return, for each question, the nearest phrase row of each entity and its cosine, shapes (entities,)."""
    phrases = index.vectors("phrases").astype(np.float32)
    counts = [len(vectors) if len(phrases) else 0 for vectors in queries.entity_vectors]
    rows, cosines = np.zeros(sum(counts), dtype=np.int64), np.zeros(sum(counts), dtype=np.float32)
    vectors = np.concatenate([np.empty((0, phrases.shape[1]), np.float32), *queries.entity_vectors])
    for start in range(0, sum(counts), BLOCK_QUERIES):
        block = slice(start, start + BLOCK_QUERIES)
        products = vectors[block] @ phrases.T  # (block, phrases)
        rows[block] = products.argmax(axis=1)
        cosines[block] = products.max(axis=1).clip(-1.0, 1.0)
    ends = np.cumsum(counts)[:-1]
    return list(zip(np.split(rows, ends), np.split(cosines, ends), strict=True))


def entity_seeds(index: Index, queries: QueryBatch) -> list[Seeds]:
    """Seeds of HippoRAG 1: the nearest phrase of each entity, weighted by node specificity.

    Node specificity (NeurIPS 2024, section 2.3) is 1 / number of passages that hold the phrase.
    """
    counts = index.passage_counts
    seeds = []
    for entities, (rows, _) in zip(queries.entities, nearest_phrases(index, queries), strict=True):
        # without any phrase in the index, no entity has a nearest one
        weights = {
            int(row): (1.0 / counts[row], f"entity {entity}")
            for row, entity in zip(rows, entities, strict=False)
        }
        seeds.append(_seeds(weights))
    return seeds


def fact_seeds(index: Index, queries: QueryBatch, fact_top_k: int, phrase_top_k: int | None) -> list[Seeds]:
    """Seeds of HippoRAG 2 (ICML 2025, section 3.2) without recognition memory.

    The ``fact_top_k`` facts nearest to the question, scores min-max scaled over all facts, give each of their
    phrases the mean of score / number of passages that hold it. The ``phrase_top_k`` best phrases are kept,
    with ``None`` all of them.
    """
    facts = index.vectors("facts").astype(np.float32)
    if not len(facts):
        return [_seeds({}) for _ in queries.questions]
    seeds = []
    for start in range(0, len(queries), BLOCK_QUERIES):
        scores = min_max(queries.vectors[start : start + BLOCK_QUERIES] @ facts.T)  # (block, facts)
        best = largest_of_rows(scores, fact_top_k)
        seeds += [
            _phrases_of_facts(index, row[top], top, phrase_top_k)
            for row, top in zip(scores, best, strict=True)
        ]
    return seeds


def _phrases_of_facts(
    index: Index, scores: NDArray[np.floating], facts: NDArray[np.int64], kept: int | None
) -> Seeds:
    weights: dict[int, list[float]] = defaultdict(list)
    origin: dict[int, int] = {}
    for fact, score in zip(facts.tolist(), scores.tolist(), strict=True):
        for phrase in index.fact_ends[fact].tolist():
            weights[phrase].append(score / float(index.passage_counts[phrase]))
            origin.setdefault(phrase, fact)
    means = {phrase: sum(values) / len(values) for phrase, values in weights.items()}
    best = sorted(means, key=lambda phrase: (-means[phrase], phrase))[:kept]
    return _seeds({phrase: (means[phrase], f"fact {fact_text(index, origin[phrase])}") for phrase in best})


def with_entities(
    index: Index, queries: QueryBatch, seeds: Iterable[Seeds], config: RetrieveConfig
) -> list[Seeds]:
    """Add to each question's seeds the nearest phrase of each entity whose cosine is above the least one.

    Weight: cosine / number of passages that hold the phrase; the greater weight of a phrase counts.
    """
    joined = []
    found = nearest_phrases(index, queries)
    for entities, (rows, cosines), known in zip(queries.entities, found, seeds, strict=True):
        weights = {
            int(row): (float(weight), origin)
            for row, weight, origin in zip(known.rows, known.weights, known.origins, strict=True)
        }
        for entity, row, cosine in zip(entities, rows.tolist(), cosines.tolist(), strict=False):
            weight = cosine / float(index.passage_counts[row])
            if cosine > config.entity_min_cosine and weight > weights.get(row, (0.0, ""))[0]:
                weights[row] = (weight, f"entity {entity}")
        joined.append(_seeds(weights))
    return joined


def fact_text(index: Index, fact: int) -> str:
    """Return "subject | predicate | object" of a fact row."""
    phrases = index.phrases["phrase"]
    subject, obj = (phrases[end].as_py() for end in index.fact_ends[fact].tolist())
    return f"{subject} | {index.facts['predicate'][fact].as_py()} | {obj}"


def _seeds(weights: Mapping[int, tuple[float, str]]) -> Seeds:
    kept = {row: value for row, value in sorted(weights.items()) if value[0] > 0}
    return Seeds(
        np.array(list(kept), dtype=np.int64),
        np.array([weight for weight, _ in kept.values()], dtype=np.float64),
        [origin for _, origin in kept.values()],
    )
