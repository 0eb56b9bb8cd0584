"""Arrays begin with a cache line, and asking for a line changes nothing."""

import numba
import numpy as np
import pytest

from hippoindex.kernels.ppr.lines import LINE_BYTES, aligned_copy, aligned_zeros, prefetch


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (1000, 4), (300_000, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_begin_with_a_line(shape: tuple[int, ...], dtype: type) -> None:
    zeros = aligned_zeros(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    assert zeros.flags.c_contiguous
    assert zeros.flags.writeable
    assert not zeros.any()
    assert zeros.size == 0 or zeros.ctypes.data % LINE_BYTES == 0
    rows = np.random.default_rng(0).random(shape).astype(dtype)
    copy = aligned_copy(rows)
    assert np.array_equal(copy, rows)
    assert not np.shares_memory(copy, rows)


@numba.njit
def ask_and_add(values: np.ndarray, rows: np.ndarray) -> float:
    total = 0.0
    for i in range(rows.shape[0]):
        prefetch(values, rows[i], LINE_BYTES)
        if 0 <= rows[i] < values.shape[0]:
            total += values[rows[i], 0]
    return total


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_asking_for_lines_outside_does_no_harm(kind: type) -> None:
    values = np.arange(12.0).reshape(6, 2)
    rows = np.array([0, 5, 2**30, -(2**30), 3], dtype=kind)
    assert ask_and_add(values, rows) == 0.0 + 10.0 + 6.0
    assert np.array_equal(values, np.arange(12.0).reshape(6, 2))
