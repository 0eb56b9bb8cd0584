"""The options of the methods, on the sample index, against what the papers and the authors' code say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from hippoindex.errors import ArtifactError, UsageError
from hippoindex.kernels import ppr
from hippoindex.pipeline import words
from hippoindex.pipeline.answer import answer_queries, evaluate_queries, open_retriever, read_gold
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.parity import index_settings
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.base import Fact, QueryBatch, min_max
from hippoindex.pipeline.retrieve.baselines import dense_scores
from hippoindex.pipeline.retrieve.engine import Retriever
from hippoindex.pipeline.retrieve.fusion import first_step, hippoindex_seeds, score
from hippoindex.pipeline.retrieve.seeds import entity_seeds, fact_seeds, node_seeds


@pytest.fixture(scope="module")
def retriever(sample_index: Path) -> Retriever:
    return open_retriever(sample_index)


@pytest.fixture(scope="module")
def queries(retriever: Retriever, sample: Path) -> list[Query]:
    return read_gold(retriever.index, sample / "questions.jsonl").queries


@pytest.fixture(scope="module")
def batch(retriever: Retriever, queries: list[Query]) -> QueryBatch:
    return retriever.encode(queries)


def changed(retriever: Retriever, **settings: Any) -> Retriever:
    return Retriever(retriever.index, retriever.config.model_copy(update=settings))


def reference(retriever: Retriever, restart: np.ndarray, *, phrases_only: bool = False) -> np.ndarray:
    index = retriever.index
    graph = index.walked_graph(phrases_only=phrases_only, synonyms=retriever.config.synonym_edges)
    return ppr.reference(graph, restart[: graph.n_nodes, None], retriever.config.damping).scores[:, 0]


# --- hippoindex


def test_hippoindex_is_the_product_of_its_walks(retriever: Retriever, batch: QueryBatch) -> None:
    index, config = retriever.index, retriever.config
    ranking = changed(retriever, epsilon=1e-10).rank(batch, "hippoindex", top_k=5)
    seeds = hippoindex_seeds(index, batch, config)
    near = min_max(dense_scores(index, batch.vectors).astype(np.float64))
    every = np.tile(np.arange(index.n_passages), (len(batch), 1))
    together = config.pair_weight * index.pairs.shares(batch.questions, every) ** config.pair_exponent
    n = index.n_phrases

    def log(restart: np.ndarray) -> np.ndarray:
        walked = reference(retriever, restart)[n:]
        return np.log(walked / walked.max() + config.floor)

    held = (index.occurrence > 0).toarray().T.astype(float)  # (passages, phrases)
    for number in range(len(batch)):
        facts, entities, feedback = np.zeros((3, index.graph.n_nodes))
        facts[seeds.facts[number].rows] = seeds.facts[number].weights
        facts[n:] += config.passage_weight * near[number]
        entities[seeds.entities[number].rows] = seeds.entities[number].weights
        total = log(facts) + log(entities) + config.dense_weight * near[number] + together[number]
        best = np.argsort(-total, kind="stable")[: config.feedback_top_k]
        weights = np.exp(total[best]) / np.exp(total[best]).sum()
        feedback[:n] = weights @ (held[best] / held[best].sum(axis=1, keepdims=True))
        total = total + log(feedback)
        np.testing.assert_allclose(ranking.scores[number], np.sort(total)[::-1][:5], atol=2e-3)


def test_with_the_other_weights_at_0_hippoindex_ranks_by_its_first_walk(
    retriever: Retriever, batch: QueryBatch
) -> None:
    zero = dict.fromkeys(("entity_weight", "dense_weight", "pair_weight", "feedback_weight"), 0)
    alone = changed(retriever, **zero, epsilon=1e-9)
    (scored,) = score(alone.index, batch, hippoindex_seeds(alone.index, batch, alone.config), alone.config)
    assert list(scored.terms) == ["facts"]
    ranking = alone.rank(batch, "hippoindex", top_k=5)
    for number, rows in enumerate(ranking.rows):
        walked = scored.walks["facts"][number]
        assert walked[rows].min() >= np.sort(walked)[-5]


def test_blocks_of_questions_do_not_change_a_score(retriever: Retriever, batch: QueryBatch) -> None:
    small = changed(retriever, memory_bytes=2**20)
    index = retriever.index
    one = 8 * 4 * index.n_passages
    object.__setattr__(small.config, "memory_bytes", 3 * one)  # three questions at a time
    together, apart = (used.rank(batch, "hippoindex", top_k=5) for used in (retriever, small))
    np.testing.assert_array_equal(together.rows, apart.rows)
    np.testing.assert_allclose(together.scores, apart.scores, rtol=1e-4)


def test_the_first_step_goes_from_passages_to_their_phrases(retriever: Retriever) -> None:
    index = retriever.index
    starts = sp.csr_array(np.eye(index.n_passages)[[3, 5]])
    steps = first_step(index, starts).toarray()
    graph = index.graph.matrix(np.float64).toarray()
    for row, passage in zip(steps, (3, 5), strict=True):
        neighbours = graph[index.n_phrases + passage] > 0
        np.testing.assert_allclose(row, neighbours / neighbours.sum())


def test_titles_are_the_heavier_edges_of_passages(retriever: Retriever) -> None:
    index = retriever.index
    mentions = index.graph.matrix(np.float64)[index.n_phrases :, : index.n_phrases].toarray()
    heavier = np.argwhere(mentions > 1)
    assert len(heavier) > index.n_passages / 2
    titled = np.flatnonzero(index.titles >= 0)
    np.testing.assert_array_equal(heavier, np.stack([titled, index.titles[titled]], axis=1))
    np.testing.assert_allclose(mentions.max(axis=1)[titled], 1 + (mentions > 0).sum(axis=1)[titled])
    bare = index.walked_graph(synonyms=False).matrix(np.float64)[index.n_phrases :, : index.n_phrases]
    np.testing.assert_array_equal(bare.toarray(), mentions)


def test_pairs_add_what_two_passages_say_of_the_question(retriever: Retriever, batch: QueryBatch) -> None:
    index, seeds = retriever.index, hippoindex_seeds(retriever.index, batch, retriever.config)
    plain = changed(retriever, pair_weight=0.0)
    paired = changed(retriever, pair_weight=6.0, pair_exponent=2.0, pair_top_k=7)
    with_pairs = list(score(index, batch, seeds, paired.config))
    without = list(score(index, batch, seeds, plain.config))
    every = np.tile(np.arange(index.n_passages), (len(batch), 1))
    shares = index.pairs.shares(batch.questions, every)
    assert 0 < shares.max() <= 1
    terms = np.concatenate([scored.terms["pairs"] for scored in with_pairs])
    before = np.concatenate([scored.total - scored.terms["feedback"] for scored in without])
    best = np.argsort(-before, axis=1, kind="stable")[:, :7]
    expected = np.zeros_like(terms)
    np.put_along_axis(expected, best, 6 * np.take_along_axis(shares, best, axis=1) ** 2, axis=1)
    np.testing.assert_allclose(terms, expected, rtol=1e-5)
    for one, other in zip(with_pairs, without, strict=True):
        np.testing.assert_allclose(sum(one.terms.values()), one.total, rtol=1e-5)
        assert "pairs" not in other.terms
    assert index.pairs.shares(batch.questions[:1], every[:1])[0] == pytest.approx(shares[0])


def test_an_index_without_words_says_what_to_do(
    sample_index: Path, tmp_path: Path, batch: QueryBatch
) -> None:
    older = shutil.copytree(sample_index, tmp_path / "older")
    manifest = json.loads((older / "manifest.json").read_text(encoding="utf-8"))
    for name in [name for name in manifest["files"] if "words" in name]:
        del manifest["files"][name]
    (older / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    retriever = Retriever(older)
    with pytest.raises(ArtifactError, match=r"build it again, or set retrieve\.pair_weight=0"):
        retriever.rank(batch, "hippoindex")
    assert len(changed(retriever, pair_weight=0.0).rank(batch, "hippoindex").rows) == len(batch)


def test_known_words_are_taken_unless_another_version_found_them(
    sample_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index(sample_index)
    held = np.arange(index.n_passages)
    monkeypatch.setattr(words, "passage_words", lambda *_: ["mill"])

    def written(name: str) -> list[str]:
        words.write_words(index.passages, tmp_path / name, lambda _: None, index, held)
        found: list[str] = pq.read_table(tmp_path / name / "words")["word"].to_pylist()
        return found

    assert written("same") == index.words["word"].to_pylist()
    monkeypatch.setattr(words, "VERSION", words.VERSION + 1)
    assert written("other") == ["mill"]


# --- HippoRAG's choices


def test_linking_decides_the_seeds_and_passage_nodes_the_graph(
    retriever: Retriever, batch: QueryBatch
) -> None:
    one = changed(retriever, linking="query-to-fact", passage_nodes=True).rank(batch, "hipporag1", top_k=8)
    two = retriever.rank(batch, "hipporag2", top_k=8)
    np.testing.assert_array_equal(one.rows, two.rows)
    one = retriever.rank(batch, "hipporag1", top_k=8)
    two = changed(retriever, linking="ner-to-node", passage_nodes=False).rank(batch, "hipporag2", top_k=8)
    np.testing.assert_array_equal(one.rows, two.rows)


def test_query_to_node_seeds_with_the_phrases_nearest_to_the_question(
    retriever: Retriever, batch: QueryBatch
) -> None:
    index = retriever.index
    cosines = batch.vectors @ index.vectors("phrases").astype(np.float32).T
    for seeds, row in zip(node_seeds(index, batch, retriever.config), cosines, strict=True):
        assert set(seeds.rows.tolist()) == set(np.argsort(-row, kind="stable")[:5].tolist())
        scaled = (row - row.min()) / (row.max() - row.min())
        np.testing.assert_allclose(seeds.weights, (scaled / index.passage_counts)[seeds.rows], rtol=1e-4)


def test_without_node_specificity_counts_do_not_matter(retriever: Retriever, batch: QueryBatch) -> None:
    config = retriever.config.model_copy(update={"node_specificity": False})
    for seeds in entity_seeds(retriever.index, batch, config):
        assert set(seeds.weights.tolist()) == {1.0}
    plain = fact_seeds(retriever.index, batch, config, None)
    for seeds, specific in zip(
        plain, fact_seeds(retriever.index, batch, retriever.config, None), strict=True
    ):
        assert seeds.rows.tolist() == specific.rows.tolist()
        counts = retriever.index.passage_counts[seeds.rows]
        np.testing.assert_allclose(seeds.weights, specific.weights * counts)
        assert counts.max() > 1


@pytest.mark.parametrize("method", ["hipporag1", "hipporag2", "hippoindex"])
def test_without_synonym_edges_walks_are_those_of_the_other_edges(
    retriever: Retriever, batch: QueryBatch, method: str
) -> None:
    index = retriever.index
    synonyms = index.synonyms.num_rows
    assert synonyms
    bare = index.walked_graph(synonyms=False)
    assert bare.n_edges < index.graph.n_edges
    assert bare.weights.sum() == pytest.approx(
        index.graph.weights.sum() - 2 * index.synonyms["cosine"].to_numpy().sum(), rel=1e-5
    )
    ranking = changed(retriever, synonym_edges=False).rank(batch, method, top_k=3)
    assert ranking.rows.shape == (len(batch), 3)
    with pytest.raises(UsageError, match="precomputed with synonym edges"):
        changed(retriever, synonym_edges=False, solver="push").rank(batch, "hipporag2")


def test_in_place_of_ppr_the_seeds_or_their_neighbours_are_summed(
    retriever: Retriever, batch: QueryBatch
) -> None:
    index = retriever.index
    held = (index.occurrence > 0).toarray()
    joined = index.phrase_graph.matrix().toarray() > 0
    seeds = entity_seeds(index, batch, retriever.config)
    few = changed(retriever, walk="seeds").rank(batch, "hipporag1", top_k=4)
    near = changed(retriever, walk="neighbours").rank(batch, "hipporag1", top_k=4)
    for number, seed in enumerate(seeds):
        weights = np.zeros(index.n_phrases)
        weights[seed.rows] = seed.weights
        np.testing.assert_allclose(few.scores[number], np.sort(weights @ held)[::-1][:4], rtol=1e-5)
        weights += 0.5 * seed.weights.min() * joined[seed.rows].sum(axis=0)
        np.testing.assert_allclose(near.scores[number], np.sort(weights @ held)[::-1][:4], rtol=1e-5)


def test_unsure_questions_are_ranked_by_graph_and_dense_scores_together(
    retriever: Retriever, batch: QueryBatch
) -> None:
    always = changed(retriever, ensemble_cosine=1.0).rank(batch, "hipporag1", top_k=4)
    never = changed(retriever, ensemble_cosine=-1.0).rank(batch, "hipporag1", top_k=4)
    np.testing.assert_array_equal(never.rows, retriever.rank(batch, "hipporag1", top_k=4).rows)
    index = retriever.index
    near = min_max(dense_scores(index, batch.vectors))
    for number, seed in enumerate(entity_seeds(index, batch, retriever.config)):
        restart = np.zeros(index.n_phrases)
        restart[seed.rows] = seed.weights
        summed = reference(retriever, restart, phrases_only=True) @ (index.occurrence > 0)
        expected = 0.5 * (min_max(summed) + near[number])
        np.testing.assert_allclose(always.scores[number], np.sort(expected)[::-1][:4], atol=1e-4)


# --- recognition memory and fallback


def test_recognition_memory_keeps_the_facts_it_names(retriever: Retriever, queries: list[Query]) -> None:
    asked: list[tuple[str, Sequence[Fact]]] = []

    def keep_last(questions: Sequence[str], facts: Sequence[Sequence[Fact]]) -> list[list[int]]:
        asked.extend(zip(questions, facts, strict=True))
        return [[len(row) - 1] for row in facts]

    filtering = Retriever(retriever.index, retriever.config, fact_filter=keep_last)
    batch = filtering.encode(queries)
    for seeds, (question, facts), query in zip(
        fact_seeds(retriever.index, batch, retriever.config, None), asked, queries, strict=True
    ):
        assert question == query.question
        assert len(facts) == retriever.config.fact_top_k
        names = retriever.index.phrases["phrase"].take(seeds.rows).to_pylist()
        assert set(names) <= {facts[-1].subject, facts[-1].object}
    assert filtering.rank(batch, "hipporag2").notes == ""
    assert retriever.rank(retriever.encode(queries), "hipporag2").notes == "recognition memory off"


def test_a_question_none_of_whose_facts_survives_falls_back_to_dense(
    retriever: Retriever, queries: list[Query]
) -> None:
    def keep_for_the_first(questions: Sequence[str], _: Sequence[Sequence[Fact]]) -> list[list[int]]:
        return [[0] if question == queries[0].question else [] for question in questions]

    filtering = Retriever(retriever.index, retriever.config, fact_filter=keep_for_the_first)
    batch = filtering.encode(queries)
    ranking = filtering.rank(batch, "hipporag2", top_k=4)
    assert ranking.fallbacks == len(queries) - 1
    assert ranking.fell_back is not None
    assert not ranking.fell_back[0]
    dense = retriever.rank(batch, "dense", top_k=4)
    np.testing.assert_array_equal(ranking.rows[1:], dense.rows[1:])
    assert ranking.certified_share == 1.0
    others = filtering.rank(batch.take(np.arange(1, len(queries))), "hipporag2", top_k=4)
    assert others.certified_share == 1.0  # a shard of such questions says what all together say


def test_a_filter_that_names_facts_it_was_not_given_is_refused(
    retriever: Retriever, queries: list[Query]
) -> None:
    wrong = Retriever(retriever.index, retriever.config, fact_filter=lambda q, _: [[99]] * len(q))
    with pytest.raises(UsageError, match=r"kept the positions \[99\] of 5 facts"):
        wrong.rank(wrong.encode(queries), "hipporag2")


def test_a_question_without_a_word_falls_back_and_is_counted(retriever: Retriever) -> None:
    batch = retriever.encode([Query("q", "???"), Query("r", "Who built the Tamsin Observatory?")])
    ranking = retriever.rank(batch, "hipporag1", top_k=3)
    assert ranking.fell_back is not None
    assert ranking.fell_back.tolist() == [True, False]
    assert ranking.rows[0].tolist() == retriever.rank(batch, "dense", top_k=3).rows[0].tolist()


def test_rankings_say_how_many_questions_fell_back(sample_index: Path, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "???"}\n{"question": "Who built the Tamsin Observatory?"}\n')
    answers = answer_queries(sample_index, file, method="hipporag1", top_k=2)
    assert answers.summary()["fallbacks"] == 1
    assert answers.remarks() == [
        "hipporag1: 1 questions had no phrase to start from and fell back to the cosines of passages"
    ]


def test_more_passages_than_there_are_cannot_be_asked_for(retriever: Retriever, batch: QueryBatch) -> None:
    for method in ("bm25", "dense", "hipporag1", "hipporag2", "hippoindex"):
        rows = retriever.rank(batch, method, top_k=10_000).rows
        assert sorted(rows[0].tolist()) == list(range(retriever.index.n_passages))


# --- parity


@pytest.fixture(scope="module")
def theirs(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("parity") / "index"
    corpus = [str(sample / "passages.jsonl")]
    settings = [*index_settings(), "precompute.enabled=false"]
    build_index(load_config(overrides=settings, corpus__path=corpus, output=str(output), cluster__workers=1))
    return output


def test_titles_are_known_where_they_weigh_like_other_phrases(theirs: Path) -> None:
    index = open_index(theirs)
    index.verify()
    mentions = index.graph.matrix(np.float64)[index.n_phrases :, : index.n_phrases].toarray()
    assert set(mentions.ravel()) == {0, 1}
    titled = np.flatnonzero(index.titles >= 0)
    assert len(titled) > index.n_passages / 2
    assert (mentions[titled, index.titles[titled]] == 1).all()


def test_parity_needs_an_index_as_they_build_it(sample_index: Path) -> None:
    with pytest.raises(UsageError, match=r"graph.weights is 'plain', not 'hipporag'.*--parity"):
        open_retriever(sample_index, parity="hipporag2")
    with pytest.raises(UsageError, match="no parity with 'bm25'"):
        open_retriever(sample_index, parity="bm25")


@pytest.mark.parametrize("other", ["hipporag1", "hippoindex"])
def test_parity_is_with_one_method(theirs: Path, sample: Path, other: str) -> None:
    questions = sample / "questions.jsonl"
    with pytest.raises(UsageError, match=f"says how hipporag2 ranks, not {other}"):
        evaluate_queries(theirs, questions, ["dense", "hipporag2", other], parity="hipporag2")
    with pytest.raises(UsageError, match=f"not {other}"):
        answer_queries(theirs, questions, method=other, parity="hipporag2")


def test_a_method_that_is_set_to_be_another_says_so(theirs: Path, queries: list[Query]) -> None:
    own = open_retriever(theirs, parity="hipporag2")
    assert own.rank(own.encode(queries[:2]), "hipporag1").notes == ""
    stored = open_retriever(theirs, ["retrieve.linking=query-to-fact", "retrieve.passage_nodes=true"])
    batch = stored.encode(queries[:2])
    notes = stored.rank(batch, "hipporag1").notes
    assert notes == "linking=query-to-fact, passage_nodes=true, recognition memory off"
    assert stored.rank(batch, "hipporag2").notes == "recognition memory off"


def test_parity_with_hipporag2_is_their_code(theirs: Path, sample: Path) -> None:
    """Their retrieval written anew from its description: dense arrays, igraph, argsort reversed."""
    igraph = pytest.importorskip("igraph")
    retriever = open_retriever(theirs, ["retrieve.tolerance=1e-7"], parity="hipporag2")
    index = retriever.index
    batch = retriever.encode(read_gold(index, sample / "questions.jsonl").queries)
    ranking = retriever.rank(batch, top_k=10)
    matrix = sp.triu(index.graph.matrix(np.float64)).tocoo()
    graph = igraph.Graph(n=index.graph.n_nodes, edges=list(zip(matrix.row, matrix.col, strict=True)))
    facts, passages = (index.vectors(kind).astype(np.float64) for kind in ("facts", "passages"))
    for number, vector in enumerate(batch.vectors.astype(np.float64)):
        scores = min_max(facts @ vector)
        weights, occurs = np.zeros((2, index.graph.n_nodes))
        for fact in np.argsort(scores)[-5:][::-1]:
            for phrase in index.fact_ends[fact]:
                weights[phrase] += scores[fact] / index.passage_counts[phrase]
                occurs[phrase] += 1
        weights = np.divide(weights, occurs, out=np.zeros_like(weights), where=occurs > 0)
        weights[np.argsort(-weights, kind="stable")[5:]] = 0
        weights[index.n_phrases :] = 0.05 * min_max(passages @ vector)
        walked = np.array(
            graph.personalized_pagerank(
                damping=0.5, directed=False, weights=list(matrix.data), reset=weights, implementation="prpack"
            )
        )[index.n_phrases :]
        expected = np.argsort(walked, kind="stable")[::-1][:10]
        np.testing.assert_allclose(ranking.scores[number], walked[expected], rtol=1e-3, atol=1e-7)
        assert set(ranking.rows[number][:5].tolist()) == set(expected[:5].tolist())


def test_parity_with_hipporag1_counts_phrases_per_fact_and_takes_the_last_of_equals(
    theirs: Path, sample: Path
) -> None:
    retriever = open_retriever(theirs, parity="hipporag1")
    index = retriever.index
    batch = retriever.encode(read_gold(index, sample / "questions.jsonl").queries)
    ranking = retriever.rank(batch, top_k=index.n_passages)
    counts = np.zeros((index.n_phrases, index.n_passages))
    names = index.passages["passage_id"].to_pylist()
    for ends, holders in zip(index.fact_ends, index.facts["passage_ids"].to_pylist(), strict=True):
        for phrase in set(ends.tolist()):
            counts[phrase, [names.index(name) for name in holders]] += 1
    for number, seed in enumerate(entity_seeds(index, batch, retriever.config)):
        restart = np.zeros(index.n_phrases)
        restart[seed.rows] = seed.weights
        expected = reference(retriever, restart, phrases_only=True) @ counts
        np.testing.assert_allclose(ranking.scores[number], np.sort(expected)[::-1], rtol=1e-3, atol=1e-6)
        equal = np.flatnonzero(np.diff(ranking.scores[number]) == 0)
        assert np.all(np.diff(ranking.rows[number])[equal] < 0)
