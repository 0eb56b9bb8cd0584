"""Numbering and counting against plain dictionaries, and against whole tables in memory."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import HippoIndexError
from hippoindex.kernels.ids import ranks, stable_order
from hippoindex.pipeline import artifact, merge, schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.merge import Resolution
from hippoindex.pipeline.normalise import phrase_id, unicode_phrase
from hippoindex.pipeline.resolve import RESOLVED, ResolveStage
from hippoindex.pipeline.stage import table_bytes

SMALL, LARGE = 1, 2**31
"""A budget for as many partitions as there can be, and one for a single partition."""

names = st.sampled_from(["Mill", "the mill", "Orrin", "orrin", "River", "1,000", "北京", "--", "C++", "C"])
triples = st.builds(
    lambda s, p, o: {"subject": s, "predicate": p, "object": o}, names, st.sampled_from(["is", "has"]), names
)
passages = st.lists(
    st.tuples(st.lists(names, max_size=4), st.lists(triples, max_size=5)), min_size=1, max_size=8
)
budgets = st.sampled_from([SMALL, 20_000, LARGE])


def extraction(content: list[tuple[list[str], list[dict[str, str]]]]) -> pa.Table:
    rows = [
        {"passage_id": f"p{i}", "entities": entities, "triples": facts, "missing": False}
        for i, (entities, facts) in enumerate(content)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.EXTRACTION)


def shards_of(table: pa.Table, shard_rows: int = 100, **settings: Any) -> list[pa.Table]:
    process = ResolveStage(GraphConfig(**settings)).open()
    return [process(table.slice(start, shard_rows)).rows for start in range(0, table.num_rows, shard_rows)]


def merged(shards: Sequence[pa.Table], ids: pa.Array, folder: Path, memory_bytes: int = LARGE) -> Resolution:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}.arrow" for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        file.write_bytes(table_bytes(shard))
    return merge.merge(files, ids, folder / "merged", memory_bytes=memory_bytes)


@contextmanager
def folder_with_small_parts() -> Iterator[Path]:
    """A new folder, while a part of a table has three rows and there are at most 8 partitions."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "ROWS_PER_FILE", 3)
        patch.setattr(merge, "MAX_PARTITIONS", 8)
        yield Path(name)


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of what is published."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for name in merge.TABLES
        for file in (folder / name).iterdir()
    }


def matrix(result: Resolution) -> np.ndarray:
    indptr, indices, n_passages = result.occurrence
    counts = result.tables.array("occurrence/counts")
    return sp.csr_matrix((counts, indices, indptr), (result.n_phrases, n_passages)).toarray()


@settings(max_examples=25, deadline=None)
@given(content=passages, ner_nodes=st.booleans(), budget=budgets)
def test_everything_is_counted_as_a_dictionary_would(content: Any, ner_nodes: bool, budget: int) -> None:
    mentions: dict[str, Counter[int]] = defaultdict(Counter)
    facts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for number, (entities, extracted) in enumerate(content):
        for triple in extracted:
            s, p, o = (unicode_phrase(triple[key]) for key in ("subject", "predicate", "object"))
            if s and o:
                mentions[s][number] += 1
                mentions[o][number] += 1
                facts[s, p, o][f"p{number}"] += 1
        for entity in entities if ner_nodes else ():
            if unicode_phrase(entity):
                mentions[unicode_phrase(entity)][number] += 1
    order = sorted(mentions, key=phrase_id)
    table = extraction(content)
    with folder_with_small_parts() as folder:
        shards = shards_of(table, ner_nodes=ner_nodes)
        result = merged(shards, table["passage_id"].combine_chunks(), folder, budget)
        assert result.phrases["phrase"].to_pylist() == order
        assert result.phrases["phrase_id"].to_pylist() == [phrase_id(phrase) for phrase in order]
        assert result.phrases["passage_count"].to_pylist() == [len(mentions[phrase]) for phrase in order]
        dense = [[mentions[phrase][i] for i in range(len(content))] for phrase in order]
        expected = np.array(dense, dtype=np.int32).reshape(len(order), len(content))
        np.testing.assert_array_equal(matrix(result), expected)
        found = {}
        for row, (a, b) in zip(result.facts.to_pylist(), result.fact_ends.tolist(), strict=True):
            found[order[a], row["predicate"], order[b]] = (row["count"], row["passage_ids"])
        assert found == {
            fact: (sum(c.values()), sorted(c, key=lambda i: int(i[1:]))) for fact, c in facts.items()
        }
        assert result.fact_counts.tolist() == result.facts["count"].to_pylist()
        assert result.n_triples == sum(sum(c.values()) for c in facts.values())
        texts = [text for part in result.fact_texts() for text in part.to_pylist()]
        assert {*texts} == {" ".join(fact) for fact in facts}
        assert len(texts) == result.n_facts == len(result.fact_ids)


@settings(max_examples=25, deadline=None)
@given(content=passages, shard_rows=st.integers(1, 4), budget=budgets)
def test_neither_shards_nor_partitions_change_a_byte(
    slow: ModuleType, content: Any, shard_rows: int, budget: int
) -> None:
    table = extraction(content)
    ids = table["passage_id"].combine_chunks()
    with folder_with_small_parts() as folder:
        shards = shards_of(table, shard_rows)
        result = merged(shards, ids, folder / "new", budget)
        whole = slow.merge(shards, ids)
        slow.write(whole, folder / "slow")
        assert files_of(folder / "new" / "merged") == files_of(folder / "slow")
        assert np.array_equal(result.fact_ends, whole.fact_ends)
        assert result.n_triples == whole.n_triples
        assert {path.name for path in (folder / "new" / "merged").iterdir()} == {*merge.TABLES, merge.ENDS}


@settings(max_examples=25, deadline=None)
@given(content=passages, split=st.integers(0, 8), ner_nodes=st.booleans(), budget=budgets)
def test_two_resolutions_combine_to_that_of_both(
    content: Any, split: int, ner_nodes: bool, budget: int
) -> None:
    table = extraction(content)
    ids = table["passage_id"].combine_chunks()
    with folder_with_small_parts() as folder:
        whole = merged(shards_of(table, ner_nodes=ner_nodes), ids, folder / "whole")
        halves = [
            merged(shards_of(part, ner_nodes=ner_nodes), part["passage_id"].combine_chunks(), folder / name)
            for name, part in (("old", table.slice(0, split)), ("new", table.slice(split)))
        ]
        combined = merge.combine(*halves, ids, folder / "both", memory_bytes=budget)
        assert files_of(folder / "both") == files_of(folder / "whole" / "merged")
        assert np.array_equal(combined.fact_ends, whole.fact_ends)
        assert np.array_equal(combined.fact_counts, whole.fact_counts)
        assert combined.n_triples == whole.n_triples


def resolved(phrases: dict[int, str], facts: list[tuple[int, int, str, int]]) -> pa.Table:
    """One passage with phrases and facts of chosen ids."""
    keys = ("fact_id", "subject_id", "predicate", "object_id")
    row = {
        "passage_id": "p",
        "phrase_ids": [*phrases],
        "phrases": [*phrases.values()],
        "counts": [1] * len(phrases),
        "facts": [dict(zip(keys, fact, strict=True)) for fact in facts],
    }
    return pa.Table.from_pylist([row], schema=RESOLVED)


TOP = 2**64 - 1


@pytest.mark.parametrize("memory_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("together", [True, False], ids=["one block", "two blocks"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (({TOP: "abc", 1: "a"}, []), ({TOP: "xyz"}, []), "phrases have the same 64-bit id: '(abc|xyz)' and"),
        (({1: "a"}, [(TOP, 1, "is", 1)]), ({1: "a"}, [(TOP, 1, "has", 1)]), "facts .* '(is|has)' and"),
        (({1: "a", 2: "b"}, [(5, 1, "is", 2)]), ({1: "a", 2: "b"}, [(5, 2, "is", 1)]), "facts .* same"),
    ],
)
def test_equal_ids_of_different_things_are_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_bytes: int,
    together: bool,
    first: Any,
    second: Any,
    message: str,
) -> None:
    monkeypatch.setattr(merge, "BLOCK_SHARE", 1 / 2**40)
    monkeypatch.setattr(merge, "MAX_BLOCK_BYTES", 2**26 if together else 1)
    shards = [resolved(*first), resolved(*second)]
    with pytest.raises(HippoIndexError, match=message):
        merged(shards, pa.array(["p", "p"]), tmp_path, memory_bytes)
    assert not (tmp_path / "merged" / "runs").exists()


@pytest.mark.parametrize("memory_bytes", [SMALL, LARGE])
def test_a_collision_with_what_an_index_holds_is_an_error(tmp_path: Path, memory_bytes: int) -> None:
    halves = [
        merged([resolved({7: "a", TOP: name}, [])], pa.array(["p"]), tmp_path / name) for name in ("b", "c")
    ]
    with pytest.raises(HippoIndexError, match="phrases have the same 64-bit id: 'b' and 'c'"):
        merge.combine(*halves, pa.array(["p", "q"]), tmp_path / "both", memory_bytes=memory_bytes)


def test_a_fact_of_no_phrase_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HippoIndexError, match="names a phrase that no passage holds"):
        merged([resolved({1: "a"}, [(5, 1, "is", 2)])], pa.array(["p"]), tmp_path)


@pytest.mark.parametrize("ids", [["p0"], ["p", "p1"], []])
def test_shards_of_other_passages_are_refused(tmp_path: Path, ids: list[str]) -> None:
    with pytest.raises(HippoIndexError, match="do not hold the passages"):
        merged([resolved({1: "a"}, [])], pa.array(ids, pa.string()), tmp_path)


def test_a_corpus_without_any_extraction_has_no_phrases(tmp_path: Path) -> None:
    table = extraction([([], []), ([], [])])
    result = merged(shards_of(table), table["passage_id"].combine_chunks(), tmp_path)
    assert result.phrases.num_rows == result.n_facts == result.n_triples == 0
    assert matrix(result).shape == (0, 2)
    assert result.fact_ends.shape == (0, 2)


def test_files_move_into_an_index(tmp_path: Path) -> None:
    result = merged([resolved({1: "a"}, [])], pa.array(["p"]), tmp_path)
    (tmp_path / "index").mkdir()
    result.move(tmp_path / "index")
    assert {path.name for path in (tmp_path / "index").iterdir()} == {*merge.TABLES}


id_arrays = st.lists(
    st.one_of(st.integers(0, TOP), st.integers(0, 9), st.just(TOP), st.integers(2**63, 2**63 + 5)),
    max_size=150,
).map(lambda values: np.array(values, np.uint64))


@settings(max_examples=100, deadline=None)
@given(ids=id_arrays)
def test_ids_are_sorted_as_numpy_sorts_them(ids: np.ndarray) -> None:
    order, ascending = stable_order(ids)
    assert np.array_equal(order, np.argsort(ids, kind="stable"))
    assert np.array_equal(ascending, np.sort(ids))


@settings(max_examples=100, deadline=None)
@given(ids=id_arrays, wanted=id_arrays)
def test_ranks_are_those_of_a_binary_search(ids: np.ndarray, wanted: np.ndarray) -> None:
    held = np.unique(ids)
    place = {number: rank for rank, number in enumerate(held.tolist())}
    everything = np.concatenate([ids, wanted])
    assert ranks(held, everything).tolist() == [place.get(number, -1) for number in everything.tolist()]


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark as a module; its folder leaves the path again, where its names could hide others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("graph_build")
        for name in ("graph_build", "triples", "common"):
            patch.delitem(sys.modules, name)


def test_the_graph_is_that_of_hipporags_loops(tmp_path: Path, benchmark: ModuleType) -> None:
    made = benchmark.by_resolving(tmp_path / "shards", 3_000)
    ours = benchmark.by_hippoindex(tmp_path / "shards", 3_000, LARGE)
    theirs = benchmark.by_hipporag(tmp_path / "shards", 3_000)
    assert benchmark.agree([made, ours, theirs])
    assert ours["edges"] == theirs["edges"] > 3_000
    assert not benchmark.agree([ours, theirs | {"digest": "another"}])
    assert len(benchmark.markdown([made, ours, theirs]).splitlines()) == 5


def test_extractions_have_the_shape_that_they_are_said_to_have(benchmark: ModuleType) -> None:
    n_triples = 60_000
    triples = benchmark.triples
    parts = [triples.extraction(n_triples, number) for number in range(triples.n_shards(n_triples))]
    table = pa.concat_tables(parts)
    assert parts[0].equals(triples.extraction(n_triples, 0))
    assert table.num_rows == triples.n_passages(n_triples) == len(set(table["passage_id"].to_pylist()))
    extracted = table["triples"].combine_chunks()
    assert len(extracted.flatten()) == n_triples
    hub = triples.phrase_texts(np.array([0]))[0].as_py()
    holders = sum(any(hub in triple.values() for triple in row.as_py()) for row in extracted)
    assert 0.006 < holders / table.num_rows < 0.01  # a hub may be in no triple of its passage
    assert len(set(triples.WORDS.to_pylist())) == len(triples.WORDS)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's figures of memory")
def test_a_million_triples_fit_a_small_budget_and_make_the_same_bytes(
    tmp_path: Path, benchmark: ModuleType
) -> None:
    benchmark.by_resolving(tmp_path / "shards", 1_000_000)
    found = {}
    for budget in (2**24, LARGE):
        (tmp_path / str(budget)).mkdir()
        script = [sys.executable, Path(__file__).with_name("merge_memory.py"), tmp_path / "shards"]
        command = [*map(str, script), str(tmp_path / str(budget)), str(budget), str(2**16)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[budget] = json.loads(output)
    assert found[2**24]["digest"] == found[LARGE]["digest"]
    assert found[2**24]["taken_bytes"] < 120 * 2**20 < 0.7 * found[LARGE]["taken_bytes"]
