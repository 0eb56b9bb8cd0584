"""The k largest: any values, ties by key, any k."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.kernels.ppr.top import largest

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
