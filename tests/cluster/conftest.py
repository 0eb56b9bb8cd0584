"""Storage of both kinds; the S3 server runs once for all tests."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hippoindex.cluster.storage import Storage, StorageOptions, open_storage

HERE = Path(__file__).parent
#: Small parts, so that little data makes many, and no long waits.
OPTIONS = StorageOptions(part_bytes=5 << 20, attempts=4, first_wait_s=0.01, max_wait_s=0.05)
_numbers = itertools.count()


def _helper(name: str) -> ModuleType:
    """Import a module of this folder, also for processes that are started later."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module(name)


@pytest.fixture(scope="session")
def workers() -> ModuleType:
    return _helper("storage_workers")


@pytest.fixture(scope="session")
def processes(s3_server: object) -> Any:  # noqa: ARG001 - they get the environment as it is then
    """What makes processes quickly: the one they are forked from has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["s3fs", "aiobotocore.session", "hippoindex.cluster.ledger"])
    return context


@pytest.fixture(scope="session")
def in_processes(processes: Any) -> Callable[[Callable[..., None], Storage], list[Any]]:
    """Run a function of ``storage_workers`` in four processes at once and return what they report."""

    def run(work: Callable[..., None], storage: Storage) -> list[Any]:
        barrier, results = processes.Barrier(4), processes.Queue()
        started = [
            processes.Process(target=work, args=(storage, barrier, number, results), daemon=True)
            for number in range(4)
        ]
        for process in started:
            process.start()
        found = [results.get(timeout=40) for _ in started]
        for process in started:
            process.join(40)
            assert process.exitcode == 0
        return found

    return run


@pytest.fixture(params=["disk", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Make the URL of storage that holds nothing yet."""

    def make() -> str:
        number = next(_numbers)
        if kind == "disk":
            return str(tmp_path / f"storage-{number}")
        return f"s3://{request.getfixturevalue('s3_server').bucket}/test-{os.getpid()}-{number}"

    return make


@pytest.fixture
def storage(new_url: Callable[[], str]) -> Storage:
    return open_storage(new_url(), OPTIONS)
