"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let small cases not wait for other threads of a loaded machine; a test may ask for more."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
