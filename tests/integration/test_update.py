"""Append and delete make the index of a full build over the changed corpus, and nothing half."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.precompute import refresh
from hippoindex.pipeline.update import append, delete

Digests = Callable[[Path], dict[str, str]]
LINEAGE = {"manifest.json", "SHA256SUMS"}
"""Files that say from which index another was made."""


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def build(corpus: list[str], output: Path, *overrides: str) -> Path:
    values = {
        "corpus__path": corpus,
        "output": str(output),
        "cluster__workers": 1,
        "max_quarantine_rate": 1.0,
    }
    build_index(load_config(overrides=overrides, **values))
    return output


@pytest.fixture(scope="module")
def records(sample: Path) -> list[dict[str, Any]]:
    lines = (sample / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][:14]


@pytest.fixture
def data_of(digests: Digests) -> Digests:
    return lambda index: {name: sha for name, sha in digests(index).items() if name not in LINEAGE}


TRICKY = ["extract.max_passage_chars=600", "synonyms.max_neighbors=2", "synonyms.threshold=0.55"]
"""Some passages are too long, and the cap of neighbours binds."""


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], TRICKY, ["chunk.max_tokens=48", "chunk.overlap_tokens=8"]])
def test_appending_gives_the_bytes_of_a_full_build(
    tmp_path: Path, records: list[dict[str, Any]], data_of: Digests, overrides: list[str]
) -> None:
    records = [*records, {"id": "long", "text": "Hester Vane built the Orrin Mill. " * 40}]
    parts = [records[:9], [records[2], *records[9:12], {"id": "empty", "text": " "}], records[12:]]
    paths = [write(tmp_path / f"{number}.jsonl", part) for number, part in enumerate(parts)]
    whole = build(paths, tmp_path / "whole", *overrides)
    grown = build(paths[:1], tmp_path / "grown", *overrides)
    for path in paths[1:]:
        assert append(grown, [path], cluster__workers=1, max_quarantine_rate=1.0) is not None
    assert data_of(grown) == data_of(whole)
    one, other = open_index(grown).manifest, open_index(whole).manifest
    assert one.counts == other.counts
    assert one.corpus_fingerprint == other.corpus_fingerprint
    assert one.config == other.config
    same = one.stages.keys() - {"synonyms"}
    assert {name: one.stages[name] for name in same} == {name: other.stages[name] for name in same}
    assert one.parent
    assert other.parent is None
    assert not (tmp_path / "grown.work").exists()


@pytest.mark.slow
def test_synonym_weights_do_not_grow_with_appends(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    settings = ["synonyms.threshold=0.6", "precompute.enabled=false", "graph.memory_bytes=1048576"]
    paths = [write(tmp_path / f"{number}.jsonl", records[2 * number :][:2]) for number in range(5)]
    whole = open_index(build(paths, tmp_path / "whole", *settings))
    grown = build(paths[:1], tmp_path / "grown", *settings)
    for path in paths[1:]:
        assert append(grown, [path], cluster__workers=1) is not None
    assert whole.manifest.counts.synonym_edges > 5
    for name in ("indptr", "indices", "weights"):
        assert np.array_equal(getattr(open_index(grown).graph, name), getattr(whole.graph, name))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [TRICKY, ["chunk.max_tokens=48", "chunk.overlap_tokens=8"]])
def test_deleting_gives_the_bytes_of_a_build_over_the_rest(
    tmp_path: Path, records: list[dict[str, Any]], data_of: Digests, overrides: list[str]
) -> None:
    long = {"id": "long", "text": "Hester Vane built the Orrin Mill. " * 40}
    everything = [records[0], long, *records[1:], records[5], records[3]]
    gone = {records[3]["id"], records[7]["id"], "long"}
    corpus = write(tmp_path / "all.jsonl", everything)
    rest = write(tmp_path / "rest.jsonl", [record for record in everything if record["id"] not in gone])
    shrunk = build([corpus], tmp_path / "shrunk", *overrides)
    fresh = build([rest], tmp_path / "fresh", *overrides)
    delete(shrunk, gone, cluster__workers=1)
    assert data_of(shrunk) == data_of(fresh)
    one, other = open_index(shrunk).manifest, open_index(fresh).manifest
    assert one.counts == other.counts
    assert one.corpus_fingerprint == other.corpus_fingerprint


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("halves")
    first, second = write(folder / "a.jsonl", records[:6]), write(folder / "b.jsonl", records[6:9])
    return build([first], folder / "index"), first, second


def copy_of(index: Path, target: Path) -> Path:
    shutil.copytree(index, target)
    return target


def test_what_is_in_the_index_already_changes_nothing(
    tmp_path: Path, halves: tuple[Path, str, str], digests: Digests
) -> None:
    index = copy_of(halves[0], tmp_path / "index")
    before = digests(index)
    assert append(index, [halves[1]], cluster__workers=1) is None
    assert digests(index) == before
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_deleting_what_was_appended_leaves_no_trace(
    tmp_path: Path, halves: tuple[Path, str, str], data_of: Digests, records: list[dict[str, Any]]
) -> None:
    index = copy_of(halves[0], tmp_path / "index")
    before, old = data_of(index), open_index(index)
    graph, text = old.graph, old.passages["text"].to_pylist()
    weights = np.array(graph.weights)
    append(index, [halves[2]], cluster__workers=1)
    assert open_index(index).n_passages == 9
    assert old.passages["text"].to_pylist() == text  # who had it open keeps the old one
    assert np.array_equal(graph.weights, weights)
    delete(index, [record["id"] for record in records[6:9]], cluster__workers=1)
    after = data_of(index)
    files = open_index(index).manifest.counts.files
    assert files == 2  # a deleted document was read all the same
    assert after == before


def test_without_precompute_the_pieces_are_missing_until_they_are_made(
    tmp_path: Path, halves: tuple[Path, str, str], data_of: Digests
) -> None:
    index, other = copy_of(halves[0], tmp_path / "index"), copy_of(halves[0], tmp_path / "other")
    append(index, [halves[2]], precompute=False, cluster__workers=1)
    assert open_index(index).precomputed_damping is None
    assert not (index / "ppr").exists()
    refresh(index)
    append(other, [halves[2]], cluster__workers=1)
    assert data_of(index) == data_of(other)
    assert open_index(index).manifest.config == open_index(other).manifest.config


def test_what_cannot_be_appended_or_deleted_is_refused(
    tmp_path: Path, halves: tuple[Path, str, str], records: list[dict[str, Any]], digests: Digests
) -> None:
    index = halves[0]
    before = digests(index)
    changed = write(tmp_path / "changed.jsonl", [{**records[0], "text": "Something else."}])
    with pytest.raises(InputError, match="already belongs to another title or text, in the index"):
        append(index, [changed], cluster__workers=1)
    with pytest.raises(UsageError, match=r"synonyms.threshold=0.9: an index keeps the settings"):
        append(index, [halves[2]], ["synonyms.threshold=0.9"], cluster__workers=1)
    with pytest.raises(UsageError, match=r"1 ids are not those of documents of .*: 'nobody'"):
        delete(index, ["nobody", records[0]["id"]], cluster__workers=1)
    with pytest.raises(UsageError, match="No document would be left"):
        delete(index, [record["id"] for record in records[:6]], cluster__workers=1)
    with pytest.raises(UsageError, match="nothing to delete"):
        delete(index, [], cluster__workers=1)
    assert digests(index) == before


@pytest.mark.slow
def test_lists_are_kept_for_appends_and_deletions(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    lists = ["synonyms.method=ivf", "synonyms.threshold=0.5", "synonyms.target_recall=0.5"]
    first, second = write(tmp_path / "a.jsonl", records[:10]), write(tmp_path / "b.jsonl", records[10:])
    index = build([first], tmp_path / "index", *lists)
    assert {path.stem for path in (index / "lists").iterdir()} == {"axes", "centroids", "owner", "sketches"}
    append(index, [second], cluster__workers=1)
    delete(index, [records[0]["id"]], cluster__workers=1)
    opened = open_index(index)
    opened.verify()
    kept = opened.synonym_lists
    assert kept is not None
    assert len(kept.owner) == len(kept.sketches) == opened.n_phrases
    rest = write(tmp_path / "rest.jsonl", records[1:])
    exact = open_index(build([rest], tmp_path / "exact", "synonyms.method=exact", lists[1]))
    assert opened.phrases.equals(exact.phrases)
    found, expected = (
        {(row["phrase_id"], row["other_id"]) for row in one.synonyms.to_pylist()} for one in (opened, exact)
    )
    assert found <= expected
    assert len(found) >= 0.4 * len(expected)


def test_another_version_of_a_stage_is_not_mixed_in(
    tmp_path: Path, halves: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = copy_of(halves[0], tmp_path / "index")
    monkeypatch.setattr("hippoindex.pipeline.resolve.ResolveStage.version", 99)
    with pytest.raises(UsageError, match="Stage 'resolve' has version 99; the index was made with 1"):
        append(index, [halves[2]], cluster__workers=1)


@pytest.mark.slow
def test_the_commands_append_and_delete(
    tmp_path: Path,
    halves: tuple[Path, str, str],
    run_cli: Any,
    records: list[dict[str, Any]],
    data_of: Digests,
) -> None:
    index = copy_of(halves[0], tmp_path / "index")
    before = data_of(index)
    done = run_cli("append", "--index", index, "--corpus", halves[2], "--workers", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["passages"] == 9
    again = run_cli("append", "--index", index, "--corpus", halves[2], "--workers", 1)
    assert again.returncode == 0
    assert "nothing was changed" in again.stdout
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(record["id"] for record in records[6:9]) + "\n\n", encoding="utf-8")
    assert run_cli("delete", "--index", index, "--ids", ids, "--workers", 1).returncode == 0
    assert data_of(index) == before
    refused = run_cli("delete", "--index", index, "--ids", tmp_path / "none.txt")
    assert refused.returncode == 2
    assert "none.txt" in refused.stderr
