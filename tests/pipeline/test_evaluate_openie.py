"""Engines measured the whole way: files in, report out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hippoindex.cli import app
from hippoindex.errors import InputError, ThresholdError, UsageError
from hippoindex.pipeline.config import CorpusConfig, ExtractConfig
from hippoindex.pipeline.evaluate_openie import evaluate_openie, read_carb
from hippoindex.pipeline.openie_quality import OpenTuple

SENTENCES = ("Ada Stone left Oslo .", "Bo Lind sang old songs .", "It rained .")
GOLD = (
    (SENTENCES[0], "left", "Ada Stone", "Oslo"),
    (SENTENCES[1], "sang", "Bo Lind", "old songs", "C: The paper said"),
    (SENTENCES[2], "rained", "It", "", "all day"),
)


@pytest.fixture
def gold(tmp_path: Path) -> Path:
    path = tmp_path / "gold.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in GOLD), encoding="utf-8")
    return path


def write_results(path: Path, results: dict[str, tuple[list[str], list[list[str]]]]) -> Path:
    docs = [
        {"passage": text, "extracted_entities": entities, "extracted_triples": triples}
        for text, (entities, triples) in results.items()
    ]
    path.write_text(json.dumps({"docs": docs}), encoding="utf-8")
    return path


def imported(path: Path, **settings: Any) -> ExtractConfig:
    return ExtractConfig(engine="import", path=str(path), **settings)


def test_gold_tuples_are_read_by_sentence(gold: Path) -> None:
    assert read_carb(gold) == {
        SENTENCES[0]: [OpenTuple("left", ("Ada Stone", "Oslo"))],
        SENTENCES[1]: [OpenTuple("sang", ("Bo Lind", "old songs"))],
        SENTENCES[2]: [OpenTuple("rained", ("It", "all day"))],
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a sentence\tleft\tAnn\nanother sentence\tleft\n", "gold.tsv:2: expected sentence"),
        (b"a sentence\t\tAnn\tRome\n", "gold.tsv:1: expected sentence"),
        (b"\n\n", "holds no gold tuple"),
        (b"\xff\xfe\t", "is not UTF-8"),
    ],
)
def test_a_gold_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "gold.tsv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_carb(path)


def test_any_engine_is_scored_and_everything_is_counted(gold: Path, tmp_path: Path) -> None:
    triples = [["Ada Stone", "left", "Oslo"], ["Ada Stone", "left"]]
    results = {SENTENCES[0]: (["Ada Stone"], triples), SENTENCES[1]: ([], [["Bo Lind", "hummed", "songs"]])}
    file = write_results(tmp_path / "results.json", results)
    carb = evaluate_openie(imported(file), gold=gold)["carb"]
    assert (carb["precision"], carb["recall"]) == (0.5, pytest.approx(1 / 3, abs=1e-4))
    assert (carb["sentences"], carb["gold_tuples"], carb["extractions"]) == (3, 3, 2)
    assert (carb["triples_rejected"], carb["passages_without_extraction"]) == (1, 1)
    assert carb["passages_quarantined"] == 0


def test_a_sentence_that_fails_counts_as_not_found(gold: Path, tmp_path: Path) -> None:
    file = write_results(tmp_path / "results.json", {SENTENCES[0]: ([], [["Ada Stone", "left", "Oslo"]])})
    carb = evaluate_openie(imported(file, max_passage_chars=22), gold=gold)["carb"]
    assert (carb["passages_quarantined"], carb["passages_without_extraction"]) == (1, 1)
    assert (carb["precision"], carb["recall"]) == (1.0, pytest.approx(1 / 3, abs=1e-4))


def test_the_rules_in_both_ways(gold: Path) -> None:
    whole = evaluate_openie(ExtractConfig(arguments="clauses"), gold=gold, limit=2)
    assert whole["extract"] == {"engine": "rules", "arguments": "clauses"}
    assert (whole["carb"]["sentences"], whole["carb"]["f1"]) == (2, 1.0)


def test_agreement_is_over_the_passages_that_both_have(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": s, "title": "", "text": s}) + "\n" for s in SENTENCES))
    mine = {SENTENCES[0]: (["Oslo"], [["Ada Stone", "left", "Oslo"]]), SENTENCES[1]: ([], [])}
    other = {SENTENCES[0]: (["Ada Stone"], [["Ada Stone", "quit", "Norway"]]), SENTENCES[2]: (["It"], [])}
    report = evaluate_openie(
        imported(write_results(tmp_path / "mine.json", mine)),
        corpus=CorpusConfig(path=(str(corpus),)),
        reference=write_results(tmp_path / "other.json", other),
    )["agreement"]
    assert (report["passages"], report["passages_compared"]) == (3, 1)
    assert report["arguments"] == {"total": 2, "found": 1, "share": 0.5}
    assert report["entities"] == {"total": 1, "found": 1, "share": 1.0}
    assert report["pairs"]["found"] == 0


def test_what_is_measured_must_be_given(gold: Path) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        evaluate_openie(ExtractConfig())
    with pytest.raises(UsageError, match=r"--corpus.*--reference"):
        evaluate_openie(ExtractConfig(), gold=gold, reference=gold)


def test_a_reference_on_other_passages_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "text": "Quite another text."}) + "\n")
    file = write_results(tmp_path / "results.json", {SENTENCES[0]: ([], [])})
    with pytest.raises(InputError, match="none of the passages"):
        evaluate_openie(imported(file), corpus=CorpusConfig(path=(str(corpus),)), reference=file)


def test_the_command_prints_tables_writes_json_and_checks_a_threshold(gold: Path, tmp_path: Path) -> None:
    file = write_results(tmp_path / "results.json", {SENTENCES[0]: ([], [["Ada Stone", "left", "Oslo"]])})
    engine = ["--set", "extract.engine=import", "--set", f"extract.path={file}"]
    command = ["evaluate-openie", "--gold", str(gold), *engine, "--output", str(tmp_path / "report.json")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert [word for word in ("100.0", "33.3", "same confidence") if word not in shown.stdout] == []
    assert json.loads((tmp_path / "report.json").read_text())["carb"]["f1"] == 0.5
    missed = CliRunner().invoke(app, [*command, "--require-f1", "51"])
    assert isinstance(missed.exception, ThresholdError)
    assert CliRunner().invoke(app, [*command, "--require-f1", "50"]).exit_code == 0


@pytest.mark.slow
def test_carb_dev(data_dir: Path) -> None:
    gold = data_dir / "carb_dev" / "gold.tsv"
    names = evaluate_openie(ExtractConfig(), gold=gold)["carb"]
    clauses = evaluate_openie(ExtractConfig(arguments="clauses"), gold=gold)["carb"]
    assert (names["sentences"], names["gold_tuples"]) == (638, 2548)
    assert names["f1"] >= 0.27
    assert clauses["f1"] >= 0.55
