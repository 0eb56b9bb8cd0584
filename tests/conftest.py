"""Fixtures for every room."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data sets.

    Where ``HIPPOINDEX_DATA`` names a folder that is not there, tests that need it fail; where it is not set
    and the default folder is not there either, they are skipped.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    given = os.environ.get("HIPPOINDEX_DATA")
    path = Path(given) if given else default
    if not path.is_dir():
        message = f"The real data is missing: {path} is no folder. Point HIPPOINDEX_DATA to it."
        if given:
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def s3_server() -> Iterator[object]:
    """A running :class:`s3_server.S3Server`, with this process's environment set for it."""
    with cluster_helper("s3_server").running_s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def cluster_helper(name: str) -> ModuleType:
    """Import a module of ``tests/cluster``, also for processes that are started later."""
    folder = str(Path(__file__).parent / "cluster")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


@pytest.fixture(scope="session")
def faults() -> ModuleType:
    return cluster_helper("faulty_storage")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first: what is broken shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
