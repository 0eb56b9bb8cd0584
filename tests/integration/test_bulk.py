"""Large query files: workers rank as one process does, and say which questions they failed on."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hippoindex.cluster.executor import Executor, LocalExecutor
from hippoindex.cluster.task_queue import Limits
from hippoindex.errors import ExecutorError, UsageError
from hippoindex.kernels.ppr import solve
from hippoindex.pipeline import answer
from hippoindex.pipeline.answer import answer_queries, open_retriever, read_gold
from hippoindex.pipeline.bulk import rank_in_shards, solve_in_shards
from hippoindex.pipeline.config import ClusterConfig
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.base import PARTS, Ranking
from hippoindex.pipeline.retrieve.engine import METHODS, Retriever

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def retriever(sample_index: Path) -> Retriever:
    return open_retriever(sample_index)


@pytest.fixture(scope="module")
def queries(retriever: Retriever, sample: Path) -> list[Query]:
    """The sample's questions three times, each time under other ids."""
    found = read_gold(retriever.index, sample / "questions.jsonl").queries
    return [
        dataclasses.replace(query, query_id=f"{query.query_id}-{copy}")
        for copy in range(3)
        for query in found
    ]


def assert_same(found: Ranking, expected: Ranking) -> None:
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
    assert found.solver == expected.solver
    assert (found.certified_k is None) == (expected.certified_k is None)
    if found.certified_k is not None:
        np.testing.assert_array_equal(found.certified_k, expected.certified_k)


@pytest.mark.parametrize("method", METHODS)
def test_shards_rank_as_one_batch_does(retriever: Retriever, queries: list[Query], method: str) -> None:
    found = rank_in_shards(
        retriever.index.path, queries, LocalExecutor(1), retriever.config, method=method, shard_questions=5
    )
    assert_same(found, retriever.rank(retriever.encode(queries), method))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_workers_answer_as_one_process_does(sample_index: Path, sample: Path, kind: Any) -> None:
    file, cluster = sample / "questions.jsonl", ClusterConfig(executor=kind, workers=2)
    for method in ("hippoindex", "dense"):
        found, expected = (
            answer_queries(sample_index, file, method=method, top_k=4, **where)
            for where in ({"cluster": cluster}, {})
        )
        assert_same(found.ranking, expected.ranking)
        assert found.queries == expected.queries


@pytest.mark.slow
def test_the_command_line_ranks_by_workers_and_explains(
    run_cli: Run, sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    common = ["retrieve", "--index", sample_index, "--queries", sample / "questions.jsonl", "--explain"]
    here, shards = tmp_path / "here.jsonl", tmp_path / "shards.jsonl"
    assert run_cli(*common, "--output", here).returncode == 0
    done = run_cli(*common, "--output", shards, "--executor", "local", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "executor=local" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.jsonl", "shards.jsonl"]
    for left, right in zip(*(map(json.loads, file.open()) for file in (here, shards)), strict=True):
        assert left["id"] == right["id"]
        for one, other in zip(left["passages"], right["passages"], strict=True):
            assert one.pop("score") == pytest.approx(other.pop("score"), rel=1e-4)
            assert one == other


@pytest.mark.parametrize(
    ("cluster", "chosen"),
    [
        (ClusterConfig(), None),
        (ClusterConfig(workers=1), "local"),
        (ClusterConfig(executor="local", workers=1), "local"),
    ],
)
def test_auto_stays_in_this_process_unless_workers_are_given(
    sample_index: Path,
    sample: Path,
    cluster: ClusterConfig,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Executor] = []
    run = LocalExecutor.run

    def note(self: LocalExecutor, *arguments: Any) -> None:
        made.append(self)
        run(self, *arguments)

    monkeypatch.setattr(LocalExecutor, "run", note)
    answer_queries(sample_index, sample / "questions.jsonl", method="bm25", cluster=cluster)
    assert [executor.name for executor in made] == ([chosen] if chosen else [])


@pytest.mark.slow
def test_many_questions_go_to_workers_by_themselves(
    sample_index: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sample / "questions.jsonl"
    here = answer_queries(sample_index, file, method="hippoindex", top_k=4)
    monkeypatch.setattr(answer, "MANY_QUESTIONS", len(here.queries))
    monkeypatch.setattr(answer, "available_cores", lambda: 2)
    shared = answer_queries(sample_index, file, method="hippoindex", top_k=4)
    assert here.ranking.parts_s is None
    assert shared.ranking.parts_s is not None
    assert shared.ranking.parts_s.shape == (2, len(PARTS))
    assert set(shared.summary()["parts_queries_per_s"]) == set(PARTS)
    assert_same(shared.ranking, here.ranking)
    explained = answer_queries(sample_index, file, method="hippoindex", top_k=4, explain=True)
    assert explained.ranking.parts_s is None


class Struck(LocalExecutor):
    """Local processes, one of which is killed as soon as it is there."""

    def run(self, factory: Any, tasks: Sequence[Any], on_done: Callable[[Any], None], *rest: Any) -> None:
        threading.Thread(target=kill_a_worker, daemon=True).start()
        super().run(factory, tasks, on_done, *rest)


def kill_a_worker() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            if any("spawn_main" in word for word in child.cmdline()):
                child.kill()
                return
        time.sleep(0.01)


def test_what_fails_names_its_questions(
    retriever: Retriever, queries: list[Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, config = retriever.index.path, retriever.config
    where = rf"shard 1 \(questions 5\.\.9, ids '{queries[5].query_id}' to '{queries[9].query_id}'\)"

    def fail(self: Retriever, batch: Any, *_: Any, **__: Any) -> Ranking:
        if batch.questions[0] == queries[5].question:
            raise ZeroDivisionError("no reason")
        return rank(self, batch, "bm25")

    rank = Retriever.rank
    monkeypatch.setattr(Retriever, "rank", fail)
    with pytest.raises(ExecutorError, match=rf"Could not process {where}: ZeroDivisionError: no reason"):
        rank_in_shards(index, queries, LocalExecutor(1), config, method="bm25", shard_questions=5)


def test_an_interrupted_run_goes_on_where_it_stopped(
    retriever: Retriever, queries: list[Query], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    options: dict[str, Any] = {"method": "dense", "shard_questions": 5, "work": work}
    ranked: list[str] = []
    broken = True

    def stop_at_the_second(self: Retriever, batch: Any, *_: Any, **__: Any) -> Ranking:
        if broken and batch.questions[0] == queries[5].question:
            raise ZeroDivisionError("no reason")
        ranked.extend(batch.questions)
        return rank(self, batch, "dense")

    rank = Retriever.rank
    monkeypatch.setattr(Retriever, "rank", stop_at_the_second)
    index, config = retriever.index.path, retriever.config
    with pytest.raises(ExecutorError):
        rank_in_shards(index, queries, LocalExecutor(1), config, **options)
    assert list(work.iterdir())
    broken = False
    assert rank_in_shards(index, queries, LocalExecutor(1), config, **options).rows.shape[1] == config.top_k
    assert sorted(ranked) == sorted(query.question for query in queries)
    assert not work.exists()


def test_a_worker_that_dies_names_its_questions(retriever: Retriever, queries: list[Query]) -> None:
    once = Struck(2, limits=Limits(shard_attempts=1))
    said = r"process shard \d \(questions \d+\.\.\d+, ids .*lost its worker once.*SIGKILL"
    with pytest.raises(ExecutorError, match=said):
        rank_in_shards(retriever.index.path, queries, once, retriever.config, method="bm25")


def test_what_cannot_be_ranked_is_refused_before_any_worker_starts(
    retriever: Retriever, queries: list[Query]
) -> None:
    index, config, none = retriever.index.path, retriever.config, LocalExecutor(1)
    with pytest.raises(UsageError, match="There is no method 'magic'"):
        rank_in_shards(index, queries, none, config, method="magic")
    with pytest.raises(UsageError, match="There is no question"):
        rank_in_shards(index, [], none, config, method="dense")
    with pytest.raises(UsageError, match="shard_questions must be at least 1"):
        rank_in_shards(index, queries, none, config, method="dense", shard_questions=0)


def test_restarts_are_solved_from_the_files_of_an_index(retriever: Retriever, tmp_path: Path) -> None:
    index = retriever.index
    restarts = np.eye(12, index.graph.n_nodes)
    found = solve_in_shards(
        index.path / "graph",
        restarts,
        LocalExecutor(1),
        transition=index.path / "ppr" / "transition.npy",
        shard_restarts=5,
        work=tmp_path,
    )
    expected = solve(index.graph, restarts)
    np.testing.assert_array_equal(found.nodes, expected.nodes)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranked", "restarts"]
