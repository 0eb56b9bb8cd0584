"""Edge weights of both modes against a dictionary of ordered pairs, as HippoRAG's code keeps one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.graph import build_graph

N = 6
pairs = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1))
facts = st.lists(st.tuples(pairs, st.integers(1, 3)), max_size=12)
synonyms = st.sets(pairs.filter(lambda p: p[0] < p[1]), max_size=6)
occurrences = st.sets(st.tuples(st.integers(0, N - 1), st.integers(0, 2)), max_size=10)


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
    graph, counts = build_graph(
        np.array([ends for ends, _ in facts], dtype=np.int64).reshape(-1, 2),
        np.array([count for _, count in facts], dtype=np.int64),
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
