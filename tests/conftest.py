"""Fixtures for every room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data sets; tests that need it fail without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("HIPPOINDEX_DATA", default))
    if not path.is_dir():
        pytest.fail(f"The real data is missing: {path} is no folder. Point HIPPOINDEX_DATA to it.")
    return path
