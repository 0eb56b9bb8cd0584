"""Every damage is found and named: bytes of any file, rows of any table, cells of any array."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from hippoindex.errors import ArtifactError
from hippoindex.pipeline import artifact, schemas, verify
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.normalise import phrase_id
from hippoindex.pipeline.precompute import refresh
from hippoindex.pipeline.verify import verify_index

Run = Callable[..., Any]
FLIPS_PER_FILE = 3


@pytest.fixture
def index(sample_index: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(sample_index, tmp_path / "index"))
    artifact.write_checksums(folder)
    return folder


def found(index: Path) -> list[str]:
    return [str(fault) for fault in verify_index(index).faults]


def reseal(index: Path, **changes: object) -> None:
    """Write manifest and checksums anew, as a program would that writes wrong content."""
    content = json.loads((index / "manifest.json").read_text())
    content["files"] = {
        name: artifact.file_entry(index / name).model_dump() for name in artifact.covered_files(index)
    }
    for section, values in changes.items():
        content[section] |= values
    artifact.write_json(index / "manifest.json", content)
    artifact.write_checksums(index)


def change_rows(index: Path, table: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    file = index / table / "part-00000.parquet"
    rows = pq.read_table(file).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=verify.SCHEMAS[table]), file, compression="zstd")
    reseal(index)


def change_array(index: Path, name: str, change: Callable[[NDArray], NDArray | None]) -> None:
    file = index / f"{name}.npy"
    array = np.load(file)
    changed = change(array)
    np.save(file, array if changed is None else changed)
    reseal(index)


def test_a_sound_index_has_no_fault(index: Path) -> None:
    result = verify_index(index)
    assert result.faults == []
    assert result.record()["sound"] is True
    counts = open_index(index).manifest.counts
    looked_at = {check.name: check.items for check in result.checks}
    listed = [file for file in index.rglob("*") if file.is_file() and file.name not in artifact.UNCOVERED]
    assert looked_at["files"] == sum(file.stat().st_size for file in listed)
    assert looked_at["facts"] == counts.facts
    assert looked_at["graph"] == 2 * counts.graph_edges
    assert not any(check.skipped for check in result.checks)
    result.require_sound()


def test_flipping_a_byte_of_any_file_is_found(index: Path) -> None:
    chance = random.Random(3)
    files = sorted(file for file in index.rglob("*") if file.is_file())
    names = {file.relative_to(index).as_posix() for file in files}
    assert {"manifest.json", "stats.json", "report.html", "SHA256SUMS", "ppr/z.npy"} <= names
    for file in files:
        content = file.read_bytes()
        offsets = {0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(FLIPS_PER_FILE))}
        for offset in offsets:
            flipped = bytearray(content)
            flipped[offset] ^= chance.randrange(1, 256)
            file.write_bytes(flipped)
            try:
                faults = found(index)
            except ArtifactError as error:  # what the manifest says cannot be read any more
                faults = [str(error)]
            name = file.relative_to(index).as_posix()
            assert any(name in fault for fault in faults), f"byte {offset} of {name}: {faults}"
        file.write_bytes(content)
    assert found(index) == []


def test_a_stranger_can_check_it_with_sha256sum(index: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=index, check=False).returncode == 0
    listed = {line.split("  ", 1)[1] for line in (index / "SHA256SUMS").read_text().splitlines()}
    present = {file.relative_to(index).as_posix() for file in index.rglob("*") if file.is_file()}
    assert listed == present - {"SHA256SUMS"}
    (index / "report.html").write_text("other")
    done = subprocess.run(command, cwd=index, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "report.html: FAILED" in done.stdout


def test_files_that_are_missing_or_foreign_are_all_named(index: Path) -> None:
    (index / "vectors" / "facts.npy").unlink()
    (index / "stats.json").unlink()
    (index / "graph" / "notes.txt").write_text("?")
    with (index / "graph" / "weights.npy").open("ab") as file:
        file.write(b"\0")
    result = verify_index(index)
    faults = "\n".join(map(str, result.faults))
    assert "vectors/facts.npy is missing" in faults
    assert "SHA256SUMS does not hold the SHA-256 of 'stats.json', or that file is missing" in faults
    assert "graph/notes.txt is not in the manifest" in faults
    assert "graph/weights.npy has changed" in faults
    skipped = {check.name: check.skipped for check in result.checks if check.skipped}
    assert skipped == {
        "graph": "its files have changed",
        "vectors": "its files have changed",
        "ppr": "it builds on graph",
    }
    with pytest.raises(ArtifactError, match=r"weights\.npy has changed.* \(and 3 more\)"):
        result.require_sound()
    (index / "SHA256SUMS").unlink()
    assert any(fault.startswith("SHA256SUMS is missing") for fault in found(index))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text.replace("\n", "\x0b", 1), "SHA256SUMS is not in the form"),
        (lambda text: "".join(reversed(text.splitlines(keepends=True))), "SHA256SUMS is not in the form"),
        (lambda text: text.upper(), "SHA256SUMS line 1 is not as sha256sum writes it"),
        (lambda text: text + text.splitlines()[0] + "\n", "SHA256SUMS is not in the form"),
        (
            lambda text: text + "0" * 64 + "  ghost.npy\n",
            "SHA256SUMS does not hold the SHA-256 of 'ghost.npy'",
        ),
        (lambda _: "", "SHA256SUMS does not hold the SHA-256 of 'facts/part-00000.parquet'"),
    ],
)
def test_checksums_must_be_as_they_are_written(index: Path, change: Callable[[str], str], fault: str) -> None:
    file = index / "SHA256SUMS"
    file.write_bytes(change(file.read_bytes().decode()).encode())
    assert any(line.startswith(fault) for line in found(index))


def _swap(rows: list[dict[str, Any]]) -> None:
    rows[3], rows[4] = rows[4], rows[3]


ROW_FAULTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], object], str]] = {
    "document twice": (
        "documents",
        lambda rows: rows[7].update(doc_id=rows[2]["doc_id"]),
        "documents, row 7: its doc_id stands in an earlier row too",
    ),
    "document lost": ("documents", lambda rows: rows.pop(), "counts.documents = 60, but there are 59 rows"),
    "documents": ("documents", _swap, "corpus_fingerprint that is not that of documents/"),
    "digest": ("documents", lambda rows: rows[3].update(digest="x" * 32), "row 3: digest is not 32"),
    "records": (
        "documents",
        lambda rows: rows[3].update(records=3),
        "counts.duplicates = 0, but there are 2",
    ),
    "no record": ("documents", lambda rows: rows[3].update(records=0), "row 3: records is less than 1"),
    "unknown document": (
        "passages",
        lambda rows: rows[7].update(doc_id="nowhere"),
        "passages, row 7: doc_id names no document",
    ),
    "passage order": (
        "passages",
        _swap,
        "passages, row 4: its document stands before that of the row before",
    ),
    "extraction order": ("extractions", _swap, "row 3: passage_id is not that of the passage of this row"),
    "extraction lost": ("extractions", lambda rows: rows.pop(), "extractions has 59 rows for 60 passages"),
    "extraction more": ("extractions", lambda rows: rows.append(rows[0]), "has 61 rows for 60 passages"),
    "no triples": (
        "extractions",
        lambda rows: rows[3].update(triples=[]),
        "has counts.passages_without_triples = 0, but there are 1 extractions without triples",
    ),
    "passage twice": (
        "passages",
        lambda rows: rows[7].update(passage_id=rows[2]["passage_id"]),
        "passages, row 7: its passage_id stands in an earlier row too",
    ),
    "passage lost": ("passages", lambda rows: rows.pop(), "counts.passages = 60, but there are 59 rows"),
    "span": (
        "passages",
        lambda rows: rows[1].update(span_end=rows[1]["span_end"] + 1),
        "passages/part-00000.parquet, row 1: span_start and span_end do not bound",
    ),
    "phrase order": ("phrases", _swap, "phrases/part-00000.parquet, row 4: phrase_id is not greater"),
    "phrase hash": (
        "phrases",
        lambda rows: rows[5].update(phrase=rows[5]["phrase"] + "s"),
        "phrases/part-00000.parquet, row 5: phrase_id is not the hash",
    ),
    "passage count": (
        "phrases",
        lambda rows: rows[6].update(passage_count=40),
        "phrases, row 6: passage_count is not that of occurrence/",
    ),
    "no passage": ("phrases", lambda rows: rows[6].update(passage_count=0), "row 6: passage_count is less"),
    "fact order": ("facts", _swap, "facts/part-00000.parquet, row 4: fact_id is not greater"),
    "fact hash": ("facts", lambda rows: rows[8].update(predicate="x"), "row 8: fact_id is not the hash"),
    "dangling subject": (
        "facts",
        lambda rows: rows[9].update(subject_id=12345),
        "facts/part-00000.parquet, row 9: subject_id is the id of no phrase",
    ),
    "dangling object": (
        "facts",
        lambda rows: rows[9].update(object_id=1),
        "object_id is the id of no phrase",
    ),
    "dangling passage": (
        "facts",
        lambda rows: rows[2].update(passage_ids=["nowhere"]),
        "facts/part-00000.parquet, row 2: passage_ids names no passage",
    ),
    "no holder": ("facts", lambda rows: rows[2].update(passage_ids=[]), "row 2: passage_ids is empty"),
    "passage held twice": (
        "facts",
        lambda rows: rows[2].update(passage_ids=rows[2]["passage_ids"] * 2),
        "row 2: passage_ids are not in node order, each once",
    ),
    "extractions": ("facts", lambda rows: rows[0].update(count=50), " extractions of facts"),
    "too few extractions": ("facts", lambda rows: rows[0].update(count=0), "row 0: count is less than"),
    "synonym order": ("synonyms", _swap, "synonyms/part-00000.parquet, row 4: the pair is not greater"),
    "synonym twice": ("synonyms", lambda rows: rows.insert(1, rows[0]), "row 1: the pair is not greater"),
    "synonym direction": (
        "synonyms",
        lambda rows: rows[3].update(phrase_id=rows[3]["other_id"], other_id=rows[3]["phrase_id"]),
        "synonyms/part-00000.parquet, row 3: phrase_id is not less than other_id",
    ),
    "dangling synonym": (
        "synonyms",
        lambda rows: rows[-1].update(other_id=2**64 - 1),
        "other_id is the id of no phrase",
    ),
    "cosine": ("synonyms", lambda rows: rows[2].update(cosine=0.5), "row 2: cosine is not between 0.8"),
    "no cosine": (
        "synonyms",
        lambda rows: rows[2].update(cosine=float("nan")),
        "row 2: cosine is not between",
    ),
    "word order": ("words", _swap, "words, row 4: word is not greater than in the row before"),
    "other word": (
        "words",
        lambda rows: rows[-1].update(word=rows[-1]["word"] + "x"),
        "the words are not those of the passage",
    ),
    "holders of a word": (
        "words",
        lambda rows: rows[2].update(passage_count=rows[2]["passage_count"] + 1),
        "words, row 2: passage_count is not that of passage_words/",
    ),
    "no word": ("words", lambda rows: rows.pop(), "passage_words/indices.npy, row"),
    "quarantine": (
        "quarantine",
        lambda rows: rows.append(schemas.quarantine_row("extract", "a", "", line=0, kind="triple")),
        "counts.triples_rejected = 0, but there are 1 such rows",
    ),
    "no reason": (
        "quarantine",
        lambda rows: rows.append(schemas.quarantine_row("extract", "a", "", line=0, kind="triple")),
        "quarantine/part-00000.parquet, row 0: reason is empty",
    ),
}


@pytest.mark.parametrize("case", ROW_FAULTS)
def test_rows_that_break_the_specification_are_named(index: Path, case: str) -> None:
    table, change, fault = ROW_FAULTS[case]
    change_rows(index, table, change)
    faults = found(index)
    assert any(fault in line for line in faults), faults


def _set(position: int | tuple[int, ...], value: float) -> Callable[[NDArray], None]:
    def change(array: NDArray) -> None:
        array[position] = value

    return change


ARRAY_FAULTS: dict[str, tuple[str, Callable[[NDArray], NDArray | None], str]] = {
    "asymmetric": ("graph/weights", _set(5, 7.5), "graph, row 0: it is not symmetric"),
    "negative": (
        "graph/weights",
        _set(0, -1),
        "graph/weights.npy, row 0: a number is not positive and finite",
    ),
    "not finite": ("graph/weights", _set(0, np.nan), "row 0: a number is not positive and finite"),
    "outside": ("graph/indices", _set(0, 10**6), "graph/indices.npy, row 0: a column is not in 0 to"),
    "below": ("graph/indices", _set(0, -1), "graph/indices.npy, row 0: a column is not in 0 to"),
    "loop": ("graph/indices", _set(0, 0), "graph, row 0: there is a self-loop"),
    "backwards": ("graph/indptr", _set(3, 0), "graph/indptr.npy, row 2: the row ends before it begins"),
    "start": ("graph/indptr", _set(0, 1), "graph/indptr.npy does not run from 0 to the number of cells"),
    "short": (
        "graph/indptr",
        lambda a: a[:-1],
        "graph/indptr.npy is int64 of shape",
    ),
    "type": ("graph/indptr", lambda a: a.astype(np.int32), "graph/indptr.npy is int32 of shape"),
    "weights of mentions": (
        "graph/weights",
        lambda a: 2 * a,
        "the weight of an edge to a passage is not 1, or not its title's",
    ),
    "titles": ("graph/titles", lambda a: np.full_like(a, -1), "is not the phrase of the passage's title"),
    "title of nothing": ("graph/titles", _set(0, 10**6), "graph/titles.npy, row 0: is not the phrase"),
    "words of passages": ("passage_words/indices", _set(0, -1), "passage_words/indices.npy, row 0: a column"),
    "words out of order": ("passage_words/indices", lambda a: a[::-1].copy(), "columns are not sorted"),
    "ends of words": ("passage_words/indptr", _set(-1, 3), "does not run from 0 to the number of cells"),
    "fewer numbers": ("occurrence/counts", lambda a: a[1:], "occurrence/counts.npy has"),
    "sorted": ("occurrence/indices", lambda a: a[::-1].copy(), "occurrence/indices.npy, row"),
    "outside occurrence": ("occurrence/indices", _set(-1, 60), "a column is not in 0 to 59"),
    "no mention": ("occurrence/counts", _set(0, 0), "occurrence/counts.npy, row 0: a number is not positive"),
    "other mention": ("occurrence/indices", lambda a: np.where(a == 59, 58, a), "occurrence/"),
    "vector": ("vectors/phrases", _set((4, 2), np.inf), "vectors/phrases.npy, row 4: a number is not finite"),
    "rows": ("vectors/facts", lambda a: a[1:], "vectors/facts.npy is float16 of shape"),
    "dimension": ("vectors/facts", lambda a: a[:, 1:].copy(), "vectors have different dimensions: 383, 384"),
    "double": ("vectors/facts", lambda a: a.astype(np.float64), "vectors/facts.npy is float64"),
    "Fortran": ("vectors/facts", np.asfortranarray, "vectors/facts.npy is not of .npy format 1.0 in C order"),
    "z": ("ppr/z", _set((3, 3), np.nan), "ppr/z.npy, row 3: a number is not finite"),
    "z1": (
        "ppr/z1",
        lambda a: a[:, None],
        "ppr/z1.npy is float32 of shape (60, 1); expected float32 of shape",
    ),
    "stale": ("ppr/transition", _set(9, 0.99), "is not of this graph: run hippoindex precompute"),
}


@pytest.mark.parametrize("case", ARRAY_FAULTS)
def test_arrays_that_break_the_specification_are_named(index: Path, case: str) -> None:
    name, change, fault = ARRAY_FAULTS[case]
    change_array(index, name, change)
    faults = found(index)
    assert any(fault in line for line in faults), faults


def test_edges_to_passages_must_be_those_of_the_occurrence(index: Path) -> None:
    opened = open_index(index)
    held, row = opened.occurrence, 0
    free = next(passage for passage in range(60) if passage not in held[row].indices)
    mentions = held.indices.copy()
    mentions[held.indptr[row]] = free
    mentions[held.indptr[row] : held.indptr[row + 1]].sort()
    change_array(index, "occurrence/indices", lambda _: mentions)
    fault = "graph/indices.npy, row 0: the edges to passages are not those of occurrence/"
    assert fault in found(index)


@pytest.mark.parametrize(
    ("section", "values", "fault"),
    [
        ("counts", {"records": 61}, "manifest.json is wrong: Counts do not add up: records ="),
        ("counts", {"facts": 1}, "manifest.json has counts.facts = 1, but there are"),
        ("counts", {"fact_edges": 1}, "manifest.json has counts.fact_edges = 1"),
        ("counts", {"graph_edges": 1}, "manifest.json has counts.graph_edges = 1"),
        ("counts", {"synonym_edges": 1}, "manifest.json has counts.synonym_edges = 1, but"),
        ("config", {"embed": {}}, "manifest.json is wrong: config.embed.dtype is None"),
        ("config", {"synonyms": "none"}, "manifest.json is wrong: config.synonyms.threshold is None"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(
    index: Path, section: str, values: dict[str, object], fault: str
) -> None:
    reseal(index, **{section: values})
    assert any(line.startswith(fault) for line in found(index))


def test_tables_of_another_shape_are_named(index: Path) -> None:
    file = index / "phrases" / "part-00000.parquet"
    good = pq.read_table(file)
    pq.write_table(good.drop_columns("passage_count"), file)
    reseal(index)
    assert any("phrases/part-00000.parquet does not have the columns" in line for line in found(index))
    file.write_bytes(b"PAR1 nothing PAR1")
    reseal(index)
    assert any("phrases/part-00000.parquet cannot be read" in line for line in found(index))
    pq.write_table(good, file)
    file.rename(file.with_name("part-00001.parquet"))
    reseal(index)
    assert any("part-00001.parquet is out of the sequence" in line for line in found(index))
    (index / "vectors" / "facts.npy").write_bytes(b"\x93NUMPY\x01\x00\x02\x00{'")
    reseal(index)
    assert any("vectors/facts.npy cannot be read" in line for line in found(index))


def test_ids_are_checked_over_the_parts_of_a_table(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "ROWS_PER_FILE", 200)
    for name in ("phrases", "facts", "synonyms", "words"):
        table = pq.read_table(index / name)
        shutil.rmtree(index / name)
        artifact.write_parquet(table, index / name)
    reseal(index)
    assert found(index) == []
    first, second = (index / "phrases" / f"part-0000{number}.parquet" for number in (0, 1))
    one, two = pq.read_table(first), pq.read_table(second)
    pq.write_table(two, first)
    pq.write_table(one, second)
    reseal(index)
    assert "phrases/part-00001.parquet, row 200: phrase_id is not greater than in the row before" in found(
        index
    )


def test_many_faults_are_counted_and_the_first_ones_listed(index: Path) -> None:
    change_rows(index, "phrases", lambda rows: [row.update(phrase="x") for row in rows])
    assert phrase_id("x") not in open_index(index).phrases["phrase_id"].to_pylist()
    result = verify_index(index)
    assert result.n_faults == open_index(index).manifest.counts.phrases
    assert len(result.faults) == verify.MAX_LISTED
    assert "it builds on phrases" in {check.skipped for check in result.checks}


def test_refresh_leaves_an_index_that_verifies_and_its_source_untouched(index: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(index, copy, copy_function=lambda a, b: Path(b).hardlink_to(a))
    refresh(copy, ["precompute.dtype=float16"])
    assert found(copy) == []
    assert found(index) == []


def test_the_command_prints_a_table_and_exits_with_2_on_a_fault(run_cli: Run, index: Path) -> None:
    sound = run_cli("verify", index)
    assert sound.returncode == 0, sound.stderr
    assert [word for word in ("files", "graph", "seconds", "faults") if word not in sound.stdout] == []
    (index / "stats.json").write_text("{}")
    damaged = run_cli("verify", index, "--json")
    assert damaged.returncode == 2
    assert "stats.json has changed" in damaged.stderr
    assert "Traceback" not in damaged.stderr
    printed = json.loads(damaged.stdout)
    assert printed["sound"] is False
    [fault] = printed["faults"]
    assert (fault["file"], fault["row"]) == ("stats.json", None)
