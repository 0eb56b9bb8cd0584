"""Tasks and workers for the executor tests, in a module that worker processes can import."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hippoindex.errors import HippoIndexError, MissingPackageError, ModelError


@dataclass(frozen=True)
class FileTask:
    index: int
    input: str
    output: str
    do: str = "write"


class OddError(HippoIndexError):
    """An error whose ``__init__`` takes other things than its message."""

    def __init__(self, row: int, *, column: str) -> None:
        super().__init__(f"row {row}, column {column}")
        self.row = row


class UnpicklableError(HippoIndexError):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.handle = open(os.devnull)  # noqa: SIM115, PTH123


def process(salt: str, task: FileTask) -> None:
    ACTIONS[task.do](salt, task)


def write(salt: str, task: FileTask) -> None:
    Path(task.output).write_text(f"{salt} {task.index} {os.getpid()}")


def write_environment(_salt: str, task: FileTask) -> None:
    numpy_first = "numpy" in sys.modules
    threads = [os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "OPENBLAS", "MKL")]
    Path(task.output).write_text(f"{threads} {numpy_first}")


def print_something(salt: str, task: FileTask) -> None:
    print("printed by a worker", flush=True)  # noqa: T201
    write(salt, task)


def last_first(salt: str, task: FileTask) -> None:
    """Finish later the earlier the task."""
    time.sleep(max(0.0, 0.6 - 0.2 * task.index))
    write(salt, task)


def raise_value_error(_salt: str, task: FileTask) -> None:
    raise ValueError(f"seven is not {task.index}")


def raise_missing_package(_salt: str, _task: FileTask) -> None:
    raise MissingPackageError("antigravity", "--fly", "pip install antigravity")


def raise_odd(_salt: str, task: FileTask) -> None:
    raise OddError(task.index, column="text")


def raise_unpicklable(_salt: str, _task: FileTask) -> None:
    raise UnpicklableError("holds an open file")


def leave(_salt: str, _task: FileTask) -> None:
    sys.exit(5)


def die(_salt: str, _task: FileTask) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(_salt: str, task: FileTask) -> None:
    Path(task.output).write_text(str(os.getpid()))
    time.sleep(600)


ACTIONS: dict[str, Callable[[str, FileTask], None]] = {
    function.__name__: function
    for function in (
        write,
        write_environment,
        print_something,
        last_first,
        raise_value_error,
        raise_missing_package,
        raise_odd,
        raise_unpicklable,
        leave,
        die,
        sleep_long,
    )
}


def make_worker(salt: str) -> Callable[[FileTask], None]:
    return functools.partial(process, salt)


def make_no_worker(_salt: str) -> Callable[[FileTask], None]:
    raise ModelError("no such model")


class CountedWorker:
    """Notes in a file of its own that it was made."""

    def __init__(self, folder: str) -> None:
        Path(folder, f"made-{os.getpid()}-{time.monotonic_ns()}").touch()

    def __call__(self, task: FileTask) -> None:
        write("", task)
