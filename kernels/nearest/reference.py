"""The reference: all products in float64, sorted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Nearest(NamedTuple):
    """What was found for each of Q queries.

    Attributes
    ----------
    rows : ndarray of int64, shape (Q, k)
        Rows with the greatest products, greatest first; of equal products the lower row first.
    products : ndarray of float32, shape (Q, k)
    least : ndarray of float32, shape (Q,)
        Least product with any row; infinity if there is no row.
    """

    rows: NDArray[np.int64]
    products: NDArray[np.float32]
    least: NDArray[np.float32]


def reference(vectors: ArrayLike, queries: ArrayLike, k: int) -> Nearest:
    """Return the k nearest rows of each query by brute force.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        float16 or float32, finite.
    queries : array_like, shape (Q, d)
        float32, finite.
    k : int

    Returns
    -------
    Nearest
        With ``min(k, N)`` columns.
    """
    x, q = np.asarray(vectors, dtype=np.float64), np.asarray(queries, dtype=np.float64)
    products = np.stack([(x * row).sum(axis=1) for row in q]) if len(q) else np.empty((0, len(x)))
    rows = np.argsort(-products, axis=1, kind="stable")[:, :k].astype(np.int64)
    kept = np.take_along_axis(products, rows, axis=1)
    return Nearest(rows, kept.astype(np.float32), products.min(axis=1, initial=np.inf).astype(np.float32))
