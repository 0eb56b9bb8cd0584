"""PPR in shards: the same bytes as in one process, resumed work, shared memory, and refusals."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from hippoindex.cluster.executor import Executor, LocalExecutor
from hippoindex.errors import ArtifactError, ExecutorError, HippoIndexError, KernelError, UsageError
from hippoindex.kernels.ppr import Goal, Graph, Ranked, solve
from hippoindex.kernels.ppr.solve import SPARSE_SHARE
from hippoindex.pipeline.bulk import solve_in_shards

N_NODES = 3000
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def workers_module() -> Iterator[ModuleType]:
    """The module of watched workers, importable in this process and in those it starts."""
    sys.path.insert(0, str(HERE))
    yield importlib.import_module("bulk_workers")
    sys.path.remove(str(HERE))


def random_graph(n_nodes: int, n_edges: int) -> Graph:
    rng = np.random.default_rng(n_nodes)
    ends = rng.integers(0, n_nodes - 5, (2, n_edges))  # the last five nodes are isolated
    return Graph.from_edges(n_nodes, *ends, rng.random(n_edges).astype(np.float32))


def save_graph(graph: Graph, folder: Path) -> Path:
    folder.mkdir()
    for name, array in asdict(graph).items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    return folder


def random_restarts(n_restarts: int, seeds: int, n_nodes: int = N_NODES) -> sp.csr_array:
    rng = np.random.default_rng(seeds)
    nodes = [rng.choice(n_nodes, seeds, replace=False) for _ in range(n_restarts)]
    indptr = np.arange(0, n_restarts * seeds + 1, seeds)
    weights = rng.random(n_restarts * seeds) + 0.1
    return sp.csr_array((weights, np.concatenate(nodes), indptr), shape=(n_restarts, n_nodes))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return random_graph(N_NODES, 4 * N_NODES)


@pytest.fixture(scope="module")
def graph_folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_graph(graph, tmp_path_factory.mktemp("bulk") / "graph")


@pytest.fixture
def one() -> Executor:
    return LocalExecutor(1)


class CountingExecutor(LocalExecutor):
    """One worker in this process; ``done`` lists the shards it was given."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(1)
        self.done: list[int] = []
        self._fail_at = fail_at

    def run(self, factory: Any, tasks: Sequence[Any], on_done: Callable[[Any], None]) -> None:
        def note(task: Any) -> None:
            if task.index == self._fail_at:
                raise LookupError("stopped half-way")
            self.done.append(task.index)
            on_done(task)

        super().run(factory, tasks, note)


def assert_identical(found: Ranked, expected: Ranked) -> None:
    assert found.method == expected.method
    for name, value in asdict(expected).items():
        if name != "method":
            other = getattr(found, name)
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert other.tobytes() == value.tobytes(), name


@pytest.mark.parametrize("method", ["push", "power"])
@pytest.mark.parametrize("shard_restarts", [1, 7, 1000])
def test_shards_give_the_bytes_of_one_call(
    graph: Graph, graph_folder: Path, one: Executor, method: Any, shard_restarts: int
) -> None:
    restarts = random_restarts(20, 5)
    options: dict[str, Any] = {"method": method, "top_k": 30, "candidates": (1000, 3000), "damping": 0.7}
    found = solve_in_shards(graph_folder, restarts, one, shard_restarts=shard_restarts, **options)
    assert_identical(found, solve(graph, restarts, **options))


@pytest.mark.slow
def test_ray_gives_the_bytes_of_one_call(graph: Graph, graph_folder: Path) -> None:
    from hippoindex.cluster.ray_executor import RayExecutor

    restarts = random_restarts(40, 5)
    with RayExecutor(2) as executor:
        for method in ("push", "power"):
            found = solve_in_shards(graph_folder, restarts, executor, shard_restarts=9, method=method)
            assert_identical(found, solve(graph, restarts, method))  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [1, int(SPARSE_SHARE * N_NODES), int(SPARSE_SHARE * N_NODES) + 1, 900])
def test_auto_chooses_as_one_call_does(graph: Graph, graph_folder: Path, one: Executor, seeds: int) -> None:
    restarts = random_restarts(6, seeds)
    assert_identical(
        solve_in_shards(graph_folder, restarts, one, shard_restarts=2), solve(graph, restarts, "auto")
    )


def test_the_method_is_chosen_for_all_restarts_and_not_by_shard(
    graph: Graph, graph_folder: Path, one: Executor
) -> None:
    restarts = sp.vstack([random_restarts(8, 1), random_restarts(1, 2000)], format="csr")
    found = solve_in_shards(graph_folder, restarts, one, shard_restarts=1)
    assert found.method == "power"
    assert_identical(found, solve(graph, restarts))


def test_no_restarts(graph: Graph, graph_folder: Path, one: Executor) -> None:
    none = sp.csr_array((0, N_NODES))
    assert_identical(solve_in_shards(graph_folder, none, one, top_k=3), solve(graph, none, top_k=3))


def test_work_that_was_stopped_goes_on_where_it_ended(
    graph: Graph, graph_folder: Path, tmp_path: Path
) -> None:
    restarts, work = random_restarts(10, 5), tmp_path / "work"

    def run(executor: CountingExecutor, **options: Any) -> Ranked:
        return solve_in_shards(graph_folder, restarts, executor, shard_restarts=2, work=work, **options)

    with pytest.raises(LookupError, match="stopped half-way"):
        run(CountingExecutor(fail_at=2))
    again = CountingExecutor()
    assert_identical(run(again), solve(graph, restarts))
    assert again.done == [3, 4], "shard 2 had been written when the run was stopped"
    again = CountingExecutor()
    run(again, memory_bytes=2**24)
    assert again.done == [], "neither the work nor the memory budget changes the result"
    for changed in ({"damping": 0.6}, {"top_k": 7}, {"method": "power"}, {"goal": Goal(1e-5)}):
        again = CountingExecutor()
        run(again, **changed)
        assert again.done == [0, 1, 2, 3, 4], changed


def test_another_graph_is_not_taken_for_this_one(graph: Graph, graph_folder: Path, tmp_path: Path) -> None:
    restarts, work = random_restarts(4, 5), tmp_path / "work"
    solve_in_shards(graph_folder, restarts, CountingExecutor(), work=work)
    other = Graph(graph.indptr, graph.indices, graph.weights * np.float32(2))
    other.weights[graph.indptr[1] :] /= 2  # heavier edges of node 0 alone
    symmetric = sp.csr_array(other.matrix().maximum(other.matrix().T))
    changed = Graph(graph.indptr, graph.indices, symmetric.data)
    executor = CountingExecutor()
    found = solve_in_shards(save_graph(changed, tmp_path / "other"), restarts, executor, work=work)
    assert executor.done == [0]
    assert_identical(found, solve(changed, restarts))


def test_equal_shards_are_solved_once(graph: Graph, graph_folder: Path) -> None:
    restarts = sp.vstack([random_restarts(2, 5)] * 3, format="csr")
    executor = CountingExecutor()
    found = solve_in_shards(graph_folder, restarts, executor, shard_restarts=2)
    assert executor.done == [2]
    assert_identical(found, solve(graph, restarts))


def test_files_hold_no_pickled_arrays_and_stay_where_they_are_wanted(
    graph_folder: Path, one: Executor, tmp_path: Path
) -> None:
    before = sorted(graph_folder.iterdir())
    solve_in_shards(graph_folder, random_restarts(4, 5), one, shard_restarts=2, work=tmp_path)
    assert sorted(graph_folder.iterdir()) == before
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".npy", *[".npz"] * 4]
    for path in files:
        loaded = np.load(path, allow_pickle=False)
        for array in [loaded] if path.suffix == ".npy" else [loaded[name] for name in loaded.files]:
            assert not array.dtype.hasobject


def test_a_stored_transition_is_used(graph: Graph, graph_folder: Path, one: Executor, tmp_path: Path) -> None:
    restarts, slow = random_restarts(4, 5), graph.transition / 2  # walks that lose half their mass a step
    np.save(tmp_path / "half.npy", slow)
    found = solve_in_shards(graph_folder, restarts, one, transition=tmp_path / "half.npy", work=tmp_path)
    assert_identical(found, solve(graph.with_transition(slow), restarts))
    folder = save_graph(graph, tmp_path / "with")
    np.save(folder / "transition.npy", slow)
    assert_identical(solve_in_shards(folder, restarts, one, work=tmp_path), found)
    assert not list(tmp_path.glob("transition-*.npy"))


@pytest.mark.parametrize("method", ["push", "power"])
def test_two_processes_give_the_bytes_of_one_call_and_share_one_copy_of_the_graph(
    tmp_path: Path, workers_module: ModuleType, method: Any
) -> None:
    large = random_graph(20_000, 1_000_000)
    folder, reports = save_graph(large, tmp_path / "graph"), tmp_path / "reports"
    reports.mkdir()
    cells_bytes = large.indices.nbytes + large.weights.nbytes + large.transition.nbytes
    executor = workers_module.WatchedExecutor(2, reports, method)
    restarts = random_restarts(8, 3, 20_000)
    goal = Goal(certify_k=10, max_edges=10**7)
    ranked = solve_in_shards(folder, restarts, executor, shard_restarts=2, method=method, goal=goal)
    assert_identical(ranked, solve(large, restarts, method, goal=goal))
    found = [json.loads(report.read_text()) for report in reports.iterdir()]
    assert len(found) == 2
    for report in found:
        kinds = {name.split("-")[0].removesuffix(".npy") for name in report["mapped"]}
        assert kinds == {"indptr", "indices", "weights", "transition"}
        assert sum(in_memory for in_memory, _ in report["mapped"].values()) > cells_bytes / 2
        assert [own for _, own in report["mapped"].values()] == [0, 0, 0, 0]
        assert report["grown_bytes"] < large.transition.nbytes


def test_what_one_call_refuses_is_refused_before_any_worker_starts(graph_folder: Path) -> None:
    restarts = random_restarts(4, 5)
    executor = CountingExecutor()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"damping": 1.0}, "damping is the probability"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"candidates": (5, 9000)}, "no range of the nodes"),
        ({"method": "magic"}, "There is no method 'magic'"),
        ({"method": "push", "memory_bytes": 10}, "the budget is 10"),
        ({"goal": Goal(epsilon=0.0)}, "epsilon must be positive"),
    ]
    for options, message in cases:
        with pytest.raises(KernelError, match=message):
            solve_in_shards(graph_folder, restarts, executor, shard_restarts=1, **options)
    restarts.data[11] = -1
    with pytest.raises(KernelError, match="restart 2 has weight -1"):
        solve_in_shards(graph_folder, restarts, executor, shard_restarts=1)
    with pytest.raises(KernelError, match=r"restarts have shape \(2, 9\)"):
        solve_in_shards(graph_folder, np.ones((2, 9)), executor)
    with pytest.raises(TypeError, match="speed"):
        solve_in_shards(graph_folder, random_restarts(4, 5), executor, speed="high")
    with pytest.raises(UsageError, match="shard_restarts must be at least 1"):
        solve_in_shards(graph_folder, restarts, executor, shard_restarts=0)
    assert executor.done == []


def test_files_that_are_no_graph_are_refused(graph: Graph, one: Executor, tmp_path: Path) -> None:
    restarts = random_restarts(2, 5)
    with pytest.raises(ArtifactError, match=r"nowhere/indptr.npy cannot be opened as an array"):
        solve_in_shards(tmp_path / "nowhere", restarts, one)
    folder = save_graph(graph, tmp_path / "graph")
    np.save(tmp_path / "short.npy", graph.transition[1:])
    with pytest.raises(KernelError, match="transition has shape"):
        solve_in_shards(folder, restarts, one, transition=tmp_path / "short.npy")
    np.save(folder / "indices.npy", np.flip(graph.indices))
    with pytest.raises(KernelError, match="Graph: row"):
        solve_in_shards(folder, restarts, one)
    np.save(folder / "indices.npy", np.array([{"no": "array"}]), allow_pickle=True)
    with pytest.raises(ArtifactError, match=r"indices.npy cannot be opened as an array"):
        solve_in_shards(folder, restarts, one)


def test_a_shard_that_fails_and_a_result_that_is_damaged_are_named(
    graph_folder: Path, one: Executor, tmp_path: Path
) -> None:
    def run() -> Ranked:
        return solve_in_shards(graph_folder, random_restarts(4, 5), one, shard_restarts=2, work=tmp_path)

    class Spoiling(LocalExecutor):
        def run(self, factory: Any, tasks: Sequence[Any], on_done: Callable[[Any], None]) -> None:
            Path(tasks[1].input).write_bytes(b"no archive")
            super().run(factory, tasks, on_done)

    with pytest.raises(ExecutorError, match=r"Could not process shard 1 \(.*\.npz\): "):
        solve_in_shards(graph_folder, random_restarts(4, 5), Spoiling(1), shard_restarts=2, work=tmp_path)
    run()
    damaged = next((tmp_path / "ranked").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(HippoIndexError, match=f"{damaged.name}, the result of a shard, cannot be read"):
        run()
