"""The dense restart that is affine in the query, against the reference with that restart written out."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import Goal, Graph, Pusher, Ranked, affine, reference

pytestmark = pytest.mark.usefixtures("one_thread")
FLOAT32 = 1e-6
"""Largest difference of a score to the reference's, as a share of the best passage's, where cosines spread
over 1; min-max scaling divides by the spread, and rounding with it. Nearer passages may swap places."""
FLOAT16 = 2e-3
TO_THE_END = Goal(1e-12, max_edges=10**7)


@dataclass
class Case:
    graph: Graph
    vectors: np.ndarray
    first: int
    damping: float
    queries: np.ndarray
    weights: np.ndarray
    seeds: sp.csr_array

    def pusher(self, **options: Any) -> Pusher:
        candidates = (self.first, self.graph.n_nodes)
        return Pusher(self.graph, self.damping, candidates=candidates, **options)

    @cached_property
    def columns(self) -> np.ndarray:
        blocks = affine.precompute(self.graph, self.vectors, self.first, self.damping, 1e-7)
        return np.concatenate([block.values for block in blocks], axis=1)

    def dense(self, dtype: type = np.float32) -> affine.DenseRestart:
        z, z1 = np.ascontiguousarray(self.columns[:, :-1]), np.ascontiguousarray(self.columns[:, -1])
        return affine.DenseRestart(self.vectors.astype(dtype), z.astype(dtype), z1)

    def rank(self, dtype: type = np.float32, top_k: int = 20, goal: Goal = TO_THE_END) -> Ranked:
        dense, pusher = self.dense(dtype), self.pusher()
        return affine.rank(pusher, dense, self.queries, self.weights, self.seeds, top_k, goal)

    @property
    def cosines(self) -> np.ndarray:
        return self.queries.astype(np.float64) @ self.vectors.astype(np.float64).T

    def exact(self) -> np.ndarray:
        """Return the reference's scores of passages, shape (Q, M)."""
        cosines = self.cosines
        low, high = cosines.min(axis=1, keepdims=True), cosines.max(axis=1, keepdims=True)
        scaled = np.where(high > low, (cosines - low) / np.where(high > low, high - low, 1), 1.0)
        restart = self.seeds.toarray()
        restart[:, self.first :] += self.weights[:, None] * scaled
        return reference(self.graph, restart.T, self.damping).scores.T[:, self.first :]


def rounding(case: Case, tolerance: float) -> np.ndarray:
    """Return how far each query's scores may be off, as a share of the best passage's, shape (Q, 1)."""
    spread = np.ptp(case.cosines, axis=1, keepdims=True)
    return tolerance / np.where(spread > 0, np.minimum(spread, 1), 1)


def unit_rows(rng: np.random.Generator, rows: int, dimension: int) -> np.ndarray:
    vectors = rng.standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_case(seed: int, n: int = 120, queries: int = 6, dimension: int = 7) -> Case:
    """Return phrases and passages, some isolated; queries without weight, and without seeds."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, n))
    a, b = (n * rng.random((2, int(rng.integers(0, 4 * n)))) ** 2).astype(np.int64)
    graph = Graph.from_edges(n, a, b, rng.choice([0.0, 1.0, 2.0, 0.9], len(a)))
    seeds = rng.random((queries, n)) * (rng.random((queries, n)) < 4 / n)
    seeds[:2] = 0
    weights = np.full(queries, 0.05)
    weights[1] = 3.0
    if queries > 3:
        weights[2] = 0.0
        seeds[2, rng.integers(0, n)] = 1.5
        seeds[3, n - 1] = 40.0  # scores far from sum 1, at a passage
    damping = float(rng.choice([0.2, 0.5, 0.8]))
    vectors, asked = unit_rows(rng, n - first, dimension), unit_rows(rng, queries, dimension)
    return Case(graph, vectors, first, damping, asked, weights, sp.csr_array(seeds))


def check(result: Ranked, case: Case, tolerance: float) -> None:
    exact, first, k = case.exact(), case.first, result.nodes.shape[1]
    assert np.all((result.nodes >= first) & (result.nodes < first + exact.shape[1]))
    allowed = rounding(case, tolerance) * exact.max(axis=1, keepdims=True)
    allowed = allowed + result.residual[:, None]  # all that counts where no passage has more than is unspread
    ranked = np.take_along_axis(exact, result.nodes - first, axis=1)
    assert np.all(np.abs(result.scores - ranked) <= allowed)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    sorted_exact = np.take_along_axis(exact, order, axis=1)
    swapped = order != result.nodes - first  # only what stands nearer than both errors
    assert np.all(
        np.abs(sorted_exact - ranked)[swapped] <= 2 * np.broadcast_to(allowed, swapped.shape)[swapped]
    )
    assert all(len(set(row)) == k for row in result.nodes.tolist())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 150))
@example(seed=181262, n=126)
def test_rank_equals_ppr_with_the_dense_restart(seed: int, n: int) -> None:
    case = make_case(seed, n)
    result = case.rank()
    assert result.nodes.shape == (6, min(20, n - case.first))
    assert result.converged.all()
    assert result.method == "affine"
    check(result, case, FLOAT32)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 150))
def test_half_precision_is_off_by_its_rounding(seed: int, n: int) -> None:
    case = make_case(seed, n, dimension=16)
    case.vectors = case.vectors.astype(np.float16).astype(np.float32)  # what was stored is what is meant
    check(case.rank(np.float16), case, FLOAT16)


def test_half_precision_is_widened_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3)
    whole = case.rank(np.float16)
    monkeypatch.setattr(affine, "CHUNK_PASSAGES", 7)
    np.testing.assert_allclose(case.rank(np.float16).scores, whole.scores, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 80))
def test_equally_near_passages_all_restart_with_the_whole_weight(seed: int, n: int) -> None:
    case = make_case(seed, n)
    case.queries[:] = 0  # every cosine is 0, exactly
    check(case.rank(), case, FLOAT32)


def test_isolated_passages_keep_what_they_get() -> None:
    # 0 - 1 phrases, 1 - 2 a passage, 3 and 4 isolated passages
    graph = Graph.from_edges(5, [0, 1], [1, 2], [1.0, 1.0])
    vectors = np.eye(3, dtype=np.float32)
    queries = np.array([[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]], dtype=np.float32)
    seeds = sp.csr_array([[1.0, 0, 0, 0, 0], [0, 0, 0, 2.0, 0]])
    case = Case(graph, vectors, 2, 0.5, queries, np.array([0.4, 0.4]), seeds)
    result = case.rank()
    check(result, case, FLOAT32)
    # of mass 1.6 every half ends at once, and of 0.2 + 0.4 on isolated nodes the other half starts again
    assert result.scores[0, 0] == pytest.approx(0.5 * 0.4 / (1.6 - 0.5 * 0.6), rel=1e-5)
    assert result.nodes[1].tolist() == [3, 4, 2]


def test_every_block_of_queries_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(12, 150, queries=2 * affine.BLOCK_QUERIES + 3)
    result = case.rank()
    check(result, case, FLOAT32)
    monkeypatch.setattr(affine, "BLOCK_QUERIES", 5)
    other = case.rank()
    np.testing.assert_array_equal(other.nodes, result.nodes)
    np.testing.assert_allclose(other.scores, result.scores, rtol=1e-5)


def test_one_weight_serves_all_queries_and_no_query_is_no_error() -> None:
    case = make_case(4)
    case.weights = np.full(6, 0.3)
    pusher, dense = case.pusher(), case.dense()
    one = affine.rank(pusher, dense, case.queries, 0.3, case.seeds, 20)
    each = affine.rank(pusher, dense, case.queries, case.weights, case.seeds, 20)
    np.testing.assert_array_equal(one.nodes, each.nodes)
    none = affine.rank(pusher, dense, case.queries[:0], 0.3, case.seeds[:0], 20)
    assert none.nodes.shape == (0, one.nodes.shape[1])


def test_duplicate_seeds_are_summed() -> None:
    case = make_case(5)
    doubled = sp.csr_array(
        (np.repeat(case.seeds.data / 2, 2), np.repeat(case.seeds.indices, 2), case.seeds.indptr * 2),
        shape=case.seeds.shape,
    )
    expected = case.rank()
    case.seeds = doubled
    np.testing.assert_allclose(case.rank().scores, expected.scores, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), epsilon=st.sampled_from([1e-2, 1e-3, 1e-5]))
def test_the_certified_are_the_best_passages_and_residual_is_the_error(seed: int, epsilon: float) -> None:
    case = make_case(seed)
    exact, m, allowed = case.exact(), case.graph.n_nodes - case.first, rounding(case, FLOAT32)
    for goal in (Goal(epsilon), Goal(epsilon, max_edges=20)):
        result = case.rank(top_k=m, goal=goal)
        missing = np.take_along_axis(exact, result.nodes - case.first, axis=1) - result.scores
        assert np.all(missing >= -allowed)
        assert np.all(missing.sum(axis=1) <= result.residual + m * allowed[:, 0])
        for k in (1, 5, m):
            best = case.rank(top_k=k, goal=goal)
            for row in range(6):
                proven = int(best.certified_k[row])
                listed = best.nodes[row, :proven] - case.first
                rest = np.setdiff1d(np.arange(m), listed)
                if proven and len(rest):
                    assert exact[row, listed].min() >= exact[row, rest].max() - 2 * allowed[row, 0]
        assert np.all(best.certified_k == m), "all passages are the best m"


def test_the_certificate_grows_as_epsilon_falls() -> None:
    case = make_case(6, 150)
    proven = [case.rank(goal=Goal(epsilon)).certified_k.sum() for epsilon in (1.0, 1e-3, 1e-5, 1e-9)]
    assert proven == sorted(proven)
    assert proven[0] < proven[-1]


def test_a_push_that_was_given_up_is_said() -> None:
    case = make_case(7)
    result = case.rank(goal=Goal(1e-12, max_edges=1))
    assert result.converged.tolist()[:2] == [True, True], "without seeds there is nothing to push"
    assert not result.converged[2:].all()
    assert np.all(result.residual[~result.converged] > 0)


# ------------------------------------------------------------------------------------------ precompute


@pytest.mark.parametrize("width", [1, 3, 5, 32])
def test_columns_are_the_same_bytes_in_any_block_and_may_be_taken_up_anywhere(width: int) -> None:
    case = make_case(8, 3000, dimension=9)
    case.vectors[1:, 2] = 0
    at_once = next(affine.precompute(case.graph, case.vectors, case.first, case.damping, block_columns=10))
    assert at_once.values.shape == (len(case.vectors), 10)
    assert len(set(at_once.iterations)) > 1, "columns that stop at once would show nothing"
    for start in (0, 4, 9, 10):
        blocks = list(
            affine.precompute(
                case.graph, case.vectors, case.first, case.damping, block_columns=width, start=start
            )
        )
        assert [block.first for block in blocks] == list(range(start, 10, width))
        for field, expected in (("values", at_once.values), ("residual", at_once.residual)):
            parts = [getattr(block, field) for block in blocks] or [expected[..., 10:]]
            assert np.array_equal(np.concatenate(parts, axis=-1), expected[..., start:]), field


def test_columns_are_the_operator_applied_to_the_vectors_and_to_ones() -> None:
    case = make_case(9, 60, dimension=3)
    m = len(case.vectors)
    degrees = np.where(case.graph.degrees > 0, case.graph.degrees, 1)
    step = case.graph.matrix(np.float64).toarray() / degrees
    operator = (1 - case.damping) * np.linalg.inv(np.eye(60) - case.damping * step)[
        case.first :, case.first :
    ]
    dense = case.dense()
    np.testing.assert_allclose(dense.z, operator @ case.vectors, atol=1e-5)
    np.testing.assert_allclose(dense.z1, operator @ np.ones(m), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_memory_mapped_vectors_work(tmp_path: Path, dtype: type) -> None:
    case = make_case(10)
    for name, array in vars(case.dense(dtype)).items():
        np.save(tmp_path / f"{name}.npy", array)
    vectors, z, z1 = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("vectors", "z", "z1"))
    arguments = case.queries, case.weights, case.seeds, 20
    mapped = affine.rank(case.pusher(), affine.DenseRestart(vectors, z, z1), *arguments)
    held = affine.rank(case.pusher(), case.dense(dtype), *arguments)
    np.testing.assert_array_equal(mapped.nodes, held.nodes)
    blocks = [list(affine.precompute(case.graph, e, case.first)) for e in (vectors, np.array(vectors))]
    assert np.array_equal(blocks[0][0].values, blocks[1][0].values)


def test_a_block_stays_within_the_memory_that_was_said() -> None:
    case = make_case(11, 40_000, dimension=23)
    case.first, m = 30_000, 10_000
    case.vectors = np.resize(case.vectors, (m, 23))
    needed = affine.precompute_bytes(40_000, m, 8)

    def columns(**options: int) -> list[int]:
        blocks = affine.precompute(case.graph, case.vectors, case.first, block_columns=8, **options)
        return [block.first for block in blocks]

    with pytest.raises(
        KernelError, match=f"8 columns over 40000 nodes needs {needed} bytes; the budget is 9"
    ):
        columns(memory_bytes=9)
    with pytest.raises(KernelError, match=f"needs {needed} bytes"):
        columns(memory_bytes=needed - 1)
    assert columns(memory_bytes=needed) == [0, 8, 16]
    tracemalloc.start()
    columns()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.05 * needed


@pytest.mark.parametrize("options", [{"block_columns": 0}, {"start": -1}])
def test_blocks_that_cannot_be_are_refused(options: dict[str, int]) -> None:
    case = make_case(1)
    with pytest.raises(KernelError, match="must be positive, start"):
        list(affine.precompute(case.graph, case.vectors, case.first, **options))


# ------------------------------------------------------------------------------------------- bad input


def set_weight(case: Case, value: float) -> None:
    case.weights[4] = value


def set_seed(case: Case, value: float) -> None:
    seeds = case.seeds.toarray()
    seeds[1, 3] = value
    case.seeds = sp.csr_array(seeds)


def nothing_to_walk_from(case: Case) -> None:
    seeds = case.seeds.toarray()
    seeds[4], case.weights[4] = 0, 0
    case.seeds = sp.csr_array(seeds)


def set_query(case: Case) -> None:
    case.queries[5, 0] = np.nan


def drop(case: Case, name: str, axis: int) -> None:
    array = getattr(case, name)
    setattr(case, name, array[:-1] if axis == 0 else array[:, :-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda case: set_weight(case, -0.1), "query 4 has weight -0.1"),
        (lambda case: set_weight(case, np.nan), "query 4 has weight nan"),
        (lambda case: set_weight(case, np.inf), "query 4 has weight inf"),
        (nothing_to_walk_from, r"query 4 has weight 0.0 and seeds of sum 0.0: it needs seeds or a positive"),
        (lambda case: set_seed(case, -1.0), "restart 1 has weight -1.0 at node 3"),
        (lambda case: set_seed(case, np.nan), "restart 1 has weight nan at node 3"),
        (set_query, "query 5 holds a non-finite value"),
        (lambda case: drop(case, "queries", 0), r"seeds \(6, 120\) and weights \(6,\) do not fit 5 queries"),
        (lambda case: drop(case, "queries", 1), r"candidates and queries \(6, 6\) do not fit vectors"),
        (lambda case: drop(case, "weights", 0), r"weights \(5,\) do not fit 6 queries"),
        (lambda case: drop(case, "seeds", 1), r"seeds \(6, 119\) .* do not fit 6 queries over 120 nodes"),
    ],
)
def test_bad_arguments_are_refused_by_row(spoil: Callable[[Case], None], message: str) -> None:
    case = make_case(2)
    pusher, dense = case.pusher(), case.dense()
    spoil(case)
    with pytest.raises(KernelError, match=message):
        affine.rank(pusher, dense, case.queries, case.weights, case.seeds, 20)


def test_arrays_that_do_not_fit_are_refused() -> None:
    case = make_case(2)
    pusher, dense = case.pusher(), case.dense()
    arguments = case.queries, case.weights, case.seeds
    with pytest.raises(KernelError, match="top_k must be at least 1; got 0"):
        affine.rank(pusher, dense, *arguments, 0)
    with pytest.raises(KernelError, match=r"candidates and queries .* do not fit vectors"):
        affine.rank(Pusher(case.graph, case.damping), dense, *arguments, 5)
    for bad in (
        affine.DenseRestart(dense.vectors, dense.z[:, 1:], dense.z1),
        affine.DenseRestart(dense.vectors, dense.z, dense.z1[1:]),
        affine.DenseRestart(dense.vectors[:0], dense.z[:0], dense.z1[:0]),
        affine.DenseRestart(dense.z1, dense.z1, dense.z1),
    ):
        with pytest.raises(KernelError, match=r"do not fit together|vectors have shape"):
            affine.rank(pusher, bad, *arguments, 5)


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_all_passages_are_those_of_the_reference(seed: int) -> None:
    case = make_case(seed)
    arguments = case.queries, case.weights, case.seeds
    found = affine.scores(case.pusher(), case.dense(), *arguments, TO_THE_END.epsilon)
    exact = case.exact()
    allowed = rounding(case, FLOAT32) * exact.max(axis=1, keepdims=True)
    assert np.all(np.abs(found - exact) <= allowed)
    ranked = case.rank(top_k=5)
    of_ranked = np.take_along_axis(found, ranked.nodes - case.first, axis=1)
    np.testing.assert_allclose(of_ranked, ranked.scores, rtol=1e-5, atol=1e-9)
