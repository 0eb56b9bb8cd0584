from __future__ import annotations

import igraph
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Graph, block_width, power, reference
from hippoindex.kernels.ppr.spec import generate

seeds = st.integers(0, 2**32 - 1)


def path_graph() -> Graph:
    return Graph.from_edges(4, [0, 1], [1, 2], [1.0, 2.0])  # 0 - 1 = 2, and 3 alone


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=st.integers(2, 80))
def test_reference_agrees_with_igraph(seed: int, size: int) -> None:
    inputs = generate(np.random.default_rng(seed), size)
    graph: Graph = inputs["graph"]
    result = reference(**inputs)
    coo = graph.matrix(np.float64).tocoo()
    upper = coo.row < coo.col
    other = igraph.Graph(n=graph.n_nodes, edges=list(zip(coo.row[upper], coo.col[upper], strict=True)))
    for column in range(inputs["restart"].shape[1]):
        expected = other.personalized_pagerank(
            damping=inputs["damping"],
            directed=False,
            weights=coo.data[upper].tolist(),
            reset=inputs["restart"][:, column].tolist(),
            implementation="prpack",
        )
        np.testing.assert_allclose(result.scores[:, column], expected, atol=1e-9)


def test_scores_of_a_small_graph_by_hand() -> None:
    # x0 = x1 / 6 + 1 / 2, x1 = (x0 + x2) / 2, x2 = x1 / 3
    scores = reference(path_graph(), [[1.0], [0.0], [0.0], [0.0]]).scores[:, 0]
    np.testing.assert_allclose(scores, [5 / 9, 1 / 3, 1 / 9, 0], atol=1e-12)


def test_mass_on_an_isolated_node_goes_back_to_the_restart() -> None:
    restart = np.array([[0.0], [0.0], [0.0], [1.0]])
    for solve in (reference, power):
        np.testing.assert_allclose(solve(path_graph(), restart).scores[:, 0], [0, 0, 0, 1], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_a_column_does_not_depend_on_the_number_of_threads(seed: int) -> None:
    inputs = generate(np.random.default_rng(seed), 3000)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = power(**inputs)
        numba.set_num_threads(before)
        many = power(**inputs)
    finally:
        numba.set_num_threads(before)
    assert np.array_equal(one.scores, many.scores)
    assert np.array_equal(one.residual, many.residual)


def test_residual_is_an_upper_bound_when_stopped_early() -> None:
    inputs = generate(np.random.default_rng(3), 400)
    exact = reference(**inputs).scores
    for iterations in (1, 2, 4, 8):
        result = power(**inputs, max_iterations=iterations)
        error = np.abs(result.scores - exact).sum(axis=0)
        assert np.all(error <= result.residual + 2e-6)
        assert not result.converged.any()
        assert np.all(result.iterations == iterations)


@pytest.mark.parametrize(
    ("restart", "damping", "message"),
    [
        (np.zeros((4, 1)), 0.5, "column 0 is all zeros"),
        (np.ones((3, 1)), 0.5, r"shape \(3, 1\); expected \(4, B\)"),
        (-np.ones((4, 1)), 0.5, "negative or non-finite"),
        (np.full((4, 1), np.nan), 0.5, "negative or non-finite"),
        (np.ones((4, 1)), 1.0, "probability of continuing"),
    ],
)
def test_bad_arguments_are_refused(restart: np.ndarray, damping: float, message: str) -> None:
    for solve in (reference, power):
        with pytest.raises(KernelError, match=message):
            solve(path_graph(), restart, damping)


def test_block_width_follows_the_budget_and_says_what_is_missing() -> None:
    assert block_width(1000, 64, 16_000 * 10) == 10
    assert block_width(1000, 4, 10**9) == 4
    assert block_width(1000, 0, 1) == 0
    with pytest.raises(KernelError, match="needs 16000 bytes; the budget is 100"):
        block_width(1000, 4, 100)


@settings(max_examples=80, deadline=None)
@given(seed=seeds, size=st.integers(1, 40), edges=st.integers(0, 120))
def test_from_edges_sums_parallel_edges_and_is_valid(seed: int, size: int, edges: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, size, (2, edges))
    weights = rng.integers(1, 5, edges).astype(float)
    graph = Graph.from_edges(size, a, b, weights)
    graph.validate()
    expected = np.zeros((size, size))
    for i, j, w in zip(a, b, weights, strict=True):
        if i != j:
            expected[i, j] += w
            expected[j, i] += w
    np.testing.assert_array_equal(graph.matrix(np.float64).toarray(), expected)
    np.testing.assert_array_equal(graph.degrees, expected.sum(axis=1))
    part = graph.head(size // 2)
    part.validate()
    np.testing.assert_array_equal(part.matrix().toarray(), expected[: size // 2, : size // 2])


def broken(**changes: list[float]) -> Graph:
    good = path_graph()
    arrays = {name: np.array(getattr(good, name)) for name in ("indptr", "indices", "weights")}
    for name, values in changes.items():
        arrays[name] = np.array(values, dtype=arrays[name].dtype)
    return Graph(**arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [1, 2, 0, 1]}, "row 1: columns are not sorted"),
        ({"indices": [1, 0, 1, 1]}, "row 1: there is a self-loop"),
        ({"indices": [1, 0, 2, 7]}, "row 2: a column is outside the graph"),
        ({"weights": [1, 1, 2, np.inf]}, "row 2: a weight is negative or not finite"),
        ({"weights": [1, 1, 3, 2]}, "row 1: it is not symmetric"),
        ({"indices": [1, 0, 3, 1]}, "row 1: it is not symmetric"),
        ({"indptr": [0, 1, 3, 2, 4]}, "row 2: indptr decreases"),
        ({"indptr": [0, 1, 3, 4, 5]}, "indptr must start with 0"),
    ],
)
def test_validate_names_the_first_offending_row(changes: dict[str, list[float]], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        broken(**changes).validate()


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (([0], [9], [1.0]), "Edge 0 joins nodes 0 and 9; nodes are 0..3"),
        (([0], [1], [-1.0]), "Edge 0 has weight -1.0"),
        (([0, 1], [1], [1.0]), "2 sources, 1 targets"),
    ],
)
def test_from_edges_refuses_bad_edges(edge: tuple[list[int], list[int], list[float]], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Graph.from_edges(4, *edge)
