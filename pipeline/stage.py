"""What a stage is: a frozen description, and a pure function from one table to another.

The runner (``pipeline/build.py``) cuts the input into shards, records every shard's output under its
completion key, and lets an executor of ``cluster/`` run a :class:`ShardRunner` wherever it likes: a shard's
output depends on nothing but the stage and the shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from hippoindex.cluster.ledger import Ledger
from hippoindex.cluster.storage import Storage
from hippoindex.errors import HippoIndexError
from hippoindex.pipeline import schemas

ROWS = "rows.arrow"
QUARANTINE = "quarantine.arrow"
"""Roles of the outputs of a shard in the ledger of its stage."""


@dataclass(frozen=True)
class StageOutput:
    """Rows that a stage made of one shard, and what it could not process."""

    rows: pa.Table
    quarantine: pa.Table


Process = Callable[[pa.Table], StageOutput]


class Stage(Protocol):
    """The contract of a sharded stage. Implementations are frozen dataclasses that can be sent to workers.

    The four properties may be class variables, or depend on the stage's fields. A stage whose worker needs
    more than one core has a fifth, ``resources``, a :class:`hippoindex.cluster.task_queue.Resources`.
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
    """One unit of work: read an object, write the outputs of a key.

    Attributes
    ----------
    index : int
    storage : Storage
        Of the run; on a cluster it must mean the same on every node.
    input : str
        Name of the object.
    key : str
        Completion key, under which the outputs are recorded.
    """

    index: int
    storage: Storage
    input: str
    key: str


def quarantine_table(rows: Iterable[Mapping[str, object]] = ()) -> pa.Table:
    """Return rows made by :func:`schemas.quarantine_row` as a table."""
    return pa.Table.from_pylist(list(rows), schema=schemas.QUARANTINE)


def completion_key(stage: Stage, sha256: str) -> str:
    """Key of a stage's output on a shard: hash of name, version, configuration and the shard's SHA-256."""
    description = {
        "stage": stage.name,
        "version": stage.version,
        "config": stage.key_part(),
        "shard": sha256,
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def read_table(path: Path) -> pa.Table:
    """Read an Arrow IPC file, memory-mapped: what is not used of it takes no memory."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def joined(tables: Iterable[pa.Table], file: Path) -> pa.Table:
    """Write tables of one schema, at least one, to one Arrow IPC file; return its rows, memory-mapped."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        sink, writer = stack.enter_context(pa.OSFile(str(file), "wb")), None
        for table in tables:
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_file(sink, table.schema))
            writer.write_table(table)
    return read_table(file)


def table_bytes(table: pa.Table) -> pa.Buffer:
    """Return a table as an Arrow IPC file."""
    sink = pa.BufferOutputStream()
    write_table(table, sink)
    return sink.getvalue()


def write_table(table: pa.Table, file: BinaryIO | pa.NativeFile) -> None:
    """Write a table as an Arrow IPC file."""
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


class ShardRunner:
    """Callable that opens a stage once and then processes shard after shard in the same worker."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._process = stage.open()

    def __call__(self, task: ShardTask) -> None:
        """Process one shard and record its outputs."""
        table = _read_input(task)
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
        outputs = {
            ROWS: partial(write_table, result.rows),
            QUARANTINE: partial(write_table, result.quarantine),
        }
        Ledger(task.storage, self._stage.name).commit(task.key, outputs)


def _read_input(task: ShardTask) -> pa.Table:
    path = task.storage.local_path(task.input)
    if path is not None:
        return read_table(path)
    return pa.ipc.open_file(pa.BufferReader(task.storage.read_bytes(task.input))).read_all()
