"""Where work runs: the executor interface, the choice of one, and processes on this machine.

A task is one unit of work that reads its own input and writes its own output file, so tasks may run anywhere
and in any order. An executor makes one worker per process, feeds it tasks, and reports each that is done.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Literal, NoReturn, Protocol, Self, TypeVar

import structlog

from hippoindex.cluster.usage import available_cores
from hippoindex.errors import ExecutorError, HippoIndexError, UsageError

_log = structlog.get_logger(__name__)

#: Set to 1 in worker processes, before they import numpy or numba: N workers share N cores.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
#: How long a worker without work may take to end before it is killed.
_EXIT_TIMEOUT_S = 10.0
#: Shards named in a message.
_MAX_NAMED = 20


class Task(Protocol):
    """One unit of work: any object that can be pickled and has a number.

    An attribute ``input``, where there is one, is named in error messages beside the number.
    """

    @property
    def index(self) -> int:
        """Number of the task within its run."""
        ...


T = TypeVar("T", bound=Task)
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

    def run(self, factory: WorkerFactory[T], tasks: Sequence[T], on_done: Callable[[T], None]) -> None:
        """Process every task; return when all are done.

        Tasks are handed out in order and may end in another. On the first failure no further task is handed
        out and the workers are stopped.

        Parameters
        ----------
        factory : callable
            Makes one worker per process.
        tasks : sequence
            What to process.
        on_done : callable
            Called in this process with each task that is done.

        Raises
        ------
        HippoIndexError
            The error of that class which a worker raised, with the same class and message.
        ExecutorError
            If a worker raised anything else (its traceback is the cause) or died.
        UsageError
            If the factory or a task cannot be pickled.
        """
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

        executor = RayExecutor(workers, address=address)
    else:
        executor = LocalExecutor(available_cores() if workers is None else workers)
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

    Parameters
    ----------
    workers : int
        Number of processes.
    """

    name = "local"

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self.workers = workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held between runs."""

    def run(self, factory: WorkerFactory[T], tasks: Sequence[T], on_done: Callable[[T], None]) -> None:
        """Process every task; see :meth:`Executor.run`."""
        if self.workers == 1 or len(tasks) <= 1:
            _run_here(factory, tasks, on_done)
        else:
            _run_in_processes(pickled(factory, "The worker factory"), tasks, on_done, self.workers)


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


def _run_in_processes(factory: bytes, tasks: Sequence[T], on_done: Callable[[T], None], workers: int) -> None:
    queue = iter(tasks)
    pool: list[_Process[T]] = []
    resource_tracker.ensure_running()  # started later it would lift the block on interrupts
    try:
        with worker_environment():
            for task in itertools.islice(queue, workers):
                pool.append(_Process(factory))
                pool[-1].give(task)
        while busy := {process: process.task for process in pool if process.task is not None}:
            ready = multiprocessing.connection.wait([process.connection for process in busy])
            for process, task in busy.items():
                if process.connection in ready:
                    process.finish(task, in_flight=[p.task for p in pool if p.task is not None])
                    process.give(next(queue, None))
                    on_done(task)
        for process in pool:
            process.dismiss()
    finally:
        _kill(pool)


class _Process(Generic[T]):
    """A worker process, this end of the pipe to it, and the task it is at."""

    def __init__(self, factory: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.task: T | None = None
        self.process = context.Process(target=_serve, args=(other_end, factory), daemon=True)
        self.process.start()
        other_end.close()  # so that the death of the process ends the connection

    def give(self, task: T | None) -> None:
        self.task = task
        if task is not None:
            message = pickled(task, describe(task))
            with contextlib.suppress(OSError):  # it has died: finish() finds the connection ended
                self.connection.send_bytes(message)

    def finish(self, task: T, in_flight: Iterable[T]) -> None:
        """Take the outcome of the present task; raise what went wrong."""
        try:
            failure: Failure | None = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_EXIT_TIMEOUT_S)
            raise worker_died(_how_it_ended(self.process.exitcode), in_flight, task) from None
        if failure is not None:
            raise_failure(task, failure)

    def dismiss(self) -> None:
        """Let an idle process end by itself."""
        self.connection.close()
        self.process.join(_EXIT_TIMEOUT_S)


def _kill(processes: Iterable[_Process[T]]) -> None:
    """End what still runs, at once: outputs are written atomically, so nothing needs a farewell."""
    for process in processes:
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
        os._exit(1)


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


def worker_died(how: str, in_flight: Iterable[Task], at: Task | None = None) -> ExecutorError:
    """Return the error for a worker that died.

    Parameters
    ----------
    how : str
        What happened to it, e.g. ``"was killed by SIGKILL"``.
    in_flight : iterable of Task
        Tasks that the workers were at.
    at : Task, optional
        The task of the worker that died, if it is known.
    """
    where = f" while processing {describe(at)}" if at is not None else ""
    shards = [describe(task) for task in sorted(in_flight, key=lambda task: task.index)]
    if len(shards) > _MAX_NAMED:
        shards = [*shards[:_MAX_NAMED], f"{len(shards) - _MAX_NAMED} more"]
    return ExecutorError(
        f"A worker process {how}{where}. In flight were: {', '.join(shards)}. If memory ran out, use fewer "
        "workers (cluster.workers) or smaller shards (cluster.shard_passages, cluster.shard_texts)."
    )


def describe(task: Task) -> str:
    """Name a task in a message: its number and, where it has one, its input."""
    source = getattr(task, "input", None)
    return f"shard {task.index}" if source is None else f"shard {task.index} ({source})"


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
