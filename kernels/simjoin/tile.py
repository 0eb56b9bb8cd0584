"""The inner loops of the join, compiled: scan a tile of bounds, recheck what it nominates, cap.

All of them release the interpreter lock, so that worker threads run side by side.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

CHUNK = 64


@numba.njit(nogil=True, cache=True)
def nominate(
    bounds: Any,
    rows: Any,
    columns: Any,
    least: float,
    floors: Any,
    slack: float,
    asks: Any,
    owner: Any,
    probes: Any,
    position: int,
    out_first: Any,
    out_second: Any,
) -> tuple[int, int]:
    """Write the pairs of a tile that may count, from ``position`` on, until the output is full.

    Parameters
    ----------
    bounds : ndarray of float32, shape (R, C)
        Upper bound of the cosine of every row with every column.
    rows, columns : ndarray of int64, shape (R,) and (C,)
        Numbers of the tile's nodes.
    least : float
        Bounds below do not count.
    floors : ndarray of float64, shape (N,)
        What a node's cosine must reach to be kept by it; infinite for nodes that keep none.
    slack : float
        Rounding error of a bound.
    asks : ndarray of bool, shape (N,)
        Nodes that are rows of some tile. A pair of two of them is nominated in one of its two tiles only.
    owner : ndarray of int32, shape (N,)
        List of every node.
    probes : ndarray of int32, shape (N, P)
        Lists whose members a node is compared with; with P = 0 all of them.
    position : int
        Row to start at.

    Returns
    -------
    count : int
        Pairs written, each with ``first < second``.
    position : int
        Row to go on with; R when the tile is done. The output must hold at least C pairs.
    """
    column_floor = np.inf
    for c in range(len(columns)):
        column_floor = min(column_floor, floors[columns[c]])
    count = 0
    width = len(columns)
    for r in range(position, len(rows)):
        if count + width > len(out_first):
            return count, r
        i = rows[r]
        line = bounds[r]
        low = np.float32(max(least, min(floors[i], column_floor) - slack))
        for begin in range(0, width, CHUNK):
            end = min(begin + CHUNK, width)
            if end - begin == CHUNK and not _any_reaches(line[begin:end], low):
                continue
            for c in range(begin, end):
                if line[c] < low:
                    continue
                j = columns[c]
                if i == j or line[c] < min(floors[i], floors[j]) - slack:
                    continue
                if asks[j] and j < i and _probes_list(probes, j, owner[i]):
                    continue
                out_first[count] = min(i, j)
                out_second[count] = max(i, j)
                count += 1
    return count, len(rows)


@numba.njit(nogil=True, cache=True, inline="always")
def _any_reaches(chunk: Any, low: Any) -> bool:
    """Tell whether one of ``CHUNK`` values is at least ``low``; without an early end, so that it is SIMD."""
    found = np.uint8(0)
    for c in range(CHUNK):
        found |= np.uint8(chunk[c] >= low)
    return found != 0


@numba.njit(nogil=True, cache=True, inline="always")
def _probes_list(probes: Any, node: int, wanted: int) -> bool:
    found = probes.shape[1] == 0
    for p in range(probes.shape[1]):
        found |= probes[node, p] == wanted
    return found


@numba.njit(nogil=True, cache=True)
def recheck(
    x: Any,
    row_of: Any,
    threshold: float,
    floors: Any,
    first: Any,
    second: Any,
    count: int,
    cosine: Any,
) -> int:
    """Compute float64 cosines of nominated pairs and keep, in place, those that count.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (M, d); uint16 stands for the bits of float16
    row_of : ndarray of int64, shape (N,)
        Row of ``x`` of every node.
    threshold : float
    floors : ndarray of float64, shape (N,)
    first, second : ndarray of int64
        Overwritten with the pairs that remain.
    count : int
        Nominated pairs.
    cosine : ndarray of float64
        Overwritten with their cosines.

    Returns
    -------
    int
        Pairs that remain.
    """
    kept = 0
    for p in range(count):
        i, j = first[p], second[p]
        value = _inner_product(x[row_of[i]], x[row_of[j]])
        if value >= threshold and (value >= floors[i] or value >= floors[j]):
            first[kept], second[kept], cosine[kept] = i, j, value
            kept += 1
    return kept


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def dot(a: Any, b: Any) -> float:
    """Inner product in float64, shape (d,) each; on one machine always summed in the same order."""
    total = 0.0
    for k in range(len(a)):
        total += np.float64(a[k]) * np.float64(b[k])
    return total


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def dot_of_halves(a: Any, b: Any) -> float:
    """Inner product in float64 of float16 numbers given as their bits (uint16)."""
    total = 0.0
    for k in range(len(a)):
        total += _half(a[k]) * _half(b[k])
    return total


@numba.njit(nogil=True, cache=True)
def _half(value: Any) -> float:
    """Return the number of which ``value`` holds the bits: as float32 with its exponent's bias put right.

    The scaling is done in float64, where it cannot overflow even if it is reassociated with a product.
    """
    word = np.uint32(value)
    sign = np.uint32(word & np.uint32(0x8000)) << np.uint32(16)
    magnitude = np.uint32(word & np.uint32(0x7FFF)) << np.uint32(13)
    return np.float64(np.uint32(sign | magnitude).view(np.float32)) * 2.0**112


def _inner_product(a: Any, b: Any) -> float:
    return float(dot_of_halves(a, b) if a.dtype == np.uint16 else dot(a, b))


@numba.extending.overload(_inner_product)
def _inner_product_of_type(a: Any, b: Any) -> Any:
    inner = dot_of_halves if a.dtype == numba.types.uint16 == b.dtype else dot

    def call(a: Any, b: Any) -> Any:
        return inner(a, b)

    return call


def bits(x: NDArray) -> NDArray:
    """Return an array that compiled code can read: float16 as its bits."""
    return x.view(np.uint16) if x.dtype == np.float16 else x


def best_of_each(
    first: NDArray,
    second: NDArray,
    cosine: NDArray[np.float64],
    searches: NDArray[np.bool_],
    max_neighbors: int,
    floors: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Mark the pairs that one of their ends keeps, and raise the floors of nodes that are full.

    Parameters
    ----------
    first, second : ndarray of int32 or int64, shape (P,)
        Distinct pairs.
    cosine : ndarray of float64, shape (P,)
    searches : ndarray of bool, shape (N,)
    max_neighbors : int
    floors : ndarray of float64, shape (N,)
        Set to the least kept cosine of every node that keeps ``max_neighbors``.

    Returns
    -------
    ndarray of bool, shape (P,)
    """
    kept = np.zeros(len(first), np.bool_)
    entry = np.empty(0, np.int32 if len(first) < 2**31 else np.int64)
    _mark_best(first, second, cosine, searches, max_neighbors, floors, entry, kept)
    return kept


@numba.njit(nogil=True, cache=True)
def _mark_best(
    first: Any,
    second: Any,
    cosine: Any,
    searches: Any,
    max_neighbors: int,
    floors: Any,
    entry: Any,
    kept: Any,
) -> None:
    n = len(searches)
    start = np.zeros(n + 1, np.int64)
    for p in range(len(first)):
        start[first[p] + 1] += searches[first[p]]
        start[second[p] + 1] += searches[second[p]]
    for node in range(n):
        start[node + 1] += start[node]
    entries = np.empty(start[n], entry.dtype)
    fill = start[:-1].copy()
    for p in range(len(first)):
        for node in (first[p], second[p]):
            if searches[node]:
                entries[fill[node]] = p
                fill[node] += 1
    for node in range(n):
        own = entries[start[node] : start[node + 1]]
        if len(own) > max_neighbors:
            own = _best(own, node, first, second, cosine, max_neighbors)
        for p in own:
            kept[p] = True
        if len(own) == max_neighbors:
            floors[node] = cosine[own].min()


@numba.njit(nogil=True, cache=True)
def _best(own: Any, node: int, first: Any, second: Any, cosine: Any, count: int) -> Any:
    """Return the ``count`` pairs of a node with the highest cosines, ties by the other end's number."""
    values = cosine[own]
    last = np.partition(values, len(own) - count)[len(own) - count]
    chosen = np.empty(count, own.dtype)
    n_chosen = 0
    for k in range(len(own)):
        if values[k] > last:
            chosen[n_chosen] = own[k]
            n_chosen += 1
    tied = own[values == last]
    others = np.empty(len(tied), np.int64)
    for k in range(len(tied)):
        others[k] = first[tied[k]] + second[tied[k]] - node
    chosen[n_chosen:] = tied[np.argsort(others)[: count - n_chosen]]
    return chosen


@numba.njit(nogil=True, cache=True)
def top_columns(values: Any, count: int, out: Any) -> None:
    """Write the columns of the ``count`` largest values of each row, largest first, ties by column.

    Parameters
    ----------
    values : ndarray of float32, shape (R, C)
    count : int
        At most C.
    out : ndarray of int32, shape (R, at least count)
    """
    best = np.empty(count, np.float32)
    for r in range(len(values)):
        line = values[r]
        best[:] = -np.inf
        for begin in range(0, len(line), CHUNK):
            end = min(begin + CHUNK, len(line))
            if end - begin == CHUNK and not _any_reaches(line[begin:end], best[count - 1]):
                continue
            for c in range(begin, end):
                value = line[c]
                if value <= best[count - 1]:
                    continue
                place = count - 1
                while place > 0 and best[place - 1] < value:
                    best[place] = best[place - 1]
                    out[r, place] = out[r, place - 1]
                    place -= 1
                best[place] = value
                out[r, place] = c


@numba.njit(nogil=True, cache=True)
def add_rows(x: Any, groups: Any, sums: Any) -> None:
    """Add every row of ``x``, shape (R, d), to the row of ``sums`` that ``groups`` names."""
    for r in range(len(x)):
        for k in range(x.shape[1]):
            sums[groups[r], k] += x[r, k]


@numba.njit(nogil=True, cache=True)
def invert(probes: Any, order: Any, fill: Any, nodes: Any) -> None:
    """Write the nodes that probe each list, in the given order, from ``fill`` of the list on.

    Parameters
    ----------
    probes : ndarray of int32, shape (N, P)
        Negative entries are no lists.
    order : ndarray of int64, shape (N,)
        The nodes.
    fill : ndarray of int64, shape (L,)
        Moved on by what is written.
    nodes : ndarray, shape (sum of entries,)
    """
    for node in order:
        for p in range(probes.shape[1]):
            wanted = probes[node, p]
            if wanted >= 0:
                nodes[fill[wanted]] = node
                fill[wanted] += 1


@numba.njit(nogil=True, cache=True)
def hash_rows(words: Any, out: Any) -> None:
    """Hash rows of 16-bit words by FNV-1a's recurrence on words, with a final mix."""
    for r in range(len(words)):
        value = np.uint64(0xCBF29CE484222325)
        for k in range(words.shape[1]):
            value = (value ^ np.uint64(words[r, k])) * np.uint64(0x100000001B3)
        value ^= value >> np.uint64(32)
        out[r] = value * np.uint64(0x9E3779B97F4A7C15)
