"""Opening an index with numpy and pyarrow alone, and manifests that must not be followed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hippoindex
from hippoindex.errors import ArtifactError, HippoIndexError, UsageError
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.artifact import open_index

TABLES = {
    "passages": [
        schemas.PASSAGE,
        {"passage_id": "sele", "doc_id": "sele", "title": "Sele", "text": "A river.", "span_start": 0},
        {"passage_id": "mill", "doc_id": "mill", "title": "", "text": "Grinds.", "span_start": 0},
    ],
    "phrases": [
        schemas.PHRASE,
        {"phrase_id": 5, "phrase": "mill", "passage_count": 1},
        {"phrase_id": 9, "phrase": "river", "passage_count": 1},
    ],
    "facts": [
        schemas.FACT,
        {
            "fact_id": 3,
            "subject_id": 5,
            "predicate": "by",
            "object_id": 9,
            "count": 1,
            "passage_ids": ["sele"],
        },
    ],
    "synonyms": [schemas.SYNONYM],
    "quarantine": [schemas.QUARANTINE],
}
ARRAYS = {
    "graph": {"indptr": np.array([0, 2, 4, 5, 6]), "weights": np.ones(6, dtype=np.float32)},
    "vectors": {"passages": np.eye(2, 4, dtype=np.float16), "facts": np.ones((1, 4), dtype=np.float16)},
}
COUNTS = dict.fromkeys(artifact.Counts.model_fields, 0)

Open = Callable[[Path], Any]
both_ways_to_open = pytest.mark.parametrize("open_it", [hippoindex.open, open_index])


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Write the least that a reader takes for an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, (schema, *rows) in TABLES.items():
        rows = [row | {"span_end": len(row["text"])} if "text" in row else row for row in rows]
        artifact.write_parquet(pa.Table.from_pylist(rows, schema=schema), folder / name)
    for name, arrays in ARRAYS.items():
        artifact.write_arrays(folder / name, **arrays)
    counts = artifact.Counts.model_validate(COUNTS | {"passages": 2, "phrases": 2, "passages_made": 2})
    fields = {"generator": "test", "corpus_fingerprint": "0", "parent": None, "config": {}, "stages": {}}
    artifact.write_manifest(folder, counts=counts, **fields)
    return folder


def change(index: Path, **values: object) -> None:
    file = index / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_object_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="hippoindex copy s3://bucket/index FOLDER"):
        hippoindex.open("s3://bucket/index")


def test_tables_and_arrays_have_the_names_of_the_specification(index: Path) -> None:
    opened = hippoindex.open(index)
    assert opened.tables == ["passages", "phrases", "facts", "synonyms", "quarantine"]
    assert opened.arrays == ["graph/indptr", "graph/weights", "vectors/facts", "vectors/passages"]
    assert opened.manifest["counts"]["phrases"] == 2
    for name, (schema, *_) in TABLES.items():
        assert opened.table(name).schema.equals(schema)
    assert opened.table("phrases", ["phrase"]).to_pydict() == {"phrase": ["mill", "river"]}
    assert opened.table("facts")["passage_ids"].to_pylist() == [["sele"]]
    vectors = opened.array("vectors/passages")
    assert isinstance(vectors, np.memmap)
    assert not vectors.flags.writeable
    np.testing.assert_array_equal(vectors, np.eye(2, 4))


def test_batches_are_the_table_in_its_order_over_all_parts(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "ROWS_PER_FILE", 3)
    rows = [{"phrase_id": n, "phrase": str(n), "passage_count": 1} for n in range(8)]
    for part in (index / "phrases").iterdir():
        part.unlink()
    (index / "phrases").rmdir()
    artifact.write_parquet(pa.Table.from_pylist(rows, schema=schemas.PHRASE), index / "phrases")
    old = artifact.parse_manifest(index, json.loads((index / "manifest.json").read_text()))
    artifact.write_manifest(index, **old.model_dump(exclude={"schema_version", "files"}))
    opened = hippoindex.open(index)
    batches = list(opened.batches("phrases", ["phrase_id"], rows=2))
    assert [batch.num_rows for batch in batches] == [2, 1, 2, 1, 2]
    assert pa.Table.from_batches(batches)["phrase_id"].to_pylist() == list(range(8))
    assert opened.table("phrases").to_pylist() == rows


def test_what_is_not_there_is_named_with_what_is(index: Path) -> None:
    opened = hippoindex.open(str(index))
    with pytest.raises(UsageError, match="has no table 'edges'; it has passages, phrases"):
        opened.table("edges")
    with pytest.raises(UsageError, match="has no array 'ppr/z'; it has graph/indptr"):
        opened.array("ppr/z")
    (index / "graph" / "stray.npy").write_bytes((index / "graph" / "indptr.npy").read_bytes())
    with pytest.raises(UsageError, match="has no array 'graph/stray'"):
        opened.array("graph/stray")


def test_only_numpy_and_pyarrow_are_loaded(index: Path) -> None:
    code = """
import sys, hippoindex
opened = hippoindex.open(sys.argv[1])
opened.table("phrases"), opened.array("vectors/passages").sum(), list(opened.batches("facts"))
known = {"hippoindex", "numpy", "pyarrow"} | set(sys.stdlib_module_names) | set(sys.builtin_module_names)
print(*sorted({name.partition(".")[0] for name in sys.modules} - known))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(index)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    heavy = {
        "numba",
        "scipy",
        "pydantic",
        "ray",
        "onnxruntime",
        "spacy",
        "structlog",
        "rich",
        "pandas",
        "xxhash",
    }
    assert heavy & set(done.stdout.split()) == set()
    assert "hippoindex" not in done.stdout


def test_importing_the_package_loads_neither() -> None:
    code = "import sys, hippoindex; print('numpy' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


@both_ways_to_open
def test_a_folder_without_a_manifest_is_no_index(open_it: Open, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is not an index: it has no manifest\.json"):
        open_it(tmp_path)


@both_ways_to_open
@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (2, "install a newer hippoindex"),
        (0, "it is damaged"),
        ("1", "it is damaged"),
        (True, "it is damaged"),
        (None, "it is damaged"),
    ],
)
def test_another_schema_version_is_refused(open_it: Open, version: object, advice: str, index: Path) -> None:
    change(index, schema_version=version)
    with pytest.raises(ArtifactError, match=rf"schema version {version}; this version reads 1: {advice}"):
        open_it(index)


@both_ways_to_open
@pytest.mark.parametrize(
    "name",
    [
        "../outside.npy",
        "graph/../../outside.npy",
        "graph/./indptr.npy",
        "graph//indptr.npy",
        "/etc/hostname",
        "graph\\indptr.npy",
        "C:indptr.npy",
        "C:/indptr.npy",
        ".hidden/indptr.npy",
        "graph/indptr.npy\n",
        "graph/",
        "",
        "graph/ind\0ptr.npy",
        "gräph/indptr.npy",
    ],
)
def test_paths_that_are_not_plain_are_refused(open_it: Open, name: str, index: Path) -> None:
    (index.parent / "outside.npy").write_bytes(b"secret")
    files = json.loads((index / "manifest.json").read_text())["files"]
    change(index, files=files | {name: {"bytes": 6, "sha256": "0" * 64}})
    with pytest.raises(ArtifactError, match="is no plain path inside the index"):
        open_it(index)


@both_ways_to_open
@pytest.mark.parametrize("linked", ["graph/indptr.npy", "graph", "manifest.json"])
def test_links_that_lead_out_of_the_index_are_refused(open_it: Open, linked: str, index: Path) -> None:
    outside = index.parent / "outside"
    (index / linked).rename(outside)
    (index / linked).symlink_to(outside)
    with pytest.raises(ArtifactError, match="is a link that leads out of the index"):
        open_it(index)


@both_ways_to_open
def test_a_loop_of_links_is_refused(open_it: Open, index: Path) -> None:
    (index / "graph" / "indptr.npy").unlink()
    (index / "graph" / "indptr.npy").symlink_to(index / "graph" / "indptr.npy")
    with pytest.raises(ArtifactError, match=r"indptr\.npy"):
        open_it(index)


@both_ways_to_open
def test_an_index_may_be_reached_through_a_link(open_it: Open, index: Path) -> None:
    link = index.parent / "latest"
    link.symlink_to(index)
    assert open_it(link).path == link


@both_ways_to_open
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1, "schema_version": 1, "files": {}}', "'schema_version' stands twice"),
        ('{"schema_version": 1, "files": {"a": {"bytes": 1}, "a": {"bytes": 2}}}', "'a' stands twice"),
        ('{"schema_version": 1, "files": {', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "schema version None"),
        ('{"schema_version": 1}', "it lists no files"),
        ('{"schema_version": 1, "files": ["a"]}', "it lists no files"),
        ('{"schema_version": 1, "files": {"a": 5}}', "does not say how many bytes a has"),
        ('{"schema_version": 1, "files": {"a": {"bytes": "5"}}}', "does not say how many bytes a has"),
        ('{"schema_version": 1, "files": {"a": {"bytes": 5}}}', "a"),
    ],
)
def test_a_manifest_that_is_none_is_refused(open_it: Open, text: str, message: str, index: Path) -> None:
    (index / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=message):
        open_it(index)


@both_ways_to_open
def test_a_manifest_that_is_not_utf8_is_refused(open_it: Open, index: Path) -> None:
    (index / "manifest.json").write_bytes(b'{"generator": "\xff"}')
    with pytest.raises(ArtifactError, match="is not valid JSON"):
        open_it(index)


@both_ways_to_open
def test_a_missing_or_shorter_file_is_refused(open_it: Open, index: Path) -> None:
    file = index / "vectors" / "passages.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"passages\.npy is missing or does not have \d+ bytes"):
        open_it(index)
    file.unlink()
    with pytest.raises(ArtifactError, match=r"passages\.npy is missing"):
        open_it(index)


def test_open_index_refuses_unknown_and_missing_fields(index: Path) -> None:
    change(index, colour="blue")
    with pytest.raises(HippoIndexError, match=r"is not a manifest of version 1(.|\n)*colour"):
        open_index(index)
