"""Where work runs: the executor interface, the choice of one, and processes on this machine.

A task is one unit of work that reads its own input and writes its own output file, so tasks may run anywhere
and in any order. An executor makes one worker per process, feeds it tasks, and reports each that is done.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Literal, NoReturn, Protocol, Self

import structlog

from hippoindex.cluster.task_queue import Limits, Resources, T, Task, TaskQueue, describe
from hippoindex.cluster.usage import available_cores
from hippoindex.errors import ExecutorError, HippoIndexError, UsageError, WorkerLostError

_log = structlog.get_logger(__name__)

#: Set to 1 in worker processes, before they import numpy or numba: N workers share N cores.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
#: How long a worker without work may take to end before it is killed.
_EXIT_TIMEOUT_S = 10.0
#: A worker needs one core, where nothing else is said.
ONE_CORE = Resources()
#: Three attempts, and no limit of time.
DEFAULT_LIMITS = Limits()

Worker = Callable[[T], None]
"""Processes one task and writes its output."""
WorkerFactory = Callable[[], Worker[T]]
"""Makes a worker: called once in each process, where it loads models. Sent to the processes by pickle."""


class Executor(Protocol):
    """Runs tasks on workers. A context manager: :meth:`close` is called on leaving.

    Attributes
    ----------
    name : str
        ``"local"`` or ``"ray"``.
    workers : int
        Number of workers that run in parallel.
    """

    name: str

    @property
    def workers(self) -> int:
        """Number of workers that run in parallel."""
        ...

    def run(
        self,
        factory: WorkerFactory[T],
        tasks: Sequence[T],
        on_done: Callable[[T], None],
        resources: Resources = ONE_CORE,
    ) -> None:
        """Process every task; return when all are done.

        Tasks are handed out in order and may end in another. A worker that dies, takes too long, or raises
        :class:`WorkerLostError` costs the task it was at, which is given to another worker; see
        :class:`Limits`. On the first failure no further task is handed out and the workers are stopped.

        Parameters
        ----------
        factory : callable
            Makes one worker per process.
        tasks : sequence
            What to process.
        on_done : callable
            Called in this process with each task that is done, once.
        resources : Resources
            What each worker needs.

        Raises
        ------
        HippoIndexError
            The error of that class which a worker raised, with the same class and message.
        ExecutorError
            If a worker raised anything else (its traceback is the cause), or a task lost as many workers as
            it may.
        UsageError
            If the factory or a task cannot be pickled.
        """
        ...

    def workers_for(self, resources: Resources) -> int:
        """Return how many workers that need so much run in parallel."""
        ...

    def close(self) -> None:
        """Release what the executor holds between runs."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def choose_executor(
    kind: Literal["auto", "local", "ray"],
    *,
    address: str | None,
    workers: int | None,
    passages: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Executor:
    """Return the executor that was asked for, or the one that suits.

    Parameters
    ----------
    kind : {"auto", "local", "ray"}
        ``auto`` takes Ray where an address is given and local processes otherwise: on one machine Ray adds
        10 to 20 seconds of start and no speed.
    address : str or None
        Ray cluster to join.
    workers : int or None
        Parallel workers; ``None`` is one per core that this process, or the cluster at ``address``, may use.
    passages : int, optional
        Size of the job, for the log.
    limits : Limits
        How often a shard may lose its worker, and how long it may take.

    Raises
    ------
    UsageError
        If an address is given for the local executor.
    MissingPackageError
        If Ray is needed and not installed.
    """
    if kind == "local" and address is not None:
        raise UsageError(
            f"cluster.address is {address!r}, but the local executor joins no cluster. "
            "Set cluster.executor to 'ray', or leave the address out."
        )
    executor: Executor
    if kind == "ray" or address is not None:
        from hippoindex.cluster.ray_executor import RayExecutor  # an optional dependency

        executor = RayExecutor(workers, address=address, limits=limits)
    else:
        executor = LocalExecutor(available_cores() if workers is None else workers, limits=limits)
    if kind != "auto":
        why = "asked for"
    elif address is not None:
        why = "a cluster address is given"
    else:
        why = "no cluster address is given"
    size = {} if passages is None else {"passages": passages}
    _log.info("executor chosen", executor=executor.name, why=why, address=address, **size)
    return executor


class LocalExecutor:
    """Worker processes on this machine, or this very process where one worker or one task is all there is.

    Processes are spawned for each run and end with it. Each has one thread for numerical libraries, except
    when the work runs in this process, whose settings are left alone. Their standard output goes to standard
    error. A script that calls this must do so under ``if __name__ == "__main__":``, as always with spawned
    processes.

    Work in this process has no worker to lose: a crash there ends the program. Where
    ``limits.shard_timeout_s`` is set, even a single worker is a process of its own, which can be killed.

    A stage whose workers need several cores gets fewer of them. GPUs are not divided: a stage that needs one
    has one worker here, which sees them all.

    Parameters
    ----------
    workers : int
        Number of processes.
    limits : Limits
    """

    name = "local"

    def __init__(self, workers: int, *, limits: Limits = DEFAULT_LIMITS) -> None:
        if workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self.workers = workers
        self._limits = limits

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held between runs."""

    def workers_for(self, resources: Resources) -> int:
        """Return how many workers fit; see :meth:`Executor.workers_for`."""
        return 1 if resources.num_gpus else max(1, int(self.workers // max(resources.num_cpus, 1)))

    def run(
        self,
        factory: WorkerFactory[T],
        tasks: Sequence[T],
        on_done: Callable[[T], None],
        resources: Resources = ONE_CORE,
    ) -> None:
        """Process every task; see :meth:`Executor.run`."""
        workers = max(1, min(self.workers_for(resources), len(tasks)))
        if workers == 1 and self._limits.shard_timeout_s is None:
            _run_here(factory, tasks, on_done)
        else:
            payload = pickled(factory, "The worker factory")
            _run_in_processes(payload, tasks, on_done, workers, self._limits)


def _run_here(factory: WorkerFactory[T], tasks: Sequence[T], on_done: Callable[[T], None]) -> None:
    worker: Worker[T] | None = None
    for task in tasks:
        try:
            if worker is None:
                worker = factory()
            worker(task)
        except HippoIndexError as error:
            error.add_note(f"While processing {describe(task)}.")
            raise
        except (Exception, SystemExit) as error:
            raise _task_error(task, _summary(error)) from error
        on_done(task)


def _run_in_processes(
    factory: bytes, tasks: Sequence[T], on_done: Callable[[T], None], workers: int, limits: Limits
) -> None:
    queue = TaskQueue(tasks, limits)
    pool: list[_Process[T]] = []
    resource_tracker.ensure_running()  # started later it would lift the block on interrupts
    try:
        for _ in range(workers):
            pool.append(_Process(factory))
            pool[-1].give(queue.take())
        while busy := {process: process.task for process in pool if process.task is not None}:
            for process in _wait(busy, limits.shard_timeout_s):
                task = busy[process]
                lost = process.finish(task, limits)
                if lost is None:
                    process.give(queue.take())
                    on_done(task)
                else:
                    _kill([process])
                    pool.remove(process)
                    queue.put_back(task, lost)
                    pool.append(_Process(factory))
                    pool[-1].give(queue.take())
        for process in pool:
            process.dismiss()
    finally:
        _kill(pool)


def _wait(busy: Collection[_Process[T]], timeout_s: float | None) -> list[_Process[T]]:
    """Wait for processes that have an outcome, have died or have taken too long, and return them."""
    left_s = None
    if timeout_s is not None:
        left_s = max(0.0, min(process.given_s for process in busy) + timeout_s - time.monotonic())
    ready = multiprocessing.connection.wait([process.connection for process in busy], left_s)
    overdue_s = time.monotonic() - (timeout_s or 0.0)
    return [
        process
        for process in busy
        if process.connection in ready or (timeout_s is not None and process.given_s <= overdue_s)
    ]


class _Process(Generic[T]):
    """A worker process, this end of the pipe to it, and the task it is at."""

    def __init__(self, factory: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.task: T | None = None
        self.given_s = time.monotonic()
        # Not a daemon, which might have no processes of its own, as an inference engine has.
        self.process = context.Process(target=_serve, args=(other_end, factory), daemon=False)
        with worker_environment():
            self.process.start()
        other_end.close()  # so that the death of the process ends the connection

    def give(self, task: T | None) -> None:
        self.task = task
        self.given_s = time.monotonic()
        if task is not None:
            message = pickled(task, describe(task))
            with contextlib.suppress(OSError):  # it has died: finish() finds the connection ended
                self.connection.send_bytes(message)

    def finish(self, task: T, limits: Limits) -> str | None:
        """Return ``None`` if the present task is done, or how the process was lost; raise what went wrong."""
        if not self.connection.poll():
            return limits.hung
        try:
            failure: Failure | None = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_EXIT_TIMEOUT_S)
            return _how_it_ended(self.process.exitcode)
        if failure is None:
            return None
        if failure.lost is None:
            raise_failure(task, failure)
        return failure.lost

    def dismiss(self) -> None:
        """Let an idle process end by itself."""
        self.connection.close()
        self.process.join(_EXIT_TIMEOUT_S)


def _kill(processes: Iterable[_Process[T]]) -> None:
    """End what still runs, at once: outputs are written atomically, so nothing needs a farewell."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not come as far
            os.killpg(process.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.process.kill()
    for process in processes:
        process.process.join()
        process.connection.close()


@contextlib.contextmanager
def worker_environment() -> Iterator[None]:
    """While it is open, processes that are started count one thread each and are deaf to Ctrl-C.

    Both are inherited: the environment is read when a library is loaded, which can be before any code of
    ours runs in the new process, and an interrupt is for this process to handle, which then ends the others.
    """
    before = {name: os.environ.get(name) for name in _THREAD_COUNTS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.environ.update(dict.fromkeys(_THREAD_COUNTS, "1"))
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(connection: Connection, factory: bytes) -> None:
    """Life of a worker process: process what comes until the other end is closed."""
    os.setpgid(0, 0)  # what it starts ends with it
    os.dup2(2, 1)  # standard output belongs to the program, not to its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    runner = TaskRunner(factory)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(runner(connection.recv_bytes()))


def _exit_with_parent() -> None:
    """End this process in the middle of its task when the program has been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


@dataclass(frozen=True)
class Failure:
    """What a worker raised, in a form that survives the way to another process.

    Attributes
    ----------
    error : HippoIndexError or None
        The error itself, if it is one of ours.
    summary : str
        Class and message, one line.
    traceback : str
        Text of the traceback, causes included.
    """

    error: HippoIndexError | None
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe ``error``; one of ours that cannot be pickled is only described."""
        ours = error if isinstance(error, HippoIndexError) and _survives_pickling(error) else None
        return cls(ours, _summary(error), "".join(traceback.format_exception(error)))

    @property
    def lost(self) -> str | None:
        """How the worker was lost, where it says so itself."""
        return f"gave up: {self.error}" if isinstance(self.error, WorkerLostError) else None


class TaskRunner:
    """Makes a worker on its first task and turns whatever is raised into a :class:`Failure`.

    Where the machine of a cluster that was joined does not say otherwise, the worker counts one thread, as
    those do that inherit :func:`worker_environment`.

    Parameters
    ----------
    factory : bytes
        The pickled worker factory.
    """

    def __init__(self, factory: bytes) -> None:
        for name in _THREAD_COUNTS:
            os.environ.setdefault(name, "1")
        self._factory = factory
        self._worker: Worker | None = None

    def __call__(self, task: bytes) -> Failure | None:
        """Process a pickled task."""
        try:
            if self._worker is None:
                self._worker = pickle.loads(self._factory)()  # noqa: S301 - made by this run's own program
            self._worker(pickle.loads(task))  # noqa: S301 - likewise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - carried to the program, which raises it
            return Failure.of(error)
        return None


def raise_failure(task: Task, failure: Failure) -> NoReturn:
    """Raise what a worker raised on ``task``: our errors as they are, others as :class:`ExecutorError`."""
    error = failure.error
    if error is None:
        error = _task_error(task, failure.summary)
    else:
        error.add_note(f"While processing {describe(task)}.")
    raise error from ExecutorError(f"In the worker:\n{failure.traceback}")


def pickled(value: object, name: str, dumps: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Pickle what is to be sent to a worker.

    Raises
    ------
    UsageError
        If it cannot be pickled.
    """
    try:
        return dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} cannot be sent to worker processes: {error}. It must be made of functions and classes "
            "at the top level of a module, and of plain values."
        ) from error


def _task_error(task: Task, summary: str) -> ExecutorError:
    return ExecutorError(f"Could not process {describe(task)}: {summary}")


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _survives_pickling(error: HippoIndexError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - made one step before
    except Exception:  # noqa: BLE001 - whatever an attribute's own pickling code raises
        return False


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"ended by itself with exit code {exit_code} (its last words are on standard error)"
    name = {number.value: number.name for number in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
    return f"was killed by {name}" + (" (memory may have run out)" if name == "SIGKILL" else "")
