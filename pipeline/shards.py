"""Shards of a run: objects of its storage, and running a stage over them.

A shard's output is recorded under its completion key, so what a failed run has done is found and not done
again: on this machine or, where the storage is S3, on another one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import structlog

from hippoindex.cluster.executor import ONE_CORE, Executor
from hippoindex.cluster.ledger import Ledger, Output
from hippoindex.cluster.storage import Storage
from hippoindex.errors import HippoIndexError
from hippoindex.pipeline.overlap import GroupRunner, ShardGroup, grouped, shards_in_flight
from hippoindex.pipeline.progress import Advance, Monitor, Note
from hippoindex.pipeline.stage import (
    QUARANTINE,
    ROWS,
    ShardRunner,
    ShardTask,
    Stage,
    completion_key,
    quarantine_table,
    read_table,
    table_bytes,
)

log = structlog.get_logger("hippoindex")

T = TypeVar("T")
U = TypeVar("U")

_PARALLEL_REQUESTS = 16
#: How often it is looked which shards of groups are recorded.
_LOOK_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Shard:
    """Rows in an object of the storage of a run.

    Attributes
    ----------
    name : str
        Of the object.
    sha256 : str
        Of its content.
    path : Path
        A file of this machine with that content.
    """

    name: str
    sha256: str
    path: Path

    @cached_property
    def n_rows(self) -> int:
        """Number of rows; no column is read for it."""
        with pa.memory_map(str(self.path)) as file:
            reader = pa.ipc.open_file(file)
            return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))

    def read(self) -> pa.Table:
        """Return the rows, memory-mapped."""
        return read_table(self.path)


class ShardStore:
    """Where the shards of a run are, and what the stages that ran over them could not process.

    Parameters
    ----------
    storage : Storage
        Kept when the run fails.
    folder : Path
        Folder of this machine for what only this process needs; that of ``storage`` where it is local.
    monitor : Monitor

    Attributes
    ----------
    storage : Storage
    stages : dict
        Name of each stage that ran to its version and what else decides its output.
    quarantine : list of pyarrow.Table
        Of schema ``QUARANTINE``, in stage and shard order.
    """

    def __init__(self, storage: Storage, folder: Path, monitor: Monitor) -> None:
        self.folder = folder
        self.monitor = monitor
        self.stages: dict[str, dict[str, Any]] = {}
        self.quarantine: list[pa.Table] = []
        self.storage = storage

    def write(self, table: pa.Table) -> Shard:
        """Write a table as one shard, named by its content."""
        data = table_bytes(table)
        sha256 = hashlib.sha256(data).hexdigest()
        name = f"input/{sha256[:32]}.arrow"
        if not self.storage.exists(name):
            with self.storage.write(name) as file:
                file.write(data)
        path = self.storage.local_path(name)
        if path is None:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return Shard(name, sha256, path)

    def write_rows(self, rows: Iterable[Mapping[str, object]], schema: pa.Schema, size: int) -> list[Shard]:
        """Write rows as shards of ``size`` rows; never holds more than one shard."""
        return [self.write(pa.Table.from_pylist(batch, schema=schema)) for batch in _batches(rows, size)]

    def write_column(self, values: Iterable[pa.Array], schema: pa.Schema, size: int) -> list[Shard]:
        """Write one column, given in pieces, as shards of ``size`` rows; never holds more than a piece."""
        shards: list[Shard] = []
        waiting = schema.empty_table()
        for piece in values:
            waiting = pa.concat_tables([waiting, pa.table([piece], schema=schema)])
            whole = waiting.num_rows - waiting.num_rows % size
            shards += self.write_slices(waiting.slice(0, whole), size)
            waiting = waiting.slice(whole)
        return shards + self.write_slices(waiting, size)

    def write_slices(self, table: pa.Table, size: int) -> list[Shard]:
        """Write a table as shards of ``size`` rows."""
        starts = range(0, table.num_rows, size)
        return [self.write(table.slice(start, size).combine_chunks()) for start in starts]

    def pending(self, stage: Stage, shards: Iterable[Shard]) -> Iterator[ShardTask]:
        """Yield the units of work of a stage that are not recorded when this begins, one by one."""
        done = Ledger(self.storage, stage.name).done()
        for number, shard in enumerate(shards):
            key = completion_key(stage, shard.sha256)
            if key not in done:
                yield ShardTask(number, self.storage, shard.name, key)

    def run(
        self,
        executor: Executor,
        stage: Stage,
        unit: str,
        shards: Sequence[Shard],
        note: Note | None = None,
    ) -> list[Shard]:
        """Run a stage over shards.

        Parameters
        ----------
        executor : Executor
        stage : Stage
        unit : str
            What a row is, in the plural.
        shards : sequence of Shard
        note : callable, optional
            See :meth:`hippoindex.pipeline.progress.Monitor.stage`.

        Returns
        -------
        list of Shard
            The output of each shard, in their order.
        """
        ledger = Ledger(self.storage, stage.name)
        keys = [completion_key(stage, shard.sha256) for shard in shards]
        rows: Counter[str] = Counter()
        for key, shard in zip(keys, shards, strict=True):
            rows[key] += shard.n_rows
        names = {key: shard.name for key, shard in zip(keys, shards, strict=True)}
        pending = ledger.missing(names)
        with self.monitor.stage(stage.name, rows.total(), unit, note) as advance:
            if len(pending) < len(names):
                log.info("shards found done", stage=stage.name, done=len(names) - len(pending))
            advance(rows.total() - sum(rows[key] for key in pending))
            tasks = [ShardTask(n, self.storage, names[key], key) for n, key in enumerate(pending)]
            in_flight, resources = shards_in_flight(stage), getattr(stage, "resources", ONE_CORE)
            if in_flight == 1:
                runner = functools.partial(ShardRunner, stage)
                executor.run(runner, tasks, lambda task: advance(rows[task.key]), resources)
            else:
                groups = grouped(tasks, executor.workers_for(resources), in_flight)
                with _Recorded(ledger, {key: rows[key] for key in pending}, advance) as recorded:
                    executor.run(functools.partial(GroupRunner, stage), groups, recorded.tell, resources)
        self.stages[stage.name] = {"version": stage.version, **stage.key_part()}
        outputs = _at_once(ledger.outputs, keys)
        self.quarantine += [shard.read() for shard in self._fetched([o[QUARANTINE] for o in outputs])]
        return self._fetched([o[ROWS] for o in outputs])

    def _fetched(self, outputs: Sequence[Output]) -> list[Shard]:
        """Make the shards of outputs, after they were fetched if they are not on this machine."""
        paths = _at_once(self._local_file, outputs)
        return [Shard(o.name, o.sha256, path) for o, path in zip(outputs, paths, strict=True)]

    def _local_file(self, output: Output) -> Path:
        path = self.storage.local_path(output.name)
        if path is None:
            path = self.folder / output.name
            if not path.is_file():  # a download appears when it is whole
                path.parent.mkdir(parents=True, exist_ok=True)
                self.storage.download(output.name, path)
        return path

    def all_quarantine(self) -> pa.Table:
        """Return everything that could not be processed, in one table."""
        return pa.concat_tables([quarantine_table(), *self.quarantine])


class _Recorded:
    """Tells of shards as they are recorded, since a group of them can take hours.

    Parameters
    ----------
    ledger : Ledger
    rows : dict
        Key of each shard that is to come, to its rows.
    advance : callable
        Told the rows of shards that have come; called from one thread at a time.
    """

    def __init__(self, ledger: Ledger, rows: dict[str, int], advance: Advance) -> None:
        self._ledger = ledger
        self._rows = rows
        self._advance = advance
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="recorded", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def tell(self, group: ShardGroup) -> None:
        """Tell of a group that is done, as far as that is not told yet."""
        self._come(task.key for task in group.tasks)

    def _come(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._advance(sum(self._rows.pop(key, 0) for key in keys))

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_INTERVAL_S):
            with contextlib.suppress(HippoIndexError):  # the stage itself will meet it
                self._come(self._ledger.done())


def column(shards: Sequence[Shard], name: str) -> pa.Array:
    """Return one column of all shards, in order. ``shards`` must not be empty."""
    return pa.chunked_array([c for s in shards for c in s.read()[name].chunks] or [[]]).combine_chunks()


def _at_once(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return list(pool.map(function, items))


def _batches(rows: Iterable[Mapping[str, object]], size: int) -> Iterator[list[Mapping[str, object]]]:
    batch: list[Mapping[str, object]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
