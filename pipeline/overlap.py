"""Work that overlaps: several shards at once in one worker, and two stages at once.

Several shards are for stages whose engine would run empty at the end of each shard.
A worker is given a group of shards instead of one. Each shard is recorded as soon as it is done, so a worker
that is lost costs what it was at, and not its group.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from hippoindex.cluster.ledger import Ledger
from hippoindex.pipeline.config import EmbedConfig, ExtractConfig
from hippoindex.pipeline.stage import ShardRunner, ShardTask, Stage

_log = structlog.get_logger("hippoindex")

#: Groups that each worker gets, if there are shards enough: so that all workers end at about the same time.
_GROUPS_PER_WORKER = 4

_Outcomes = queue.SimpleQueue[BaseException | None]


@dataclass(frozen=True)
class ShardGroup:
    """A unit of work of several shards.

    Attributes
    ----------
    index : int
    tasks : tuple of ShardTask
    """

    index: int
    tasks: tuple[ShardTask, ...]

    @property
    def input(self) -> str:
        """What the messages of an executor name."""
        more = len(self.tasks) - 1
        return self.tasks[0].input + (f" and {more} more" if more else "")


def shards_in_flight(stage: Stage) -> int:
    """Return how many shards a worker should be at, at once: ``stage.shards_in_flight``, or 1."""
    return getattr(stage, "shards_in_flight", 1)


def grouped(tasks: Sequence[ShardTask], workers: int, in_flight: int) -> list[ShardGroup]:
    """Cut tasks into groups of neighbours, of ``in_flight`` at least where that leaves no worker without."""
    least = min(in_flight, -(-len(tasks) // workers))
    size = max(1, least, -(-len(tasks) // (workers * _GROUPS_PER_WORKER)))
    starts = range(0, len(tasks), size)
    return [ShardGroup(n, tuple(tasks[start : start + size])) for n, start in enumerate(starts)]


class GroupRunner:
    """Callable that opens a stage once and then processes group after group, some shards of each at once.

    Parameters
    ----------
    stage : Stage
        Its function is called from several threads at once.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage.name
        self._in_flight = shards_in_flight(stage)
        self._runner = ShardRunner(stage)

    def __call__(self, group: ShardGroup) -> None:
        """Process the shards of a group that are not recorded yet; stop at the first error."""
        names = {task.key: task for task in group.tasks}
        missing = Ledger(group.tasks[0].storage, self._stage).missing(names)
        todo = iter([names[key] for key in missing])
        outcomes: _Outcomes = queue.SimpleQueue()
        lock = threading.Lock()
        # Not a pool: at the end of the process its threads would be waited for.
        for _ in range(min(self._in_flight, len(missing))):
            threading.Thread(target=self._work, args=(todo, lock, outcomes), daemon=True).start()
        for _ in missing:
            error = outcomes.get()
            if error is not None:
                with lock:
                    for _ in todo:  # nothing more is begun
                        pass
                raise error

    def _work(
        self,
        todo: Iterator[ShardTask],
        lock: threading.Lock,
        outcomes: queue.SimpleQueue[BaseException | None],
    ) -> None:
        while True:
            with lock:
                task = next(todo, None)
            if task is None:
                return
            try:
                self._runner(task)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                outcomes.put(error)
                return
            outcomes.put(None)


@contextlib.contextmanager
def meanwhile(stage: Stage, tasks: Iterable[ShardTask]) -> Iterator[list[ShardTask]]:
    """Run a stage in a thread of this process while the block runs. It begins no shard after the block.

    What is done is recorded, so the stage's own run finds it. An error ends the thread and is logged; the
    stage's own run will meet it again, and raise it.

    Parameters
    ----------
    stage : Stage
    tasks : iterable of ShardTask
        Taken in the thread, one by one.

    Yields
    ------
    list of ShardTask
        Those that are done; it grows.
    """
    ended, done = threading.Event(), list[ShardTask]()

    def work() -> None:
        try:
            runner: ShardRunner | None = None
            for task in tasks:
                if ended.is_set():
                    return
                runner = runner or ShardRunner(stage)
                runner(task)
                done.append(task)
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("a stage that ran ahead has stopped", stage=stage.name, error=str(error))

    thread = threading.Thread(target=work, name=f"{stage.name}-ahead", daemon=True)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def on_other_devices(extract: ExtractConfig, embed: EmbedConfig) -> bool:
    """Return whether this process can embed and take nothing from extraction.

    That is a language model at an endpoint or on GPUs, and an encoder on the CPU or at another endpoint.
    """
    if not (extract.engine == "openai" or (extract.engine == "vllm" and extract.vllm.gpus)):
        return False
    if embed.engine == "openai":
        return extract.engine == "vllm" or extract.base_url.rstrip("/") != embed.base_url.rstrip("/")
    return embed.engine == "onnx"
