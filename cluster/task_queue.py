"""What an executor hands out: tasks that wait for a worker, and what a worker needs and may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from hippoindex.errors import ExecutorError, UsageError

_log = structlog.get_logger(__name__)

_HUNG = "hung:"


class Task(Protocol):
    """One unit of work: any object that can be pickled and has a number.

    An attribute ``input``, where there is one, is named in error messages beside the number.
    """

    @property
    def index(self) -> int:
        """Number of the task within its run."""
        ...


T = TypeVar("T", bound=Task)


@dataclass(frozen=True)
class Resources:
    """What one worker needs.

    Attributes
    ----------
    num_cpus : float
    num_gpus : float
    one_node : bool
        Whether the GPUs must be of one node. A worker that can use those of several is given such if no node
        has enough: on Ray, a placement group of one bundle for each, in the first of which it runs.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    one_node: bool = True


@dataclass(frozen=True)
class Limits:
    """How often a shard may lose its worker, and how long it may take.

    Attributes
    ----------
    shard_attempts : int
        Workers that one shard may lose, the last of which fails the run.
    shard_timeout_s : float or None
        A worker that takes longer over one shard is killed and counts as lost; ``None`` is no limit.
    """

    shard_attempts: int = 3
    shard_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.shard_attempts < 1:
            raise UsageError(f"shard_attempts must be at least 1, got {self.shard_attempts}")
        if self.shard_timeout_s is not None and not self.shard_timeout_s > 0:
            raise UsageError(f"shard_timeout_s must be more than 0, got {self.shard_timeout_s}")

    @property
    def hung(self) -> str:
        """What is said of a worker that was killed for taking too long."""
        return f"{_HUNG} it took more than {self.shard_timeout_s:g} s (cluster.shard_timeout_s)"


class TaskQueue(Generic[T]):
    """Tasks of a run that wait for a worker: in their order, but first those that have lost theirs.

    A task may run twice, when its worker is lost after the output was written; tasks are such that this
    writes the same output again.

    Parameters
    ----------
    tasks : sequence of Task
    limits : Limits
    """

    def __init__(self, tasks: Sequence[T], limits: Limits) -> None:
        self._fresh = iter(tasks)
        self._again: deque[T] = deque()
        self._losses: dict[int, list[str]] = {}
        self._limits = limits

    def take(self) -> T | None:
        """Return the next task to hand out, ``None`` if none waits."""
        return self._again.popleft() if self._again else next(self._fresh, None)

    def put_back(self, task: T, how: str) -> None:
        """Take back a task whose worker was lost.

        Parameters
        ----------
        task : Task
        how : str
            What happened to the worker, e.g. ``"was killed by SIGKILL"``.

        Raises
        ------
        ExecutorError
            If it has lost as many workers as it may.
        """
        losses = self._losses.setdefault(task.index, [])
        losses.append(how)
        allowed = self._limits.shard_attempts
        if len(losses) >= allowed:
            raise ExecutorError(self._message(task, losses))
        _log.warning(
            "a worker was lost", shard=describe(task), worker=how, attempt=len(losses), attempts=allowed
        )
        self._again.append(task)

    def _message(self, task: T, losses: list[str]) -> str:
        advice = []
        hung = {how for how in losses if how.startswith(_HUNG)}
        if hung != set(losses):
            advice.append(
                "if memory ran out, use fewer workers (cluster.workers) or smaller shards "
                "(cluster.shard_passages, cluster.shard_texts)"
            )
        if hung:
            advice.append("if the shard is merely slow, raise cluster.shard_timeout_s")
        times = "once" if len(losses) == 1 else f"{len(losses)} times"
        return (
            f"Could not process {describe(task)}: it lost its worker {times}, which is all that "
            f"cluster.shard_attempts allows. The worker {'; another '.join(dict.fromkeys(losses))}. "
            f"What was done is kept; {'; '.join(advice)}."
        )


def describe(task: Task) -> str:
    """Name a task in a message: its number and, where it has one, its input."""
    source = getattr(task, "input", None)
    return f"shard {task.index}" if source is None else f"shard {task.index} ({source})"
