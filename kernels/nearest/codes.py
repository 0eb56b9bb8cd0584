r"""Nearest rows by products of short integers, proven and then computed in full.

Rows and queries are rounded to one byte a number. With :math:`v = s c + e` for a row and :math:`q = t a + r`
for a query (c and a integers), the product of integers is wrong by

.. math:: |q \cdot v - s t \, (a \cdot c)| \le \|q\| \, \|e\| + \|r\| \, \|s c\|

A row whose rounded product lies below the k-th greatest by more than twice the largest such error cannot be
among the k nearest. The few others are multiplied in float32, each by itself, so that a result depends
neither on the queries beside it nor on the number of threads. A CPU multiplies bytes four times as fast as
float32 numbers and reads a quarter of the memory.
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from hippoindex.errors import KernelError
from hippoindex.kernels.nearest.reference import Nearest

BLOCK_QUERIES = 256
TILE_ROWS = 2048
"""Rows multiplied at a time: the products of a block then stay in the CPU's caches."""
KEPT_BYTES = 1 << 30
"""Codes are kept up to this; those of more rows are made anew for every call."""
LEAST_CODED = 64
"""Rows are not rounded for fewer queries than this."""
CHECKED_AT_ONCE = 1 << 14
"""Candidates multiplied in full at a time."""
# Two products of an unsigned byte and such a code fit the signed 16-bit sums of CPUs without VNNI.
_LEVELS = 64
_QUERY_LEVELS = 127
_ZERO = 128
_ROUNDING = 1e-5
"""Share of the norms that the float32 arithmetic around the integers can be wrong by, amply."""
_SCANNED = 64
"""Products whose greatest and least are found at once."""


class _Tile(NamedTuple):
    """The codes of some rows.

    Attributes
    ----------
    codes : ndarray of int8, shape (d, n)
    scales : ndarray of float32, shape (n,)
    error, norm : float
        Largest norms of what rounding took away, and of the rows.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    error: float
    norm: float


class _Codes(NamedTuple):
    """Rounded queries.

    Attributes
    ----------
    codes : ndarray of uint8, shape (Q, d)
    scales : ndarray of float32, shape (Q,)
    errors, norms : ndarray of float64, shape (Q,)
        Norms of what rounding took away, and of the queries.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    errors: NDArray[np.float64]
    norms: NDArray[np.float64]


class NearestRows:
    """Finds the rows of a matrix that have the greatest products with queries.

    Parameters
    ----------
    vectors : ndarray of float16 or float32, shape (N, d)
        Finite. Not copied: it may be a memory map.
    threads : int
        Blocks of 256 queries are searched in parallel.
    kept_bytes : int
        Codes (N x d bytes) that take more are made anew for every call.

    Raises
    ------
    KernelError
        If the vectors are no matrix of such numbers.
    """

    def __init__(
        self, vectors: NDArray[np.floating], *, threads: int = 1, kept_bytes: int = KEPT_BYTES
    ) -> None:
        if vectors.ndim != 2 or vectors.dtype not in (np.float16, np.float32) or not vectors.shape[1]:
            raise KernelError(
                f"vectors are {vectors.dtype} {vectors.shape}; expected float16 or float32 (N, d)"
            )
        self._vectors, self._threads = vectors, threads
        self._kept: list[_Tile] | None = [] if vectors.size <= kept_bytes else None

    def find(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """Find the nearest rows of every query.

        Parameters
        ----------
        queries : ndarray of float32, shape (Q, d)
            Finite.
        k : int
            At least 1.

        Returns
        -------
        Nearest
            With ``min(k, N)`` columns.

        Raises
        ------
        KernelError
            If the queries do not fit the vectors or are not finite, or a vector is not finite.
        """
        q = np.ascontiguousarray(queries, dtype=np.float32)
        if q.ndim != 2 or q.shape[1] != self._vectors.shape[1]:
            raise KernelError(f"queries {q.shape} do not fit vectors {self._vectors.shape}")
        if k < 1:
            raise KernelError(f"k must be at least 1; got {k}")
        bad = np.flatnonzero(~np.isfinite(q).all(axis=1))
        if len(bad):
            raise KernelError(f"query {bad[0]} holds a non-finite value")
        width = min(k, len(self._vectors))
        if not len(q) or not width:
            nothing = np.full(len(q), np.inf, np.float32)
            return Nearest(
                np.empty((len(q), width), np.int64), np.empty((len(q), width), np.float32), nothing
            )
        if len(q) >= LEAST_CODED and self._kept == []:
            self._kept = [_rounded_rows(self._rows(start), start) for start in self._starts]
        blocks = [q[start : start + BLOCK_QUERIES] for start in range(0, len(q), BLOCK_QUERIES)]
        if self._threads == 1 or len(blocks) == 1:
            found = [self._find(block, width) for block in blocks]
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                found = list(pool.map(self._find, blocks, itertools.repeat(width)))
        return Nearest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    @property
    def _starts(self) -> range:
        return range(0, len(self._vectors), TILE_ROWS)

    def _rows(self, start: int) -> NDArray[np.floating]:
        return self._vectors[start : start + TILE_ROWS]

    def _find(self, queries: NDArray[np.float32], k: int) -> Nearest:
        scan = _Scan(len(queries), k)
        scanned = self._scan_codes if self._kept or len(queries) >= LEAST_CODED else self._scan_rows
        scanned(queries, scan)
        asked, rows = scan.candidates()
        exact = np.empty(len(rows), np.float32)
        for first in range(0, len(rows), CHECKED_AT_ONCE):
            part = slice(first, first + CHECKED_AT_ONCE)
            checked = self._vectors[rows[part]].astype(np.float32)
            exact[part] = np.einsum("ij,ij->i", checked, queries[asked[part]])
        return _chosen(len(queries), asked, rows, exact, k)

    def _scan_codes(self, queries: NDArray[np.float32], scan: _Scan) -> None:
        rounded = _rounded_queries(queries)
        for start in self._starts:
            tile = self._kept[start // TILE_ROWS] if self._kept else _rounded_rows(self._rows(start), start)
            products = _multiply(rounded.codes, tile.codes)  # (Q, n)
            errors = rounded.norms * tile.error + rounded.errors * (tile.norm + tile.error)
            errors += _ROUNDING * rounded.norms * tile.norm
            scan.add(products, start, rounded.scales, tile.scales, errors)

    def _scan_rows(self, queries: NDArray[np.float32], scan: _Scan) -> None:
        """Multiply in full: for a few queries, rounding the rows would take longer."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        for start in self._starts:
            wide = self._rows(start).astype(np.float32, copy=False)
            norm = float(np.sqrt(np.einsum("ij,ij->i", wide, wide).max()))
            _check_rows(norm, wide, start)
            ones = np.ones(max(len(queries), len(wide)), np.float32)
            scan.add(
                queries @ wide.T, start, ones[: len(queries)], ones[: len(wide)], _ROUNDING * norms * norm
            )


class _Scan:
    """The rows that can still be among the nearest of a block of queries, or the farthest.

    Rounded products are of no use without their errors: ``kth`` holds, per query, the k greatest of the lower
    bounds met so far, smallest first, and ``least`` the least of the upper bounds.
    """

    def __init__(self, n_queries: int, k: int) -> None:
        self._kth = np.full((n_queries, k), -np.inf, np.float32)
        self._least = np.full(n_queries, np.inf, np.float32)
        self._found: list[tuple[NDArray, NDArray, NDArray, NDArray]] = []

    def add(
        self,
        products: NDArray[np.int32] | NDArray[np.float32],
        first: int,
        query_scales: NDArray[np.float32],
        row_scales: NDArray[np.float32],
        errors: NDArray[np.float64],
    ) -> None:
        """Take the products of all queries with the rows from ``first`` on."""
        bounds = np.nextafter(errors.astype(np.float32), np.float32(np.inf))
        ranges = np.empty((len(products), -(-products.shape[1] // _SCANNED), 2), np.float32)
        _raise_bounds(products, query_scales, row_scales, bounds, self._kth, self._least, ranges)
        room = max(64 * len(products), 4096)
        while True:
            asked, rows = np.empty(room, np.int32), np.empty(room, np.int64)
            ends = np.empty((2, room), np.float32)
            count = _collect(
                products,
                first,
                (query_scales, row_scales, bounds),
                (self._kth, self._least),
                ranges,
                asked,
                rows,
                ends,
            )
            if count <= room:
                break
            room = count
        self._found.append((asked[:count], rows[:count], *ends[:, :count]))

    def candidates(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs of query and row that the bounds of all tiles leave."""
        asked, rows, lower, upper = (np.concatenate(parts) for parts in zip(*self._found, strict=True))
        kept = (upper >= self._kth[asked, 0]) | (lower <= self._least[asked])
        return asked[kept].astype(np.int64), rows[kept]


def _chosen(
    n_queries: int, asked: NDArray[np.int64], rows: NDArray[np.int64], products: NDArray[np.float32], k: int
) -> Nearest:
    """Return the best of the candidates of each query."""
    order = np.lexsort((rows, -products, asked))
    counts = np.bincount(asked, minlength=n_queries)
    starts = np.cumsum(counts) - counts
    best = order[starts[:, None] + np.arange(k)]
    return Nearest(rows[best], products[best], np.minimum.reduceat(products[order], starts))


def _rounded_rows(vectors: NDArray[np.floating], first: int) -> _Tile:
    wide = vectors.astype(np.float32)
    codes, scales = np.empty(wide.shape, np.int8), np.empty(len(wide), np.float32)
    error, norm = _round(wide, codes, scales)
    _check_rows(norm, wide, first)
    return _Tile(np.ascontiguousarray(codes.T), scales, error, norm)


def _check_rows(norm: float, rows: NDArray[np.float32], first: int) -> None:
    if not np.isfinite(norm):
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))[0]
        raise KernelError(f"vector {first + bad} holds a non-finite value")


def _rounded_queries(queries: NDArray[np.float32]) -> _Codes:
    scales = np.abs(queries).max(axis=1) / np.float32(_QUERY_LEVELS)
    scales[scales == 0] = 1
    levels = np.rint(queries / scales[:, None])
    return _Codes(
        (levels + _ZERO).astype(np.uint8),
        scales,
        np.linalg.norm((queries - levels * scales[:, None]).astype(np.float64), axis=1),
        np.linalg.norm(queries.astype(np.float64), axis=1),
    )


def _multiply(queries: NDArray[np.uint8], codes: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return ``(queries - 128) @ codes``, exactly."""
    products: NDArray[np.int32] = _session().run(None, {"queries": queries, "codes": codes})[0]
    return products


@functools.cache
def _session() -> Any:
    """Return the product of byte matrices, by the kernels of onnxruntime, on the calling thread."""
    node = helper.make_node("MatMulInteger", ["queries", "codes", "zero"], ["products"])
    inputs = [
        helper.make_tensor_value_info("queries", TensorProto.UINT8, ["Q", "d"]),
        helper.make_tensor_value_info("codes", TensorProto.INT8, ["d", "n"]),
    ]
    output = helper.make_tensor_value_info("products", TensorProto.INT32, ["Q", "n"])
    zero = helper.make_tensor("zero", TensorProto.UINT8, [], [_ZERO])
    graph = helper.make_graph([node], "products", inputs, [output], [zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _round(rows: NDArray, codes: NDArray, scales: NDArray) -> tuple[float, float]:
    """Write codes and scales of rows; return the largest norms of what is lost, and of the rows."""
    error, norm = np.float32(0), np.float32(0)
    for i in range(rows.shape[0]):
        greatest = np.float32(0)
        for value in rows[i]:
            greatest = max(greatest, abs(value))
        scale = greatest / np.float32(_LEVELS) if greatest > 0 else np.float32(1)
        scales[i] = scale
        lost, whole = np.float32(0), np.float32(0)
        for j in range(rows.shape[1]):
            level = np.rint(rows[i, j] / scale)
            codes[i, j] = np.int8(level)
            rest = rows[i, j] - level * scale
            lost += rest * rest
            whole += rows[i, j] * rows[i, j]
        if not np.isfinite(whole):
            return np.inf, np.inf
        error, norm = max(error, lost), max(norm, whole)
    return np.sqrt(error), np.sqrt(norm)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"nnan", "nsz", "reassoc"})
def _extremes(products: NDArray, scales: NDArray, factor: float) -> tuple[np.float32, np.float32]:
    """Return the greatest and the least of products times their scales."""
    greatest, least = np.float32(-np.inf), np.float32(np.inf)
    for i in range(products.shape[0]):
        value = np.float32(products[i]) * (scales[i] * factor)
        greatest = max(greatest, value)
        least = min(least, value)
    return greatest, least


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _raise_bounds(
    products: NDArray,
    query_scales: NDArray,
    row_scales: NDArray,
    errors: NDArray,
    kth: NDArray,
    least: NDArray,
    ranges: NDArray,
) -> None:
    """Update the k greatest lower bounds and the least upper bound of each query.

    ``ranges`` (Q, n / 64, 2) becomes the greatest and the least of every 64 products.
    """
    n = products.shape[1]
    for q in range(products.shape[0]):
        factor, error, best = query_scales[q], errors[q], kth[q]
        for start in range(0, n, _SCANNED):
            stop = min(start + _SCANNED, n)
            greatest, smallest = _extremes(products[q, start:stop], row_scales[start:stop], factor)
            ranges[q, start // _SCANNED] = greatest, smallest
            least[q] = min(least[q], smallest + error)
            if greatest - error <= best[0]:
                continue
            for i in range(start, stop):
                lower = np.float32(products[q, i]) * (row_scales[i] * factor) - error
                if lower > best[0]:
                    at = 0
                    while at + 1 < best.shape[0] and best[at + 1] < lower:
                        best[at] = best[at + 1]
                        at += 1
                    best[at] = lower


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _collect(
    products: NDArray,
    first: int,
    scales: tuple[NDArray, NDArray, NDArray],
    bounds: tuple[NDArray, NDArray],
    ranges: NDArray,
    asked: NDArray,
    rows: NDArray,
    ends: NDArray,
) -> int:
    """Write the rows that the bounds leave, as many as there is room for; return how many there are."""
    n, room, count = products.shape[1], asked.shape[0], 0
    query_scales, row_scales, errors = scales
    kth, least = bounds
    for q in range(products.shape[0]):
        factor, error = query_scales[q], errors[q]
        low, high = kth[q, 0] - error, least[q] + error
        for start in range(0, n, _SCANNED):
            if ranges[q, start // _SCANNED, 0] < low and ranges[q, start // _SCANNED, 1] > high:
                continue
            for i in range(start, min(start + _SCANNED, n)):
                value = np.float32(products[q, i]) * (row_scales[i] * factor)
                if value >= low or value <= high:
                    if count < room:
                        asked[count], rows[count] = q, first + i
                        ends[0, count], ends[1, count] = value - error, value + error
                    count += 1
    return count
