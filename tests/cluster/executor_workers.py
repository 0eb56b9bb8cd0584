"""Tasks and workers for the executor tests, in a module that worker processes can import."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba

from hippoindex.errors import HippoIndexError, MissingPackageError, ModelError, WorkerLostError


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
    threads = [os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")]
    Path(task.output).write_text(f"{threads} {numba.get_num_threads()}")
    print("printed by a worker", flush=True)  # noqa: T201


def first_after_second(salt: str, task: FileTask) -> None:
    """Let task 0 end well after task 1."""
    if task.index == 0:
        deadline = time.monotonic() + 120
        while not Path(task.output).with_name("1.out").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)
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


def leave_at_once(_salt: str, _task: FileTask) -> None:
    os._exit(7)


def _again(task: FileTask) -> bool:
    """Whether this is not the first worker at the task."""
    tried = Path(f"{task.output}.tried")
    try:
        tried.touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def die_once(salt: str, task: FileTask) -> None:
    """Kill the first worker when the output is written."""
    write(salt, task)
    if not _again(task):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_once(salt: str, task: FileTask) -> None:
    if not _again(task):
        os._exit(7)
    write(salt, task)


def hang_once(salt: str, task: FileTask) -> None:
    """Hang the first worker in code that holds the interpreter's lock."""
    if not _again(task):
        hang(salt, task)
    write(salt, task)


def hang(_salt: str, task: FileTask) -> None:
    Path(f"{task.output}.{os.getpid()}.hung").touch()
    ctypes.PyDLL(None).sleep(600)


def give_up_once(salt: str, task: FileTask) -> None:
    if not _again(task):
        raise WorkerLostError("the engine has died")
    write(salt, task)


def trouble_once(salt: str, task: FileTask) -> None:
    """Be lost in another way according to the task's number."""
    (die_once, leave_once, hang_once, give_up_once, write)[task.index](salt, task)


def hang_with_child(salt: str, task: FileTask) -> None:
    """Start a process, as an inference engine does, and hang."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    Path(f"{task.output}.{child.pid}.child").touch()
    hang(salt, task)


def sleep_long(_salt: str, task: FileTask) -> None:
    Path(task.output).write_text(str(os.getpid()))
    time.sleep(600)


ACTIONS: dict[str, Callable[[str, FileTask], None]] = {
    function.__name__: function
    for function in (
        write,
        write_environment,
        first_after_second,
        raise_value_error,
        raise_missing_package,
        raise_odd,
        raise_unpicklable,
        leave,
        die,
        leave_at_once,
        hang,
        hang_with_child,
        trouble_once,
        sleep_long,
    )
}


def make_worker(salt: str) -> Callable[[FileTask], None]:
    return functools.partial(process, salt)


def make_noted_worker(folder: str) -> Callable[[FileTask], None]:
    """Make a worker, and leave a file that tells of it."""
    Path(folder, f"made-{os.getpid()}-{time.monotonic_ns()}").touch()
    return make_worker("salt")


def make_no_worker(_salt: str) -> Callable[[FileTask], None]:
    raise ModelError("no such model")
