"""The graph type of the PPR kernels: built from edges, checked, mapped from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Goal, Graph, power, push
from hippoindex.kernels.ppr.csr import CHUNK_ROWS, SHORT_ROW
from hippoindex.kernels.ppr.graph import index_type
from hippoindex.kernels.ppr.spec import generate

pytestmark = pytest.mark.usefixtures("one_thread")
seeds = st.integers(0, 2**32 - 1)


def path_graph() -> Graph:
    return Graph.from_edges(4, [0, 1], [1, 2], [1.0, 2.0])  # 0 - 1 = 2, and 3 alone


def summed_in_order(n: int, a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the dense matrix, each cell summed in float64 in the order of the edges."""
    expected = np.zeros((n, n))
    for i, j, w in zip(a.tolist(), b.tolist(), weights.tolist(), strict=True):
        if i != j:
            expected[i, j] += w
            expected[j, i] += w
    return expected.astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(seed=seeds, size=st.integers(1, 40), edges=st.integers(0, 120))
def test_from_edges_sums_parallel_edges_and_is_valid(seed: int, size: int, edges: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, size, (2, edges))
    weights = rng.integers(1, 5, edges).astype(float)
    graph = Graph.from_edges(size, a, b, weights)
    graph.validate()
    expected = summed_in_order(size, a, b, weights)
    np.testing.assert_array_equal(graph.matrix().toarray(), expected)
    np.testing.assert_array_equal(graph.degrees, expected.sum(axis=1))
    np.testing.assert_array_equal(graph.isolated, np.flatnonzero(expected.sum(axis=1) == 0))
    assert graph.n_edges == np.count_nonzero(expected) // 2
    part = graph.head(size // 2)
    part.validate()
    np.testing.assert_array_equal(part.matrix().toarray(), expected[: size // 2, : size // 2])


@settings(max_examples=40, deadline=None)
@given(seed=seeds, nodes=st.integers(2, 70), edges=st.integers(SHORT_ROW, 600))
def test_long_rows_sum_to_the_last_bit_in_the_order_given(seed: int, nodes: int, edges: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = np.zeros(edges, dtype=np.int64), rng.integers(0, nodes, edges)
    a[rng.random(edges) < 0.2] = 1
    weights = 10.0 ** rng.uniform(-12, 6, edges)  # of such different size that another order shows
    graph = Graph.from_edges(nodes, a, b, weights)
    graph.validate()  # both rows of an edge hold the same bits
    np.testing.assert_array_equal(graph.matrix().toarray(), summed_in_order(nodes, a, b, weights))


@pytest.mark.parametrize("columns", [1, 3, 20])
@pytest.mark.parametrize(("weights", "expected"), [((0, 24, 53, 53), 0.0), ((53, 53, 24, 0), 2.0**-23)])
def test_parallel_edges_are_summed_in_the_order_given(
    columns: int, weights: tuple[int, ...], expected: float
) -> None:
    # 1 + 2^-24 is half-way between two float32; what would tip it is too small to be added to it one by one
    targets = np.tile(np.arange(1, columns + 1), len(weights))
    powers = 2.0 ** -np.repeat(np.array(weights, dtype=float), columns)
    graph = Graph.from_edges(columns + 1, np.zeros_like(targets), targets, powers)
    graph.validate()
    assert (4 * columns > SHORT_ROW) == (columns == 20), "row 0 is sorted in both ways"
    np.testing.assert_array_equal(graph.weights, np.float32(1 + expected))


def test_a_graph_of_several_chunks_of_rows_equals_scipy_on_any_number_of_threads() -> None:
    rng = np.random.default_rng(5)
    n = 2 * CHUNK_ROWS + 17
    a, b = rng.integers(0, n, (2, 4 * n))
    b[:200] = n - 1  # a long row in the last chunk
    weights = rng.integers(1, 9, 4 * n).astype(np.float32)
    keep = a != b
    rows, columns = np.r_[a[keep], b[keep]], np.r_[b[keep], a[keep]]
    expected = sp.csr_array((np.r_[weights[keep], weights[keep]], (rows, columns)), shape=(n, n))
    expected.sum_duplicates()
    before = numba.get_num_threads()
    try:
        for threads in (1, numba.config.NUMBA_NUM_THREADS):
            numba.set_num_threads(threads)
            graph = Graph.from_edges(n, a, b, weights)
            graph.validate()
            np.testing.assert_array_equal(graph.indptr, expected.indptr)
            np.testing.assert_array_equal(graph.indices, expected.indices)
            np.testing.assert_array_equal(graph.weights, expected.data)
            np.testing.assert_allclose(graph.degrees, expected.sum(axis=1), rtol=1e-12)
            columns_sum = np.bincount(graph.indices, weights=graph.transition, minlength=n)
            np.testing.assert_allclose(columns_sum[graph.degrees > 0], 1.0, atol=1e-6)
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("first", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("second", [np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("weight", [np.int64, np.float16, np.float32, np.float64])
def test_from_edges_takes_any_integers_as_nodes_and_any_numbers_as_weights(
    first: type, second: type, weight: type
) -> None:
    sources: np.ndarray = np.array([0, 1], dtype=first)
    targets: np.ndarray = np.array([1, 2], dtype=second)
    graph = Graph.from_edges(4, sources, targets, np.array([1, 2], dtype=weight))
    types = [graph.indptr.dtype.name, graph.indices.dtype.name, graph.weights.dtype.name]
    assert types == ["int64", "int32", "float32"]
    np.testing.assert_array_equal(graph.matrix().toarray(), path_graph().matrix().toarray())


def test_a_graph_may_have_no_edges_and_no_nodes() -> None:
    for n in (0, 3):
        graph = Graph.from_edges(n, [], [], [])
        graph.validate()
        assert (graph.n_nodes, graph.n_edges, len(graph.isolated)) == (n, 0, n)


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (([0], [9], [1.0]), "Edge 0 joins nodes 0 and 9; nodes are 0..3"),
        (([0, 4], [1, 1], [1.0, 1.0]), "Edge 1 joins nodes 4 and 1; nodes are 0..3"),
        (([0, -1], [1, 1], [1.0, 1.0]), "Edge 1 joins nodes -1 and 1"),
        (([0], [1], [-1.0]), "Edge 0 has weight -1.0"),
        (([0, 0], [1, 2], [1.0, np.nan]), "Edge 1 has weight nan"),
        (([0], [1], [np.inf]), "Edge 0 has weight inf"),
        (([0, 1], [1], [1.0]), "2 sources, 1 targets and 1 weights"),
        (([0.0], [1], [1.0]), "sources are float64; node numbers are integers"),
        (([0], [True], [1.0]), "targets are bool"),
        ((np.array([2**63], dtype=np.uint64), [1], [1.0]), "sources hold 9223372036854775808"),
        (([0, 3, 1], [1, 2, 0], [3e38, 1.0, 3e38]), "Edges 0 - 1: the sum of their weights overflows"),
        (([2], [3], [1e39]), "Edges 2 - 3: the sum of their weights overflows"),
    ],
)
def test_from_edges_refuses_bad_edges(edge: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Graph.from_edges(4, *edge)


def test_node_numbers_are_int32_while_they_fit() -> None:
    assert index_type(2**31 - 1) is np.int32
    assert index_type(2**31) is np.int64


def broken(**changes: list[float]) -> Graph:
    good = path_graph()
    arrays = {name: np.array(getattr(good, name)) for name in ("indptr", "indices", "weights")}
    for name, values in changes.items():
        arrays[name] = np.array(values, dtype=arrays[name].dtype)
    return Graph(**arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [1, 2, 0, 1]}, "row 1: columns are not sorted or repeat"),
        ({"indices": [1, 0, 0, 1]}, "row 1: columns are not sorted or repeat"),
        ({"indices": [1, 0, 1, 1]}, "row 1: there is a self-loop"),
        ({"indices": [0, 1, 2, 1]}, "row 0: there is a self-loop"),
        ({"indices": [1, 0, 2, 7]}, "row 2: a column is outside the graph"),
        ({"indices": [1, 0, 2, 4]}, "row 2: a column is outside the graph"),
        ({"indices": [1, -1, 2, 1]}, "row 1: a column is outside the graph"),
        ({"weights": [1, 1, 2, np.inf]}, "row 2: a weight is negative or not finite"),
        ({"weights": [1, np.nan, 2, 2]}, "row 1: a weight is negative or not finite"),
        ({"weights": [-1, -1, 2, 2]}, "row 0: a weight is negative or not finite"),
        ({"weights": [1, 1, 3, 2]}, "row 1: it is not symmetric"),
        ({"indices": [1, 0, 3, 1]}, "row 1: it is not symmetric"),
        ({"indptr": [0, 1, 2, 2, 3], "indices": [1, 0, 1], "weights": [1, 1, 2]}, "row 3: it is not symm"),
        ({"indptr": [0, 1, 3, 3, 3], "indices": [1, 0, 2], "weights": [1, 1, 2]}, "row 1: it is not symm"),
        ({"indptr": [0, 1, 3, 2, 4]}, "row 2: indptr decreases"),
        ({"indptr": [0, 1, 3, 4, 5]}, "indptr must start with 0 and end with the length"),
        ({"indptr": [1, 1, 3, 4, 4]}, "indptr must start with 0"),
        ({"indptr": []}, "indptr must start with 0"),
        ({"weights": [1, 1, 2]}, "the length of indices and weights"),
    ],
)
def test_validate_names_the_first_offending_row(changes: dict[str, list[float]], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        broken(**changes).validate()


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("indptr", np.int32, "indptr is int32, weights are float32; expected int64 and float32"),
        ("indices", np.uint32, "indices are uint32; expected int32 or int64"),
        ("weights", np.float64, "indptr is int64, weights are float64"),
    ],
)
def test_validate_refuses_other_types(name: str, dtype: type, message: str) -> None:
    arrays = {key: getattr(path_graph(), key) for key in ("indptr", "indices", "weights")}
    with pytest.raises(KernelError, match=message):
        Graph(**arrays | {name: arrays[name].astype(dtype)}).validate()


@settings(max_examples=150, deadline=None)
@given(seed=seeds, size=st.integers(2, 30))
def test_validate_finds_any_single_change(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, size, (2, 3 * size))
    graph = Graph.from_edges(size, a, b, rng.random(3 * size) + 0.1)
    cell = int(rng.integers(0, max(len(graph.indices), 1)))
    if not len(graph.indices):
        return
    graph.validate()
    indices, weights = graph.indices.copy(), graph.weights.copy()
    if rng.random() < 0.5:
        indices[cell] = (indices[cell] + rng.integers(1, size)) % size
    else:
        weights[cell] = np.nextafter(weights[cell], np.float32(np.inf))
    with pytest.raises(KernelError, match=r"Graph: row \d+: "):
        Graph(graph.indptr, indices, weights).validate()


def test_indices_of_64_bits_are_as_good() -> None:
    graph = path_graph()
    wide = Graph(graph.indptr, graph.indices.astype(np.int64), graph.weights)
    wide.validate()
    restart = np.eye(4)[:, :1]
    np.testing.assert_array_equal(power(wide, restart).scores, power(graph, restart).scores)
    np.testing.assert_array_equal(push(wide, restart.T).scores, push(graph, restart.T).scores)


def test_read_only_memory_maps_work_everywhere(tmp_path: Path) -> None:
    inputs = generate(np.random.default_rng(8), 200)
    graph: Graph = inputs["graph"]
    names = ("indptr", "indices", "weights", "transition")
    for name in names:
        np.save(tmp_path / f"{name}.npy", getattr(graph, name))
    *arrays, transition = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in names)
    assert not arrays[2].flags.writeable
    mapped = Graph(*arrays)
    mapped.validate()
    restart = inputs["restart"]
    for other in (mapped, mapped.with_transition(transition)):
        np.testing.assert_array_equal(power(other, restart).scores, power(graph, restart).scores)
        np.testing.assert_array_equal(
            push(other, restart.T, goal=Goal(1e-5)).scores, push(graph, restart.T, goal=Goal(1e-5)).scores
        )


def test_stored_transition_cells_are_used_and_must_fit() -> None:
    graph = path_graph()
    changed = graph.with_transition(graph.transition / np.float32(2))
    assert changed.transition is not graph.transition
    restart = np.eye(4)[:, :1]
    assert power(changed, restart).scores[1, 0] < power(graph, restart).scores[1, 0]
    bad: Any
    for bad in (graph.transition[:-1], graph.transition.astype(np.float64)):
        with pytest.raises(KernelError, match=r"transition has shape .*; expected \(4,\) of float32"):
            graph.with_transition(bad)
