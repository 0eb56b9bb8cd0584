"""A real cluster of several nodes on this machine: what a run makes of it, and of the loss of a node."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import structlog

import hippoindex
from hippoindex.cluster.ray_executor import RayExecutor
from hippoindex.cluster.task_queue import Limits, Resources
from hippoindex.errors import ExecutorError, MissingPackageError
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ray_nodes = importlib.import_module("ray_nodes")
SAMPLE = Path(hippoindex.__file__).parent / "sample" / "passages.jsonl"


@pytest.fixture(scope="module")
def workers() -> Iterator[ModuleType]:
    sys.path.insert(0, str(HERE))
    yield importlib.import_module("cluster_workers")
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_nodes.Cluster]:
    from ray._private.authentication import authentication_token_setup

    # All ask for the same token: an earlier test may have made this process do so, for good.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    authentication_token_setup._enable_token_auth()
    made = ray_nodes.Cluster()
    try:
        made.add_node("--num-gpus=1")  # Ray takes our word for it
        yield made
    finally:
        made.remove()


@pytest.fixture
def make_tasks(tmp_path: Path, workers: ModuleType) -> Callable[[int, str], list[Any]]:
    return lambda count, do: [workers.PlacedTask(i, str(tmp_path / f"{i}.out"), do) for i in range(count)]


def run(cluster: ray_nodes.Cluster, tasks: list[Any], *rest: Any, limits: Limits | None = None) -> Any:
    """Run tasks on the cluster; return the numbers of those done, their nodes, and the log."""
    done: list[int] = []
    make_worker = importlib.import_module("cluster_workers").make_worker
    limits = limits or Limits()
    with structlog.testing.capture_logs() as log, RayExecutor(address=cluster.address, limits=limits) as made:
        made.run(make_worker, tasks, lambda task: done.append(task.index), *rest)
    places = [Path(task.output).read_text().split() for task in tasks]
    return done, places, log


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_gpus_that_are_not_there_are_refused_at_once(cluster: ray_nodes.Cluster, make_tasks: Any) -> None:
    started = time.monotonic()
    there = r"which the cluster does not have: its GPUs are 1 on [\d.]+\. Ask for fewer"
    with pytest.raises(ExecutorError, match=rf"A worker needs 2 GPUs of one node, {there}"):
        run(cluster, make_tasks(1, "gather"), Resources(num_gpus=2))
    with pytest.raises(
        ExecutorError, match=rf"A worker needs 2 GPUs and, beside one of them, 1 CPUs, {there}"
    ):
        run(cluster, make_tasks(1, "gather"), Resources(num_gpus=2, one_node=False))
    assert time.monotonic() - started < 30


def test_gpus_of_several_nodes_are_held_by_a_group_that_is_given_back(
    cluster: ray_nodes.Cluster, make_tasks: Any
) -> None:
    """The node of the second GPU is killed: the worker, which lives on, is ended and has a successor."""
    import ray

    for _ in range(2):
        cluster.add_node("--num-gpus=1")
    tasks = make_tasks(2, "sit")
    folder = tasks[0].folder
    struck: list[ray_nodes.Node] = []

    def begun() -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in folder.glob("*.begun")]

    def strike() -> None:
        ray_nodes.wait_until(begun, "no worker has begun")
        (first,) = begun()
        ((node, pid),) = [sitter for sitter in first["sitters"] if sitter[0] != first["node"]]
        struck.append(
            next(node for node in cluster.nodes if pid in {process.pid for process in node.processes()})
        )
        struck[0].kill_raylet()
        (folder / "doomed.new").write_text(node)
        (folder / "doomed.new").rename(folder / "doomed")

    striking = in_background(strike)
    ray.init(address=cluster.address, log_to_driver=False)  # the program's own connection stays open
    try:
        _, places, log = run(cluster, tasks, Resources(num_gpus=2, one_node=False))
        striking.join()
        groups = ray.util.placement_group_table().values()
        assert [group["state"] for group in groups] == ["REMOVED"] * 2
        ray_nodes.wait_until(lambda: ray.available_resources().get("GPU") == 2, "a GPU is still held")
    finally:
        head, *others = cluster.nodes
        kept = next(node for node in others if node not in struck)
        for node in others:
            if node is not kept:
                node.remove()
        cluster.nodes = [head, kept]
        ray_nodes.wait_until(
            lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "the nodes are not missed"
        )
        ray.shutdown()
    assert len({pid for _, pid in places}) == 1
    for worker in begun():
        assert len({node for node, _ in worker["sitters"]}) == 2
        pids = {pid for _, pid in worker["sitters"]}
        ray_nodes.wait_until(
            lambda pids=pids: pids.isdisjoint(psutil.pids()), "what was started lives on", 30.0
        )
    told = {entry["event"]: entry for entry in log}
    assert told["a worker was lost"]["worker"] == "was lost with a node on which some of its GPUs are"
    assert told["a worker's GPUs"]["by_node"] == [1, 1]
    assert told["workers"]["nodes"] == 2


def test_a_node_that_comes_during_the_run_is_used(cluster: ray_nodes.Cluster, make_tasks: Any) -> None:
    """There is one node at first, whose task waits for the other's."""
    with RayExecutor(address=cluster.address) as executor:
        assert executor.workers == 1
    tasks = make_tasks(3, "meet")
    begun = tasks[0].folder

    def come() -> None:
        ray_nodes.wait_until(lambda: list(begun.glob("*.begun")), "no task has begun")
        cluster.add_node()

    coming = in_background(come)
    done, places, log = run(cluster, tasks)
    coming.join()
    assert sorted(done) == [0, 1, 2]
    assert len({node for node, _ in places}) == 2
    told = [(entry["running"], entry["nodes"]) for entry in log if entry["event"] == "workers"]
    assert told == [(1, 1), (2, 2)]


def test_workers_get_what_they_need(cluster: ray_nodes.Cluster, make_tasks: Any) -> None:
    """Two nodes of one CPU hold four workers that need half of one."""
    done, places, _ = run(cluster, make_tasks(4, "gather"), Resources(num_cpus=0.5))
    assert sorted(done) == [0, 1, 2, 3]
    assert len({node for node, _ in places}) == 2
    assert len({pid for _, pid in places}) == 4


def test_a_killed_node_costs_only_the_shards_that_were_on_it(
    cluster: ray_nodes.Cluster, make_tasks: Any
) -> None:
    tasks = make_tasks(6, "outlive")
    folder = tasks[0].folder
    doomed = cluster.nodes.pop()

    def strike() -> None:
        def nodes() -> dict[str, int]:
            files = list(folder.glob("*.begun"))
            return {file.read_text(): int(file.name.split(".")[2]) for file in files}

        ray_nodes.wait_until(lambda: len(nodes()) == 2, "the nodes are not at work")
        pids = {process.pid for process in doomed.processes()}
        (node,) = (node for node, pid in nodes().items() if pid in pids)
        doomed.kill_raylet()
        (folder / "doomed.new").write_text(node)
        (folder / "doomed.new").rename(folder / "doomed")

    striking = in_background(strike)
    done, places, log = run(cluster, tasks)
    striking.join()
    doomed.remove()
    assert sorted(done) == list(range(6)), "each once"
    assert {node for node, _ in places}.isdisjoint({(folder / "doomed").read_text()})
    lost = [entry for entry in log if entry["event"] == "a worker was lost"]
    assert [entry["shard"] in {"shard 0", "shard 1"} for entry in lost] == [True]
    assert lost[0]["worker"].startswith("was lost with its node (node ")


def test_a_node_without_memory_does_not_fail_the_run(cluster: ray_nodes.Cluster, make_tasks: Any) -> None:
    """Ray kills whatever runs on it, while it starts or at a task."""
    node = cluster.add_node(RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="100")
    tasks = make_tasks(3, "linger")
    with structlog.testing.capture_logs() as log:

        def relieve() -> None:
            ray_nodes.wait_until(
                lambda: any("low on memory" in entry.get("worker", "") for entry in log), "no worker lost"
            )
            (tasks[0].folder / "enough").touch()

        relieving = in_background(relieve)
        done: list[int] = []
        make_worker = importlib.import_module("cluster_workers").make_worker
        with RayExecutor(address=cluster.address, limits=Limits(shard_attempts=50)) as executor:
            executor.run(make_worker, tasks, lambda task: done.append(task.index))
        relieving.join()
    cluster.nodes.remove(node)
    node.remove()
    assert sorted(done) == [0, 1, 2]


def test_nodes_with_another_version_are_refused(
    cluster: ray_nodes.Cluster, make_tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hippoindex.cluster.ray_executor.__version__", "0.0.1")
    with pytest.raises(ExecutorError, match=r"has hippoindex .*, this one has 0\.0\.1: install the"):
        run(cluster, make_tasks(1, "place"))


def test_a_node_that_lacks_the_package_is_named(
    cluster: ray_nodes.Cluster, make_tasks: Any, tmp_path: Path
) -> None:
    (tmp_path / "hippoindex.py").write_text("raise ImportError('there is none')")
    node = cluster.add_node(PYTHONPATH=str(tmp_path))
    try:
        with pytest.raises(ExecutorError) as caught:
            run(cluster, make_tasks(2, "linger"))
    finally:
        cluster.nodes.remove(node)
        node.remove()
    assert "Ray cannot start workers: one failed as it started: ImportError: there is none (node " in str(
        caught.value
    )


def test_the_client_needs_a_package_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hippoindex.cluster.ray_executor.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"ray://\.\.\. needs .* pip install 'ray\[client\]'"):
        RayExecutor(address="ray://127.0.0.1:10001")


def test_auto_joins_the_cluster_that_the_environment_names(
    cluster: ray_nodes.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with RayExecutor(address="auto") as executor:
        ray_nodes.wait_until(
            lambda: executor.workers == len(cluster.nodes) - 1, "not one for each node but the head"
        )


def digests(index: Path) -> dict[str, str]:
    """Return the digest of every file that must not differ between two runs."""
    return {
        file.relative_to(index).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(index.rglob("*"))
        if file.is_file() and file.name not in {"stats.json", "report.html", "SHA256SUMS"}
    }


def test_an_index_built_on_a_cluster_that_loses_a_node_has_the_same_bytes(
    cluster: ray_nodes.Cluster, tmp_path: Path
) -> None:
    """A first run is ended by a signal as it joins; under the second a node is killed."""
    settings = ["cluster.shard_passages=4", "cluster.shard_texts=64"]
    config = load_config(
        overrides=settings, corpus__path=[str(SAMPLE)], output=str(tmp_path / "here"), cluster__workers=1
    )
    build_index(config)
    output, work = tmp_path / "there", tmp_path / "there.work"
    doomed = cluster.add_node()
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--corpus", str(SAMPLE)]
    command += ["--output", str(output), "--address", cluster.address, "--json"]
    command += [part for setting in settings for part in ("--set", setting)]

    def extracted() -> int:
        return len([*work.glob("extract/done/*.json")])

    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ray_nodes.wait_until(lambda: [*work.rglob("*.arrow")] or program.poll() is not None, "nothing is read")
    program.send_signal(signal.SIGTERM)
    _, said = program.communicate(timeout=120)
    assert program.returncode == 143, said
    assert not output.exists()

    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ray_nodes.wait_until(lambda: extracted() >= 4 or program.poll() is not None, "nothing is extracted")
    assert program.poll() is None
    doomed.kill_raylet()
    printed, said = program.communicate(timeout=300)
    assert program.returncode == 0, said
    assert printed.startswith("{"), "and nothing of Ray's"
    assert '"executor": "ray"' in printed
    assert digests(output) == digests(tmp_path / "here")


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import cluster_workers as w
from hippoindex.cluster.ray_executor import RayExecutor

tasks = [w.PlacedTask(i, f"{folder}/{{i}}.out", "linger") for i in range(3)]
with RayExecutor(address={address!r}) as executor:
    executor.run(w.make_worker, tasks, print)
"""


def test_the_loss_of_the_head_ends_the_run_with_a_message(cluster: ray_nodes.Cluster, tmp_path: Path) -> None:
    """The last test: there is no cluster after it."""
    script = SCRIPT.format(here=str(HERE), folder=str(tmp_path), address=cluster.address)
    program = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    ray_nodes.wait_until(
        lambda: [*tmp_path.glob("*.begun")] or program.poll() is not None, "no task has begun"
    )
    (head,) = (p for p in cluster.nodes[0].processes() if Path(p.cmdline()[0]).name == "gcs_server")
    head.kill()
    _, said = program.communicate(timeout=55)  # after 60 s Ray itself would end the program
    port = cluster.address.rpartition(":")[2]
    assert re.search(rf"ExecutorError: The head of the Ray cluster, \S+:{port}, is gone: ", said), said
    assert program.returncode == 1
