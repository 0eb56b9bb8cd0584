"""The k largest: any values, ties by key, any k."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.kernels.ppr import top
from hippoindex.kernels.ppr.top import largest, largest_of_rows

finite = st.floats(allow_nan=False, width=32)


@settings(max_examples=300, deadline=None)
@given(st.lists(finite | st.sampled_from([0.0, -0.0, 1.0]), max_size=60), st.integers(0, 70), st.randoms())
def test_largest_is_the_beginning_of_a_sort(values: list[float], k: int, random: object) -> None:
    keys = np.arange(len(values)) * 3
    random.shuffle(keys)  # type: ignore[attr-defined]
    for dtype in (np.float32, np.float64):
        given_values: np.ndarray = np.array(values, dtype=np.float64).astype(dtype)
        expected = np.lexsort((keys, -given_values))[:k]
        np.testing.assert_array_equal(largest(given_values, keys, k), expected)


def test_many_equal_values_come_by_key() -> None:
    values = np.tile([2.0, 1.0, 2.0], 1000)
    best = largest(values, np.arange(3000), 2500)
    np.testing.assert_array_equal(best, np.lexsort((np.arange(3000), -values))[:2500])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(finite | st.sampled_from([0.0, -0.0, 1.0]), min_size=9, max_size=9), max_size=4),
    st.integers(0, 12),
)
def test_rows_are_ranked_alike_by_heap_and_by_partition(rows: list[list[float]], k: int) -> None:
    values = np.array(rows, np.float32).reshape(-1, 9)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :k]
    for most in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(top, "_HEAP_K", most)
            np.testing.assert_array_equal(largest_of_rows(values, k), expected)


def test_many_rows_are_ranked_in_threads() -> None:
    values = np.random.default_rng(5).integers(0, 50, (1100, 4000)).astype(np.float32)
    for k in (3, 60):
        expected = np.argsort(-values[::100], axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(largest_of_rows(values, k)[::100], expected)
