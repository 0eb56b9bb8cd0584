r"""The exact join on a CUDA device, through CuPy: tiles by GEMM, what may count rechecked on the host.

As on the CPU (:mod:`hippoindex.kernels.simjoin.exact`), products only nominate pairs. cuBLAS multiplies
float16 vectors on tensor cores with sums and results in float32, one kernel (``nominate.cu``) compacts the
cells of a tile that may be pairs, and the host computes their cosines anew in float64 from the stored vectors
while the device goes on. The pairs are those of the reference.

.. rubric:: How far a product can be from the cosine

Let :math:`x, y` be stored vectors of dimension :math:`d`, of norm :math:`R = 1.005` at most, which
:mod:`~hippoindex.kernels.simjoin.rows` checks, and :math:`\hat x, \hat y` what the device gets of them.

- Rounding to nearest changes a component by a share :math:`u` of it (:math:`2^{-11}` for float16), or, if it
  is subnormal, by :math:`\eta` (:math:`2^{-25}`). So :math:`\|\hat x - x\| \le r := u R + \eta \sqrt d`, and

  .. math:: |\langle \hat x, \hat y \rangle - \langle x, y \rangle|
            \le \|\hat x\| \|\hat y - y\| + \|\hat x - x\| \|y\| \le r (2 R + r).

  Vectors stored in the device's type, or a narrower one, are not rounded: :math:`r = 0`.
- Products of two float16 numbers are exact in float32. A tensor core aligns :math:`n` of them (4 to 16) and
  the accumulator to the largest, truncates, adds, and truncates the sum (Fasi, Higham, Mikaitis and Pranesh,
  "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021, on V100, T4 and A100).
  Each of these :math:`n + 2` times less than :math:`2^{-23} S` is lost, :math:`S` being a bound of the
  partial sums, :math:`\sum_k |\hat x_k \hat y_k| \le (R + r)^2` and what was lost before. That happens
  :math:`\lceil d / n \rceil` times, and as many results may have to be added, if the sum is split: in all
  less than :math:`2 (d + 16)` losses. Units for float32 lose no more: a product and a sum are rounded, by
  :math:`2^{-24} S` at most. Doubled for what is of second order, for thresholds rounded to float32, for the
  float64 of the recheck and for GPUs that have not been studied, that makes
  :math:`4 (d + 16) \, 2^{-23} (R + r)^2`.

:func:`margin` is the sum of both: 1.4e-3 for float32 vectors of dimension 768 on the device in float16,
3.8e-4 if they are stored as float16. It decides how many pairs are rechecked, not which are found.

A hub of near-duplicates is nominated a few rows of a tile at a time, and the floors of
:class:`~hippoindex.kernels.simjoin.best.BestPairs` rise meanwhile. Memory is bounded by the tile, the room
for nominated cells and a few chunks that wait for a core; time, at worst, by a recheck of every pair.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import cupy_backend as ppr_cupy
from hippoindex.kernels.simjoin.best import BestPairs
from hippoindex.kernels.simjoin.duplicates import Found
from hippoindex.kernels.simjoin.problem import MEMORY_BYTES, Problem, Progress, pose
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.rows import NORM_TOLERANCE
from hippoindex.kernels.simjoin.threads import n_threads
from hippoindex.kernels.simjoin.tile import bits, recheck

Storage = Literal["float16", "float32"]

SOURCE = Path(__file__).with_name("nominate.cu")
THREAD_ROWS = 32  # ROWS in the source
BLOCK_THREADS = 256
TILES = (8192, 4096, 2048, 1024, 512, 256)
"""Rows and columns that a tile may have."""
CELLS_PER_NOMINATION = 16
"""The device has room for one nominated pair per so many cells of a tile."""
ALIGNMENT = 8
"""Components, to a multiple of which vectors are padded with zeros: 16 bytes, as tensor cores like it."""
UPLOAD_ROWS = 1 << 15
RECHECK_PAIRS = 1 << 16
"""Pairs that a thread of the host rechecks at once."""

ROUNDING = {"float16": (2.0**-11, 2.0**-25), "float32": (2.0**-24, 2.0**-126)}
"""Largest relative error of rounding to a type, and absolute error where that is larger."""
CUDA_R_32F, CUDA_R_16F = 0, 2  # cudaDataType of library_types.h


@dataclass(frozen=True)
class Device:
    """What the join needs of an array library. Tests put numpy and a host build of ``nominate.cu`` here.

    Attributes
    ----------
    xp : module
        ``cupy``.
    multiply : callable
        ``multiply(a, b, out)`` writes ``a @ b.T`` with sums in float32 to ``out``; ``a`` of shape (R, D) and
        ``b`` (C, D) are both float16 or both float32, ``out`` (R, C) is float32. All are C-contiguous.
    launch : callable
        ``launch(kernel name, grid, block, arguments)``, arguments being arrays and numpy scalars.
    write : callable
        ``write(array on the device, array on the host)`` copies from the host.
    to_host : callable
        Returns a copy on the host.
    free_bytes : callable
        How much device memory can still be taken.
    """

    xp: Any
    multiply: Callable[[Any, Any, Any], None]
    launch: Callable[[str, tuple[int, int], tuple[int, int], tuple[Any, ...]], None]
    write: Callable[[Any, NDArray], None]
    to_host: Callable[[Any], NDArray]
    free_bytes: Callable[[], int]


def unavailable() -> str | None:
    """Return why CuPy cannot be used on this machine, with what to do about it, or ``None``."""
    reason = ppr_cupy.unavailable()
    if reason is not None:
        return reason
    import cupy

    try:
        cupy.cuda.device.get_cublas_handle()
    except (ImportError, OSError, RuntimeError) as error:
        return f"CuPy cannot load or start cuBLAS ({error}). Run: {ppr_cupy.INSTALL}"
    return None


@functools.cache
def cuda_device() -> Device:
    """Return the current CUDA device, with the kernel compiled for it.

    Raises
    ------
    KernelError
        If there is none; the message says why.
    """
    reason = unavailable()
    if reason is not None:
        raise KernelError(f"CuPy cannot be used here: {reason}")
    import cupy

    module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=ppr_cupy.OPTIONS)

    def multiply(a: Any, b: Any, out: Any) -> None:
        gemm(cupy.cuda.cublas, cupy.cuda.device.get_cublas_handle(), a, b, out)

    def launch(name: str, grid: tuple[int, int], block: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        module.get_function(name)(grid, block, arguments)

    def write(target: Any, values: NDArray) -> None:
        target.set(values)

    def free_bytes() -> int:
        return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())

    return Device(cupy, multiply, launch, write, cupy.asnumpy, free_bytes)


def gemm(cublas: Any, handle: int, a: Any, b: Any, out: Any) -> None:
    """Write ``a @ b.T`` to ``out`` by cublasGemmEx; :func:`cupy.matmul` of float16 would round to float16.

    To cuBLAS, which stores by columns, a row-major ``out`` is its transpose: ``b`` transposed, times ``a`` as
    it lies there. Float32 inputs are multiplied in float32 proper: the pedantic type excludes TF32, whatever
    the environment says.

    Parameters
    ----------
    cublas : module
        ``cupy.cuda.cublas``.
    handle : int
    a, b : cupy.ndarray, shape (R, D) and (C, D)
        Both float16 or both float32, C-contiguous.
    out : cupy.ndarray of float32, shape (R, C)
    """
    (n_rows, n_columns), depth = out.shape, a.shape[1]
    half = a.dtype == np.float16
    kind = CUDA_R_16F if half else CUDA_R_32F
    compute = cublas.CUBLAS_COMPUTE_32F if half else cublas.CUBLAS_COMPUTE_32F_PEDANTIC
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    cublas.gemmEx(
        handle,
        cublas.CUBLAS_OP_T,
        cublas.CUBLAS_OP_N,
        n_columns,
        n_rows,
        depth,
        one.ctypes.data,
        b.data.ptr,
        kind,
        depth,
        a.data.ptr,
        kind,
        depth,
        zero.ctypes.data,
        out.data.ptr,
        CUDA_R_32F,
        n_columns,
        compute,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


def exact(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    storage: Storage = "float16",
    known: Pairs | None = None,
    new: ArrayLike | None = None,
    memory_bytes: int | None = None,
    device: Device | None = None,
    on_progress: Progress | None = None,
) -> Pairs:
    """Return all pairs with cosine >= threshold that survive the per-node cap.

    Result as of :func:`hippoindex.kernels.simjoin.reference.reference`.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        L2-normalised rows; float16, float32 or float64; may be a memory map, which is read in blocks.
    threshold, max_neighbors, searches, known, new
        As for :func:`hippoindex.kernels.simjoin.exact.exact`.
    storage : {"float16", "float32"}
        What the device multiplies. float16 runs on tensor cores; float32 nominates fewer pairs near the
        threshold. The result is the same.
    memory_bytes : int, optional
        Device memory to use; by default nine tenths of what is free. Vectors that do not fit are sent in
        blocks.
    device : Device, optional
        By default the current CUDA device.
    on_progress : callable, optional
        Called with the share of the work done, 0 to 1.

    Returns
    -------
    Pairs

    Raises
    ------
    KernelError
        If the arguments are not as described, there is no device, or not even one tile fits the memory.
    """
    if storage not in ROUNDING:
        raise KernelError(f"There is no storage {storage!r}; choose one of {sorted(ROUNDING)}")
    problem = pose(vectors, threshold, max_neighbors, searches, known, new, MEMORY_BYTES)
    device = cuda_device() if device is None else device
    budget = int(ppr_cupy.USED_SHARE * device.free_bytes()) if memory_bytes is None else memory_bytes
    return problem.finish(by_tiles(problem, storage, budget, device, on_progress))


def margin(dtype: Any, storage: Storage, dimension: int) -> float:
    """Return how far a product on the device can be from the cosine; the module says why.

    Parameters
    ----------
    dtype : numpy dtype
        Of the stored vectors.
    storage : {"float16", "float32"}
    dimension : int
    """
    relative, absolute = ROUNDING[storage]
    norm = 1.0 + NORM_TOLERANCE
    change = 0.0 if np.can_cast(dtype, storage) else relative * norm + absolute * math.sqrt(dimension)
    sums = 4.0 * (dimension + 16) * 2.0**-23 * (norm + change) ** 2
    return change * (2 * norm + change) + sums


@dataclass(frozen=True)
class Layout:
    """How device memory is used.

    Attributes
    ----------
    tile : int
        Rows and columns of a tile.
    block : int
        Nodes whose vectors lie on the device together, twice: as rows and as columns.
    capacity : int
        Nominated cells that the device has room for; at least a row of a tile.
    """

    tile: int
    block: int
    capacity: int


def layout(n_nodes: int, n_asking: int, dimension: int, storage: Storage, memory_bytes: int) -> Layout:
    """Plan device memory: tiles as large as half of it allows, and as many vectors as the rest holds.

    Parameters
    ----------
    n_nodes : int
    n_asking : int
        Nodes that are rows of tiles. If all are, rows and columns share one copy of the vectors that fit.
    dimension : int
    storage : {"float16", "float32"}
    memory_bytes : int

    Returns
    -------
    Layout

    Raises
    ------
    KernelError
        If not even the smallest tile fits; the message says how much is needed.
    """
    node_bytes = _padded(dimension) * np.dtype(storage).itemsize
    everything = node_bytes * (n_nodes if n_asking == n_nodes else n_nodes + n_asking)
    for size in TILES:
        tile = max(min(size, n_nodes), 1)
        room = memory_bytes - tile_bytes(tile)
        if room >= everything:
            return Layout(tile, max(n_nodes, 1), _capacity(tile))
        block = room // (2 * node_bytes) // tile * tile
        if block > 0 and (size == TILES[-1] or tile_bytes(tile) <= memory_bytes // 2):
            return Layout(tile, block, _capacity(tile))
    needed = tile_bytes(tile) + min(2 * tile * node_bytes, everything)
    raise KernelError(
        f"The join on the device needs {needed} bytes for one tile of {tile} x {tile} nodes of dimension "
        f"{dimension} as {storage}; the budget is {memory_bytes}"
    )


def tile_bytes(tile: int) -> int:
    """Return the device memory that a tile takes besides its vectors."""
    per_node = 8 + 1 + 2 * (4 + 4)  # number of a row, flag of a column; floors of both, old ones and new
    return 4 * tile * tile + 4 * _capacity(tile) + per_node * tile + 8


def by_tiles(
    problem: Problem,
    storage: Storage,
    memory_bytes: int,
    device: Device,
    on_progress: Progress | None = None,
) -> Found:
    """Join the nodes that ask with all, and return the capped pairs of nodes."""
    best = problem.best(problem.node_searches())
    scan = _Scan(problem, best, storage, memory_bytes, device)
    total, done = scan.n_cells(), 0
    with ThreadPoolExecutor(n_threads()) as pool:
        rechecks = _Rechecks(problem, best, pool)
        for rows, row_vectors, left, column_vectors in scan.tiles():
            width = len(column_vectors)
            for part, cells in scan.nominate(rows, row_vectors, left, column_vectors):
                rechecks.take(part, left, width, cells)
            done += len(rows) * width
            if on_progress is not None and done < total:
                on_progress(done / total)
        rechecks.finish()
    if on_progress is not None:
        on_progress(1.0)
    return best.arrays()


class _Scan:
    """Tiles on the device: the vectors they need, their products, and what these nominate."""

    def __init__(
        self, problem: Problem, best: BestPairs, storage: Storage, memory_bytes: int, device: Device
    ) -> None:
        n, dimension = problem.n_nodes, problem.x.shape[1]
        self._problem, self._best, self._storage, self._device = problem, best, storage, device
        self._asking = np.flatnonzero(problem.asks)
        self._half = len(self._asking) == n  # then only the upper triangle is scanned
        self._layout = plan = layout(n, len(self._asking), dimension, storage, memory_bytes)
        self._margin = margin(problem.x.dtype, storage, dimension)
        xp, padded = device.xp, _padded(dimension)
        self._rows = xp.empty((min(plan.block, len(self._asking)), padded), storage)
        shared = self._half and plan.block >= n
        self._columns = None if shared else xp.empty((min(plan.block, n), padded), storage)
        self._products = xp.empty(plan.tile**2, np.float32)
        self._cells = xp.empty(plan.capacity, np.uint32)
        self._count = xp.zeros(1, np.uint64)

    def n_cells(self) -> int:
        """Return how many cells all tiles have."""
        n, tile, n_asking = self._problem.n_nodes, self._layout.tile, len(self._asking)
        return sum(
            min(tile, n_asking - top) * (n - (top if self._half else 0)) for top in range(0, n_asking, tile)
        )

    def tiles(self) -> Iterator[tuple[NDArray[np.int64], Any, int, Any]]:
        """Yield every tile: its rows' nodes, their vectors, its first column's node, the columns' vectors."""
        tile = self._layout.tile
        for rows, row_vectors, left, column_vectors in self._blocks():
            diagonal = column_vectors is row_vectors
            for top in range(0, len(rows), tile):
                for start in range(top if diagonal else 0, len(column_vectors), tile):
                    part, columns = slice(top, top + tile), slice(start, start + tile)
                    yield rows[part], row_vectors[part], left + start, column_vectors[columns]

    def nominate(
        self, rows: NDArray[np.int64], row_vectors: Any, left: int, column_vectors: Any
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
        """Yield the cells of a tile that may be pairs, a few rows at a time, sorted.

        Where the device has no room for all that some rows nominate, half as many rows are tried. One row
        always fits.

        Yields
        ------
        rows : ndarray of int64, shape (R,)
            Nodes of the rows that the cells count from.
        cells : ndarray of uint32
            ``r * C + c`` for a tile of C columns.
        """
        xp, to_host, width = self._device.xp, self._device.to_host, len(column_vectors)
        columns = slice(left, left + width)
        products = self._products[: len(rows) * width].reshape(len(rows), width)
        self._device.multiply(row_vectors, column_vectors, products)
        nodes, asks = xp.asarray(rows), xp.asarray(self._problem.asks[columns].view(np.uint8))
        top, step = 0, len(rows)
        while top < len(rows):
            part = slice(top, min(top + step, len(rows)))
            height = part.stop - top
            self._count.fill(0)
            sizes = np.int64(height), np.int64(width)
            names = nodes[part], np.int64(left), asks
            lows = xp.asarray(self._low(rows[part])), xp.asarray(self._low(columns))
            output = np.int64(self._layout.capacity), self._count, self._cells
            grid = -(-width // BLOCK_THREADS), -(-height // THREAD_ROWS)
            arguments = (*sizes, products[part], *names, *lows, *output)
            self._device.launch("nominate", grid, (BLOCK_THREADS, 1), arguments)
            count = int(to_host(self._count)[0])
            if count > self._layout.capacity:
                step = -(-height // 2)
                continue
            if count:
                yield rows[part], np.sort(to_host(self._cells[:count]))
            top = part.stop

    def _blocks(self) -> Iterator[tuple[NDArray[np.int64], Any, int, Any]]:
        """Yield pairs of blocks: nodes and vectors of rows, first node and vectors of columns."""
        n, size = self._problem.n_nodes, self._layout.block
        for top in range(0, len(self._asking), size):
            rows = self._asking[top : top + size]
            row_vectors = self._upload(rows, self._rows)
            for left in range(top if self._half else 0, n, size):
                if self._half and left == top:
                    yield rows, row_vectors, left, row_vectors
                else:
                    columns = np.arange(left, min(left + size, n))
                    yield rows, row_vectors, left, self._upload(columns, self._columns)

    def _upload(self, nodes: NDArray[np.int64], target: Any) -> Any:
        x, rows = self._problem.x, self._problem.groups.first_row[nodes]
        for start in range(0, len(rows), UPLOAD_ROWS):
            part = rows[start : start + UPLOAD_ROWS]
            values = np.zeros((len(part), target.shape[1]), self._storage)
            values[:, : x.shape[1]] = x[part]  # rounds to nearest
            self._device.write(target[start : start + len(part)], values)
        return target[: len(rows)]

    def _low(self, nodes: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return what a product must reach for the nodes to keep the pair, rounded down to float32."""
        wanted = np.maximum(self._best.floors[nodes], self._problem.threshold) - self._margin
        low = wanted.astype(np.float32)
        return np.where(low > wanted, np.nextafter(low, np.float32(-np.inf)), low)


class _Rechecks:
    """Rechecks nominated cells in float64 on the host's cores; few wait, so that memory is bounded."""

    def __init__(self, problem: Problem, best: BestPairs, pool: ThreadPoolExecutor) -> None:
        self._problem, self._best, self._pool = problem, best, pool
        self._waiting: deque[Future[None]] = deque()
        self._most = 2 * n_threads()

    def take(self, rows: NDArray[np.int64], left: int, width: int, cells: NDArray[np.uint32]) -> None:
        """Have cells rechecked; waits while too many are under way."""
        for start in range(0, len(cells), RECHECK_PAIRS):
            part = cells[start : start + RECHECK_PAIRS]
            self._waiting.append(self._pool.submit(self._recheck, rows, left, width, part))
            while len(self._waiting) > self._most:
                self._waiting.popleft().result()

    def finish(self) -> None:
        """Wait for all."""
        while self._waiting:
            self._waiting.popleft().result()

    def _recheck(self, rows: NDArray[np.int64], left: int, width: int, cells: NDArray[np.uint32]) -> None:
        row, column = np.divmod(cells.astype(np.int64), width)
        node, other = rows[row], left + column
        first, second = np.minimum(node, other), np.maximum(node, other)
        problem, cosine = self._problem, np.empty(len(cells))
        count = recheck(
            bits(problem.x),
            problem.groups.first_row,
            problem.threshold,
            self._best.floors,
            first,
            second,
            len(cells),
            cosine,
        )
        self._best.add(first[:count], second[:count], cosine[:count])


def _padded(dimension: int) -> int:
    return max(-(-dimension // ALIGNMENT), 1) * ALIGNMENT


def _capacity(tile: int) -> int:
    return max(tile, tile * tile // CELLS_PER_NOMINATION)
