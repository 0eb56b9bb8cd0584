from __future__ import annotations

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
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.kernels.ppr import Graph

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script as a module; its folder leaves the path again, where its names could hide others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("ppr")
        yield module
        for name in ("ppr", "graphs", "common"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def graphs(benchmark: ModuleType) -> ModuleType:
    found: ModuleType = benchmark.graphs
    return found


def clustering(graph: Graph) -> float:
    """Share of the paths of length two whose ends are joined."""
    links = graph.matrix(np.float64)
    links.data[:] = 1.0
    degrees = links.sum(axis=1)
    closed = (links @ links).multiply(links).sum()
    return float(closed / (np.square(degrees) - degrees).sum())


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 3000), edges_per_node=st.integers(1, 12), seed=seeds)
def test_a_power_law_graph_is_valid_and_the_same_for_a_seed(
    graphs: ModuleType, n: int, edges_per_node: int, seed: int
) -> None:
    edges = graphs.power_law(n, edges_per_node, seed=seed)
    edges.graph().validate()
    assert len(edges.sources) >= n * edges_per_node
    assert edges.n_nodes - edges.first_passage == int(0.3 * n)
    again = graphs.power_law(n, edges_per_node, seed=seed)
    for one, other in zip(edges, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert edges.weights.min() >= 0.8


def test_ranks_fall_as_the_power_law_says(graphs: ModuleType) -> None:
    n, count, head = 5000, 400_000, 20.0
    drawn = graphs.ranks(np.random.default_rng(0), count, n)
    shares = np.cumsum(np.bincount(drawn, minlength=n)) / count
    ends = np.arange(n) + 1.0 + head
    expected = (np.cbrt(ends) - np.cbrt(head)) / (np.cbrt(n + head) - np.cbrt(head))
    assert np.abs(shares - expected).max() < 0.004  # Kolmogorov's bound at this count, far beyond 1 in 1000


def test_a_power_law_graph_has_the_edges_and_the_hubs_it_is_asked_for(graphs: ModuleType) -> None:
    graph = graphs.power_law(50_000).graph()
    assert graph.n_edges == pytest.approx(500_000, rel=0.005)
    degrees = np.sort(np.diff(graph.indptr))[::-1]
    # expected degree of a rank goes with (rank + 20) ** (-2 / 3)
    assert degrees[:20].mean() / degrees[2000:2020].mean() == pytest.approx((2030 / 30) ** (2 / 3), rel=0.15)


def test_communities_hold_most_edges(graphs: ModuleType) -> None:
    plain, communities = graphs.power_law(20_000), graphs.power_law(20_000, communities=True)
    assert communities.graph().n_edges == pytest.approx(200_000, rel=0.1)
    assert clustering(communities.graph()) > 3 * clustering(plain.graph())
    with pytest.raises(ValueError, match="no multiple of the community size, 200"):
        graphs.power_law(20_001, communities=True)


@settings(max_examples=10, deadline=None)
@given(scale=st.floats(0.01, 0.2), seed=seeds)
def test_a_phrase_graph_has_the_published_counts(graphs: ModuleType, scale: float, seed: int) -> None:
    edges = graphs.phrase_graph(scale, seed)
    edges.graph().validate()
    n_phrases, n_passages = int(85_288 * scale), int(11_656 * scale)
    assert (edges.n_nodes, edges.first_passage) == (n_phrases + n_passages, n_phrases)
    assert edges.sources.max() < n_phrases
    n_mentions, n_facts = int(132_586 * scale), int(140_830 * scale)
    mentions, facts = slice(0, n_mentions), slice(n_mentions, n_mentions + n_facts)
    np.testing.assert_array_equal(np.flatnonzero(edges.targets >= n_phrases), np.arange(n_mentions))
    assert np.unique(edges.sources[mentions]).size == n_phrases
    assert np.all(edges.weights[mentions] == 1)
    assert np.all(edges.weights[facts] == 2)
    n_synonyms = len(edges.sources) - facts.stop
    assert 0.5 * 1_125_951 * scale < n_synonyms <= 1_125_951 * scale
    standing = sp.csr_array(
        (np.ones(n_mentions), (edges.sources[mentions], edges.targets[mentions])),
        shape=(n_phrases, edges.n_nodes),
    )
    shared = standing[edges.sources[facts]].multiply(standing[edges.targets[facts]])
    assert np.all(shared.sum(axis=1) > 0)  # both ends of a fact stand in one passage
    assert np.all(edges.sources[facts] != edges.targets[facts])


def test_synonyms_of_a_phrase_graph_are_nearly_cliques(graphs: ModuleType) -> None:
    edges = graphs.phrase_graph(1.0)
    synonyms = slice(len(edges.sources) - 1_125_951, None)
    assert np.all(edges.weights[synonyms] >= np.float32(1.6))
    joined = Graph.from_edges(
        edges.n_nodes, edges.sources[synonyms], edges.targets[synonyms], edges.weights[synonyms]
    )
    assert joined.n_edges == 1_125_951
    assert clustering(joined) == pytest.approx(0.9, abs=0.05)


def test_a_saved_graph_is_mapped_and_the_same(graphs: ModuleType, tmp_path: Path) -> None:
    graph = graphs.power_law(500).graph()
    graphs.save(graph, tmp_path)
    loaded = graphs.load(tmp_path)
    for name in ("indptr", "indices", "weights"):
        assert isinstance(getattr(loaded, name), np.memmap)
        np.testing.assert_array_equal(getattr(loaded, name), getattr(graph, name))


def test_overlap_counts_ties_and_not_what_is_missing(benchmark: ModuleType) -> None:
    scores = np.array([0.1, 0.5, 0.3, 0.3, 0.0])
    assert benchmark.overlap(np.array([1, 2]), scores, 2) == 1
    assert benchmark.overlap(np.array([1, 3]), scores, 2) == 1  # as good as passage 2
    assert benchmark.overlap(np.array([1, 0]), scores, 2) == 0.5
    assert benchmark.overlap(np.array([1, -1]), scores, 2) == 0.5
    assert benchmark.overlap(np.array([3, 2, 1, 0, -1]), scores, 5) == 1  # the last has no score at all


def test_an_order_may_differ_only_where_scores_do_not(benchmark: ModuleType) -> None:
    scores = np.array([0.1, 0.5, 0.3, 0.3 * (1 + 1e-8)])
    assert benchmark.same_order(np.array([1, 3, 2, 0]), scores)
    assert benchmark.exact_order(np.array([1, 3, 2, 0]), scores)
    assert benchmark.same_order(np.array([1, 2, 3, 0]), scores)
    assert not benchmark.exact_order(np.array([1, 2, 3, 0]), scores)
    assert not benchmark.same_order(np.array([3, 1, 2, 0]), scores)


def rows_of(benchmark: ModuleType, **changed: float) -> list[dict[str, Any]]:
    common = {"graph": "power-law", "nodes": 10, "overlap_at_20": 1.0, "same_order_at_20": 1.0}
    names = {name for name, _ in benchmark.BOUNDS}
    return [{**common, "certified_right": 1.0, **changed, "method": name} for name in sorted(names)]


def test_a_bound_is_held_against_the_worst_graph(benchmark: ModuleType) -> None:
    good = {"size": 10, "rows": rows_of(benchmark)}
    assert all(goal.met for goal in benchmark.overlaps([good]))
    bad = {"size": 77, "rows": rows_of(benchmark, overlap_at_20=0.5, nodes=77)}
    missed = [goal for goal in benchmark.overlaps([good, bad, good]) if not goal.met]
    assert {goal.name.partition(":")[0] for goal in missed} == {
        name for name, measure in benchmark.BOUNDS if measure == "overlap_at_20"
    }
    assert all("77 nodes" in goal.measured for goal in missed)
    huge = bad | {"size": benchmark.HUGE}
    assert all(goal.met for goal in benchmark.overlaps([good, huge]))  # told, not judged


@pytest.mark.slow
def test_the_benchmark_writes_rows_of_every_method(tmp_path: Path) -> None:
    record, figure = tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, BENCHMARKS / "ppr.py", "--quick", "--sizes", "1000", "--markdown"]
    command += ["--json", record, "--svg", figure]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| push |" in done.stdout
    written = json.loads(record.read_text("utf-8"))
    assert written["machine"]["cores"] >= 1
    by_graph: dict[str, set[str]] = {}
    for row in written["rows"]:
        by_graph.setdefault(row["graph"], set()).add(row["method"])
        assert row["seconds_per_query"] > 0
        assert row["overlap_at_20"] >= 0.95
        assert row["peak_bytes"] > 10_000_000
        assert row["nodes"] == pytest.approx(1000, abs=2)
        assert row["edges"] > 5000
        touches_unknown = row["method"] in ("igraph", "igraph dense", "scikit-network")
        assert (row["edges_touched"] is None) == touches_unknown
    everywhere = {"push", "push 1e-6", "push certified 10", "push bulk", "power", "igraph", "scikit-network"}
    assert by_graph["community"] == by_graph["phrase-like"] == everywhere
    assert by_graph["power-law"] == everywhere | {"affine", "affine single", "igraph dense"}
    assert figure.read_text("utf-8").startswith("<?xml")
