"""Metrics by hand, and the interval against a plain resampling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.pipeline import schemas
from hippoindex.pipeline.evaluate import Gold, paired_bootstrap, summarise
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.base import Ranking, min_max, top_k


def index_of(*rows: tuple[str, str]) -> Any:
    table = pa.Table.from_pylist(
        [
            {"passage_id": p, "doc_id": d, "title": "", "text": "", "span_start": 0, "span_end": 0}
            for p, d in rows
        ],
        schema=schemas.PASSAGE,
    )
    return SimpleNamespace(passages=table, n_passages=len(rows))


def ranking(*rows: list[int]) -> Ranking:
    return Ranking(np.array(rows), np.zeros((len(rows), len(rows[0]))))


TWELVE = index_of(*((f"p{i}", f"p{i}") for i in range(12)))


def test_recall_of_known_rankings() -> None:
    queries = [Query("a", "?", ("p0", "p5")), Query("b", "?", ("p3",)), Query("c", "?", ("p1", "p2"))]
    gold = Gold(TWELVE, queries)
    order = list(range(12))
    recalls = gold.recalls(ranking(order, order, order))
    assert recalls["recall@2"].tolist() == [0.5, 0.0, 0.5]
    assert recalls["recall@5"].tolist() == [0.5, 1.0, 1.0]
    assert recalls["recall@10"].tolist() == [1.0, 1.0, 1.0]
    assert recalls["all_recall@2"].tolist() == [0.0, 0.0, 0.0]
    assert recalls["all_recall@5"].tolist() == [0.0, 1.0, 1.0]
    assert (gold.n_gold, gold.n_missing, gold.depth) == (5, 0, 12)


def test_gold_that_is_not_in_the_index_counts_as_missed() -> None:
    gold = Gold(TWELVE, [Query("a", "?", ("p0", "absent")), Query("b", "?", ("p1",), unresolved_gold=3)])
    recalls = gold.recalls(ranking(list(range(12)), list(range(12))))
    assert recalls["recall@10"].tolist() == [0.5, 0.25]
    assert (gold.n_gold, gold.n_missing) == (6, 4)


def test_a_split_document_is_found_by_its_best_passage_and_takes_one_rank() -> None:
    index = index_of(("a#0", "a"), ("a#1", "a"), ("a#2", "a"), ("b", "b"), ("c", "c"))
    gold = Gold(index, [Query("q", "?", ("b",)), Query("q", "?", ("a",)), Query("q", "?", ("a#2",))])
    assert gold.depth == 5
    recalls = gold.recalls(ranking([0, 1, 2, 3, 4], [3, 4, 2, 1, 0], [0, 1, 2, 3, 4]))
    assert recalls["recall@2"].tolist() == [1.0, 0.0, 0.0]
    assert recalls["recall@5"].tolist() == [1.0, 1.0, 1.0]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_recall_agrees_with_sets(data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(12)))
    ids = data.draw(st.sets(st.sampled_from([f"p{i}" for i in range(15)]), min_size=1, max_size=5))
    recalls = Gold(TWELVE, [Query("q", "?", tuple(sorted(ids)))]).recalls(ranking(rows))
    for k in (2, 5, 10):
        found = {f"p{row}" for row in rows[:k]} & ids
        assert recalls[f"recall@{k}"][0] == pytest.approx(len(found) / len(ids))
        if k < 10:
            assert recalls[f"all_recall@{k}"][0] == float(found == ids)


def test_interval_is_that_of_a_plain_bootstrap() -> None:
    rng = np.random.default_rng(7)
    a, b = rng.random(200), rng.random(200)
    mean, low, high = paired_bootstrap(a * 100, b * 100)
    means = [np.mean(rng.choice(100 * (a - b), 200)) for _ in range(4000)]
    assert mean == pytest.approx(100 * (a - b).mean(), abs=0.006)
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.4)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.4)
    assert paired_bootstrap(a, b) == paired_bootstrap(a, b)
    assert paired_bootstrap(a, a) == [0, 0, 0]


def test_summary_is_in_percent() -> None:
    values = {"recall@5": np.array([1.0, 0.0, 1.0]), "recall@2": np.array([0.0, 0.0, 1.0])}
    summary = summarise(values, np.array([1.0, 0.0, 0.0]))
    assert summary["recall@5"] == 66.67
    assert summary["delta_recall@5"][0] == 33.33


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 9)
)
def test_top_k_takes_the_highest_and_ties_in_column_order(scores: list[list[int]], k: int) -> None:
    result = top_k(np.array(scores, dtype=np.float32), k)
    for row, columns, values in zip(scores, result.rows, result.scores, strict=True):
        assert columns.tolist() == sorted(range(6), key=lambda i: (-row[i], i))[:k]
        assert values.tolist() == [row[i] for i in columns]


def test_min_max_of_a_constant_is_ones() -> None:
    np.testing.assert_array_equal(
        min_max(np.array([[2.0, 4.0, 3.0], [5.0, 5.0, 5.0]])), [[0, 1, 0.5], [1, 1, 1]]
    )
