"""The command line as a user meets it: processes, exit codes, what is printed and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hippoindex import cli

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("command", "mentions"),
    [
        ([], ["index", "retrieve", "evaluate", "inspect", "quickstart", "models", "Exit codes"]),
        (
            ["index"],
            ["--corpus", "--output", "--config", "--set", "--executor", "--address", "--overwrite", "--json"],
        ),
        (["append"], ["--executor", "--workers", "--address"]),
        (["delete"], ["--executor", "--workers", "--address"]),
        (["retrieve"], ["--index", "--queries", "--output", "--method", "--top-k", "--explain", "--address"]),
        (["retrieve"], ["[default: the index's]", "retrieve.damping=0.7"]),
        (["evaluate"], ["--methods", "hipporag2", "--require", "--output", "--json"]),
        (["tune"], ["--grid", "[default: passage_weight", "--folds", "--allow-missing"]),
        (["evaluate-openie"], ["--gold", "--corpus", "--reference", "--require-f1", "--output", "--json"]),
        (["inspect"], ["--phrase", "--passage", "--verify"]),
        (["models", "fetch"], ["--json"]),
    ],
)
def test_help_names_every_option(run_cli: Run, command: list[str], mentions: list[str]) -> None:
    done = run_cli(*command, "--help")
    assert done.returncode == 0
    assert [word for word in mentions if word not in done.stdout] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["index", "--output", "x"], "give --corpus PATH"),
        (["index", "--corpus", "nowhere.jsonl", "--output", "x"], "nowhere.jsonl"),
        (
            ["index", "--corpus", "a", "--output", "x", "--set", "synonims.threshold=1"],
            "unknown key synonims",
        ),
        (
            ["index", "--corpus", "a", "--output", "x", "--set", "synonyms.treshold=1"],
            "did you mean 'threshold'",
        ),
        (["index", "--corpus", "a", "--output", "x", "--set", "synonyms.threshold=7"], "synonyms.threshold"),
        (["index", "--corpus", "a", "--output", "x", "--set", "graph"], "expected section.key=value"),
        (["index", "--corpus", "a", "--output", "x", "--config", "none.yaml"], "none.yaml"),
        (["index", "--speed", "high"], "No such option"),
        (["retrieve", "--index", "nowhere", "--queries", "q.jsonl"], "nowhere is not an index"),
        (["inspect", "nowhere"], "nowhere is not an index"),
        (["evaluate", "--index", "i", "--queries", "q", "--require", "recall=1"], "METHOD:METRIC>=PERCENT"),
        (["evaluate", "--index", "i", "--queries", "q", "--require", "a:b>=1.2.3"], "METHOD:METRIC>=PERCENT"),
        (["evaluate", "--index", "i", "--queries", "q", "--output", "r.md"], "call it r.json"),
        (["retrieve", "--index", "i", "--queries", "q", "--output", "no/x.jsonl"], "there is no folder no"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(
    run_cli: Run, arguments: list[str], message: str
) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unforeseen_error_is_no_missed_threshold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", lambda: {}["nothing"])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 3
    assert "KeyError: 'nothing'" in capsys.readouterr().err


def test_index_prints_json_and_leaves_nothing_but_the_index(
    run_cli: Run, tmp_path: Path, sample: Path
) -> None:
    output = tmp_path / "index"
    done = run_cli("index", "--corpus", sample / "passages.jsonl", "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["counts"]["passages"] == 60
    assert printed["stats"]["peak_memory_bytes"] > 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_retrieve_writes_json_lines_and_parquet(
    run_cli: Run, sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    common = ["retrieve", "--index", sample_index, "--queries", sample / "questions.jsonl"]
    lines = tmp_path / "out.jsonl"
    drawings = tmp_path / "drawings"
    done = run_cli(*common, "--output", lines, "--top-k", 3, "--explain", "--svg", drawings)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in sorted(drawings.iterdir())] == [f"{n:04d}.svg" for n in range(1, 13)]
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    questions = [json.loads(line) for line in (sample / "questions.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == [question["id"] for question in questions]
    assert all(len(record["passages"]) == 3 for record in records)
    assert {record["method"] for record in records} == {"hippoindex"}
    scores = [[passage["score"] for passage in record["passages"]] for record in records]
    assert all(row == sorted(row, reverse=True) for row in scores)
    explanation = records[0]["passages"][0]["explanation"]
    assert explanation["score"] == pytest.approx(scores[0][0], rel=1e-4)
    assert sum(explanation["terms"].values()) == pytest.approx(explanation["score"])
    steps = explanation["paths"][0]["steps"]
    assert steps[0]["by"].startswith("seed: ")
    assert steps[-1]["node"] == records[0]["passages"][0]["passage_id"]
    table = tmp_path / "out.parquet"
    assert run_cli(*common, "--output", table, "--method", "dense").returncode == 0
    assert pq.read_table(table).num_rows == 10 * len(questions)


def test_retrieve_prints_tables_or_json(run_cli: Run, sample_index: Path, sample: Path) -> None:
    common = ["retrieve", "--index", sample_index, "--queries", sample / "questions.jsonl", "--top-k", 2]
    shown = run_cli(*common)
    assert "Tamsin Observatory" in shown.stdout
    assert "gold" in shown.stdout
    assert len(json.loads(run_cli(*common, "--json").stdout)["answers"]) == 12
    unknown = run_cli(*common, "--method", "magic")
    assert unknown.returncode == 2
    assert "there are bm25, dense, hipporag1, hipporag2, hippoindex" in unknown.stderr
    unexplained = run_cli(*common, "--method", "dense", "--explain")
    assert unexplained.returncode == 2
    assert "does not walk the whole graph" in unexplained.stderr
    late = run_cli(*common, "--set", "synonyms.threshold=0.9")
    assert late.returncode == 2
    assert "only retrieve.* and reader.* can be set" in late.stderr


def test_evaluate_writes_the_report_and_checks_what_is_required(
    run_cli: Run, sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    common = ["evaluate", "--index", sample_index, "--queries", sample / "questions.jsonl"]
    output = tmp_path / "report.json"
    done = run_cli(*common, "--methods", "dense,hippoindex", "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["n"] == 12
    assert list(report["methods"]) == ["dense", "hippoindex"]
    for row in report["methods"].values():
        assert {"recall@2", "recall@5", "recall@10", "all_recall@2", "all_recall@5"} <= set(row)
        assert len(row["delta_recall@5"]) == 3
    assert report["methods"]["dense"]["delta_recall@5"] == [0, 0, 0]
    assert report["index"]["passages"] == 60
    met = run_cli(*common, "--methods", "hippoindex", "--require", "hippoindex:recall@10>=50", "--json")
    assert met.returncode == 0
    assert json.loads(met.stdout)["n"] == 12
    unmet = run_cli(*common, "--methods", "dense", "--require", "dense:recall@2>=100.1")
    assert unmet.returncode == 1
    assert "required 100.1" in unmet.stderr
    absent = run_cli(*common, "--methods", "dense", "--require", "dense:precision>=1")
    assert absent.returncode == 2


def test_inspect_shows_the_index_a_phrase_and_a_passage(run_cli: Run, sample_index: Path) -> None:
    overview = run_cli("inspect", sample_index, "--verify")
    assert overview.returncode == 0, overview.stderr
    assert "synonym edges" in overview.stdout
    manifest = json.loads(run_cli("inspect", sample_index, "--json").stdout)
    assert manifest["counts"]["passages"] == 60
    phrase = json.loads(run_cli("inspect", sample_index, "--phrase", "Tamsin Observatory", "--json").stdout)
    assert "tamsin-observatory" in phrase["passages"]
    assert phrase["facts"]
    passage = json.loads(run_cli("inspect", sample_index, "--passage", "margaret-ellwood", "--json").stdout)
    assert "margaret ellwood" in passage["phrases"]
    assert passage["title"] == "Margaret Ellwood"
    missing = run_cli("inspect", sample_index, "--phrase", "observatory")
    assert missing.returncode == 2
    assert "containing it: [" in missing.stderr
    assert run_cli("inspect", sample_index, "--phrase", "a", "--passage", "b").returncode == 2


def test_a_ray_executor_without_ray_names_the_pip_command(run_cli: Run, sample: Path, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('No module named ray')")
    done = run_cli(
        "index",
        *("--corpus", sample / "passages.jsonl", "--output", tmp_path / "index", "--executor", "ray"),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'hippoindex[ray]'" in done.stderr
