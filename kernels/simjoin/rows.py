"""The rows of a join: which can be joined, which must be normalised, and the checks of every backend."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError

NORM_TOLERANCE = 5e-3
"""How far a norm may be from 1: rounding to float16 stays well within it."""
BLOCK_ROWS = 8192


def unusable_rows(vectors: ArrayLike) -> dict[int, str]:
    """Return the rows that have no direction, with the reason, so that a caller can set them aside.

    Parameters
    ----------
    vectors : array_like, shape (N, d)

    Returns
    -------
    dict of int to str
        Row number to ``"not finite"`` or ``"zero"``, ascending.

    Raises
    ------
    KernelError
        If the array has not two axes.
    """
    bad: dict[int, str] = {}
    for start, block in _blocks(as_rows(vectors)):
        finite = np.isfinite(block).all(axis=1)
        zero = (block == 0).all(axis=1)
        for row in np.flatnonzero(~finite | zero).tolist():
            bad[start + row] = "zero" if zero[row] else "not finite"
    return bad


def normalised(vectors: ArrayLike) -> tuple[NDArray[np.floating], int]:
    """Return L2-normalised rows and how many had to be changed.

    Rows whose norm is within 0.005 of 1 stay as they are; if all are, the array itself is returned.

    Parameters
    ----------
    vectors : array_like, shape (N, d)

    Returns
    -------
    rows : ndarray, shape (N, d)
        In the type of ``vectors`` (float64 for integers).
    changed : int

    Raises
    ------
    KernelError
        If a row is zero or not finite; :func:`unusable_rows` names all of them.
    """
    x = as_rows(vectors)
    bad = unusable_rows(x)
    if bad:
        row, reason = next(iter(bad.items()))
        raise KernelError(
            f"Row {row} is {reason} ({len(bad)} such rows); it cannot be normalised: set it aside"
        )
    off = np.flatnonzero(np.abs(_norms(x) - 1.0) > NORM_TOLERANCE)
    if len(off) == 0:
        return x, 0
    out = x.copy()
    for start in range(0, len(off), BLOCK_ROWS):
        rows = off[start : start + BLOCK_ROWS]
        block = x[rows].astype(np.float64)
        block /= np.abs(block).max(axis=1, keepdims=True)  # so that no square overflows or vanishes
        out[rows] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return out, len(off)


def as_rows(vectors: ArrayLike) -> NDArray[np.floating]:
    """Return a contiguous (N, d) array of float16, float32 or float64; a memory map is not read.

    Raises
    ------
    KernelError
    """
    x = np.asarray(vectors)
    if x.ndim != 2:
        raise KernelError(f"vectors have shape {x.shape}; expected (N, d)")
    if x.dtype not in (np.float16, np.float32, np.float64):
        x = x.astype(np.float64)
    return np.ascontiguousarray(x)


def check_arguments(
    vectors: NDArray,
    threshold: float,
    max_neighbors: int,
    searches: ArrayLike | None,
    new: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Check what every backend demands of its arguments and return ``searches`` as an array, shape (N,).

    Of the vectors only the ``new`` rows are read, if given: the others were checked when they were joined.

    Raises
    ------
    KernelError
        If an argument is not as the reference describes; the message names the first bad row.
    """
    x = as_rows(vectors)
    if not 0.0 < threshold <= 1.0:
        raise KernelError(f"threshold is a cosine above 0 and at most 1; got {threshold}")
    if max_neighbors < 1:
        raise KernelError(f"max_neighbors is at least 1; got {max_neighbors}")
    rows = None if new is None else np.flatnonzero(new)
    norms = _norms(x, rows)
    off = np.flatnonzero(~(np.abs(norms - 1.0) <= NORM_TOLERANCE))
    if len(off):
        row = off[0] if rows is None else rows[off[0]]
        raise KernelError(
            f"Row {row} has norm {norms[off[0]]:.4f} ({len(off)} such rows); rows must be L2-normalised. "
            "unusable_rows tells which cannot be, normalised mends the others"
        )
    return as_mask(searches, len(x), "searches")


def as_mask(mask: ArrayLike | None, n: int, name: str) -> NDArray[np.bool_]:
    """Return a mask over ``n`` rows; ``None`` selects all.

    Raises
    ------
    KernelError
    """
    if mask is None:
        return np.ones(n, dtype=bool)
    out = np.asarray(mask, dtype=bool)
    if out.shape != (n,):
        raise KernelError(f"{name} has shape {out.shape}; expected ({n},)")
    return out


def _norms(x: NDArray, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    norms = np.empty(len(x) if rows is None else len(rows))
    for start, block in _blocks(x, rows):
        norms[start : start + len(block)] = np.sqrt(np.einsum("ij,ij->i", block, block))
    return norms


def _blocks(x: NDArray, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield the float64 values of block after block of all or of some rows, and where it begins in these."""
    for start in range(0, len(x) if rows is None else len(rows), BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        yield start, x[part if rows is None else rows[part]].astype(np.float64)
