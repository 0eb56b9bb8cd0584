"""Going through arrays that need not fit in memory, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK_CELLS = 1 << 21
"""Cells of a matrix handled together: some tens of MB with what is computed from them."""


def row_blocks(indptr: NDArray[np.integer], cells: int = BLOCK_CELLS) -> Iterator[tuple[int, int]]:
    """Cut the rows of a CSR matrix into runs of at most ``cells`` cells and rows.

    Parameters
    ----------
    indptr : ndarray of int, shape (rows + 1,)
        Must not decrease.
    cells : int
        A row with more cells is a run of its own.

    Yields
    ------
    start, stop : int
        Rows ``start`` to ``stop - 1``.
    """
    start, n_rows = 0, len(indptr) - 1
    while start < n_rows:
        fitting = int(np.searchsorted(indptr, indptr[start] + cells, side="right")) - 1
        stop = min(max(fitting, start + 1), start + cells, n_rows)
        yield start, stop
        start = stop


def row_numbers(indptr: NDArray[np.integer], start: int, stop: int) -> NDArray[np.int64]:
    """Return the row of every cell in rows ``start`` to ``stop - 1`` of a CSR matrix, shape (cells,)."""
    return np.repeat(np.arange(start, stop, dtype=np.int64), np.diff(indptr[start : stop + 1]))


def blocks(n_rows: int, row_cells: int, cells: int = BLOCK_CELLS) -> Iterator[slice]:
    """Cut the rows of a dense array of ``row_cells`` columns into slices of at most ``cells`` cells."""
    step = max(1, cells // max(1, row_cells))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))
