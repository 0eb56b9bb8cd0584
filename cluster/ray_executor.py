"""The executor that runs tasks on Ray: a pool of actors, on this machine or on a cluster.

Tasks and the worker factory are pickled bytes; a task's outcome is nothing or, if it failed, the pickled
:class:`~hippoindex.cluster.executor.Failure`. Inputs and outputs of the tasks themselves do not pass through
Ray: on a cluster, their paths must mean the same on every node.

Actors and tasks are never retried by Ray, which would not say at which task an actor was lost, nor stop at a
task that kills every actor: a lost actor is replaced here by another one, on whatever node has room. An actor
whose GPUs are of several nodes has a placement group of its own, which is given back with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import structlog

from hippoindex._version import __version__
from hippoindex.cluster.executor import (
    DEFAULT_LIMITS,
    ONE_CORE,
    TaskRunner,
    WorkerFactory,
    pickled,
    raise_failure,
    worker_environment,
)
from hippoindex.cluster.ray_placement import (
    bundle_nodes,
    bundles,
    require_gpus,
    spans_nodes,
    workers_that_fit,
)
from hippoindex.cluster.task_queue import Limits, Resources, T, TaskQueue, describe
from hippoindex.cluster.usage import available_cores
from hippoindex.errors import ExecutorError, MissingPackageError, UsageError

if TYPE_CHECKING:
    import ray

_log = structlog.get_logger(__name__)

_OBJECT_STORE_BYTES = 128 * 2**20
#: Ray's sockets lie some 70 characters below this folder, and a socket's path may have 107.
_MAX_TEMPORARY_CHARS = 30
_CONNECT_TIMEOUT_S = 10.0
#: How often, at most, the log tells of workers and the size of the cluster is asked for.
_LOOK_INTERVAL_S = 5.0
#: Looks in a row at which the head of the cluster does not answer before it counts as gone.
_MAX_MISSED = 4
#: How often the log tells that no worker has a place.
_NO_PLACE_LOG_INTERVAL_S = 60.0
#: How long a run waits for a place for its first, or next, worker.
_NO_PLACE_TIMEOUT_S = 1800.0
#: How often it is looked whether a worker has taken too long or a node has come.
_TICK_S = 0.5
#: Actors that may be lost in a row while they start, for each that is wanted, where none is running.
_START_ATTEMPTS = 3
#: After one was lost while it started.
_START_PAUSE_S = 2.0
_MAX_QUOTED_CHARS = 1000
_TORN = "was lost with a node on which some of its GPUs are"
#: What Ray says of a lost actor, and what is said of it here.
_ENDS = (
    ("low on memory", "was killed because its node ran low on memory"),
    ("its node has died", "was lost with its node"),
    ("its worker process has died", "died, for lack of memory or by a crash"),
)
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class RayExecutor:
    """Actors of Ray, one task at a time each.

    Ray is started, or the cluster joined, at the first run, and left in :meth:`close`. If the calling program
    has already connected to Ray, that connection is used and left open.

    Where the cluster has less room than workers are asked for, the run begins with those that have a place;
    others join it as nodes come.

    Parameters
    ----------
    workers : int, optional
        Number of actors; ``None`` is one per core that this process may use, or as many as fit on the cluster
        at ``address``, whose size is looked at all the time.
    address : str, optional
        Cluster to join, as for ``ray.init``; ``None`` starts Ray on this machine.
    limits : Limits

    Raises
    ------
    MissingPackageError
        If Ray, or for an address ``ray://...`` its client, is not installed.
    UsageError
        If ``workers`` is less than 1.
    """

    name = "ray"

    def __init__(
        self, workers: int | None = None, *, address: str | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self._ray = _import_ray(client=address is not None and address.startswith("ray://"))
        self._address = address
        self._workers = available_cores() if workers is None and address is None else workers
        self._limits = limits
        self._owned = contextlib.ExitStack()

    @property
    def workers(self) -> int:
        """Number of actors that run in parallel. Asking a cluster for its size joins it."""
        return self.workers_for(ONE_CORE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what was started: Ray's own processes, its temporary folder."""
        self._owned.close()

    def run(
        self,
        factory: WorkerFactory[T],
        tasks: Sequence[T],
        on_done: Callable[[T], None],
        resources: Resources = ONE_CORE,
    ) -> None:
        """Process every task; see :meth:`hippoindex.cluster.executor.Executor.run`."""
        if not tasks:
            return
        if self._address is None and self._workers is not None:  # this machine is all there is
            resources = replace(resources, num_cpus=min(resources.num_cpus, self._workers))
        self._connect()
        dumps = self._ray.cloudpickle.dumps  # unlike pickle it can send what __main__ defines
        payload = pickled(factory, "The worker factory", dumps)
        pool: _ActorPool[T] = _ActorPool(
            self._ray, payload, resources, self._limits, spread=self._is_spread(resources)
        )
        waiting = TaskQueue(tasks, self._limits)
        head = _Head(self._head_address())
        left, looked_s = len(tasks), time.monotonic()
        pool.wanted = self.workers_for(resources)
        try:
            while left:
                if time.monotonic() - looked_s >= _LOOK_INTERVAL_S:
                    looked_s = time.monotonic()
                    if head.answers():
                        pool.wanted = self.workers_for(resources)
                        pool.end_torn(waiting)
                pool.grow(left)
                while pool.idle and (task := waiting.take()) is not None:
                    pool.give(task, pickled(task, describe(task), dumps))
                for task, lost in pool.outcomes():
                    if lost is None:
                        left -= 1
                        on_done(task)
                    else:
                        waiting.put_back(task, lost)
        finally:
            pool.close(head_is_there=not head.is_gone)

    def _is_spread(self, resources: Resources) -> bool:
        """Return whether a worker's GPUs are of several nodes; refuse one that the cluster cannot hold."""
        nodes = self._nodes()
        require_gpus(nodes, resources)
        spread = spans_nodes(nodes, resources)
        if spread:
            _log.info(
                "no node has the GPUs of a worker: they are taken from several", gpus=resources.num_gpus
            )
        return spread

    def workers_for(self, resources: Resources) -> int:
        """Return the number of workers there should be: as many as were asked for, or as fit."""
        if self._workers is not None and (self._address is not None or resources == ONE_CORE):
            return self._workers
        self._connect()
        room = max(1, workers_that_fit(self._nodes(), resources))
        return room if self._workers is None else min(room, self._workers)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _head_address(self) -> str:
        if self._address is not None and self._address.startswith("ray://"):
            return self._address
        return self._ray.get_runtime_context().gcs_address

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            with _signals_deferred():
                self._owned.enter_context(_reports_in_the_log())
                if self._address is None:
                    self._start(self._workers or 1)
                else:
                    _check_reachable(self._address)
                    self._ray.init(address=self._address, **_QUIET)
        except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            self._owned.close()
            what = "start on this machine" if self._address is None else f"join the cluster {self._address}"
            raise ExecutorError(f"Ray cannot {what}: {error}") from error
        self._owned.callback(self._ray.shutdown)

    def _start(self, workers: int) -> None:
        # Ray asks for a token from whoever sends it work. Without this it would keep one in the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        folder = tempfile.mkdtemp(prefix="hippoindex-", dir=_short_temporary_folder())
        self._owned.callback(shutil.rmtree, folder, ignore_errors=True)
        with worker_environment():
            self._ray.init(
                "local",  # whatever cluster the environment names
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **_QUIET,
            )


@dataclass(eq=False)
class _Worker(Generic[T]):
    """An actor, and the task it is at since a time; once it has started, the node of each of its GPUs.

    Where it has GPUs of its own, or none, that is the node where it runs.
    """

    actor: Any
    group: Any = None
    task: T | None = None
    given_s: float = 0.0
    nodes: Sequence[str] = ()


class _ActorPool(Generic[T]):
    """The actors of a run: those that are idle, and those that owe an outcome.

    Only an actor that has started is given a task, so none waits for a node that never comes. Outcomes come
    by a queue: within ``ray.wait`` the exception of a signal's handler would be lost.
    """

    def __init__(
        self, ray: Any, factory: bytes, resources: Resources, limits: Limits, *, spread: bool
    ) -> None:
        self.idle: list[_Worker[T]] = []
        self._owing: set[_Worker[T]] = set()
        self._outcomes: queue.SimpleQueue[tuple[_Worker[T], Future]] = queue.SimpleQueue()
        self._ray = ray
        self._limits = limits
        self._factory = factory
        self._bundles = bundles(resources) if spread else None
        self._class = ray.remote(
            num_cpus=resources.num_cpus,
            num_gpus=0 if spread else resources.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )(_Actor)
        self.wanted = 0
        self._lost_while_starting = 0
        self._start_again_s = time.monotonic()
        self._tale = _Tale(resources, of_one_node=not spread)

    def grow(self, tasks: int) -> None:
        """Have as many actors as are wanted, or as there are tasks, started or waiting for a place."""
        if time.monotonic() < self._start_again_s:
            return
        for _ in range(min(self.wanted, tasks) - len(self.idle) - len(self._owing)):
            worker = self._started()
            self._expect(worker, worker.actor.place.remote())

    def _started(self) -> _Worker[T]:
        if self._bundles is None:
            return _Worker(self._class.remote(self._factory, sys.path))
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._ray.util.placement_group(self._bundles, strategy="PACK")
        inside = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        actor = self._class.options(scheduling_strategy=inside).remote(self._factory, sys.path)
        return _Worker(actor, group)

    def give(self, task: T, payload: bytes) -> None:
        """Give a task to an idle actor."""
        worker = self.idle.pop()
        worker.task, worker.given_s = task, time.monotonic()
        self._expect(worker, worker.actor.process.remote(payload))

    def _expect(self, worker: _Worker[T], reference: Any) -> None:
        self._owing.add(worker)
        reference.future().add_done_callback(lambda future: self._outcomes.put((worker, future)))

    def outcomes(self) -> Iterator[tuple[T, str | None]]:
        """Wait a little; yield the tasks that are done, with ``None``, or lost, with how."""
        with contextlib.suppress(queue.Empty):
            worker, outcome = self._outcomes.get(timeout=_TICK_S)
            if worker in self._owing:  # and was not killed in the meantime
                self._owing.remove(worker)
                if worker.task is None:
                    self._welcome(worker, outcome)
                else:
                    yield self._outcome(worker, worker.task, outcome)
        yield from self._overdue()
        running = self._running()
        self._tale.tell(len(running), len({node for worker in running for node in worker.nodes}), self.wanted)

    def end_torn(self, waiting: TaskQueue[T]) -> None:
        """End actors whose placement group has lost a node, and put back their tasks.

        Such an actor may never notice: what it has on its other nodes may wait for the rest for ever. Ray
        gives the group another node as soon as there is one, but nothing runs there.
        """
        for worker in self._running():
            if worker.group is None or bundle_nodes(worker.group) == worker.nodes:
                continue
            (self._owing if worker in self._owing else self.idle).remove(worker)
            self._end(worker)
            if worker.task is None:
                _log.warning("a worker was lost", worker=_TORN)
            else:
                waiting.put_back(worker.task, _TORN)

    def _running(self) -> list[_Worker[T]]:
        """Return the actors that have started."""
        return [worker for worker in (*self.idle, *self._owing) if worker.nodes]

    def _welcome(self, worker: _Worker[T], place: Future) -> None:
        """Take in an actor that has started, or has failed to."""
        try:
            worker.nodes, version = place.result()
        except self._ray.exceptions.RayError as error:
            self._end(worker)
            self._lost_while_starting += 1
            self._start_again_s = time.monotonic() + _START_PAUSE_S
            in_vain = self._lost_while_starting >= _START_ATTEMPTS * self.wanted and not self._running()
            if in_vain or getattr(error, "actor_init_failed", False):  # another one would fare no better
                raise ExecutorError(
                    f"Ray cannot start workers: one {_how_it_was_lost(error)}. Every node needs what this "
                    "one has: the same Python, hippoindex and the packages that it needs"
                ) from error
            _log.warning("a worker was lost before it started", worker=_how_it_was_lost(error))
            return
        self._lost_while_starting = 0
        self.idle.append(worker)
        if worker.group is not None:
            _log.info("a worker's GPUs", by_node=sorted(Counter(worker.nodes).values(), reverse=True))
        if version != __version__:
            raise ExecutorError(
                f"A node of the cluster has hippoindex {version}, this one has {__version__}: install the "
                "same everywhere, or the index would not be the one that either makes"
            )

    def _outcome(self, worker: _Worker[T], task: T, outcome: Future) -> tuple[T, str | None]:
        try:
            failure = outcome.result()
        except self._ray.exceptions.RayTaskError as error:
            raise ExecutorError(f"Could not process {describe(task)}: {error}") from error
        except self._ray.exceptions.RayError as error:
            self._end(worker)  # should it be cut off only
            return task, _how_it_was_lost(error)
        if failure is not None:
            known = pickle.loads(failure)  # noqa: S301 - made by this run's own worker
            if known.lost is None:
                raise_failure(task, known)
            self._end(worker)
            return task, known.lost
        worker.task = None
        self._lost_while_starting = 0
        self.idle.append(worker)
        return task, None

    def _overdue(self) -> Iterator[tuple[T, str]]:
        """Kill actors that have taken too long."""
        timeout_s = self._limits.shard_timeout_s
        if timeout_s is None:
            return
        for worker in list(self._owing):
            if worker.task is not None and time.monotonic() - worker.given_s > timeout_s:
                self._owing.remove(worker)
                self._end(worker)
                yield worker.task, self._limits.hung

    def close(self, *, head_is_there: bool = True) -> None:
        """End all actors at once: outputs are written atomically, so nothing needs a farewell."""
        for worker in (*self.idle, *self._owing):
            self._end(worker, head_is_there=head_is_there)

    def _end(self, worker: _Worker[T], *, head_is_there: bool = True) -> None:
        """End an actor and give back its placement group, with whatever else runs in that.

        Without the head there is nobody to take it, and asking would wait for one.
        """
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(worker.actor)
        if worker.group is not None and head_is_there:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(worker.group)


class _Head:
    """The head of the cluster: whether it is there. Without it Ray would wait, and then end this process."""

    def __init__(self, address: str) -> None:
        self.is_gone = False
        self._address = address
        self._missed = 0

    def answers(self) -> bool:
        """Return whether something listens.

        Raises
        ------
        ExecutorError
            If nothing has for several calls.
        """
        try:
            _check_reachable(self._address)
        except OSError as error:
            self._missed += 1
            if self._missed >= _MAX_MISSED:
                self.is_gone = True
                raise ExecutorError(
                    f"The head of the Ray cluster, {self._address}, is gone: {error}. What was done is kept; "
                    "run again when the cluster is back"
                ) from error
            return False
        self._missed = 0
        return True


class _Tale:
    """What the log tells of the workers of a run, and the end of the wait for one."""

    def __init__(self, resources: Resources, *, of_one_node: bool) -> None:
        self._needs = f"{resources.num_cpus:g} CPUs and {resources.num_gpus:g} GPUs" + (
            " of one node" if of_one_node else ""
        )
        self._told = (0, 0)
        self._told_s = -_LOOK_INTERVAL_S
        self._alone_since_s = time.monotonic()
        self._warn_s = self._alone_since_s + _NO_PLACE_LOG_INTERVAL_S

    def tell(self, running: int, nodes: int, wanted: int) -> None:
        """Log the numbers of running workers and of their nodes, when they have changed.

        Raises
        ------
        ExecutorError
            If there has been none for too long.
        """
        now_s = time.monotonic()
        if running:
            self._alone_since_s = now_s
            self._warn_s = now_s + _NO_PLACE_LOG_INTERVAL_S
        elif now_s - self._alone_since_s > _NO_PLACE_TIMEOUT_S:
            raise ExecutorError(
                f"The cluster has had no room for a worker for {_NO_PLACE_TIMEOUT_S:g} s: each needs "
                f"{self._needs}. What was done is kept; run again when there is room."
            )
        elif now_s > self._warn_s:
            self._warn_s = now_s + _NO_PLACE_LOG_INTERVAL_S
            _log.warning(
                "no worker has a place on the cluster yet",
                each_needs=self._needs,
                waited_s=round(now_s - self._alone_since_s),
            )
        state = (running, nodes)
        due = running >= wanted or now_s - self._told_s >= _LOOK_INTERVAL_S
        if running and state != self._told and due:
            self._told, self._told_s = state, now_s
            _log.info("workers", running=running, nodes=nodes, wanted=wanted)


class _Actor:
    """What runs in a worker process of Ray: it finds the modules that the program finds."""

    def __init__(self, factory: bytes, module_path: list[str]) -> None:
        import ray

        sys.path.extend(folder for folder in module_path if folder not in sys.path)
        if ray.util.get_current_placement_group() is not None:
            # A process that this one starts, to use the group's GPUs, finds the cluster by this.
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._runner = TaskRunner(factory)

    def place(self) -> tuple[list[str], str]:
        """Return the node of each bundle of the placement group, else of this; and hippoindex's version."""
        import ray

        group = ray.util.get_current_placement_group()
        if group is None:
            return [ray.get_runtime_context().get_node_id()], __version__
        return bundle_nodes(group), __version__

    def process(self, task: bytes) -> bytes | None:
        """Process a pickled task; return the pickled failure, if it failed."""
        failure = self._runner(task)
        return None if failure is None else pickle.dumps(failure)


def _import_ray(*, client: bool) -> ray:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError("ray", "--executor ray", "pip install 'hippoindex[ray]'") from error
    if client and find_spec("grpc") is None:
        raise MissingPackageError("grpc", "An address ray://...", "pip install 'ray[client]'")
    return ray


def _how_it_was_lost(error: Exception) -> str:
    """Say in a few words what Ray says in many."""
    text = " ".join(str(error).split())
    _log.debug("what Ray says of a lost worker", error=type(error).__name__, text=text)
    address = re.search(r"\bip(?:: |=)([^\s,]+)", text, re.IGNORECASE)
    where = f" (node {address[1]})" if address else ""
    if getattr(error, "actor_init_failed", False):
        return f"failed as it started: {str(error).strip().splitlines()[-1]}{where}"
    said = f"was lost: {type(error).__name__}: {text[:_MAX_QUOTED_CHARS]}"
    return next((end for mark, end in _ENDS if mark in text), said) + where


@contextlib.contextmanager
def _reports_in_the_log() -> Iterator[None]:
    """Keep Ray from writing to standard output, which is the program's, what has befallen an actor or a node.

    Nothing public prevents it: ``log_to_driver`` is about what actors print.
    """
    from ray._private import worker

    def log(data: dict[str, Any], **_: Any) -> None:
        _log.debug("Ray reports", text="\n".join(data["lines"]))

    usual = worker.print_to_stdstream
    worker.print_to_stdstream = log
    try:
        yield
    finally:
        worker.print_to_stdstream = usual


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Act on signals afterwards: within Ray's code the exception of a handler would be lost.

    Ray also puts a handler of its own in the place of the program's; it ends the program by ``SystemExit``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    arrived: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: arrived.append(number))
        try:
            yield
        except SystemExit:
            arrived.append(signal.SIGTERM)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arrival in arrived[:1]:
            signal.raise_signal(arrival)


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` where nothing listens; Ray itself would go on trying for more than ten minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # and not a name that Ray looks up, such as "auto"
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _short_temporary_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _MAX_TEMPORARY_CHARS else str(Path("/", "tmp"))
