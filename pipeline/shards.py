"""Shards of a run: files of the work folder, and running a stage over them.

A shard's output is named by its completion key, so what a failed run has done is found and not done again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog

from hippoindex.cluster.executor import Executor
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.stage import (
    ShardRunner,
    ShardTask,
    Stage,
    completion_key,
    quarantine_path,
    quarantine_table,
    read_table,
    write_table,
)

log = structlog.get_logger("hippoindex")


class ShardStore:
    """The work folder of a run, and what the stages that ran in it could not process.

    Parameters
    ----------
    work : Path
        Kept when the run fails.
    monitor : Monitor

    Attributes
    ----------
    stages : dict
        Name of each stage that ran to its version and what else decides its output.
    quarantine : list of pyarrow.Table
        Of schema ``QUARANTINE``, in stage and shard order.
    """

    def __init__(self, work: Path, monitor: Monitor) -> None:
        self.work = work
        self.monitor = monitor
        self.stages: dict[str, dict[str, Any]] = {}
        self.quarantine: list[pa.Table] = []

    def path(self, kind: str, number: int) -> Path:
        """Return the file of the input shard ``number`` of a kind."""
        file = self.work / "input" / kind / f"{number:06d}.arrow"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def write_rows(
        self, kind: str, rows: Iterable[Mapping[str, object]], schema: pa.Schema, size: int
    ) -> list[Path]:
        """Write rows as shards of ``size`` rows; never holds more than one shard."""
        files: list[Path] = []
        for shard in _batches(rows, size):
            files.append(self.path(kind, len(files)))
            write_table(pa.Table.from_pylist(shard, schema=schema), files[-1])
        return files

    def write_column(self, kind: str, values: pa.Array, schema: pa.Schema, size: int) -> list[Path]:
        """Write one column as shards of ``size`` rows."""
        return self.write_slices(kind, pa.table([values], schema=schema), size)

    def write_slices(self, kind: str, table: pa.Table, size: int) -> list[Path]:
        """Write a table as shards of ``size`` rows."""
        files = []
        for number, start in enumerate(range(0, table.num_rows, size)):
            files.append(self.path(kind, number))
            write_table(table.slice(start, size).combine_chunks(), files[-1])
        return files

    def run(self, executor: Executor, stage: Stage, unit: str, shards: Sequence[Path]) -> list[Path]:
        """Run a stage over shards.

        Parameters
        ----------
        executor : Executor
        stage : Stage
        unit : str
            What a row is, in the plural.
        shards : sequence of Path

        Returns
        -------
        list of Path
            The output of each shard, in their order.
        """
        rows = {str(shard): count_rows(shard) for shard in shards}
        tasks = self._tasks(stage, shards)
        pending = {task.output: task for task in tasks if not Path(task.output).is_file()}
        with self.monitor.stage(stage.name, sum(map(count_rows, shards)), unit) as advance:
            if len(pending) < len(tasks):
                log.info("shards found done", stage=stage.name, done=len(tasks) - len(pending))
            advance(sum(rows[task.input] for task in tasks if task.output not in pending))
            factory = functools.partial(ShardRunner, stage)
            executor.run(factory, list(pending.values()), lambda task: advance(rows[task.input]))
        outputs = [Path(task.output) for task in tasks]
        self.stages[stage.name] = {"version": stage.version, **stage.key_part()}
        self.quarantine += [read_table(quarantine_path(output)) for output in outputs]
        return outputs

    def _tasks(self, stage: Stage, shards: Sequence[Path]) -> list[ShardTask]:
        folder = self.work / stage.name
        folder.mkdir(exist_ok=True)
        return [
            ShardTask(number, str(shard), str(folder / f"{completion_key(stage, shard)}.arrow"))
            for number, shard in enumerate(shards)
        ]

    def all_quarantine(self) -> pa.Table:
        """Return everything that could not be processed, in one table."""
        return pa.concat_tables([quarantine_table(), *self.quarantine])


def count_rows(shard: Path) -> int:
    """Return the number of rows of a shard without reading its columns into memory."""
    with pa.memory_map(str(shard)) as file:
        reader = pa.ipc.open_file(file)
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


def column(shards: Sequence[Path], name: str) -> pa.Array:
    """Return one column of all shards, in order. ``shards`` must not be empty."""
    return pa.chunked_array([c for s in shards for c in read_table(s)[name].chunks] or [[]]).combine_chunks()


def _batches(rows: Iterable[Mapping[str, object]], size: int) -> Iterator[list[Mapping[str, object]]]:
    batch: list[Mapping[str, object]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
