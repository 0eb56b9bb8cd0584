from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hippoindex.kernels.simjoin import Pairs, exact

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as a module; its folder leaves the path again, where its names could hide others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("simjoin")
        yield module
        for name in ("simjoin", "names", "common"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def names(benchmark: ModuleType) -> ModuleType:
    found: ModuleType = benchmark.names
    return found


def clustered(n: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((max(n // 6, 1), 16))[rng.integers(0, max(n // 6, 1), n)]
    x += 0.35 * rng.standard_normal((n, 16))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def pairs_of(*rows: tuple[int, int, float]) -> Pairs:
    first, second, cosine = zip(*rows, strict=True)
    return Pairs(np.array(first), np.array(second), np.array(cosine, dtype=np.float32))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 400), seed=seeds)
def test_rivals_find_the_pairs_of_exact(benchmark: ModuleType, n: int, seed: int) -> None:
    x = clustered(n, seed)
    problem = benchmark.Problem(x, np.random.default_rng(seed).random(n) < 0.9)
    expected = exact(x, benchmark.THRESHOLD, benchmark.MAX_NEIGHBORS, problem.searches)
    for name in benchmark.SAME:
        found = benchmark.METHODS[name](problem)
        assert found.share == 1
        assert benchmark.differing(found.pairs, expected) == 0
        assert benchmark.differing(expected, found.pairs) == 0


def test_rivals_keep_at_most_101_neighbours_a_name(benchmark: ModuleType) -> None:
    rng = np.random.default_rng(0)
    x = np.ones((300, 16)) + 0.1 * rng.standard_normal((300, 16))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    problem = benchmark.Problem(x, np.arange(300) < 1)  # one name searches, all are near
    for name in (*benchmark.SAME, "exact"):
        pairs = benchmark.METHODS[name](problem).pairs
        assert len(pairs.first) == 101
        assert set(pairs.first.tolist()) == {0}


def test_a_part_knows_its_share(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TILE_ROWS", 8)
    monkeypatch.setattr(benchmark, "TILE_COLUMNS", 50)
    problem = benchmark.Problem(clustered(400, 2), np.ones(400, dtype=bool))
    whole = benchmark.by_blas(problem).pairs
    assert benchmark.differing(whole, exact(problem.vectors, 0.8, 101)) == 0
    part = benchmark.by_blas(problem, 0.5)
    assert len(part.pairs.first) / len(whole.first) == pytest.approx(part.share, abs=0.12)
    assert 0.35 < part.share < 0.65
    assert set(zip(*part.pairs[:2], strict=True)) < set(zip(*whole[:2], strict=True))
    searched = benchmark.by_faiss(problem, 0.25)
    assert searched.share == 0.25
    assert (
        0.25 < len(searched.pairs.first) / len(whole.first) < 0.6
    )  # either end may be the one that searches


def test_blocks_of_keys_do_not_change_the_nearest(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = clustered(500, 1)
    whole = benchmark.nearest_rows(x[:50], x)
    monkeypatch.setattr(benchmark, "KEY_BLOCK", 70)
    rows, cosines = benchmark.nearest_rows(x[:50], x)
    np.testing.assert_allclose(cosines, whole[1], atol=1e-6)
    np.testing.assert_allclose(np.sort(x[:50] @ x.T, axis=1)[:, ::-1], cosines, atol=1e-6)
    np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(500), (50, 1)))


def test_recall_counts_the_hard_band_apart(benchmark: ModuleType) -> None:
    truth = pairs_of((0, 1, 0.95), (0, 2, 0.81), (1, 2, 0.84), (3, 4, 0.86))
    found = benchmark.recall(pairs_of((0, 1, 0.95), (0, 2, 0.81), (3, 4, 0.86), (5, 6, 0.9)), truth)
    assert found["recall"] == 0.75
    assert found["recall_hard_band"] == 0.5
    assert (found["sampled_pairs"], found["sampled_pairs_hard_band"]) == (4, 2)
    low, high = found["recall_interval"]
    assert low < 0.75 < high


@pytest.mark.parametrize("method", ["exact", "ivf"])
def test_an_append_finds_what_a_rebuild_finds(benchmark: ModuleType, method: str, tmp_path: Path) -> None:
    problem = benchmark.Problem(clustered(3000, 3), np.ones(3000, dtype=bool))
    before = benchmark.by_join(problem.first(2970), method=method)
    assert (before.lists is not None) == (method == "ivf")
    if before.lists is not None:
        np.savez(tmp_path / "lists.npz", **dataclasses.asdict(before.lists))
        lists = benchmark.load_lists(tmp_path / "lists.npz")
        assert lists.probes == before.lists.probes
        problem = problem._replace(known=before.pairs, lists=lists)
    found = benchmark.by_append(problem, method)
    truth = exact(problem.vectors, benchmark.THRESHOLD, benchmark.MAX_NEIGHBORS)
    new = truth.second >= 2970
    assert new.sum() > 100
    share = benchmark.recall(found.pairs, Pairs(*(column[new] for column in truth)))["recall"]
    assert share > 0.95
    assert share == 1 or method == "ivf"


def test_wilsons_interval(benchmark: ModuleType) -> None:
    low, high = benchmark.wilson(95, 100)  # by hand: centre 0.9334, half width 0.0450
    assert low == pytest.approx(0.8882, abs=5e-4)
    assert high == pytest.approx(0.9785, abs=5e-4)
    assert benchmark.wilson(0, 0) == (0.0, 1.0)
    assert benchmark.wilson(50, 50)[1] == 1.0


def test_pairs_within_rounding_of_the_threshold_may_differ(benchmark: ModuleType) -> None:
    one = pairs_of((0, 1, 0.9), (2, 3, 0.800001))
    assert benchmark.differing(one, pairs_of((0, 1, 0.9))) == 0
    assert benchmark.differing(one, pairs_of((2, 3, 0.800001))) == 1
    assert benchmark.differing(pairs_of((2, 3, 0.800001)), one) == 1


def test_names_of_a_group_stand_side_by_side(names: ModuleType) -> None:
    pairs = [("nyc", "new york city"), ("big apple", "new york city"), ("eire", "ireland")]
    pairs += [(f"nickname {number}", f"town {number}") for number in range(50)]
    found = names.ordered(pairs)
    assert sorted(found.names) == sorted({name for pair in pairs for name in pair})
    assert (np.flatnonzero(np.diff(found.groups)) + 1).size == 51  # each group in one piece
    assert {frozenset(found.names[row] for row in gold) for gold in found.gold} == set(map(frozenset, pairs))
    assert np.all(found.gold[:, 0] < found.gold[:, 1])
    assert names.ordered(pairs[::-1]).names == found.names
    first = found.first(40)
    assert len(first.names) == 40
    assert 0 < len(first.gold) < len(found.gold)
    assert first.gold.max() < 40
    with pytest.raises(SystemExit, match="1,000 names are wanted"):
        found.first(1000)


def test_precision_counts_siblings_and_recall_does_not(benchmark: ModuleType) -> None:
    chosen = benchmark.names.Names(
        ["gb", "great britain", "britain", "apollo 11", "apollo 12"],
        np.array([0, 0, 0, 1, 2]),
        np.array([[0, 1], [1, 2]]),
    )
    pairs = pairs_of((0, 2, 0.9), (1, 2, 0.9), (3, 4, 0.95), (0, 1, 0.75))
    found = benchmark.judged(pairs, chosen, 0.8)
    assert found["pairs"] == 3
    assert found["precision"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["recall"] == 0.5
    assert found["precision_guard"] == 1
    assert found["recall_guard"] == 0.5
    assert found["gold_rejected_by_guard"] == 0
    assert found["others_rejected_by_guard"] == 1


def row_of(method: str, **changed: Any) -> dict[str, Any]:
    row = {"n": 20_000, "method": method, "seconds": 1.0, "dim": 384, "peak_bytes": 2**29}
    return row | {"recall": 0.995, "recall_interval": [0.99, 0.998]} | changed


def test_a_recall_is_missed_when_its_interval_is_below_the_bound(benchmark: ModuleType) -> None:
    assert all(goal.met for goal in benchmark.recalls([row_of("ivf 0.99"), row_of("auto")]))
    low = {"recall": 0.97, "recall_interval": [0.96, 0.98]}
    assert [goal.met for goal in benchmark.recalls([row_of("ivf 0.99", **low)])] == [False]
    assert [goal.met for goal in benchmark.recalls([row_of("ivf 0.95", **low)])] == [True]
    same = {"recall": 1.0, "recall_interval": [0.9999, 1.0]}
    checked = benchmark.recalls([row_of("HippoRAG", differing=1, **same)])
    assert [goal.met for goal in checked] == [True, False]


def test_goals_are_judged_at_their_sizes(benchmark: ModuleType) -> None:
    rows = [
        row_of("BLAS", n=1_000_000, seconds=160.0, recall=None, extrapolated_from=0.04),
        row_of("ivf 0.99", n=1_000_000, seconds=10.0, peak_bytes=5 * 2**30),
        row_of("exact", n=100_000, seconds=10.0),
        row_of("HippoRAG", n=100_000, seconds=40.0, peak_bytes=4 * 2**30),
        row_of("rebuild", n=500_000, seconds=10.0),
        row_of("append 1 %", n=500_000, seconds=1.0),
        row_of("rebuild, exact", n=100_000, seconds=10.0),
        row_of("append 1 %, exact", n=100_000, seconds=0.5),
    ]
    met = {goal.name: goal.met for goal in benchmark.speeds(rows)}
    assert list(met.values()) == [True, False, True, True, False, True]
    assert [name for name, fine in met.items() if not fine] == [
        "1,000,000: ivf 0.99, memory",
        "500,000: append 1 % against rebuild",
    ]


@pytest.mark.slow
def test_vectors_are_resumed_and_shared(
    names: ModuleType, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_dir.is_dir()
    chosen = names.all_names().first(50).names
    monkeypatch.setattr(names, "folder", lambda: tmp_path)
    monkeypatch.setattr(names, "BLOCK_NAMES", 20)
    whole = np.array(names.vectors(chosen, "int8"))
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(names.vectors(chosen[:30], "int8"), whole[:30])  # no new file
    kept = names.kept_file(50, "int8")
    assert list(tmp_path.glob("*.npy")) == [kept]
    kept.rename(kept.with_suffix(".partial"))  # as if stopped after the second block
    marked = np.load(kept.with_suffix(".partial"), mmap_mode="r+")
    marked[0], marked[40:] = 0, 0
    marked.flush()
    kept.with_suffix(".rows").write_text("40", encoding="utf-8")
    again = names.vectors(chosen, "int8")
    np.testing.assert_array_equal(again[1:], whole[1:])
    assert not again[0].any()
    assert list(tmp_path.glob("*.rows")) == []


@pytest.mark.slow
def test_the_benchmark_writes_rows_of_every_method(data_dir: Path, tmp_path: Path) -> None:
    assert data_dir.is_dir()
    record, figure = tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, BENCHMARKS / "simjoin.py", "--quick", "--sizes", "2000", "--markdown"]
    command += ["--json", record, "--svg", figure]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| HippoRAG |" in done.stdout
    written = json.loads(record.read_text("utf-8"))
    assert written["machine"]["cores"] >= 1
    rows = {row["method"]: row for row in written["rows"]}
    ours = {"exact", "ivf 0.9", "ivf 0.95", "ivf 0.99", "auto", "append 1 %", "rebuild"}
    assert rows.keys() == ours | {"BLAS", "faiss flat", "HippoRAG"}
    for row in rows.values():
        assert (row["n"], row["dim"]) == (2000, 384)
        assert row["seconds"] > 0
        assert row["pairs"] > 500
        assert 0.85 < row["recall"] <= 1
        assert 0.7 < row["recall_hard_band"] <= 1
        assert row["peak_bytes"] > 2000 * 384 * 4
    assert rows["HippoRAG"]["peak_bytes"] > rows["exact"]["peak_bytes"] + 2000 * 2000 * 32
    taus = written["aliases"]["rows"]
    assert [row["tau"] for row in taus] == [0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    assert taus[0]["precision"] < taus[-1]["precision"]
    assert taus[0]["recall"] > taus[-1]["recall"]
    assert all(0.98 * row["recall"] <= row["recall_guard"] <= row["recall"] for row in taus)
    assert figure.read_text("utf-8").startswith("<?xml")
