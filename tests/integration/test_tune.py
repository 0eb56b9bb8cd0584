"""Tuning on the sample: out-of-fold beside in-sample, a file that can be used, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline.answer import evaluate_queries, open_retriever, read_gold
from hippoindex.pipeline.evaluate import Gold
from hippoindex.pipeline.evaluation_report import markdown
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.engine import Retriever
from hippoindex.pipeline.tune import parse_grid, tune, write_tuned


@pytest.fixture(scope="module")
def retriever(sample_index: Path) -> Retriever:
    return open_retriever(sample_index)


@pytest.fixture(scope="module")
def queries(retriever: Retriever, sample: Path) -> list[Query]:
    return read_gold(retriever.index, sample / "questions.jsonl").queries


def test_the_best_settings_are_found_and_written(
    retriever: Retriever, queries: list[Query], sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    grid = {"passage_weight": (0.05, 5.0), "fact_top_k": (1, 5)}
    result = tune(retriever, queries, "hipporag2", grid=grid, metric="recall@2+recall@5", folds=3)
    gold, batch = Gold(retriever.index, queries), retriever.encode(queries)
    means = {}
    for weight in grid["passage_weight"]:
        for facts in grid["fact_top_k"]:
            changes = {"passage_weight": weight, "fact_top_k": facts}
            used = Retriever(retriever.index, retriever.config.model_copy(update=changes))
            recalls = gold.recalls(used.rank(batch, "hipporag2", top_k=gold.depth))
            means[weight, facts] = 50 * (recalls["recall@2"] + recalls["recall@5"]).mean()
    assert result["in_sample"] == pytest.approx(max(means.values()), abs=0.006)
    chosen = result["settings"]["passage_weight"], result["settings"]["fact_top_k"]
    assert means[chosen] == pytest.approx(max(means.values()))
    assert result["untuned"] == pytest.approx(means[0.05, 5], abs=0.006)
    assert result["out_of_fold"] <= result["in_sample"] + 0.01
    assert len(result["chosen_by_fold"]) == 3
    file = tmp_path / "tuned.yaml"
    write_tuned(result, file)
    assert f"out of fold {result['out_of_fold']}" in file.read_text(encoding="utf-8")
    report = evaluate_queries(sample_index, sample / "questions.jsonl", ["hipporag2"], config=file)
    assert report["config"]["fact_top_k"] == chosen[1]
    row = report["methods"]["hipporag2"]
    assert (row["recall@2"] + row["recall@5"]) / 2 == pytest.approx(result["in_sample"], abs=0.02)


def test_equal_settings_leave_things_as_they_are(retriever: Retriever, queries: list[Query]) -> None:
    grid = {"epsilon": (1e-9, None, 1e-10)}
    assert tune(retriever, queries, "dense", grid=grid, folds=2)["settings"] == {"epsilon": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fact_top_k", "expected retrieve.key=value"),
        ("magic=1,2", "'magic' is no setting"),
        ("top_k=1", "no setting"),
        ("fact_top_k=[3,5]", "not valid YAML"),
    ],
)
def test_a_malformed_grid_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_grid([text])
    assert parse_grid(["retrieve.fact_top_k=3,5"]) == {"fact_top_k": (3, 5)}
    with pytest.raises(UsageError, match="fact_top_k is there twice"):
        parse_grid(["fact_top_k=3", "retrieve.fact_top_k=5"])


def test_what_cannot_be_tuned_is_refused(retriever: Retriever, queries: list[Query]) -> None:
    with pytest.raises(UsageError, match="13 folds of 12 questions"):
        tune(retriever, queries, "dense", folds=13)
    with pytest.raises(UsageError, match="no metric 'magic'"):
        tune(retriever, queries, "dense", grid={"fact_top_k": (5,)}, metric="magic")
    with pytest.raises(UsageError, match="fact_top_k"):
        tune(retriever, queries, "dense", grid={"fact_top_k": (0,)})
    lost = [replace(queries[0], gold=("nowhere",)), *queries[1:]]
    with pytest.raises(InputError, match="'nowhere'"):
        tune(retriever, lost, "dense", grid={"fact_top_k": (5,)})
    assert (
        tune(retriever, lost, "dense", grid={"fact_top_k": (5,)}, allow_missing=True)["gold_not_in_index"]
        == 1
    )


def test_gold_that_is_not_in_the_index_is_refused_by_name_unless_allowed(
    retriever: Retriever, sample_index: Path, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    name = retriever.index.passages["passage_id"][0].as_py()
    file.write_text(f'{{"question": "Who?", "gold": ["{name}", "nowhere", "never"]}}\n')
    with pytest.raises(InputError, match="2 of 3 gold passages are not in the index: 'nowhere', 'never'"):
        evaluate_queries(sample_index, file, ["dense"])
    report = evaluate_queries(sample_index, file, ["dense"], allow_missing=True)
    assert report["queries"]["gold_not_in_index"] == 2
    assert "2 of 3 gold passages are not in the index and count as never found" in markdown(report)
    with pytest.raises(UsageError, match="No method to measure was named; there are bm25, dense"):
        evaluate_queries(sample_index, file, [], allow_missing=True)
    assert np.max(report["methods"]["dense"]["curve"]) <= 33.4
