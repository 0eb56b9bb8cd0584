"""Edge weights of both modes against a dictionary of ordered pairs, as HippoRAG's code keeps one."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline import artifact
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.graph import EdgeCounts, Occurrence, build_graph
from hippoindex.pipeline.normalise import phrase_id
from hippoindex.pipeline.titles import title_rows

N = 6
pairs = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1))
facts = st.lists(st.tuples(pairs, st.integers(1, 3)), max_size=12)
synonyms = st.sets(pairs.filter(lambda p: p[0] < p[1]), max_size=6)
occurrences = st.sets(st.tuples(st.integers(0, N - 1), st.integers(0, 2)), max_size=10)


def built(
    ends: np.ndarray,
    counts: np.ndarray,
    matrix: sp.csr_matrix,
    synonyms: Pairs,
    config: GraphConfig,
    titles: np.ndarray | None = None,
) -> tuple[Graph, EdgeCounts]:
    """Return the graph, copied into memory."""
    matrix.sort_indices()
    occurrence = Occurrence(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        graph, edges = build_graph(Path(folder) / "graph", ends, counts, occurrence, synonyms, config, titles)
        return Graph(*(np.array(array) for array in (graph.indptr, graph.indices, graph.weights))), edges


@pytest.mark.parametrize("weights", ["plain", "hipporag"])
@settings(max_examples=100, deadline=None)
@given(facts=facts, synonyms=synonyms, occurrences=occurrences)
def test_weights(
    weights: str,
    facts: list[tuple[tuple[int, int], int]],
    synonyms: set[tuple[int, int]],
    occurrences: set[tuple[int, int]],
) -> None:
    first, second = (np.array([p[i] for p in sorted(synonyms)], dtype=np.int64) for i in (0, 1))
    cosine = np.linspace(0.8, 0.95, len(first)).astype(np.float32)
    rows, columns = ([p[i] for p in occurrences] for i in (0, 1))
    occurrence = sp.csr_matrix(([2] * len(rows), (rows, columns)), shape=(N, 3), dtype=np.int32)
    graph, counts = built(
        np.array([ends for ends, _ in facts], dtype=np.int64).reshape(-1, 2),
        np.array([count for _, count in facts], dtype=np.int32),
        occurrence,
        Pairs(first, second, cosine),
        GraphConfig(weights=weights),
    )
    graph.validate()
    directed: dict[tuple[int, int], float] = defaultdict(float)
    for (a, b), count in facts:
        if a != b:
            directed[a, b] += count
            directed[b, a] += count if weights == "hipporag" else 0
    n_fact_edges = len({frozenset(pair) for pair in directed})
    for a, b, value in zip(first.tolist(), second.tolist(), cosine.tolist(), strict=True):
        if weights == "hipporag":
            directed[a, b] = directed[b, a] = value
        else:
            directed[a, b] += value
    expected = np.zeros((N + 3, N + 3))
    for (a, b), value in directed.items():
        expected[a, b] += value
        expected[b, a] += value
    for phrase, passage in occurrences:
        expected[phrase, N + passage] = expected[N + passage, phrase] = 1.0
    np.testing.assert_allclose(graph.matrix(np.float64).toarray(), expected, rtol=1e-6)
    assert counts.fact_edges == n_fact_edges
    assert counts.synonym_edges == len(synonyms)
    assert counts.passage_edges == len(occurrences)
    assert counts.graph_edges == graph.n_edges == np.count_nonzero(np.triu(expected))


@settings(max_examples=100, deadline=None)
@given(
    facts=facts,
    occurrences=occurrences,
    titles=st.lists(st.lists(st.integers(-1, N - 1), min_size=2, max_size=2), min_size=3, max_size=3),
    weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_the_first_held_title_of_a_passage_weighs_more(
    facts: list[tuple[tuple[int, int], int]],
    occurrences: set[tuple[int, int]],
    titles: list[list[int]],
    weight: float,
) -> None:
    ends = np.array([pair for pair, _ in facts], dtype=np.int64).reshape(-1, 2)
    counts = np.array([count for _, count in facts], dtype=np.int32)
    rows, columns = ([p[i] for p in occurrences] for i in (0, 1))
    occurrence = sp.csr_matrix(([1] * len(rows), (rows, columns)), shape=(N, 3), dtype=np.int32)
    none = Pairs(*np.empty((2, 0), np.int64), np.empty(0, np.float32))
    plain, _ = built(ends, counts, occurrence, none, GraphConfig())
    titled, edges = built(
        ends, counts, occurrence, none, GraphConfig(title_weight=weight), np.array(titles, np.int64)
    )
    titled.validate()
    expected = plain.matrix(np.float64).toarray()
    for passage, candidates in enumerate(titles):
        held = [phrase for phrase in candidates if (phrase, passage) in occurrences]
        for phrase in held[:1]:
            number = sum(column == passage for column in columns)
            expected[phrase, N + passage] = expected[N + passage, phrase] = 1 + weight * number
    np.testing.assert_array_equal(titled.matrix(np.float64).toarray(), expected)
    assert edges.passage_edges == len(occurrences)


def test_a_title_is_a_phrase_as_it_is_or_without_its_qualifier() -> None:
    names = sorted(["mercury", "mercury planet", "bonn", ""], key=phrase_id)
    phrases = pa.table({"phrase_id": pa.array(map(phrase_id, names), pa.uint64())})
    passages = pa.table({"title": ["Mercury (planet)", "BONN", "Mercury  (element)", "", "Venus"]})
    rows = title_rows(passages, phrases, "unicode")
    found = [[names[row] if row >= 0 else None for row in pair] for pair in rows.tolist()]
    assert found == [["mercury planet", "mercury"], ["bonn"] * 2, [None, "mercury"], [None] * 2, [None] * 2]
    assert (title_rows(passages, phrases.slice(0, 0), "unicode") == -1).all()


def random_parts(seed: int, n: int, facts: int, n_passages: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    ends = np.minimum(rng.integers(0, n, (facts, 2)), rng.integers(0, n, (facts, 2)))
    counts = rng.choice([1, 2, 3, 2**24 + 1], facts).astype(np.int32)
    pairs = np.unique(np.sort(rng.integers(0, n, (facts, 2)), axis=1), axis=0)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    synonyms = Pairs(pairs[:, 0], pairs[:, 1], rng.uniform(0.8, 1.0, len(pairs)).astype(np.float32))
    occurrence = sp.random(n, n_passages, 0.1, "csr", rng=rng).astype(bool).astype(np.int32)
    return ends, counts, occurrence, synonyms


@pytest.mark.parametrize("weights", ["plain", "hipporag"])
@pytest.mark.parametrize("cell_budget", [1, 100, 2**20])
def test_blocks_do_not_change_a_byte(
    slow: ModuleType, monkeypatch: pytest.MonkeyPatch, weights: Any, cell_budget: int
) -> None:
    monkeypatch.setattr("hippoindex.pipeline.graph.CELL_BYTES", 2**20 // cell_budget)
    monkeypatch.setattr("hippoindex.pipeline.graph.EDGES_AT_ONCE", 37)
    for seed, size in enumerate([(60, 400, 30), (300, 500, 80), (5, 0, 3)]):
        ends, counts, occurrence, synonyms = random_parts(seed, *size)
        config = GraphConfig(weights=weights, memory_bytes=2**20)
        graph, edges = built(ends, counts, occurrence, synonyms, config)
        whole = slow.Whole(None, pa.table({"count": counts}), ends, occurrence, 0)
        expected, expected_edges = slow.build_graph(whole, synonyms, config)
        for name in ("indptr", "indices", "weights"):
            got, reference = getattr(graph, name), getattr(expected, name)
            assert got.dtype == reference.dtype
            assert np.array_equal(got, reference)
        assert edges == expected_edges


@pytest.mark.parametrize(("ends", "pair"), [([[0, 6]], (0, 1)), ([[-1, 0]], (0, 1)), ([[0, 1]], (5, 6))])
def test_edges_to_nowhere_are_refused(ends: list[list[int]], pair: tuple[int, int]) -> None:
    synonyms = Pairs(np.array(pair[:1]), np.array(pair[1:]), np.array([0.9], np.float32))
    nothing = sp.csr_matrix((N, 3), dtype=np.int32)
    with pytest.raises(KernelError, match=r"0 joins phrases .*; phrases are 0\.\.5"):
        built(np.array(ends), np.ones(1, np.int32), nothing, synonyms, GraphConfig())


@pytest.mark.parametrize(("values", "shape"), [([], ()), ([1, 2, 3], ()), ([[1, 2], [3, 4]], (2,))])
def test_arrays_written_piece_by_piece_are_those_of_numpy(
    tmp_path: Path, values: list[Any], shape: tuple[int, ...]
) -> None:
    array = np.array(values, np.int32).reshape(-1, *shape)
    with artifact.ArrayWriter(tmp_path / "a.npy", np.int32, shape) as writer:
        for row in array:
            writer.append(row[None])
    np.save(tmp_path / "b.npy", array)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
