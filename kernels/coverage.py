"""How much of a set of weighted words two texts hold together."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(cache=True, error_model="numpy")
def best_shares(
    bits: NDArray, weights: NDArray, first: NDArray, second: NDArray, usable: NDArray, out: NDArray
) -> None:
    """Write for each text the greatest weight of the words that it, or a pair it is in, holds.

    Parameters
    ----------
    bits : ndarray of uint64, shape (texts,)
        Bit w is set where a text holds word w.
    weights : ndarray of float64, shape (W,)
        Of the words; W is at most 64.
    first, second : ndarray of int, shape (pairs,)
        Texts.
    usable : ndarray of bool, shape (pairs,)
        Pairs that count.
    out : ndarray of float32, shape (texts,)
        Written.
    """
    for text in range(out.shape[0]):
        out[text] = _weight_of(bits[text], weights)
    for pair in range(first.shape[0]):
        if usable[pair]:
            share = _weight_of(bits[first[pair]] | bits[second[pair]], weights)
            out[first[pair]] = max(out[first[pair]], share)
            out[second[pair]] = max(out[second[pair]], share)


@numba.njit(cache=True, error_model="numpy")
def _weight_of(bits: int, weights: NDArray) -> np.float32:
    total = 0.0
    for word in range(weights.shape[0] if bits else 0):
        if (bits >> np.uint64(word)) & np.uint64(1):
            total += weights[word]
    return np.float32(total)
