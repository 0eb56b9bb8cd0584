"""The whole job on the sample corpus: same bytes whatever happens, nothing lost, clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import structlog

from hippoindex.errors import ArtifactError, InputError, ThresholdError, UsageError
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import BuildResult, build_index
from hippoindex.pipeline.config import load_config

Digests = Callable[[Path], dict[str, str]]


def build(
    corpus: Path, output: Path, *overrides: str, overwrite: bool = False, **values: object
) -> BuildResult:
    config = load_config(
        overrides=overrides,
        corpus__path=[str(corpus)],
        output=str(output),
        **{"cluster__workers": 1, **values},
    )
    return build_index(config, overwrite=overwrite)


def write_corpus(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8"
    )
    return path


def passage(name: str, text: str) -> dict[str, str]:
    return {"id": name, "title": name.title(), "text": text}


FEW = [
    passage("mill", "Hester Vane built the Orrin Mill in Saint Orrin in 1802."),
    passage("vane", "Hester Vane was born in Port Calder and studied under Josiah Tremlett."),
    passage("calder", "Port Calder is a harbour town on the River Sele."),
]


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "few.jsonl", *FEW)


def test_an_index_holds_what_its_manifest_says(sample_index: Path, sample: Path) -> None:
    index = open_index(sample_index)
    index.verify()
    lines = (sample / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    assert index.passages["passage_id"].to_pylist() == [json.loads(line)["id"] for line in lines]
    counts = index.manifest.counts
    assert counts.passages == index.n_passages == len(index.vectors("passages")) == 60
    assert counts.phrases == index.phrases.num_rows == len(index.vectors("phrases"))
    assert counts.facts == index.facts.num_rows == len(index.vectors("facts"))
    assert counts.synonym_edges == index.synonyms.num_rows > 0
    assert counts.graph_edges == index.graph.n_edges
    assert index.graph.n_nodes == counts.phrases + counts.passages
    for kind in ("passages", "phrases", "facts"):
        np.testing.assert_allclose(
            np.linalg.norm(index.vectors(kind).astype(np.float64), axis=1), 1, atol=2e-3
        )
    assert index.synonyms["cosine"].to_numpy().min() >= np.float32(0.8)
    assert (sample_index / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_bytes_depend_neither_on_shards_nor_workers_nor_the_executor(
    sample: Path, sample_index: Path, tmp_path: Path, digests: Digests
) -> None:
    corpus = sample / "passages.jsonl"
    small = ("cluster.shard_passages=7", "cluster.shard_texts=100")
    one = build(corpus, tmp_path / "one", *small, cluster__executor="local", cluster__workers=1)
    two = build(corpus, tmp_path / "two", *small, cluster__executor="local", cluster__workers=2)
    ray = build(corpus, tmp_path / "ray", *small, cluster__executor="ray", cluster__workers=2)
    assert digests(one.path) == digests(two.path) == digests(ray.path)
    assert ray.stats["executor"] == "ray"
    assert two.stats["workers"] == 2
    assert digests(one.path) == digests(sample_index), "the size of a shard must not matter either"


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    sample: Path, tmp_path: Path, digests: Digests
) -> None:
    corpus = sample / "passages.jsonl"
    settings = ["cluster.shard_passages=4", "cluster.shard_texts=64"]
    expected = digests(build(corpus, tmp_path / "whole", *settings).path)
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--corpus", corpus, "--output", output]
    command += [part for setting in settings for part in ("--set", setting)] + ["--workers", "2"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, start_new_session=True)
    work = tmp_path / "killed.work"
    deadline = time.monotonic() + 120
    while len(list(work.glob("extract/done/*.json"))) < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    done = {file: file.stat().st_mtime_ns for file in work.glob("extract/done/*.json")}
    build(corpus, output, *settings)
    assert done, "the killed run had finished shards"
    assert digests(output) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "killed"}, "nothing is left behind"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_workers_and_leaves_no_half_index(
    sample: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    output = tmp_path / "index"
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--corpus", sample / "passages.jsonl"]
    command += ["--output", output, "--set", "cluster.shard_passages=4", "--workers", "2"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "index.work").glob("extract/done/*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Interrupted. What was done is kept" in errors
    assert "Traceback" not in errors
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert [path.name for path in tmp_path.iterdir()] == ["index.work"]


def test_what_a_failed_run_did_is_not_done_again(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "long.jsonl", *FEW, passage("long", "Port Calder has a long pier. " * 20)
    )
    limit = "extract.max_passage_chars=300"
    with pytest.raises(ThresholdError, match=r"1 of 4 passages were quarantined \(25.0%\)") as failure:
        build(corpus, tmp_path / "index", limit)
    assert failure.value.exit_code == 1
    assert not (tmp_path / "index").exists()
    assert (tmp_path / "index.work" / "quarantine.parquet").is_file()
    with structlog.testing.capture_logs() as logs:
        result = build(corpus, tmp_path / "index", limit, max_quarantine_rate=0.5)
    assert [line["stage"] for line in logs if line["event"] == "shards found done"] == ["extract"]
    counts = result.manifest.counts
    assert (counts.passages, counts.quarantined_passages, counts.passages_made) == (3, 1, 4)
    assert open_index(result.path).quarantine["row_id"].to_pylist() == ["long"]


def test_every_record_is_in_the_index_or_in_quarantine_with_a_reason(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", *FEW, FEW[0], "{broken", [1, 2], passage("empty", "  "))
    result = build(corpus, tmp_path / "index", max_quarantine_rate=1.0)
    counts = result.manifest.counts
    assert (counts.records, counts.documents, counts.duplicates, counts.quarantined_records) == (7, 3, 1, 3)
    rows = open_index(result.path).quarantine.to_pylist()
    assert [(row["source"], row["line"], row["kind"]) for row in rows] == [
        ("c.jsonl", line, "passage") for line in (5, 6, 7)
    ]
    assert all(row["reason"] for row in rows)


def test_documents_are_chunked_and_their_ids_kept_as_parents(tmp_path: Path) -> None:
    text = "The Sele rises near Aldenmoor. It passes Saint Orrin. It reaches the sea at Port Calder. " * 4
    corpus = write_corpus(tmp_path / "c.jsonl", *FEW, passage("sele", text))
    result = build(corpus, tmp_path / "index", "chunk.max_tokens=32", "chunk.overlap_tokens=8")
    passages = open_index(result.path).passages.to_pylist()
    chunks = [row for row in passages if row["doc_id"] == "sele"]
    assert [row["passage_id"] for row in chunks] == [f"sele#{n}" for n in range(len(chunks))]
    assert len(chunks) > 2
    assert all(row["text"] == text[row["span_start"] : row["span_end"]] for row in chunks)
    assert {row["passage_id"] for row in passages} >= {"mill", "vane", "calder"}
    counts = result.manifest.counts
    assert (counts.documents, counts.passages_made, counts.passages) == (4, len(passages), len(passages))


def test_a_chunk_may_not_take_the_id_of_a_document(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "c.jsonl", passage("a#0", "Short."), passage("a", "The Sele is long. " * 20)
    )
    with pytest.raises(InputError, match="The id a#0 of a chunk is also a document's"):
        build(corpus, tmp_path / "index", "chunk.max_tokens=16")


def test_imported_extraction_of_another_corpus_is_refused(tmp_path: Path, few: Path) -> None:
    results = tmp_path / "openie.json"
    results.write_text(
        json.dumps({"docs": [{"passage": "Elsewhere", "extracted_entities": [], "extracted_triples": []}]})
    )
    with pytest.raises(InputError, match="none of its passages is in the corpus"):
        build(few, tmp_path / "index", "extract.engine=import", f"extract.path={results}")


def test_imported_extraction_counts_what_it_rejects_and_misses(tmp_path: Path, few: Path) -> None:
    results = tmp_path / "openie.json"
    triples = [
        ["Hester Vane", "built", "Orrin Mill"],
        ["Orrin Mill", "in"],
        ["Orrin Mill", "is", None],
        ["!", "is", "?"],
    ]
    docs = [
        {
            "passage": f"Mill\n{FEW[0]['text']}",
            "extracted_entities": ["Hester Vane"],
            "extracted_triples": triples,
        }
    ]
    results.write_text(json.dumps({"docs": docs}))
    result = build(few, tmp_path / "index", "extract.engine=import", f"extract.path={results}")
    counts = result.manifest.counts
    assert (counts.triples_extracted, counts.triples, counts.triples_rejected) == (4, 1, 3)
    assert (counts.passages, counts.passages_without_extraction) == (3, 2)
    stages = open_index(result.path).quarantine["stage"].to_pylist()
    assert sorted(stages) == ["extract", "extract", "resolve"]


def test_output_that_is_taken_is_refused_and_an_index_only_replaced_on_demand(
    tmp_path: Path, few: Path
) -> None:
    output = build(few, tmp_path / "index").path
    fewer = write_corpus(tmp_path / "fewer.jsonl", *FEW[:2])
    with pytest.raises(
        UsageError, match=r"is an index already, made of another corpus \(3 documents, now 2\)"
    ):
        build(fewer, output)
    with pytest.raises(UsageError, match=r"is an index already, made with other settings \(synonyms\)"):
        build(few, output, "synonyms.threshold=0.9")
    assert build(fewer, output, overwrite=True).manifest.counts.passages == 2
    other = tmp_path / "notes"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="neither empty nor an index"):
        build(few, other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "precious"


def test_a_rerun_of_a_finished_run_does_nothing(tmp_path: Path, few: Path) -> None:
    output = tmp_path / "index"
    made = build(few, output)
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    left = tmp_path / "index.work" / "extract" / "done"  # killed between its last two steps
    left.mkdir(parents=True)
    (left / "0.json").write_text("{}")
    again = build(few, output)
    assert (made.changed, again.changed) == (True, False)
    assert again.stats == made.stats
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"few.jsonl", "index"}


def test_a_changed_missing_or_foreign_file_is_found(tmp_path: Path, few: Path) -> None:
    output = build(few, tmp_path / "index").path
    weights = output / "graph" / "weights.npy"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=r"graph/weights\.npy has changed"):
        open_index(output).verify()
    weights.write_bytes(good[:-4])
    with pytest.raises(ArtifactError, match=r"weights\.npy is missing or does not have"):
        open_index(output)
    weights.write_bytes(good)
    (output / "stray.txt").write_text("?")
    with pytest.raises(ArtifactError, match=r"stray\.txt is not in the manifest"):
        open_index(output).verify()
    (output / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="is not an index"):
        open_index(output)


def test_an_index_without_any_phrase_still_answers(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", passage("", "grey sky"), {"id": "b", "text": "green field"})
    results = tmp_path / "openie.json"
    docs = [{"passage": "grey sky", "extracted_entities": [], "extracted_triples": []}]
    results.write_text(json.dumps({"docs": docs}))
    result = build(corpus, tmp_path / "index", "extract.engine=import", f"extract.path={results}")
    assert result.manifest.counts.phrases == 0
    from hippoindex.pipeline.answer import answer_queries

    questions = write_corpus(tmp_path / "q.jsonl", {"id": "1", "question": "green field?", "gold": ["b"]})
    for method in ("bm25", "dense", "hipporag1", "hipporag2", "hippoindex"):
        answers = answer_queries(result.path, questions, method=method)
        assert answers.records()[0]["passages"][0]["passage_id"] == "b", method


def test_a_run_that_could_not_begin_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        build(tmp_path / "nowhere.jsonl", tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_holds_the_measured_recall_of_the_synonym_join(sample_index: Path) -> None:
    index = open_index(sample_index)
    report = index.manifest.stages["synonyms"]
    assert report["method"] == "exact"
    assert report["recall"]["estimate"] == 1.0
    assert report["recall"]["pairs"] == index.synonyms.num_rows > 10  # of so few phrases all are sampled
    stats = json.loads((sample_index / "stats.json").read_text(encoding="utf-8"))
    assert stats["synonyms"]["estimate_s"] > 0
    assert stats["synonyms"]["seconds_s"] > 0
    assert "100.0%" in (sample_index / "report.html").read_text(encoding="utf-8")


def test_too_low_a_recall_fails_a_strict_run_that_has_published(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = sys.modules["hippoindex.kernels.simjoin.ivf"]
    monkeypatch.setattr(lists, "_probes_needed", lambda *_: lists._Needed(1, 1, 0))  # too few
    settings = load_config(
        overrides=["synonyms.method=ivf", "synonyms.threshold=0.5", "synonyms.target_recall=0.999"],
        corpus__path=[str(sample / "passages.jsonl")],
        output=str(tmp_path / "index"),
        cluster__workers=1,
    )
    with pytest.raises(
        ThresholdError, match=r"is built, but only \d+\.\d% .*target_recall is 99\.9%"
    ) as info:
        build_index(settings, strict=True)
    assert info.value.exit_code == 1
    index = open_index(tmp_path / "index")
    index.verify()
    assert index.manifest.stages["synonyms"]["recall"]["estimate"] < 0.999
    assert "less than the target" in (index.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_of_two_runs_on_one_output_one_wins_and_the_other_says_so(
    sample: Path, sample_index: Path, tmp_path: Path, digests: Digests
) -> None:
    output = tmp_path / "index"
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--corpus", sample / "passages.jsonl"]
    command += ["--output", output, "--set", "cluster.shard_passages=4", "--workers", "1"]
    first = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "index.work").glob("extract/done/*.json")):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # so that it is still there when the other one looks
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            subprocess.run, list(map(str, command)), capture_output=True, text=True, check=False
        )
        time.sleep(4)
        first.send_signal(signal.SIGCONT)
        second = other.result()
    assert first.wait() == 0
    assert second.returncode == 3
    assert f"pid {first.pid}" in second.stderr
    assert "Another run works on this output" in second.stderr
    assert digests(output) == digests(sample_index)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
