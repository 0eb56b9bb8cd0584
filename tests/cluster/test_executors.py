from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import structlog

from hippoindex.cluster.executor import Executor, LocalExecutor, choose_executor
from hippoindex.cluster.ray_executor import RayExecutor
from hippoindex.cluster.task_queue import Limits, Resources
from hippoindex.errors import ExecutorError, MissingPackageError, ModelError, UsageError

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def workers_module() -> Iterator[ModuleType]:
    """The module of tasks, importable in this process and in those it starts."""
    sys.path.insert(0, str(HERE))
    yield importlib.import_module("executor_workers")
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Each executor with two worker processes; Ray starts once."""
    tmp_path_factory.getbasetemp()  # else it would be made in a folder that is removed
    folder, usual = (
        tempfile.mkdtemp(prefix="e-", dir="/tmp"),
        tempfile.tempdir,
    )  # short: Ray puts sockets there
    tempfile.tempdir = folder
    children = set(psutil.Process().children(recursive=True))
    made: Executor = LocalExecutor(2) if request.param == "local" else RayExecutor(2)
    with made:
        yield made
    tempfile.tempdir = usual
    assert list(Path(folder).glob("hippoindex-*")) == []
    shutil.rmtree(folder)
    left = [child for child in psutil.Process().children(recursive=True) if child not in children]
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE and "ray" in child.name()] == []


@pytest.fixture(params=["here", "processes"])
def local(request: pytest.FixtureRequest) -> Executor:
    """The local executor, in this process and with two others."""
    return LocalExecutor(1 if request.param == "here" else 2)


@pytest.fixture
def factory(workers_module: ModuleType) -> Any:
    return functools.partial(workers_module.make_worker, "salt")


@pytest.fixture
def make_tasks(tmp_path: Path, workers_module: ModuleType) -> Callable[..., list[Any]]:
    def make(count: int, do: str = "write", only: int | None = None) -> list[Any]:
        """Tasks of which all, or the one numbered ``only``, do ``do``."""
        return [
            workers_module.FileTask(
                i, f"/in/{i}.Arrow", str(tmp_path / f"{i}.out"), do if only in (None, i) else "write"
            )
            for i in range(count)
        ]

    return make


def limited(executor: Executor, limits: Limits) -> Executor:
    """Return an executor of the same kind; Ray that has been started is shared."""
    return LocalExecutor(2, limits=limits) if executor.name == "local" else RayExecutor(2, limits=limits)


def wait_until(holds: Callable[[], bool], message: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def run(executor: Executor, factory: Any, tasks: Sequence[Any]) -> list[int]:
    done: list[int] = []
    executor.run(factory, tasks, lambda task: done.append(task.index))
    return done


def outputs(tasks: Sequence[Any]) -> list[list[str]]:
    return [Path(task.output).read_text().split() for task in tasks]


def test_every_task_is_done_once_by_one_worker_per_process(
    executor: Executor, tmp_path: Path, make_tasks: Any, workers_module: ModuleType
) -> None:
    tasks = make_tasks(7, "first_after_second")
    done = run(executor, functools.partial(workers_module.make_noted_worker, str(tmp_path)), tasks)
    assert sorted(done) == list(range(7))
    assert done.index(1) < done.index(0), "a later task may end first"
    assert [words[:2] for words in outputs(tasks)] == [["salt", str(i)] for i in range(7)]
    pids = {words[2] for words in outputs(tasks)}
    assert str(os.getpid()) not in pids
    assert len(list(tmp_path.glob("made-*"))) == len(pids) == 2


def test_workers_have_one_thread_and_print_nothing_to_standard_output(
    executor: Executor,
    factory: Any,
    make_tasks: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    tasks = make_tasks(3, "write_environment")
    with structlog.testing.capture_logs():
        run(executor, factory, tasks)
    assert {Path(task.output).read_text() for task in tasks} == {"['1', '1', '1', '1'] 1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ
    assert capfd.readouterr().out == ""


def test_a_worker_that_inherits_nothing_counts_one_thread_too() -> None:
    """As on a cluster that was joined; what its machine says of threads is left alone."""
    code = (
        "import os; from hippoindex.cluster.executor import TaskRunner; TaskRunner(b''); "
        "print(os.environ['NUMBA_NUM_THREADS'], os.environ['OMP_NUM_THREADS'])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"OMP_NUM_THREADS": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "7"]


def test_no_tasks(executor: Executor, workers_module: ModuleType) -> None:
    assert run(executor, functools.partial(workers_module.make_no_worker, ""), []) == []


def test_a_foreign_exception_names_the_shard_and_keeps_the_traceback(
    executor: Executor, factory: Any, make_tasks: Any
) -> None:
    with pytest.raises(ExecutorError) as caught:
        run(executor, factory, make_tasks(4, "raise_value_error", only=2))
    assert str(caught.value) == "Could not process shard 2 (/in/2.Arrow): ValueError: seven is not 2"
    assert "in raise_value_error" in str(caught.value.__cause__)


def test_an_error_of_ours_survives_whatever_its_init_takes(
    executor: Executor, factory: Any, make_tasks: Any, workers_module: ModuleType
) -> None:
    with pytest.raises(workers_module.OddError) as caught:
        run(executor, factory, make_tasks(3, "raise_odd", only=1))
    assert str(caught.value) == "row 1, column text"
    assert caught.value.row == 1
    assert caught.value.__notes__ == ["While processing shard 1 (/in/1.Arrow)."]
    assert "in raise_odd" in str(caught.value.__cause__)


def test_a_worker_lost_in_whatever_way_costs_one_attempt_at_its_shard(
    executor: Executor, factory: Any, make_tasks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = make_tasks(5, "trouble_once")
    with structlog.testing.capture_logs() as logs:
        done = run(limited(executor, Limits(3, 20.0)), factory, tasks)
    assert sorted(done) == list(range(5)), "each once"
    assert [words[:2] for words in outputs(tasks)] == [["salt", str(i)] for i in range(5)]
    assert capfd.readouterr().out == "", "what Ray has to say of it is not for standard output"
    lost = {entry["shard"]: entry["worker"] for entry in logs if entry["event"] == "a worker was lost"}
    assert sorted(lost) == [f"shard {i} (/in/{i}.Arrow)" for i in range(4)]
    assert lost["shard 3 (/in/3.Arrow)"] == "gave up: the engine has died"
    assert lost["shard 2 (/in/2.Arrow)"] == "hung: it took more than 20 s (cluster.shard_timeout_s)"
    (hung,) = tmp_path.glob("2.out.*.hung")
    pid = int(hung.name.split(".")[2])
    wait_until(lambda: not psutil.pid_exists(pid), "the worker that hung is still there")


def test_a_shard_that_kills_every_worker_fails_the_run_and_is_named(
    executor: Executor, factory: Any, make_tasks: Any
) -> None:
    started = time.monotonic()
    with structlog.testing.capture_logs() as logs, pytest.raises(ExecutorError) as caught:
        run(executor, factory, make_tasks(6, "die", only=1))
    assert time.monotonic() - started < 120
    message = str(caught.value)
    assert message.startswith("Could not process shard 1 (/in/1.Arrow): it lost its worker 3 times")
    assert "What was done is kept; if memory ran out, use fewer workers (cluster.workers) or" in message
    assert sum(entry["event"] == "a worker was lost" for entry in logs) == 2
    assert sorted(run(executor, factory, make_tasks(3))) == [0, 1, 2], "the executor is of use afterwards"


def test_a_shard_that_hangs_every_worker_fails_the_run_and_says_so(
    executor: Executor, factory: Any, make_tasks: Any, tmp_path: Path
) -> None:
    with pytest.raises(ExecutorError) as caught:
        run(limited(executor, Limits(1, 12.0)), factory, make_tasks(4, "hang", only=1))
    assert str(caught.value) == (
        "Could not process shard 1 (/in/1.Arrow): it lost its worker once, which is all that "
        "cluster.shard_attempts allows. The worker hung: it took more than 12 s (cluster.shard_timeout_s). "
        "What was done is kept; if the shard is merely slow, raise cluster.shard_timeout_s."
    )
    assert {file.name for file in tmp_path.glob("[0-9].out")} == {"0.out", "2.out", "3.out"}, (
        "others are done"
    )


def test_a_stage_that_needs_more_has_fewer_workers(executor: Executor, factory: Any, make_tasks: Any) -> None:
    tasks = make_tasks(4)
    executor.run(factory, tasks, lambda _: None, Resources(num_cpus=2))
    assert len({words[2] for words in outputs(tasks)}) == 1


def test_what_cannot_be_pickled_is_refused(executor: Executor, make_tasks: Any) -> None:
    handle = sys.stdout.buffer

    def make_worker() -> Any:
        return lambda _task: handle.flush()

    with pytest.raises(UsageError, match="The worker factory cannot be sent to worker processes"):
        run(executor, make_worker, make_tasks(2))


def test_a_missing_package_keeps_its_class_and_message(
    local: Executor, factory: Any, make_tasks: Any
) -> None:
    with pytest.raises(MissingPackageError) as caught:
        run(local, factory, make_tasks(3, "raise_missing_package", only=1))
    assert str(caught.value) == str(MissingPackageError("antigravity", "--fly", "pip install antigravity"))
    assert caught.value.package == "antigravity"


def test_an_error_while_the_worker_is_made(
    local: Executor, make_tasks: Any, workers_module: ModuleType
) -> None:
    with pytest.raises(ModelError) as caught:
        run(local, functools.partial(workers_module.make_no_worker, ""), make_tasks(3))
    assert str(caught.value) == "no such model"


def test_sys_exit_in_a_worker_does_not_end_the_program(
    local: Executor, factory: Any, make_tasks: Any
) -> None:
    with pytest.raises(ExecutorError, match=r"shard 0 .*SystemExit: 5"):
        run(local, factory, make_tasks(2, "leave", only=0))


def test_a_failing_callback_stops_the_run(local: Executor, factory: Any, make_tasks: Any) -> None:
    def stop(_task: Any) -> None:
        raise LookupError("the ledger is gone")

    with pytest.raises(LookupError, match="the ledger is gone"):
        local.run(factory, make_tasks(3), stop)
    assert worker_processes(os.getpid()) == []


def test_an_error_that_cannot_travel_is_described(factory: Any, make_tasks: Any) -> None:
    with pytest.raises(ExecutorError, match=r"shard 1 .*UnpicklableError: holds an open file"):
        run(LocalExecutor(2), factory, make_tasks(2, "raise_unpicklable", only=1))


def test_a_lost_local_worker_is_named_with_its_signal_or_exit_code(factory: Any, make_tasks: Any) -> None:
    for do, how in (
        ("die", "was killed by SIGKILL (memory may have run out)"),
        ("leave_at_once", "ended by itself with exit code 7 (its last words are on standard error)"),
    ):
        with pytest.raises(ExecutorError) as caught:
            run(LocalExecutor(2, limits=Limits(1)), factory, make_tasks(2, do, only=1))
        assert (
            f"it lost its worker once, which is all that cluster.shard_attempts allows. The worker {how}."
            in str(caught.value)
        )
        assert worker_processes(os.getpid()) == []


def test_with_a_limit_of_time_even_one_worker_is_a_process(factory: Any, make_tasks: Any) -> None:
    tasks = make_tasks(2, "write")
    assert run(LocalExecutor(1, limits=Limits(3, 60.0)), factory, tasks) == [0, 1]
    (pid,) = {words[2] for words in outputs(tasks)}
    assert pid != str(os.getpid())


def test_a_worker_may_have_processes_of_its_own_which_end_with_it(
    factory: Any, make_tasks: Any, tmp_path: Path
) -> None:
    with pytest.raises(ExecutorError, match="hung"):
        run(LocalExecutor(1, limits=Limits(1, 5.0)), factory, make_tasks(1, "hang_with_child"))
    (child,) = tmp_path.glob("*.child")
    pid = int(child.name.split(".")[2])
    wait_until(lambda: not psutil.pid_exists(pid), "its child is still there")


@pytest.mark.parametrize("limits", [{"shard_attempts": 0}, {"shard_timeout_s": 0.0}, {"shard_timeout_s": -1}])
def test_limits_that_allow_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="shard_"):
        Limits(**limits)


@pytest.mark.parametrize(("workers", "count"), [(1, 3), (4, 1)])
def test_one_worker_or_one_task_stays_in_this_process(
    workers: int, count: int, factory: Any, make_tasks: Any
) -> None:
    tasks = make_tasks(count)
    assert run(LocalExecutor(workers), factory, tasks) == list(range(count))
    assert {words[2] for words in outputs(tasks)} == {str(os.getpid())}


def test_an_exception_in_this_process_is_reported_alike(factory: Any, make_tasks: Any) -> None:
    with pytest.raises(ExecutorError) as caught:
        run(LocalExecutor(1), factory, make_tasks(2, "raise_value_error"))
    assert str(caught.value) == "Could not process shard 0 (/in/0.Arrow): ValueError: seven is not 0"
    assert isinstance(caught.value.__cause__, ValueError)


class Counted(Sequence[Any]):
    """Tasks that keep count of how many have been taken."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self.tasks = tasks
        self.taken = 0

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        task = self.tasks[index]
        self.taken += 1
        return task


def test_tasks_in_flight_are_bounded(local: Executor, factory: Any, make_tasks: Any) -> None:
    tasks = Counted(make_tasks(300))
    ahead: list[int] = []
    local.run(factory, tasks, lambda _task: ahead.append(tasks.taken - len(ahead)))
    assert len(ahead) == 300
    assert max(ahead) <= local.workers + 1


def test_a_missing_ray_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"--executor ray needs .*pip install 'hippoindex\[ray\]'"):
        choose_executor("ray", address=None, workers=None, passages=10)


def test_auto_is_local_without_an_address() -> None:
    chosen = choose_executor("auto", address=None, workers=3, passages=10)
    assert (chosen.name, chosen.workers) == ("local", 3)
    assert choose_executor("local", address=None, workers=None, passages=1).workers >= 1


@pytest.mark.slow
def test_auto_is_ray_with_an_address() -> None:
    chosen = choose_executor("auto", address="10.0.0.1:6379", workers=3, passages=10)
    assert (chosen.name, chosen.workers) == ("ray", 3)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_an_error() -> None:
    with socket.socket() as listener:  # bound, but not listening
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        code = f"""
from hippoindex.cluster.ray_executor import RayExecutor
RayExecutor(address={address!r}).workers
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"ExecutorError: Ray cannot join the cluster {address}: [Errno 111]" in done.stderr


def test_local_with_an_address_is_refused() -> None:
    with pytest.raises(UsageError, match="joins no cluster"):
        choose_executor("local", address="10.0.0.1:6379", workers=None, passages=1)


@pytest.mark.parametrize("workers", [0, -1])
def test_less_than_one_worker_is_refused(workers: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        choose_executor("local", address=None, workers=workers, passages=1)


SCRIPT = """
import functools, sys
sys.path.insert(0, {here!r})
import executor_workers as w
from hippoindex.cluster.executor import choose_executor

if __name__ == "__main__":
    tasks = [w.FileTask(i, "in", f"{folder}/{{i}}.out", "sleep_long") for i in range(4)]
    with choose_executor({kind!r}, address=None, workers=2) as executor:
        executor.run(functools.partial(w.make_worker, ""), tasks, print)
"""


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def busy_program(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A program, leader of its process group, and its two workers, each at a task without end."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(here=str(HERE), folder=str(tmp_path), kind=request.param))
    temporary = tempfile.mkdtemp(prefix="e-", dir="/tmp")  # short: Ray puts sockets there
    program = subprocess.Popen(
        [sys.executable, str(script)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": temporary, "RAY_ADDRESS": "127.0.0.1:1"},  # a cluster not asked for
    )
    wait_until(
        lambda: all((tmp_path / f"{i}.out").exists() for i in range(2)), "the workers did not start", 120
    )
    workers = [psutil.Process(int((tmp_path / f"{i}.out").read_text())) for i in range(2)]
    others = psutil.Process(program.pid).children(recursive=True)
    yield program, workers
    for process in others:
        if process.is_running():
            process.kill()
    program.kill()
    program.communicate()
    shutil.rmtree(temporary)


def test_an_interrupt_leaves_no_process(
    busy_program: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    program, workers = busy_program
    others = psutil.Process(program.pid).children(recursive=True)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, stderr = program.communicate(timeout=120)
    assert program.returncode == -signal.SIGINT
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == 1
    assert psutil.wait_procs([*workers, *others], timeout=20)[1] == []


def test_a_killed_program_leaves_no_process(
    busy_program: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    program, workers = busy_program
    others = psutil.Process(program.pid).children(recursive=True)
    # Ray's agents go on trying for a minute to tell the cluster of the death of their node.
    others = [process for process in others if "Agent" not in "".join(process.cmdline()[:1])]
    program.kill()
    program.communicate(timeout=120)
    assert psutil.wait_procs([*workers, *others], timeout=20)[1] == []


def worker_processes(pid: int) -> list[psutil.Process]:
    """Spawned workers of a process; the tracker that multiprocessing keeps is none."""

    def is_worker(process: psutil.Process) -> bool:
        try:
            return any("spawn_main" in word for word in process.cmdline())
        except psutil.Error:  # it has ended
            return False

    return [child for child in psutil.Process(pid).children(recursive=True) if is_worker(child)]
