"""Retrieval on the sample index: seeds, walks, paths, and what the graph finds that dense misses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from hippoindex.errors import ModelError, UsageError
from hippoindex.kernels import ppr
from hippoindex.pipeline.answer import Answers, answer_queries, open_retriever, read_gold
from hippoindex.pipeline.artifact import Manifest
from hippoindex.pipeline.normalise import clean_title, unicode_phrase, words
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve import baselines
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, top_k
from hippoindex.pipeline.retrieve.engine import METHODS, Retriever
from hippoindex.pipeline.retrieve.explain import Explainer
from hippoindex.pipeline.retrieve.seeds import entity_seeds, fact_seeds, with_entities


@pytest.fixture(scope="module")
def retriever(sample_index: Path) -> Retriever:
    return open_retriever(sample_index)


@pytest.fixture(scope="module")
def queries(retriever: Retriever, sample: Path) -> list[Query]:
    return read_gold(retriever.index, sample / "questions.jsonl").queries


@pytest.fixture(scope="module")
def batch(retriever: Retriever, queries: list[Query]) -> QueryBatch:
    return retriever.encode(queries)


def test_entities_of_the_query_file_are_used_and_others_found(retriever: Retriever) -> None:
    given = Query("a", "Who built it?", entities=("Tamsin Observatory", "tamsin  observatory"))
    found = Query("b", "Who founded the Tamsin Observatory?")
    batch = retriever.encode([given, found, Query("c", "Who built it?", entities=())])
    assert list(batch.entities[0]) == ["tamsin observatory"]
    assert any("tamsin observatory" in phrase for phrase in batch.entities[1])
    assert list(batch.entities[2]) == ["who built it"]
    assert [len(vectors) for vectors in batch.entity_vectors] == [len(names) for names in batch.entities]


@pytest.mark.parametrize("method", METHODS)
def test_a_question_is_ranked_the_same_alone_and_among_others(
    retriever: Retriever, queries: list[Query], batch: QueryBatch, method: str
) -> None:
    together = retriever.rank(batch, method, top_k=5)
    for number in (0, 7):
        alone = retriever.rank(retriever.encode([queries[number]]), method, top_k=5)
        assert alone.rows[0].tolist() == together.rows[number].tolist()
        np.testing.assert_allclose(alone.scores[0], together.scores[number], rtol=1e-4)


@pytest.mark.parametrize("method", ["hipporag1", "hipporag2", "hippoindex"])
def test_blocks_of_a_small_memory_budget_change_nothing(
    retriever: Retriever, batch: QueryBatch, method: str
) -> None:
    nodes = retriever.index.graph.n_nodes
    budget = max(2**20, 5 * 4 * 4 * nodes)
    exact = retriever.config.model_copy(update={"epsilon": 1e-8})
    small = exact.model_copy(update={"memory_bytes": budget, "solver": "power"})
    rows = [Retriever(retriever.index, used).rank(batch, method, top_k=5).rows for used in (small, exact)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("method", ["hipporag1", "hipporag2", "hippoindex"])
def test_push_ranks_as_power_and_says_what_was_used(
    retriever: Retriever, batch: QueryBatch, method: str
) -> None:
    exact = retriever.config.model_copy(update={"epsilon": 1e-8})
    solvers = (exact, exact.model_copy(update={"solver": "power"}))
    push, power = (Retriever(retriever.index, used).rank(batch, method, top_k=20) for used in solvers)
    np.testing.assert_array_equal(push.rows, power.rows)
    np.testing.assert_allclose(push.scores, power.scores, rtol=1e-3, atol=1e-6)
    assert push.solver.startswith("push")
    assert power.solver.startswith("power")
    if method == "hipporag2":
        assert push.certified_share == 1.0
    assert power.certified_share is None


def test_another_damping_than_the_precomputed_one_is_walked_by_power_or_refused(
    retriever: Retriever, batch: QueryBatch
) -> None:
    other = retriever.config.model_copy(update={"damping": 0.7})
    with capture_logs() as logged:
        assert Retriever(retriever.index, other).rank(batch, "hipporag2").solver.startswith("power")
    assert "for damping 0.5, not 0.7" in logged[0]["why"]
    strict = Retriever(retriever.index, other.model_copy(update={"solver": "push"}))
    with pytest.raises(UsageError, match=r"Run: hippoindex precompute .* --set retrieve.damping=0.7"):
        strict.rank(batch, "hippoindex")


def test_hipporag2_is_ppr_of_its_restart_vector(retriever: Retriever, batch: QueryBatch) -> None:
    index = retriever.index
    ranking = retriever.rank(batch, "hipporag2", top_k=10)
    seeds = fact_seeds(index, batch, retriever.config, 5)
    cosines = batch.vectors.astype(np.float64) @ index.vectors("passages").astype(np.float64).T
    for number in range(len(batch)):
        restart = np.zeros((index.graph.n_nodes, 1))
        restart[seeds[number].rows, 0] = seeds[number].weights
        row = cosines[number]
        restart[index.n_phrases :, 0] = 0.05 * (row - row.min()) / (row.max() - row.min())
        scores = ppr.reference(index.graph, restart).scores[index.n_phrases :, 0]
        expected = np.argsort(-scores, kind="stable")[:10]
        assert ranking.rows[number].tolist() == expected.tolist()
        np.testing.assert_allclose(ranking.scores[number], scores[expected], rtol=1e-3)


def test_fact_seeds_are_those_of_the_paper(retriever: Retriever, batch: QueryBatch) -> None:
    index = retriever.index
    cosines = batch.vectors.astype(np.float64) @ index.vectors("facts").astype(np.float64).T
    for number, seeds in enumerate(fact_seeds(index, batch, retriever.config, 5)):
        row = cosines[number]
        scaled = (row - row.min()) / (row.max() - row.min())
        weights: dict[int, list[float]] = {}
        for fact in np.argsort(-scaled, kind="stable")[:5]:
            for phrase in index.fact_ends[fact]:
                weights.setdefault(int(phrase), []).append(scaled[fact] / index.passage_counts[phrase])
        means = {phrase: float(np.mean(values)) for phrase, values in weights.items()}
        best = sorted(means.values(), reverse=True)[:5]  # which of several that weigh the same is left open
        assert sorted(seeds.weights, reverse=True) == pytest.approx(best, rel=1e-4)
        for phrase, weight in zip(seeds.rows.tolist(), seeds.weights, strict=True):
            assert weight == pytest.approx(means[phrase], rel=1e-4)


def test_entity_seeds_weigh_by_node_specificity(retriever: Retriever, batch: QueryBatch) -> None:
    index = retriever.index
    for seeds, vectors in zip(
        entity_seeds(index, batch, retriever.config), batch.entity_vectors, strict=True
    ):
        nearest = (vectors @ index.vectors("phrases").astype(np.float32).T).argmax(axis=1)
        assert seeds.rows.tolist() == sorted(set(nearest.tolist()))
        np.testing.assert_allclose(seeds.weights, 1 / index.passage_counts[seeds.rows])


def test_entities_add_to_the_fact_seeds_above_the_least_cosine(
    retriever: Retriever, batch: QueryBatch
) -> None:
    index, least = retriever.index, 0.9
    config = retriever.config.model_copy(update={"entity_min_cosine": least})
    facts = fact_seeds(index, batch, config, None)
    phrases = index.vectors("phrases").astype(np.float32)
    added = 0
    for number, seeds in enumerate(with_entities(index, batch, facts, config)):
        expected = dict(zip(facts[number].rows.tolist(), facts[number].weights.tolist(), strict=True))
        for cosines in batch.entity_vectors[number] @ phrases.T:
            row = int(cosines.argmax())
            if cosines[row] > least:
                weight = min(float(cosines[row]), 1.0) / index.passage_counts[row]
                expected[row] = max(expected.get(row, 0.0), weight)
        assert dict(zip(seeds.rows.tolist(), seeds.weights.tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-3
        )
        added += len(expected) - len(facts[number].rows)
    assert added > 0


def test_without_passage_weight_a_question_without_seeds_is_ranked_by_dense(retriever: Retriever) -> None:
    lonely = Retriever(
        retriever.index,
        retriever.config.model_copy(update={"passage_weight": 0.0, "entity_min_cosine": 1.0}),
    )
    batch = lonely.encode([Query("q", "Who founded the Tamsin Observatory?")])
    ranked = lonely.rank(batch, "hipporag2", top_k=5)
    assert np.all(np.isfinite(ranked.scores))
    assert ranked.scores[0, 0] > 0


def test_the_path_is_the_most_probable_one(retriever: Retriever) -> None:
    index, damping = retriever.index, retriever.config.damping
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(index.n_phrases, 3, replace=False))
    seeds = Seeds(rows, np.array([0.5, 0.3, 0.2]), ["a", "b", "c"])
    step = damping * index.graph.matrix(np.float64).toarray() / index.graph.degrees[:, None]
    best = np.zeros(index.graph.n_nodes)
    best[rows] = seeds.weights
    for _ in range(index.graph.n_nodes):  # Bellman-Ford on products
        new = np.maximum(best, (best[:, None] * step).max(axis=0))
        if np.array_equal(new, best):
            break
        best = new
    passages = np.arange(0, index.n_passages, 7)
    found = Explainer(index, damping).explain(seeds, passages)
    for passage, explanation in zip(passages, found, strict=True):
        assert explanation is not None
        assert math.isclose(explanation.probability, best[index.n_phrases + passage], rel_tol=1e-4)
        assert explanation.steps[0].by.startswith("seed: entity ")
        assert explanation.steps[-1].kind == "passage"
        assert all(step.by.startswith(("fact: ", "synonym: ", "mention")) for step in explanation.steps[1:])


@pytest.mark.parametrize("method", ["hipporag2", "hippoindex"])
def test_contributions_add_up_to_the_score(retriever: Retriever, batch: QueryBatch, method: str) -> None:
    exact = Retriever(retriever.index, retriever.config.model_copy(update={"epsilon": 1e-9}))
    ranking = exact.rank(batch, method, top_k=5)
    for number, explained in enumerate(exact.explain(batch, ranking, method)):
        for place, found in enumerate(explained):
            assert found.score == pytest.approx(ranking.scores[number, place], rel=1e-4, abs=1e-6)
            assert sum(found.terms.values()) == pytest.approx(found.score)
            for walk, probability in found.probabilities.items():
                parts = [c.probability for c in found.contributions if c.walk == walk]
                assert sum(parts) == pytest.approx(probability, rel=1e-3, abs=1e-7)
                assert parts == sorted(parts, reverse=True)
    assert any(found.paths and found.paths[-1].steps[0].kind == "passage" for found in explained) == (
        method == "hippoindex"
    )


def test_a_pair_is_explained_by_its_words(retriever: Retriever, batch: QueryBatch) -> None:
    config, index = retriever.config, retriever.index
    titles = {row["passage_id"]: row for row in index.passages.to_pylist()}
    joined = 0
    for question, explained in zip(
        batch.questions, retriever.explain(batch, retriever.rank(batch, top_k=5)), strict=True
    ):
        for found in explained:
            pair = found.pair
            if pair is None:
                assert not found.terms["pairs"]
                continue
            gained = config.pair_weight * pair.share**config.pair_exponent
            assert found.terms["pairs"] == pytest.approx(gained, rel=1e-5)
            both = [titles[name] for name in (found.passage_id, pair.passage_id) if name]
            for said, row in zip((pair.words, pair.passage_words), both, strict=False):
                assert set(said) <= set(words(f"{row['title']} {row['text']}")) & set(words(question))
            assert bool(pair.passage_words) == bool(pair.passage_id) == bool(pair.phrase)
            if pair.phrase:
                joined += 1
                assert pair.phrase in {unicode_phrase(clean_title(row["title"])) for row in both}
            assert found.as_dict()["pair"]["share"] == pair.share
    assert joined > 5
    alone = Retriever(index, config.model_copy(update={"pair_weight": 0.0}))
    assert alone.explain(batch, alone.rank(batch, top_k=1))[0][0].pair is None


def test_methods_that_do_not_walk_from_phrases_to_passages_are_not_explained(
    retriever: Retriever, batch: QueryBatch
) -> None:
    with pytest.raises(UsageError, match="what can be explained is hipporag2 and hippoindex"):
        retriever.explain(batch, retriever.rank(batch, "dense"), "dense")


def test_paths_follow_the_edges_that_were_walked(retriever: Retriever, queries: list[Query]) -> None:
    without = Retriever(retriever.index, retriever.config.model_copy(update={"synonym_edges": False}))
    for used, synonyms in ((retriever, True), (without, False)):
        batch = used.encode(queries)
        explained = used.explain(batch, used.rank(batch, "hipporag2"), "hipporag2")
        paths = [str(path) for row in explained for found in row for path in found.paths]
        assert any("(synonym: " in path for path in paths) == synonyms


def test_a_walk_from_passages_alone_is_explained_by_them(retriever: Retriever) -> None:
    config = retriever.config.model_copy(update={"passage_weight": 0.0, "epsilon": 1e-9})
    used = Retriever(retriever.index, config, fact_filter=lambda questions, _: [[] for _ in questions])
    batch = used.encode([Query("q", "???")])
    ranking = used.rank(batch, "hippoindex", top_k=3)
    assert ranking.fallbacks == 1
    for found in used.explain(batch, ranking, "hippoindex")[0]:
        assert found.probabilities["facts"] > 0
        parts = [part for part in found.contributions if part.walk == "facts"]
        assert [part.source for part in parts] == ["all passages, by their cosine"]
        assert parts[0].probability == pytest.approx(found.probabilities["facts"], rel=1e-3)


def test_an_explanation_names_what_was_walked_from_or_is_refused(
    retriever: Retriever, batch: QueryBatch
) -> None:
    named = Retriever(retriever.index, retriever.config.model_copy(update={"linking": "ner-to-node"}))
    found = named.explain(batch, named.rank(batch, "hipporag2", top_k=1), "hipporag2")[0][0]
    assert {part.walk for part in found.contributions} == set(found.terms) == {"entities"}
    mixed = Retriever(retriever.index, retriever.config.model_copy(update={"ensemble_cosine": 0.99}))
    with pytest.raises(UsageError, match="ensemble_cosine=null"):
        mixed.explain(batch, mixed.rank(batch, "hipporag2", top_k=1), "hipporag2")


def test_a_question_without_seeds_has_no_path(retriever: Retriever) -> None:
    none = Seeds(np.empty(0, np.int64), np.empty(0), [])
    assert Explainer(retriever.index, 0.5).explain(none, np.array([0, 1])) == [None, None]


def test_the_graph_finds_a_gold_passage_that_dense_misses(sample_index: Path, sample: Path) -> None:
    found, dense = (
        answer_queries(sample_index, sample / "questions.jsonl", method=method, top_k=5)
        for method in ("hippoindex", "dense")
    )
    gained = [
        query.query_id for n, query in enumerate(found.queries) if missed(dense, n) and not missed(found, n)
    ]
    assert gained


def missed(answers: Answers, number: int) -> set[str]:
    rows = answers.ranking.rows[number].tolist()
    return set(answers.queries[number].gold) - set(
        answers.index.passages["passage_id"].take(rows).to_pylist()
    )


def test_another_embedding_model_than_the_index_has_is_refused(retriever: Retriever) -> None:
    content = json.loads((retriever.index.path / "manifest.json").read_text())
    content["stages"]["embed"]["embedder"] = "0" * 64
    other = replace(retriever.index, manifest=Manifest.model_validate(content))
    with pytest.raises(ModelError, match="their vectors cannot be compared"):
        Retriever(other)


@pytest.mark.parametrize("method", METHODS)
def test_no_question_at_all_is_refused(retriever: Retriever, method: str) -> None:
    with pytest.raises(UsageError, match="no question"):
        retriever.rank(retriever.encode([]), method)


def test_bm25_goes_through_questions_in_blocks_and_needs_no_words(
    retriever: Retriever, batch: QueryBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = retriever.rank(batch, "bm25", top_k=5)
    made: list[int] = []

    def counted(scores: np.ndarray, *arguments: Any) -> Ranking:
        made.append(len(scores))
        return top_k(scores, *arguments)

    monkeypatch.setattr(baselines, "BLOCK_QUERIES", 5)
    monkeypatch.setattr(baselines, "top_k", counted)
    blocks = retriever.rank(batch, "bm25", top_k=5)
    assert made == [5, 5, 2]
    np.testing.assert_array_equal(blocks.rows, whole.rows)
    np.testing.assert_array_equal(blocks.scores, whole.scores)
    wordless = replace(retriever.index)
    wordless.__dict__["passages"] = pa.table({"title": ["", ""], "text": ["of the", "and"]})
    scores = baselines.bm25(wordless, batch, retriever.config).scores
    assert scores.shape == (len(batch), 2)
    assert not scores.any()


def test_unknown_methods_and_kinds_of_vectors_are_refused(retriever: Retriever, batch: QueryBatch) -> None:
    with pytest.raises(UsageError, match="There is no method 'magic'"):
        retriever.rank(batch, "magic")
    with pytest.raises(UsageError, match="There are no vectors of 'words'"):
        retriever.index.vectors("words")
