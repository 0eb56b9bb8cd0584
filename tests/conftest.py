"""Fixtures for every room."""

from __future__ import annotations

import os
from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first: what is broken shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
