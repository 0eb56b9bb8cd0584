"""Forward push: its error, its bounds, its certificate, and that its memory is clean between restarts."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Goal, Graph, Pusher, SparseResult, push, reference
from hippoindex.kernels.ppr.push import bytes_needed

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 1e-6  # cells of the graph are float32: a walk's steps are off by 6e-8 each
GOALS = [
    Goal(1e-2),
    Goal(1e-4),
    Goal(1e-9),
    Goal(1e-2, tolerance=1e-5),
    Goal(1e-2, certify_k=3),
    Goal(1e-3, tolerance=1e-3, certify_k=5),
    Goal(1e-9, max_edges=40),
    Goal(1e-2, tolerance=1e-9, max_edges=1),
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, np.ndarray, float, np.random.Generator]:
    """Return a random graph with isolated nodes and zero-weight edges, and restarts that may sit on them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 90))
    edges = int(rng.integers(0, 4 * n))
    a, b = (n * rng.random((2, edges)) ** rng.choice([1.0, 3.0])).astype(np.int64)
    weights = rng.choice([0.0, 1.0, 0.8, 5.0, 1e-3], edges, p=[0.15, 0.4, 0.2, 0.2, 0.05])
    graph = Graph.from_edges(n, a, b, weights)
    restarts = rng.random((5, n)) * (rng.random((5, n)) < rng.choice([0.02, 0.2, 1.0]))
    restarts[np.arange(5), rng.integers(0, n, 5)] += 0.5
    if len(graph.isolated):
        restarts[0] = np.isin(np.arange(n), graph.isolated)
        restarts[1, rng.choice(graph.isolated)] += 3.0
    return graph, restarts, float(rng.choice([0.1, 0.5, 0.85])), rng


def same(a: SparseResult, b: SparseResult) -> bool:
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))


def dense(result: SparseResult, n: int) -> np.ndarray:
    scores = np.zeros((len(result), n))
    for number in range(len(result)):
        nodes, values = result.row(number)
        assert len(np.unique(nodes)) == len(nodes)
        scores[number, nodes] = values
    return scores


def lost_factor(graph: Graph, restarts: np.ndarray, damping: float) -> np.ndarray:
    share = restarts[:, graph.isolated].sum(axis=1) / restarts.sum(axis=1)
    return 1 / (1 - damping * share)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(GOALS))
def test_residual_is_the_error_and_scores_are_lower_bounds(case: Any, goal: Goal) -> None:
    graph, restarts, damping, _ = case
    exact = reference(graph, restarts.T, damping).scores.T
    result = push(graph, restarts, damping, goal)
    missing = exact - dense(result, graph.n_nodes)
    assert missing.min() >= -ROUNDING
    if goal.max_edges is None:
        np.testing.assert_allclose(np.abs(missing).sum(axis=1), result.residual, atol=ROUNDING)
    else:  # what an isolated node still holds ends there, though it counts as to be spread
        assert np.all(np.abs(missing).sum(axis=1) <= result.residual + ROUNDING)
    bound = result.epsilon[:, None] * graph.degrees * lost_factor(graph, restarts, damping)[:, None]
    finished = result.converged
    assert np.all((missing <= bound + ROUNDING)[finished])
    if goal.tolerance is None and goal.certify_k is None:
        assert np.all(result.epsilon[finished] <= goal.epsilon)
    if goal.tolerance is not None:
        assert np.all(result.residual[finished] <= goal.tolerance)
    # what was handed on and not yet pushed: (I - d T)(pi - score) / (1 - d) = d T r, with r <= epsilon degree
    degrees = np.where(graph.degrees > 0, graph.degrees, 1)
    step = graph.matrix(np.float64).toarray() / degrees
    handed = (missing - damping * missing @ step.T) / (1 - damping)
    assert np.all((handed <= damping * bound + 10 * ROUNDING)[finished])


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([Goal(1e-2), Goal(1e-4), *GOALS[4:6], Goal(1e-3, max_edges=60)]))
def test_the_certified_are_the_best_candidates(case: Any, goal: Goal) -> None:
    graph, restarts, damping, rng = case
    exact = reference(graph, restarts.T, damping).scores.T
    n = graph.n_nodes
    low, high = np.sort(rng.integers(0, n + 1, 2)).tolist()
    for candidates in (None, (low, high)):
        low, high = candidates or (0, n)
        for top_k in (None, 10):
            result = push(graph, restarts, damping, goal, candidates=candidates, top_k=top_k)
            for row in range(len(result)):
                nodes, _ = result.row(row)
                proven = int(result.certified_k[row])
                assert proven <= len(nodes)
                assert np.all((nodes >= low) & (nodes < high))
                rest = np.setdiff1d(np.arange(low, high), nodes[:proven])
                if proven and len(rest):
                    assert exact[row, nodes[:proven]].min() >= exact[row, rest].max() - ROUNDING
                if result.stopped_by[row] == "certified":
                    reached = np.count_nonzero(exact[row, low:high] > 0)
                    assert proven >= min(goal.certify_k or 0, int(reached))


def random_graph(seed: int, n: int, edges_per_node: int = 3) -> Graph:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, n, (2, edges_per_node * n))
    return Graph.from_edges(n, a, b, rng.random(len(a)) + 0.1)


def random_restarts(seed: int, n: int, rows: int = 40) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    nodes = rng.integers(0, n, (rows, 4))
    return sp.csr_array((rng.random(4 * rows) + 0.1, nodes.ravel(), np.arange(0, 4 * rows + 1, 4)), (rows, n))


@pytest.mark.parametrize("k", [1, 20, 150])
def test_the_goal_of_k_proven_is_reached_without_solving_to_the_end(k: int) -> None:
    graph, restarts = random_graph(0, 3000), random_restarts(1, 3000, 8)
    for top_k in (None, 150):
        result = push(graph, restarts, goal=Goal(1e-2, certify_k=k), top_k=top_k)
        assert set(result.stopped_by) == {"certified"}
        assert np.all(result.certified_k >= k)
        assert np.all(result.epsilon < 1e-2), "epsilon had to be lowered"
    exact = push(graph, restarts, goal=Goal(1e-16))
    assert result.edges_touched.sum() < exact.edges_touched.sum() / 2
    for row in range(8):
        assert set(result.row(row)[0][:1]) <= set(exact.row(row)[0][:k])


def test_ties_end_by_the_work_limit_and_say_so() -> None:
    # two equal rings that hang on one node: every score but one stands twice
    ring = np.arange(50)
    left, right = ring + 1, ring + 51
    sources = np.r_[left, right, 0, 0]
    targets = np.r_[np.roll(left, 1), np.roll(right, 1), 1, 51]
    graph = Graph.from_edges(101, sources, targets, np.ones(102))
    restart = np.eye(101)[:1]
    goal = Goal(1e-2, certify_k=2)
    limited = push(graph, restart, goal=goal._replace(max_edges=500), top_k=2)
    assert (limited.stopped_by, limited.certified_k.tolist()) == (("work limit",), [1])
    assert not limited.converged[0]
    unlimited = push(graph, restart, goal=goal, top_k=2)
    assert unlimited.stopped_by[0] in ("work limit", "certified")
    assert unlimited.edges_touched[0] <= 50 * len(graph.indices) + 3
    np.testing.assert_allclose(unlimited.scores[1], reference(graph, restart.T).scores[1, 0], atol=1e-7)


def test_fewer_candidates_than_are_to_be_proven_is_no_endless_task() -> None:
    graph, restarts = random_graph(2, 5000), random_restarts(2, 5000, 3)
    few = push(graph, restarts, goal=Goal(1e-3, certify_k=20), candidates=(100, 105), top_k=20)
    assert few.stopped_by == ("certified",) * 3
    assert few.certified_k.tolist() == [5, 5, 5]
    all_five = push(graph, restarts, goal=Goal(1e-3, certify_k=5), candidates=(100, 105), top_k=20)
    assert same(few, all_five), "no more work is done than for all there are"
    none = push(graph, restarts, goal=Goal(1e-3, certify_k=20), candidates=(7, 7), top_k=20)
    assert none.stopped_by == ("certified",) * 3
    assert not len(none.nodes)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 1e-10])
def test_the_tolerance_is_reached(tolerance: float) -> None:
    graph, restarts = random_graph(3, 500), random_restarts(3, 500)
    result = push(graph, restarts, goal=Goal(1e-2, tolerance=tolerance))
    assert set(result.stopped_by) == {"tolerance"}
    assert result.converged.all()
    assert result.residual.max() <= tolerance
    assert result.residual.max() > tolerance * 1e-3, "and not overdone"


@pytest.mark.parametrize("max_edges", [1, 10, 100, 1000])
def test_the_work_limit_is_kept(max_edges: int) -> None:
    graph, restarts = random_graph(4, 500), random_restarts(4, 500)
    result = push(graph, restarts, goal=Goal(1e-8, max_edges=max_edges))
    longest = np.diff(graph.indptr).max()
    assert np.all(result.edges_touched < max_edges + longest)
    assert np.all(result.edges_touched >= max_edges)
    assert set(result.stopped_by) == {"work limit"}
    assert not result.converged.any()


def test_work_is_bounded_by_epsilon_not_by_the_graph() -> None:
    for n in (2_000, 40_000):
        graph = Graph.from_edges(n, np.arange(n), (np.arange(n) + 1) % n, np.ones(n))
        result = push(graph, random_restarts(5, n), goal=Goal(1e-3))
        assert set(result.stopped_by) == {"epsilon"}
        assert result.edges_touched.max() <= 1 / (0.5 * 1e-3)
        assert result.edges_touched.min() > 0


def test_an_epsilon_below_every_other_limit_is_reached() -> None:
    result = push(random_graph(6, 20), random_restarts(6, 20, 2), goal=Goal(1e-19))
    assert result.stopped_by == ("epsilon", "epsilon")
    assert result.converged.all()


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 30))
def test_top_k_is_the_beginning_of_the_whole_result(case: Any, k: int) -> None:
    graph, restarts, damping, rng = case
    for first in (0, int(rng.integers(0, graph.n_nodes))):
        candidates = (first, graph.n_nodes) if first else None
        whole = push(graph, restarts, damping, Goal(1e-4), candidates=candidates)
        best = push(graph, restarts, damping, Goal(1e-4), candidates=candidates, top_k=k)
        everything = dense(push(graph, restarts, damping, Goal(1e-4)), graph.n_nodes)
        assert np.array_equal(whole.residual, best.residual)
        for row in range(len(whole)):
            nodes, scores = whole.row(row)
            assert np.array_equal(scores, everything[row, nodes])
            assert np.array_equal(np.sort(nodes), first + np.flatnonzero(everything[row, first:]))
            assert np.array_equal(np.lexsort((nodes, -scores)), np.arange(len(nodes)))
            assert np.array_equal(best.row(row)[0], nodes[:k])
            assert np.array_equal(best.row(row)[1], scores[:k])


@pytest.mark.parametrize("goal", GOALS)
def test_a_result_depends_neither_on_threads_nor_on_the_batch(goal: Goal) -> None:
    graph, restarts = random_graph(7, 800), random_restarts(7, 800, 60)
    alone = Pusher(graph, threads=1)
    together = alone.solve(restarts, goal, top_k=30)
    for threads in (2, 5):
        assert same(Pusher(graph, threads=threads).solve(restarts, goal, top_k=30), together)
    for row in (59, 0, 31):
        single = alone.solve(restarts[[row]], goal, top_k=30)
        assert np.array_equal(single.row(0)[0], together.row(row)[0])
        assert np.array_equal(single.row(0)[1], together.row(row)[1])
        for name in ("residual", "certified_k", "epsilon", "edges_touched", "iterations"):
            assert getattr(single, name)[0] == getattr(together, name)[row]


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(GOALS), st.sampled_from(GOALS))
def test_nothing_is_left_of_an_earlier_restart(case: Any, first: Goal, second: Goal) -> None:
    graph, restarts, damping, _ = case
    used = Pusher(graph, damping)
    used.solve(restarts[:3], first)
    assert same(used.solve(restarts[3:], second), Pusher(graph, damping).solve(restarts[3:], second))


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1e-2, 1e-4, 1e-9]), st.booleans())
def test_scores_are_added_to_chosen_rows(case: Any, epsilon: float, return_lost: bool) -> None:
    graph, restarts, damping, rng = case
    low, high = np.sort(rng.integers(0, graph.n_nodes + 1, 2)).tolist()
    used = Pusher(graph, damping, candidates=(low, high), threads=2)
    solved = used.solve(restarts, Goal(epsilon), return_lost=return_lost)
    before = rng.random((9, high - low)).astype(np.float32)
    rows, scales = rng.permutation(9)[:5], rng.random(5)
    expected = before.copy()
    expected[rows] += scales[:, None] * dense(solved, graph.n_nodes)[:, low:high]
    for _ in range(2):  # nothing may be left of the first time
        out = before.copy()
        used.add_scores(out, rows, restarts, epsilon, scales=scales, return_lost=return_lost)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert same(used.solve(restarts, Goal(epsilon), return_lost=return_lost), solved)


def test_scores_are_added_whatever_the_number_of_threads() -> None:
    graph, restarts = random_graph(7, 800), random_restarts(7, 800, 60)
    first, second = (np.zeros((60, 800), dtype=np.float32) for _ in range(2))
    Pusher(graph, threads=1).add_scores(first, np.arange(60), restarts, 1e-5)
    Pusher(graph, threads=5).add_scores(second, np.arange(60), restarts, 1e-5)
    assert first.any()
    assert np.array_equal(first, second)


def test_scores_are_added_to_nothing_else_than_a_fitting_block() -> None:
    graph, restarts = random_graph(7, 30), random_restarts(7, 30, 2)
    pusher = Pusher(graph)
    for out in (np.zeros((2, 30)), np.zeros((2, 29), np.float32), np.zeros((30, 2), np.float32).T):
        with pytest.raises(KernelError, match="expected C-contiguous float32"):
            pusher.add_scores(out, np.arange(2), restarts, 1e-3)
    for rows in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(KernelError, match="do not fit 2 restarts"):
            pusher.add_scores(np.zeros((2, 30), np.float32), np.array(rows), restarts, 1e-3)
    with pytest.raises(KernelError, match="epsilon must be positive"):
        pusher.add_scores(np.zeros((2, 30), np.float32), np.arange(2), restarts, 0.0)


def test_nothing_is_left_of_a_restart_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, restarts = random_graph(8, 300), random_restarts(8, 300, 4)
    used = Pusher(graph, threads=1)

    def fails(*_: object) -> str:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setitem(Pusher._solve_one.__globals__, "_reason", fails)
        with pytest.raises(MemoryError):
            used.solve(restarts[:1])
    with pytest.raises(KernelError):
        used.solve(-restarts)
    assert same(used.solve(restarts), Pusher(graph).solve(restarts))


def test_duplicates_in_a_restart_are_summed() -> None:
    graph = random_graph(9, 60)
    doubled = sp.csr_array((np.array([1.0, 2.0, 3.0]), [5, 9, 5], [0, 3]), shape=(1, 60))
    summed = sp.csr_array((np.array([4.0, 2.0]), [5, 9], [0, 2]), shape=(1, 60))
    assert same(push(graph, doubled), push(graph, summed))
    assert doubled.nnz == 3, "what was given is left as it is"
    np.testing.assert_array_equal(doubled.data, [1.0, 2.0, 3.0])


@settings(max_examples=40, deadline=None)
@given(cases(), st.floats(1e-300, 1e300))
def test_the_unit_of_a_restart_hardly_matters(case: Any, unit: float) -> None:
    graph, restarts, damping, _ = case
    given, scaled = (push(graph, r, damping, Goal(1e-5)) for r in (restarts, restarts * unit))
    np.testing.assert_allclose(dense(scaled, graph.n_nodes), dense(given, graph.n_nodes), atol=1e-4)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_array, sp.csc_array, sp.coo_array, sp.csr_matrix])
def test_any_matrix_is_taken(kind: Any) -> None:
    graph, restarts = random_graph(10, 50), random_restarts(10, 50, 3).toarray()
    assert same(push(graph, kind(restarts)), push(graph, restarts))


def test_a_weight_too_small_for_its_degree_is_still_one_node() -> None:
    star = Graph.from_edges(9, [0] * 8, range(1, 9), np.full(8, 1e6))
    for tiny in (5e-324, 1e-310):
        restart = np.zeros((1, 9))
        restart[0, :3] = tiny, 1.0, tiny
        result = push(star, restart, goal=Goal(1e-12))
        assert sorted(result.nodes.tolist()) == list(range(9))


def test_other_components_get_exactly_nothing() -> None:
    rng = np.random.default_rng(11)
    half = 100
    sources, targets = rng.integers(0, half, (2, 400))
    graph = Graph.from_edges(
        2 * half, np.r_[sources, sources + half], np.r_[targets, targets + half], np.ones(800)
    )
    restarts = np.zeros((2, 2 * half))
    restarts[0, 5] = restarts[1, half + 5] = 1
    result = push(graph, restarts, goal=Goal(1e-12))
    assert result.row(0)[0].max() < half
    assert result.row(1)[0].min() >= half
    assert not len(push(graph, restarts[:1], goal=Goal(1e-12), candidates=(half, 2 * half)).nodes)
    np.testing.assert_array_equal(result.row(0)[0], result.row(1)[0] - half)


def test_edges_of_weight_zero_lead_nowhere() -> None:
    graph = Graph.from_edges(4, [0, 1, 2], [1, 2, 3], [1.0, 0.0, 1.0])
    result = push(graph, [[1.0, 0, 0, 0]], goal=Goal(1e-14))
    assert sorted(result.nodes.tolist()) == [0, 1]
    assert result.scores.sum() == pytest.approx(1, abs=1e-6)
    alone = push(Graph.from_edges(2, [0], [1], [0.0]), [[2.0, 0]])
    assert (alone.nodes.tolist(), alone.scores.tolist(), alone.converged.tolist()) == ([0], [1.0], [True])


def test_lost_walks_are_not_returned_when_so_asked() -> None:
    graph = Graph.from_edges(3, [0], [1], [1.0])  # 2 is isolated
    restarts = sp.csr_array([[1.0, 0, 1.0]])
    linear = Pusher(graph).solve(restarts, Goal(1e-12), return_lost=False)
    np.testing.assert_allclose(dense(linear, 3)[0], [1 / 3, 1 / 6, 1 / 4], atol=1e-6)
    returned = Pusher(graph).solve(restarts, Goal(1e-12))
    np.testing.assert_allclose(dense(returned, 3), dense(linear, 3) * 4 / 3, atol=1e-12)


def test_no_restart_gives_no_result() -> None:
    result = push(random_graph(1, 10), sp.csr_array((0, 10)))
    assert len(result) == len(result.nodes) == len(result.stopped_by) == 0


@pytest.mark.parametrize(
    ("restarts", "message"),
    [
        ([[1, 0, 0], [0, -1, 2]], "restart 1 has weight -1.0 at node 1"),
        ([[1, 0, 0], [1, 0, 0], [np.nan, 1, 0]], "restart 2 has weight nan at node 0"),
        ([[1, 0, np.inf]], "restart 0 has weight inf at node 2"),
        ([[1, 0, 0], [0, 0, 0], [0, 1, 0]], "restart 1 is all zeros"),
        ([[1, 0, 0], [1e308, 1e308, 0]], "restart 1 has weights whose sum overflows"),
        ([[1, 0, 0, 0]], r"shape \(1, 4\); expected \(Q, 3\)"),
        ([1, 0, 0], r"shape \(3,\); expected \(Q, 3\)"),
        (
            sp.csr_array((np.ones(3), np.array([0, 1, 7]), np.array([0, 2, 3])), shape=(2, 3)),
            r"restart 1 names node 7; nodes are 0\.\.2",
        ),
        (
            sp.csr_array((np.ones(3), np.array([0, -1, 2]), np.array([0, 2, 3])), shape=(2, 3)),
            r"restart 0 names node -1; nodes are 0\.\.2",
        ),
    ],
)
def test_bad_restarts_are_refused_by_row(restarts: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        push(Graph.from_edges(3, [0], [1], [1.0]), restarts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"damping": damping}, "probability of continuing") for damping in (0.0, 1.0, -1.0, np.nan)),
        *(({"goal": Goal(epsilon)}, "epsilon must be positive") for epsilon in (0, -1e-7, np.nan, np.inf)),
        ({"goal": Goal(tolerance=0)}, "tolerance must be positive; got 0"),
        ({"goal": Goal(tolerance=np.nan)}, "tolerance must be positive; got nan"),
        ({"goal": Goal(certify_k=0)}, "certify_k must be at least 1; got 0"),
        ({"goal": Goal(max_edges=0)}, "max_edges must be at least 1; got 0"),
        ({"top_k": 0}, "top_k must be at least 1; got 0"),
        ({"goal": Goal(certify_k=5), "top_k": 4}, "certify_k 5 is more than top_k 4: raise top_k"),
        ({"candidates": (0, 4)}, r"candidates 0\.\.3 are no range of the nodes 0\.\.2"),
        ({"candidates": (-1, 2)}, r"candidates -1\.\.1 are no range"),
        ({"candidates": (2, 1)}, r"candidates 2\.\.0 are no range"),
        ({"graph": Graph.from_edges(0, [], [], []), "restarts": np.ones((1, 0))}, "graph is empty"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"graph": Graph.from_edges(3, [0], [1], [1.0]), "restarts": [[1.0, 0, 0]]}
    with pytest.raises(KernelError, match=message):
        push(**good | arguments)


def test_a_budget_takes_threads_away_and_says_what_one_needs() -> None:
    graph, restarts = random_graph(12, 1000), random_restarts(12, 1000, 16)
    one = bytes_needed(1000, 1)
    with pytest.raises(KernelError, match=f"Push over 1000 nodes needs {one} bytes; the budget is {one - 1}"):
        Pusher(graph, memory_bytes=one - 1)
    assert same(Pusher(graph, threads=4, memory_bytes=one).solve(restarts), push(graph, restarts))


def test_a_pusher_holds_what_it_says() -> None:
    n = 200_000
    graph = Graph.from_edges(n, np.arange(n), (np.arange(n) + 1) % n, np.ones(n))
    restarts = random_restarts(13, n, 6)
    push(graph, restarts, goal=Goal(1e-3))
    for threads, budget in ((3, bytes_needed(n, 3)), (3, bytes_needed(n, 2))):
        tracemalloc.start()
        pusher = Pusher(graph, threads=threads, memory_bytes=budget)
        pusher.solve(restarts, Goal(1e-3))
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0.95 * budget <= held <= 1.05 * budget
