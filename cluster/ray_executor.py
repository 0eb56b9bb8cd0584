"""The executor that runs tasks on Ray: a fixed pool of actors, on this machine or on a cluster.

Tasks and the worker factory are pickled bytes; a task's outcome is a row with its position and, if it failed,
the pickled :class:`~hippoindex.cluster.executor.Failure`. Inputs and outputs of the tasks themselves do not
pass through Ray: on a cluster, their paths must mean the same on every node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from hippoindex.cluster.executor import (
    T,
    TaskRunner,
    WorkerFactory,
    pickled,
    raise_failure,
    worker_died,
    worker_environment,
)
from hippoindex.cluster.usage import available_cores
from hippoindex.errors import ExecutorError, MissingPackageError, UsageError

if TYPE_CHECKING:
    import ray

_OBJECT_STORE_BYTES = 256 * 2**20
#: Ray's sockets lie some 70 characters below this folder, and a socket's path may have 107.
_MAX_TEMPORARY_CHARS = 30
#: Each block costs Ray some milliseconds; up to so many tasks each is a block of its own.
_MAX_BLOCKS = 4096
_CONNECT_TIMEOUT_S = 10.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class RayExecutor:
    """Actors of Ray Data, one task at a time each.

    Ray is started, or the cluster joined, at the first run, and left in :meth:`close`. If the calling program
    has already connected to Ray, that connection is used and left open.

    Parameters
    ----------
    workers : int, optional
        Number of actors; ``None`` is one per core that this process may use, or per CPU of the cluster at
        ``address``.
    address : str, optional
        Cluster to join, as for ``ray.init``; ``None`` starts Ray on this machine.

    Raises
    ------
    MissingPackageError
        If Ray Data is not installed.
    UsageError
        If ``workers`` is less than 1.
    """

    name = "ray"

    def __init__(self, workers: int | None = None, *, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"workers must be at least 1, got {workers}")
        self._ray = _import_ray()
        self._address = address
        self._workers = available_cores() if workers is None and address is None else workers
        self._owned = contextlib.ExitStack()

    @property
    def workers(self) -> int:
        """Number of actors. Asking a cluster for its size joins it."""
        if self._workers is None:
            self._connect()
            self._workers = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        return self._workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what was started: actors, Ray's own processes, its temporary folder."""
        self._owned.close()

    def run(self, factory: WorkerFactory[T], tasks: Sequence[T], on_done: Callable[[T], None]) -> None:
        """Process every task; see :meth:`hippoindex.cluster.executor.Executor.run`."""
        if not tasks:
            return
        self._connect()
        open_tasks = dict(enumerate(tasks))
        with _quiet():
            outcomes = self._outcomes(factory, tasks)
            try:
                for position, failure in outcomes:
                    task = open_tasks.pop(position)
                    if failure is not None:
                        raise_failure(task, self._ray.cloudpickle.loads(failure))
                    on_done(task)
            except self._ray.exceptions.RayError as error:
                # Ray does not say at which task the worker was; it hands blocks out in order.
                in_flight = self.workers * _block_size(len(tasks))
                lost = islice(open_tasks.values(), in_flight)
                raise worker_died(f"was lost ({type(error).__name__})", lost) from error
            finally:
                outcomes.close()
        if open_tasks:
            raise ExecutorError(f"Ray returned no outcome for {len(open_tasks)} of {len(tasks)} shards.")

    def _outcomes(
        self, factory: WorkerFactory[T], tasks: Sequence[T]
    ) -> Generator[tuple[int, bytes | None], None, None]:
        """Yield the position and the pickled failure of every task, as they are done."""
        data = self._ray.data
        dumps = self._ray.cloudpickle.dumps  # unlike pickle it can send what __main__ defines
        workers = min(self.workers, len(tasks))
        dataset = data.from_arrow(_blocks([pickled(task, f"Task {task.index}", dumps) for task in tasks]))
        with warnings.catch_warnings():
            # Without max_restarts Ray would give a shard that kills its worker to a new one, for ever; it
            # warns that the argument is to move elsewhere, but has no other place for it yet.
            warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
            dataset = dataset.map_batches(
                _Actor,
                fn_constructor_args=(pickled(factory, "The worker factory", dumps), sys.path),
                batch_size=1,
                batch_format="pyarrow",
                # One at a time, so that no task waits at a busy actor while another is idle.
                compute=data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
                num_cpus=1,
                max_restarts=0,
            )
        context = dataset.context
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.issue_detectors_config.detectors = []
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from zip(block["position"].to_pylist(), block["failure"].to_pylist(), strict=True)

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            if self._address is None:
                self._start()
            else:
                _check_reachable(self._address)
                self._ray.init(address=self._address, **_QUIET)
        except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            self._owned.close()
            what = "start on this machine" if self._address is None else f"join the cluster {self._address}"
            raise ExecutorError(f"Ray cannot {what}: {error}") from error
        self._owned.callback(self._ray.shutdown)

    def _start(self) -> None:
        # Ray asks for a token from whoever sends it work. Without this it would keep one in the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        folder = tempfile.mkdtemp(prefix="hippoindex-", dir=_short_temporary_folder())
        self._owned.callback(shutil.rmtree, folder, ignore_errors=True)
        with worker_environment():
            self._ray.init(
                num_cpus=self.workers + 2,  # logical: Ray Data waits for ever when actors hold all of them
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **_QUIET,
            )


class _Actor:
    """What runs in a worker process of Ray: it finds the modules that the program finds."""

    def __init__(self, factory: bytes, module_path: list[str]) -> None:
        sys.path.extend(folder for folder in module_path if folder not in sys.path)
        self._runner = TaskRunner(factory)

    def __call__(self, batch: pa.Table) -> pa.Table:
        failures = [self._runner(task) for task in batch["task"].to_pylist()]
        column = [None if failure is None else pickle.dumps(failure) for failure in failures]
        return pa.table({"position": batch["position"], "failure": pa.array(column, pa.binary())})


def _import_ray() -> ray:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingPackageError("ray", "--executor ray", "pip install 'hippoindex[ray]'") from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` where nothing listens; Ray itself would go on trying for more than ten minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # and not a name that Ray looks up, such as "auto"
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _blocks(tasks: list[bytes]) -> list[pa.Table]:
    """Cut the tasks into Ray Data blocks; a block is what an actor is given at a time."""
    size = _block_size(len(tasks))
    positions = pa.array(range(len(tasks)), pa.int64())
    table = pa.table({"position": positions, "task": pa.array(tasks, pa.binary())})
    return [table.slice(start, size) for start in range(0, len(tasks), size)]


def _block_size(tasks: int) -> int:
    return -(-tasks // _MAX_BLOCKS)


def _short_temporary_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _MAX_TEMPORARY_CHARS else str(Path("/", "tmp"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray Data from reporting to the terminal what is raised here anyway."""
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
