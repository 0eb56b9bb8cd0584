"""What a stage is: a frozen description, and a pure function from one table to another.

The runner (``pipeline/build.py``) cuts the input into shards, names every shard's output by its completion
key, and lets an executor of ``cluster/`` run a :class:`ShardRunner` wherever it likes: a shard's output
depends on nothing but the stage and the shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from hippoindex.errors import HippoIndexError
from hippoindex.pipeline import schemas


@dataclass(frozen=True)
class StageOutput:
    """Rows that a stage made of one shard, and what it could not process."""

    rows: pa.Table
    quarantine: pa.Table


Process = Callable[[pa.Table], StageOutput]


class Stage(Protocol):
    """The contract of a sharded stage. Implementations are frozen dataclasses that can be sent to workers.

    The four properties may be class variables, or depend on the stage's fields.
    """

    @property
    def name(self) -> str:
        """Also the folder of its shards in the work directory."""
        ...

    @property
    def version(self) -> int:
        """Raised whenever the code changes what comes out."""
        ...

    @property
    def reads(self) -> pa.Schema:
        """Schema of the input."""
        ...

    @property
    def writes(self) -> pa.Schema:
        """Schema of the rows that come out."""
        ...

    def key_part(self) -> Mapping[str, Any]:
        """JSON-ready values that, with name and version, decide what comes out of a given shard."""
        ...

    def open(self) -> Process:
        """Load what the stage needs (models) and return its function. Called once in each worker."""
        ...


@dataclass(frozen=True)
class ShardTask:
    """One unit of work: read ``input``, write ``output``. Paths are absolute."""

    index: int
    input: str
    output: str


def quarantine_table(rows: Iterable[Mapping[str, object]] = ()) -> pa.Table:
    """Return rows made by :func:`schemas.quarantine_row` as a table."""
    return pa.Table.from_pylist(list(rows), schema=schemas.QUARANTINE)


def completion_key(stage: Stage, shard: Path) -> str:
    """128-bit hex key of a stage's output on a shard: hash of name, version, configuration and content."""
    description = {"stage": stage.name, "version": stage.version, "config": stage.key_part()}
    digest = xxhash.xxh3_128(json.dumps(description, sort_keys=True).encode())
    digest.update(shard.read_bytes())
    return digest.hexdigest()


def quarantine_path(output: Path) -> Path:
    """Where the quarantine rows of the shard written to ``output`` lie."""
    return output.with_suffix(".quarantine.arrow")


def read_table(path: Path) -> pa.Table:
    """Read an Arrow IPC file into memory."""
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all()


def write_table(table: pa.Table, path: Path) -> None:
    """Write an Arrow IPC file atomically: under a temporary name, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    temporary.replace(path)


class ShardRunner:
    """Callable that opens a stage once and then processes shard after shard in the same worker."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._process = stage.open()

    def __call__(self, task: ShardTask) -> None:
        """Process one shard. The rows are written last: a shard with rows is a complete shard."""
        table = read_table(Path(task.input))
        if table.schema != self._stage.reads:
            raise HippoIndexError(
                f"Stage {self._stage.name!r} cannot read {task.input}: columns {table.schema.names}, "
                f"expected {self._stage.reads.names}"
            )
        result = self._process(table)
        if result.rows.schema != self._stage.writes:
            raise HippoIndexError(
                f"Stage {self._stage.name!r} made columns {result.rows.schema}, declared {self._stage.writes}"
            )
        output = Path(task.output)
        write_table(result.quarantine, quarantine_path(output))
        write_table(result.rows, output)
