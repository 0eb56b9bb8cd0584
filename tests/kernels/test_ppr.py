"""The dense solvers, and ``solve`` that chooses one: reference, power, propagate."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import igraph
import numba
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Goal, Graph, block_width, power, propagate, push, ranked, reference, solve
from hippoindex.kernels.ppr.power import CHUNK_ROWS
from hippoindex.kernels.ppr.restart import normalised_restart, return_factor
from hippoindex.kernels.ppr.spec import generate

pytestmark = pytest.mark.usefixtures("one_thread")
seeds = st.integers(0, 2**32 - 1)
FLOAT32 = 2e-6  # what rounding may add to an L1 error


def path_graph() -> Graph:
    return Graph.from_edges(4, [0, 1], [1, 2], [1.0, 2.0])  # 0 - 1 = 2, and 3 alone


def with_isolated_seeds(rng: np.random.Generator, graph: Graph, restart: np.ndarray) -> np.ndarray:
    """Return the restart with weight on some isolated nodes, and one column on nothing else."""
    if len(graph.isolated):
        restart = restart.copy()
        restart[rng.choice(graph.isolated), 0] += 2.0
        restart[:, 1] = 0
        restart[graph.isolated, 1] = 1
    return restart


@pytest.fixture
def threads() -> Iterator[int]:
    """Number of threads there are; what a test sets is undone."""
    before = numba.get_num_threads()
    yield numba.config.NUMBA_NUM_THREADS
    numba.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=st.integers(2, 80))
def test_reference_agrees_with_igraph(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    graph: Graph = inputs["graph"]
    restart = with_isolated_seeds(rng, graph, inputs["restart"])
    result = reference(graph, restart, inputs["damping"])
    coo = graph.matrix(np.float64).tocoo()
    upper = coo.row < coo.col
    other = igraph.Graph(n=graph.n_nodes, edges=list(zip(coo.row[upper], coo.col[upper], strict=True)))
    for column in range(restart.shape[1]):
        expected = other.personalized_pagerank(
            damping=inputs["damping"],
            directed=False,
            weights=coo.data[upper].tolist(),
            reset=restart[:, column].tolist(),
            implementation="prpack",
        )
        np.testing.assert_allclose(result.scores[:, column], expected, atol=1e-9)
    np.testing.assert_allclose(result.scores.sum(axis=0), 1, atol=1e-9)


def test_scores_of_a_small_graph_by_hand() -> None:
    # x0 = x1 / 6 + 1 / 2, x1 = (x0 + x2) / 2, x2 = x1 / 3
    for solver, atol in ((reference, 1e-12), (power, 1e-6)):
        scores = solver(path_graph(), [[1.0], [0.0], [0.0], [0.0]]).scores[:, 0]
        np.testing.assert_allclose(scores, [5 / 9, 1 / 3, 1 / 9, 0], atol=atol)


def test_mass_on_an_isolated_node_goes_back_to_the_restart() -> None:
    # half of the restarts are at 3, from where d = 1/2 of the walks start again: 1 / (1 - 1/4) starts a walk
    for solver, atol in ((reference, 1e-12), (power, 1e-6)):
        alone = solver(path_graph(), [[0.0], [0.0], [0.0], [1.0]]).scores[:, 0]
        np.testing.assert_allclose(alone, [0, 0, 0, 1], atol=atol)
        half = solver(path_graph(), [[1.0], [0.0], [0.0], [1.0]]).scores[:, 0]
        np.testing.assert_allclose(half, np.array([5 / 9, 1 / 3, 1 / 9, 1 / 2]) * (4 / 3) / 2, atol=atol)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=st.integers(2, 80))
def test_power_agrees_with_the_reference_where_restarts_are_isolated(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    graph: Graph = inputs["graph"]
    restart = with_isolated_seeds(rng, graph, inputs["restart"])
    result = power(graph, restart, inputs["damping"])
    exact = reference(graph, restart, inputs["damping"]).scores
    assert np.all(np.abs(result.scores - exact).sum(axis=0) <= result.residual + FLOAT32)
    assert result.converged.all()
    np.testing.assert_allclose(result.scores.sum(axis=0), 1, atol=2e-5)


def test_residual_is_an_upper_bound_when_stopped_early() -> None:
    inputs = generate(np.random.default_rng(3), 400)
    for damping in (0.2, 0.5, 0.85):
        exact = reference(inputs["graph"], inputs["restart"], damping).scores
        for iterations in (1, 2, 4, 8):
            arguments = inputs | {"damping": damping, "tolerance": 1e-9, "max_iterations": iterations}
            result = power(**arguments)
            error = np.abs(result.scores - exact).sum(axis=0)
            assert np.all(error <= result.residual + FLOAT32)
            assert not result.converged.any()
            assert np.all(result.iterations == iterations)


def wide_inputs(rng: np.random.Generator, width: int) -> tuple[Graph, np.ndarray]:
    """Return a graph of many chunks of rows, and restarts whose sums depend on the order of adding."""
    n = 40 * CHUNK_ROWS + 5
    a, b = 2 * rng.integers(0, n // 2, (2, n))  # the other half of the nodes is isolated
    restart = 10 ** rng.uniform(-6, 0, (n, width))
    restart[:, ::3] *= rng.random((n, len(range(0, width, 3)))) < 1e-3  # stops at another iteration
    return Graph.from_edges(n, a, b, rng.random(n)), restart


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_column_is_the_same_to_the_last_bit_in_any_block(width: int, threads: int) -> None:
    graph, restart = wide_inputs(np.random.default_rng(width), 64)
    numba.set_num_threads(threads)
    together = power(graph, restart)
    assert len(set(together.iterations)) > 1, "columns that stop at once would show nothing"
    numba.set_num_threads(1)
    order = np.random.default_rng(0).permutation(64)  # other companions, too
    for start in range(0, 64, width):
        columns = order[start : start + width]
        block = power(graph, restart[:, columns])
        for field in ("scores", "residual", "iterations"):
            assert np.array_equal(getattr(block, field), getattr(together, field)[..., columns]), field


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_column_is_scaled_alike_in_any_block(dtype: type, order: Any) -> None:
    graph, restart = wide_inputs(np.random.default_rng(2), 8)
    together = normalised_restart(graph, restart.astype(dtype), 0.5, np.float64)
    for column in range(8):
        alone = normalised_restart(graph, np.array(restart[:, [column]], dtype, order=order), 0.5, np.float64)
        assert np.array_equal(alone[:, 0], together[:, column])


@pytest.mark.parametrize("iterations", [1, 200])
def test_a_signed_column_is_the_same_to_the_last_bit_in_any_block(iterations: int) -> None:
    graph, restart = wide_inputs(np.random.default_rng(5), 16)
    block = restart.astype(np.float32)
    block[::2] *= -1
    together = propagate(graph, block, 0, max_iterations=iterations)
    for column in range(16):
        alone = propagate(graph, block[:, [column]], 0, max_iterations=iterations)
        assert np.array_equal(alone.scores[:, 0], together.scores[:, column])
        assert alone.residual[0] == together.residual[column]


def test_a_column_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    graph, restart = wide_inputs(np.random.default_rng(1), 5)
    numba.set_num_threads(threads)
    many = power(graph, restart)
    for count in range(1, threads):
        numba.set_num_threads(count)
        few = power(graph, restart)
        assert np.array_equal(few.scores, many.scores)
        assert np.array_equal(few.residual, many.residual)


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**900])
def test_the_unit_of_a_restart_does_not_matter(scale: float) -> None:
    inputs = generate(np.random.default_rng(4), 50)
    scaled = inputs | {"restart": inputs["restart"] * scale}
    assert np.array_equal(power(**scaled).scores, power(**inputs).scores)


@pytest.mark.parametrize(
    ("restart", "damping", "message"),
    [
        (np.eye(4)[:, [0, 1]] * [1, 0], 0.5, "column 1 is all zeros"),
        (np.ones((3, 1)), 0.5, r"shape \(3, 1\); expected \(4, B\)"),
        (np.ones(4), 0.5, r"shape \(4,\); expected \(4, B\)"),
        (np.array([[1, 1], [1, 1], [1, -1], [1, 1]]), 0.5, "negative or non-finite value in row 2, column 1"),
        (np.full((4, 1), np.nan), 0.5, "negative or non-finite value in row 0, column 0"),
        (np.full((4, 1), np.inf), 0.5, "negative or non-finite"),
        (np.full((4, 1), 1e308), 0.5, "column 0 has weights whose sum overflows"),
        *((np.ones((4, 1)), damping, "probability of continuing") for damping in (0.0, 1.0, -0.5, np.nan)),
    ],
)
def test_bad_arguments_are_refused(restart: np.ndarray, damping: float, message: str) -> None:
    for solver in (reference, power):
        with pytest.raises(KernelError, match=message):
            solver(path_graph(), restart, damping)


def test_an_empty_graph_is_refused() -> None:
    empty = Graph.from_edges(0, [], [], [])
    for solver in (reference, power):
        with pytest.raises(KernelError, match="graph is empty"):
            solver(empty, np.ones((0, 1)))


def test_block_width_follows_the_budget_and_says_what_is_missing() -> None:
    assert block_width(1000, 64, 16_000 * 10) == 10
    assert block_width(1000, 64, 16_000 * 10 - 1) == 9
    assert block_width(1000, 4, 10**9) == 4
    assert block_width(1000, 0, 1) == 0
    with pytest.raises(KernelError, match="needs 16000 bytes; the budget is 100"):
        block_width(1000, 4, 100)


def test_power_stays_within_the_memory_that_block_width_plans() -> None:
    inputs = generate(np.random.default_rng(6), 50_000)
    restart = inputs["restart"].astype(np.float32)
    power(inputs["graph"], restart)
    budget = 16 * restart.size
    assert block_width(len(restart), restart.shape[1], budget) == restart.shape[1]
    tracemalloc.start()
    power(inputs["graph"], restart)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak + restart.nbytes <= 1.1 * budget


# ------------------------------------------------------------------------------------------- propagate


@st.composite
def propagated(draw: st.DrawFn) -> tuple[Graph, np.ndarray, int, float, np.random.Generator]:
    rng = np.random.default_rng(draw(seeds))
    inputs = generate(rng, draw(st.integers(2, 80)))
    n = inputs["graph"].n_nodes
    first = int(rng.integers(0, n))
    block = rng.standard_normal((int(rng.integers(1, n - first + 1)), 4)).astype(np.float32)
    return inputs["graph"], block, first, inputs["damping"], rng


def exact_operator(graph: Graph, damping: float) -> np.ndarray:
    """Return (1 - d) (I - d W D^-1)^-1 by a dense inverse."""
    degrees = np.where(graph.degrees > 0, graph.degrees, 1)
    step = graph.matrix(np.float64).toarray() / degrees
    return (1 - damping) * np.linalg.inv(np.eye(graph.n_nodes) - damping * step)


@settings(max_examples=60, deadline=None)
@given(propagated())
def test_propagate_applies_the_operator_to_signed_blocks_at_any_offset(case: Any) -> None:
    graph, block, first, damping, _ = case
    exact = exact_operator(graph, damping)[:, first : first + len(block)] @ block.astype(np.float64)
    norm = np.abs(block).sum(axis=0)
    for iterations in (1, 3, 200):
        result = propagate(graph, block, first, damping, 1e-6, iterations)
        error = np.abs(result.scores - exact).sum(axis=0)
        assert np.all(error <= (result.residual + FLOAT32) * norm)
        assert np.array_equal(result.converged, result.residual <= 1e-6)
    assert result.converged.all()


@settings(max_examples=30, deadline=None)
@given(propagated())
def test_propagate_is_linear(case: Any) -> None:
    graph, block, first, damping, rng = case
    weights = rng.standard_normal(4).astype(np.float32)
    mixed = propagate(graph, (block @ weights)[:, None], first, damping).scores[:, 0]
    separate = propagate(graph, block, first, damping).scores @ weights
    assert np.abs(mixed - separate).sum() <= 5e-6 * np.abs(block).sum() * np.abs(weights).max()
    scaled = propagate(graph, block * np.float32(-4), first, damping).scores
    np.testing.assert_array_equal(scaled, propagate(graph, block, first, damping).scores * np.float32(-4))


@settings(max_examples=30, deadline=None)
@given(propagated())
def test_propagate_times_the_return_factor_is_ppr(case: Any) -> None:
    graph, block, first, damping, _ = case
    block = np.abs(block) / np.abs(block).sum(axis=0)
    restart = np.zeros((graph.n_nodes, 4), dtype=np.float32)
    restart[first : first + len(block)] = block
    factor = return_factor(restart[graph.isolated].sum(axis=0), damping)
    scores = propagate(graph, block, first, damping).scores * factor
    assert np.all(np.abs(scores - reference(graph, restart, damping).scores).sum(axis=0) <= 1e-5)


def test_a_column_of_zeros_propagates_to_zeros() -> None:
    result = propagate(path_graph(), np.array([[0, 1], [0, -1]], dtype=np.float32), 1)
    assert not result.scores[:, 0].any()
    assert result.scores[:, 1].any()
    assert (result.residual[0], result.converged[0]) == (0, True)


@pytest.mark.parametrize(
    ("block", "first", "damping", "message"),
    [
        (np.ones((2, 1), np.float32), 3, 0.5, r"restart rows are nodes 3..4 of 4"),
        (np.ones((2, 1), np.float32), -1, 0.5, r"restart rows are nodes -1..0 of 4"),
        (np.ones((2, 1)), 0, 0.5, "finite float32 array"),
        (np.ones(2, np.float32), 0, 0.5, "finite float32 array"),
        (np.full((2, 1), np.inf, np.float32), 0, 0.5, "finite float32 array"),
        (np.ones((2, 1), np.float32), 0, 1.0, "probability of continuing"),
    ],
)
def test_propagate_refuses_bad_arguments(block: np.ndarray, first: int, damping: float, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        propagate(path_graph(), block, first, damping)


# ----------------------------------------------------------------------------------------------- solve


def sparse_case(seed: int, n: int = 400) -> tuple[Graph, sp.csr_array]:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, n - 50, (2, 2 * n))
    graph = Graph.from_edges(n, a, b, rng.random(2 * n))
    restarts = rng.random((9, n)) * (rng.random((9, n)) < 3 / n)
    restarts[np.arange(9), np.arange(9)] = 1
    return graph, sp.csr_array(restarts)


def test_auto_pushes_sparse_restarts_and_logs_why() -> None:
    graph, sparse = sparse_case(0, 1000)
    with capture_logs() as logged:
        assert solve(graph, sparse, goal=Goal(1e-6)).method == "push"
        assert solve(graph, np.ones((2, 1000))).method == "power"
    assert [entry["method"] for entry in logged] == ["push", "power"]
    assert (logged[1]["restart_share"], logged[1]["nodes"]) == (1.0, 1000)
    with capture_logs() as logged:
        solve(graph, sparse, "push", goal=Goal(1e-3))
    assert not logged, "nothing was chosen"


@settings(max_examples=25, deadline=None)
@given(seed=seeds, top_k=st.integers(1, 30), damping=st.sampled_from([0.2, 0.5, 0.8]))
def test_push_and_power_rank_alike_and_prove_what_is_true(seed: int, top_k: int, damping: float) -> None:
    graph, restarts = sparse_case(seed, 120)
    candidates = (100, 120) if seed % 2 else (20, 90)  # 70 .. 119 are isolated
    exact = reference(graph, restarts.toarray().T, damping).scores.T
    low, high = candidates
    arguments: dict[str, Any] = {"top_k": top_k, "candidates": candidates, "damping": damping}
    method: Any
    for method in ("push", "power"):
        result = solve(graph, restarts, method, goal=Goal(1e-9), **arguments)
        assert result.method == method
        assert result.nodes.shape == result.scores.shape == (9, min(top_k, high - low))
        assert result.converged.all()
        for row in range(9):
            found = result.nodes[row][result.nodes[row] >= 0]
            assert np.all((found >= low) & (found < high))
            assert len(set(found.tolist())) == len(found)
            assert np.all(result.nodes[row][len(found) :] == -1)
            assert np.all(result.scores[row][len(found) :] == 0)
            np.testing.assert_allclose(result.scores[row][: len(found)], exact[row][found], atol=FLOAT32)
            best = np.sort(exact[row][low:high])[::-1][: len(found)]
            np.testing.assert_allclose(np.sort(exact[row][found])[::-1], best, atol=FLOAT32)
            proven = int(result.certified_k[row])
            assert proven <= len(found)
            rest = np.setdiff1d(np.arange(low, high), found[:proven])
            if proven and len(rest):
                assert exact[row][found[:proven]].min() >= exact[row][rest].max() - 1e-7


@pytest.mark.parametrize("method", ["push", "power"])
def test_nodes_that_no_walk_reaches_are_not_ranked(method: Any) -> None:
    result = solve(path_graph(), np.eye(4)[[0, 3]], method, top_k=4)
    assert result.nodes.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]
    assert result.scores[0, 3] == 0
    assert np.all(result.scores[1] == [1, 0, 0, 0])
    assert result.certified_k.tolist() == [3, 1]


def test_equal_scores_are_ranked_by_node_and_not_proven_by_power() -> None:
    star = Graph.from_edges(9, [4] * 8, [0, 1, 2, 3, 5, 6, 7, 8], np.ones(8))
    restart = np.eye(9)[[4]]
    by_power = solve(star, restart, "power", top_k=4)
    assert by_power.nodes.tolist() == [[4, 0, 1, 2]]
    assert by_power.certified_k.tolist() == [1]
    by_push = solve(star, restart, "push", top_k=4, goal=Goal(1e-10))
    assert by_push.nodes.tolist() == [[4, 0, 1, 2]]


def test_certified_k_of_power_needs_a_gap_of_the_whole_residual() -> None:
    graph, restarts = sparse_case(3, 200)
    exact = reference(graph, restarts.toarray().T).scores.T
    proven = []
    for tolerance in (0.2, 1e-2, 1e-4, 1e-6):
        result = solve(graph, restarts, "power", top_k=20, tolerance=tolerance)
        proven.append(result.certified_k.sum())
        for row in range(9):
            k = int(result.certified_k[row])
            rest = np.setdiff1d(np.arange(200), result.nodes[row, :k])
            assert not k or exact[row][result.nodes[row, :k]].min() >= exact[row][rest].max() - 1e-7
            gap = result.scores[row, :-1] - result.scores[row, 1:]
            assert np.all(gap[k:] < result.residual[row]), "what is proven, is said"
    assert proven == sorted(proven)
    assert proven[-1] > proven[0]


@pytest.mark.parametrize("columns", [1, 4])
def test_power_in_blocks_of_a_budget_gives_the_same_bytes(columns: int) -> None:
    graph, restarts = sparse_case(2)
    at_once = solve(graph, restarts, "power", top_k=7)
    in_blocks = solve(graph, restarts, "power", top_k=7, memory_bytes=16 * 400 * columns)
    for field in ("nodes", "scores", "residual", "iterations", "certified_k", "edges_touched"):
        assert np.array_equal(getattr(at_once, field), getattr(in_blocks, field)), field
    assert np.array_equal(at_once.edges_touched, at_once.iterations * len(graph.indices))


@pytest.mark.parametrize("method", ["push", "power"])
def test_solve_says_how_much_memory_is_missing(method: Any) -> None:
    graph, restarts = sparse_case(2)
    with pytest.raises(KernelError, match=r"over 400 nodes needs \d+ bytes; the budget is 1000"):
        solve(graph, restarts, method, memory_bytes=1000)


@pytest.mark.parametrize("method", ["push", "power"])
def test_no_restarts_give_no_ranking(method: Any) -> None:
    result = solve(path_graph(), sp.csr_array((0, 4)), method, top_k=3)
    assert result.nodes.shape == (0, 3)
    assert len(result.converged) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "no method 'magic'; there are auto, push and power"),
        ({"top_k": 0}, "top_k must be at least 1; got 0"),
        ({"candidates": (2, 5)}, r"candidates 2..4 are no range of the nodes 0..3"),
        ({"candidates": (-1, 2)}, "candidates -1..1 are no range"),
        ({"candidates": (3, 2)}, "candidates 3..1 are no range"),
        ({"damping": 1.0}, "probability of continuing"),
        ({"method": "power", "restarts": [[1, 0, 0, 0], [0, 0, 0, 0]]}, "restart 1 is all zeros"),
        (
            {"method": "push", "restarts": [[1, 0, 0, 0], [0, -1, 0, 0]]},
            "restart 1 has weight -1.0 at node 1",
        ),
    ],
)
def test_solve_refuses_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        solve(path_graph(), **{"restarts": [[1.0, 0, 0, 0]]} | arguments)


def test_what_is_proven_of_more_nodes_than_are_kept_proves_nothing_of_those() -> None:
    star = Graph.from_edges(9, [4] * 8, [0, 1, 2, 3, 5, 6, 7, 8], np.ones(8))
    found = push(star, np.eye(9)[[4]], goal=Goal(1e-3, certify_k=9))
    assert found.certified_k.tolist() == [9]
    assert ranked(found, 9).certified_k.tolist() == [9]
    assert ranked(found, 3).certified_k.tolist() == [0]
