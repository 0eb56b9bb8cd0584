"""Batched power iteration on a CUDA device, through CuPy.

The loop, the stop of each column, its error bound and the return of isolated nodes' mass are the CPU path's
own, :func:`hippoindex.kernels.ppr.power.iterate`; here is only the step. Two of them:

- ``fused``: one kernel (``step.cu``) for product, damping, restart and change.
- ``spmm``: cuSPARSE's product of a CSR matrix and a dense block, and array operations for the rest.

``fused`` can store blocks as float16 with sums in float32, which halves what is read per edge. Columns are
scaled by a power of two for it, so that small values stay above float16's smallest; the largest possible
value, a column's whole L1 norm, becomes 2**15, as 2**16 would be infinite. The rounding of every step is
part of the reported residual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr.graph import INT32_MAX, Graph
from hippoindex.kernels.ppr.power import Step, check_block, iterate
from hippoindex.kernels.ppr.restart import normalised_restart, return_factor
from hippoindex.kernels.ppr.result import PPRResult

Storage = Literal["float32", "float16"]
Method = Literal["fused", "spmm"]

SOURCE = Path(__file__).with_name("step.cu")
OPTIONS = ("--std=c++17",)
INSTALL = "pip install 'hippoindex[gpu]' (CUDA 13) or pip install 'cupy-cuda12x[ctk]' (CUDA 12)"

CHUNK_ROWS = 16  # rows that one thread walks
SEGMENT_EDGES = 256  # a longer row is cut
BLOCK_THREADS = 256
USED_SHARE = 0.9  # of free device memory; the rest is for what CUDA allocates by itself

LARGEST = 2.0**15
"""What float16 storage scales a column's L1 norm to, at most; the largest float16 is 65504."""
UNIT_ROUNDOFF = 2.0**-11
"""Largest relative error of rounding to float16."""


@dataclass(frozen=True)
class Device:
    """What a solver needs of an array library. Tests put numpy and a host build of ``step.cu`` in its place.

    Attributes
    ----------
    xp : module
        ``cupy``.
    csr_matrix : callable
        ``cupyx.scipy.sparse.csr_matrix``.
    launch : callable
        ``launch(kernel name, grid, block, arguments)``, arguments being arrays and numpy scalars.
    to_host : callable
        ``cupy.asnumpy``.
    free_bytes : callable
        How much device memory can still be taken.
    """

    xp: Any
    csr_matrix: Callable[..., Any]
    launch: Callable[[str, tuple[int, int], tuple[int, int], tuple[Any, ...]], None]
    to_host: Callable[[Any], NDArray]
    free_bytes: Callable[[], int]


def unavailable() -> str | None:
    """Return why CuPy cannot be used on this machine, with what to do about it, or ``None``."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed. Run: {INSTALL}"
    except ImportError as error:
        return f"CuPy is installed but cannot be loaded ({error}). Run: {INSTALL}"
    return _device_problem(cupy) or _compiler_problem(cupy)


def _device_problem(cupy: ModuleType) -> str | None:
    runtime = cupy.cuda.runtime
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return "there is no NVIDIA driver, hence no CUDA device"
    try:
        if runtime.getDeviceCount() > 0:
            return None
    except runtime.CUDARuntimeError as error:
        if driver // 1000 < needed // 1000:
            return (
                f"the NVIDIA driver supports CUDA {_version(driver)}, which is too old for CuPy's CUDA "
                f"{_version(needed)}. Update the driver, or run: {INSTALL}"
            )
        return f"CUDA reports: {error}"
    return "no CUDA device is visible; see CUDA_VISIBLE_DEVICES"


def _compiler_problem(cupy: ModuleType) -> str | None:
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        return f"CuPy finds no CUDA compiler, NVRTC ({error}). Run: {INSTALL}"
    return None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@functools.cache
def cuda_device() -> Device:
    """Return the current CUDA device, with the kernels compiled for it.

    Raises
    ------
    KernelError
        If there is none; the message says why.
    """
    reason = unavailable()
    if reason is not None:
        raise KernelError(f"CuPy cannot be used here: {reason}")
    import cupy
    import cupyx.scipy.sparse

    module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)

    def launch(name: str, grid: tuple[int, int], block: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        module.get_function(name)(grid, block, arguments)

    def free_bytes() -> int:
        return int(cupy.cuda.runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())

    return Device(cupy, cupyx.scipy.sparse.csr_matrix, launch, cupy.asnumpy, free_bytes)


def solve(
    graph: Graph, restart: ArrayLike, damping: float = 0.5, tolerance: float = 1e-6, max_iterations: int = 200
) -> PPRResult:
    """Solve Personalized PageRank for a block of restart vectors; see :meth:`Solver.solve`."""
    return Solver(graph).solve(restart, damping, tolerance, max_iterations)


def solve_float16(
    graph: Graph,
    restart: ArrayLike,
    damping: float = 0.5,
    tolerance: float | None = None,
    max_iterations: int = 200,
) -> PPRResult:
    """Solve Personalized PageRank with blocks stored as float16; see :meth:`Solver.solve`."""
    return Solver(graph, "float16").solve(restart, damping, tolerance, max_iterations)


def propagate(
    graph: Graph,
    restart: NDArray[np.float32],
    first_node: int,
    damping: float = 0.5,
    tolerance: float = 1e-6,
    max_iterations: int = 200,
) -> PPRResult:
    """Apply the linear operator to a block of any sign; see :meth:`Solver.propagate`.

    For several blocks over one graph make one :class:`Solver`: it sends the graph to the device once.
    """
    return Solver(graph).propagate(restart, first_node, damping, tolerance, max_iterations)


class Solver:
    """A graph on a device, for solving any number of blocks over it.

    Columns are solved in as many blocks as device memory asks for; their values do not depend on that.

    Parameters
    ----------
    graph : Graph
        Fewer than 2**31 nodes; with ``spmm`` also fewer than 2**31 stored edges.
    storage : {"float32", "float16"}
        What blocks are stored as. Sums are float32 either way.
    method : {"fused", "spmm"}
        ``spmm`` stores float32 only.
    memory_bytes : int, optional
        Device memory to use, graph included; by default nine tenths of what is free.
    device : Device, optional
        By default the current CUDA device.

    Raises
    ------
    KernelError
        If there is no device, or not even one column fits the memory.
    """

    def __init__(
        self,
        graph: Graph,
        storage: Storage = "float32",
        method: Method = "fused",
        memory_bytes: int | None = None,
        device: Device | None = None,
    ) -> None:
        _check_kind(graph, storage, method)
        self.graph, self.storage, self.method = graph, storage, method
        self.device = cuda_device() if device is None else device
        budget = int(USED_SHARE * self.device.free_bytes()) if memory_bytes is None else memory_bytes
        self.width = block_width(graph, budget, storage, method)
        xp = self.device.xp
        indices, cells = xp.asarray(graph.indices), xp.asarray(graph.transition)
        if method == "spmm":
            ends = xp.asarray(graph.indptr.astype(np.int32))
            self._matrix = self.device.csr_matrix((cells, indices, ends), shape=(graph.n_nodes,) * 2)
        else:
            self._csr = xp.asarray(graph.indptr), indices, cells
            self._first, self._begins, self._ends = (xp.asarray(part) for part in segments(graph.indptr))

    def solve(
        self,
        restart: ArrayLike,
        damping: float = 0.5,
        tolerance: float | None = None,
        max_iterations: int = 200,
    ) -> PPRResult:
        """Solve Personalized PageRank, as :func:`hippoindex.kernels.ppr.power.power` does.

        Parameters
        ----------
        restart : array_like, shape (N, B)
            Not negative, finite, every column with a positive sum.
        damping : float
        tolerance : float, optional
            L1 error to reach; by default 1e-6, or what rounding to float16 is sure to allow.
        max_iterations : int

        Returns
        -------
        PPRResult
            float32 scores, in host memory.

        Raises
        ------
        KernelError
            If the restart or the damping is not as described, or the tolerance is below float16's rounding.
        """
        graph = self.graph
        s = normalised_restart(graph, restart, damping, np.float32)  # (N, B)
        factor = return_factor(s[graph.isolated].sum(axis=0, dtype=np.float64), damping)  # (B,)
        tolerance, rounding = self._goal(tolerance, damping)
        # walks that are lost shrink a column's norm to 1 / factor, and its rounding with it
        x, bound, iterations = self._columns(
            s, 0, damping, (tolerance - rounding) / factor, np.ones_like(factor), max_iterations
        )
        x *= factor.astype(np.float32)
        residual = bound * factor + rounding
        return PPRResult(x, residual, iterations, residual <= tolerance)

    def propagate(
        self,
        restart: NDArray[np.float32],
        first_node: int,
        damping: float = 0.5,
        tolerance: float | None = None,
        max_iterations: int = 200,
    ) -> PPRResult:
        """Apply the linear operator, as :func:`hippoindex.kernels.ppr.power.propagate` does.

        Parameters
        ----------
        restart : ndarray of float32, shape (M, B)
            Rows of the nodes ``first_node .. first_node + M - 1``, of any sign; all other nodes have 0.
        first_node : int
        damping : float
        tolerance : float, optional
            L1 error to reach, as a share of each column's L1 norm; the default is :meth:`solve`'s.
        max_iterations : int

        Returns
        -------
        PPRResult
            float32 values of all nodes, in host memory; residuals are shares of the columns' L1 norms.

        Raises
        ------
        KernelError
            As :meth:`solve`.
        """
        check_block(self.graph, restart, first_node, damping)
        tolerance, rounding = self._goal(tolerance, damping)
        norm = np.abs(restart).sum(axis=0, dtype=np.float64)
        x, bound, iterations = self._columns(
            restart, first_node, damping, (tolerance - rounding) * norm, norm, max_iterations
        )
        residual = np.divide(bound, norm, out=np.zeros_like(bound), where=norm > 0) + rounding
        return PPRResult(x, residual, iterations, residual <= tolerance)

    def change(self, x: NDArray[np.float32], restart: NDArray[np.float32], damping: float) -> NDArray:
        """Return the L1 change that one step makes to each column of ``x``, shape (B,).

        Divided by ``1 - damping`` it bounds the L1 error of ``x``, whatever ``x`` is. Both are (N, B); mass
        that walks lose on isolated nodes is not returned.
        """
        changes = np.empty(x.shape[1])
        for part in self._blocks(x.shape[1]):
            start, s = self._store(x[:, part], 0), self._upload(restart[:, part])
            step = self.step(s, 0, damping)
            changes[part] = step(start, self.device.xp.empty_like(start), np.ones(x.shape[1], bool)[part])
        return changes

    def step(self, restart: Any, first_node: int, damping: float) -> Step:
        """Return the step for :func:`hippoindex.kernels.ppr.power.iterate`, of arrays on the device."""
        if self.method == "spmm":
            return self._spmm_step(restart, first_node, damping)
        return self._fused_step(restart, first_node, damping)

    def _goal(self, tolerance: float | None, damping: float) -> tuple[float, float]:
        """Return the tolerance and the share of it that rounding of the result takes."""
        if self.storage == "float32":
            return (1e-6 if tolerance is None else tolerance), 0.0
        rounding = rounding_share(self.graph.n_nodes, damping)
        if tolerance is None:
            return float16_tolerance(self.graph.n_nodes, damping), rounding
        if tolerance <= rounding:
            raise KernelError(
                f"float16 storage alone may be off by {rounding:.1e} in L1; a tolerance of {tolerance} needs "
                "float32 storage"
            )
        return tolerance, rounding

    def _columns(
        self,
        restart: NDArray[np.float32],
        first_node: int,
        damping: float,
        limit: NDArray[np.float64],
        norm: NDArray[np.float64],
        max_iterations: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.int64]]:
        """Iterate all columns, a block at a time, until each changes by no more than ``limit`` allows."""
        columns = restart.shape[1]
        x = np.empty((self.graph.n_nodes, columns), dtype=np.float32)
        bound, iterations = np.empty(columns), np.empty(columns, dtype=np.int64)
        scale = column_scales(norm) if self.storage == "float16" else np.ones(columns, dtype=np.float32)
        for part in self._blocks(columns):
            s = self._upload(restart[:, part])
            s *= self.device.xp.asarray(scale[part])
            start = self._store(s, first_node)
            block, bound[part], iterations[part] = iterate(
                self.step(s, first_node, damping),
                start,
                self.device.xp.empty_like(start),
                damping,
                limit[part] * scale[part],
                max_iterations,
            )
            x[:, part] = self.device.to_host(block)
            x[:, part] /= scale[part]
        return x, bound / scale, iterations

    def _blocks(self, columns: int) -> list[slice]:
        return [slice(start, start + self.width) for start in range(0, columns, self.width)]

    def _upload(self, block: NDArray[np.float32]) -> Any:
        return self.device.xp.asarray(np.array(block, dtype=np.float32, order=self._order))

    def _store(self, values: Any, first_node: int) -> Any:
        """Return a block of all nodes with the given rows, in the storage's dtype, on the device."""
        shape = self.graph.n_nodes, values.shape[1]
        block = self.device.xp.zeros(shape, dtype=self.storage, order=self._order)
        block[first_node : first_node + len(values)] = self.device.xp.asarray(values)
        return block

    @property
    def _order(self) -> Literal["C", "F"]:
        return "F" if self.method == "spmm" else "C"  # cuSPARSE through CuPy takes columns

    def _spmm_step(self, restart: Any, first_node: int, damping: float) -> Step:
        xp, matrix = self.device.xp, self._matrix
        added = np.float32(1 - damping) * restart
        rows = slice(first_node, first_node + len(restart))

        def step(x: Any, y: Any, active: NDArray[np.bool_]) -> NDArray[np.float64]:
            product = matrix @ x
            product *= np.float32(damping)
            product[rows] += added
            if not active.all():
                left = xp.asarray(np.flatnonzero(~active))
                product[:, left] = x[:, left]
            xp.subtract(product, x, out=y)
            change = xp.abs(y, out=y).sum(axis=0, dtype=np.float64)
            y[...] = product
            return self.device.to_host(change)

        return step

    def _fused_step(self, restart: Any, first_node: int, damping: float) -> Step:
        xp, launch = self.device.xp, self.device.launch
        indptr, indices, cells = self._csr
        n, width, n_segments = self.graph.n_nodes, restart.shape[1], len(self._begins)
        chunks = -(-n // CHUNK_ROWS)
        sums = xp.empty((n_segments, width), dtype=np.float32)
        changes = xp.empty((chunks, width), dtype=np.float64)
        n_restart = np.int64(len(restart))

        def step(x: Any, y: Any, active: NDArray[np.bool_]) -> NDArray[np.float64]:
            if n_segments:
                arguments = np.int64(n_segments), np.int64(width), self._begins, self._ends, indices, cells
                launch(f"segments_{self.storage}", *launch_shape(n_segments, width), (*arguments, x, sums))
            sizes = np.int64(n), np.int64(width), np.int64(CHUNK_ROWS)
            edges = indptr, indices, cells, self._first, sums
            added = restart, np.int64(first_node), n_restart, np.float32(damping)
            flags = xp.asarray(active.astype(np.uint8))
            blocks = flags, x, y, changes
            launch(f"step_{self.storage}", *launch_shape(chunks, width), (*sizes, *edges, *added, *blocks))
            return self.device.to_host(changes.sum(axis=0))

        return step


def block_width(
    graph: Graph, memory_bytes: int, storage: Storage = "float32", method: Method = "fused"
) -> int:
    """Return how many columns over a graph fit device memory at once, the graph included.

    Parameters
    ----------
    graph : Graph
    memory_bytes : int
    storage : {"float32", "float16"}
    method : {"fused", "spmm"}

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    KernelError
        If not even one column fits; the message says how much is needed.
    """
    n = graph.n_nodes
    cut = int(segments(graph.indptr)[0][-1])
    if method == "spmm":
        fixed = 4 * (n + 1) + 8 * len(graph.indices)
        column = 5 * 4 * n  # restart, its share per step, current, next, product
    else:
        fixed = 12 * (n + 1) + 8 * len(graph.indices) + 16 * cut
        cell = np.dtype(storage).itemsize
        column = (4 + 2 * cell) * n + 4 * cut + 8 * -(-n // CHUNK_ROWS)
    width = (memory_bytes - fixed) // max(column, 1)
    if width < 1:
        raise KernelError(
            f"PPR on the device needs {fixed} bytes for a graph of {n} nodes and {graph.n_edges} edges and "
            f"{column} for one column; the budget is {memory_bytes}"
        )
    return int(width)


def segments(indptr: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows of more than ``SEGMENT_EDGES`` stored edges into segments of at most that many.

    Returns
    -------
    first : ndarray of int32, shape (N + 1,)
        Row r has the segments ``first[r] .. first[r + 1] - 1``; a short row has none.
    begins, ends : ndarray of int64, shape (S,)
        Stored edges of each segment.
    """
    lengths = np.diff(indptr)
    pieces = np.where(lengths > SEGMENT_EDGES, -(-lengths // SEGMENT_EDGES), 0)
    first = np.zeros(len(indptr), dtype=np.int32)
    np.cumsum(pieces, out=first[1:])
    rows = np.repeat(np.arange(len(lengths)), pieces)
    begins = indptr[rows] + SEGMENT_EDGES * (np.arange(len(rows)) - first[rows])
    return first, begins, np.minimum(begins + SEGMENT_EDGES, indptr[rows + 1])


def launch_shape(items: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return grid and block of a kernel with one thread per item and column, columns along the warp."""
    across = min(32, 1 << (width - 1).bit_length())
    down = BLOCK_THREADS // across
    return (-(-items // down), -(-width // across)), (across, down)


def column_scales(norm: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return for each column the power of two that takes its L1 norm just to :data:`LARGEST`, or 1 for 0."""
    exponent = np.floor(np.log2(LARGEST / np.where(norm > 0, norm, LARGEST)))
    return np.exp2(exponent).astype(np.float32)


def rounding_share(n_nodes: int, damping: float) -> float:
    """Return a bound of what storing a column as float16 changes in it, as a share of its L1 norm.

    The relative error of normal numbers, and half the distance of subnormal ones for every node.
    """
    return UNIT_ROUNDOFF + n_nodes * 2.0**-25 / (LARGEST / 2) / (1 - damping)


def float16_tolerance(n_nodes: int, damping: float) -> float:
    r"""Return the L1 error that iterates stored as float16 are sure to come below.

    With :math:`u` from :func:`rounding_share`, changes obey :math:`c_{k+1} \le d (c_k + u) + u`, so they fall
    to :math:`u (1 + d) / (1 - d)` at most; the error is :math:`d / (1 - d)` times that, and :math:`u` for
    storing the result. An eighth is added so that it is reached in few steps.
    """
    share = rounding_share(n_nodes, damping)
    return 1.125 * share * (1 + damping * (1 + damping) / (1 - damping) ** 2)


def _check_kind(graph: Graph, storage: str, method: str) -> None:
    if storage not in ("float32", "float16") or method not in ("fused", "spmm"):
        raise KernelError(f"There is no storage {storage!r} with method {method!r}")
    if method == "spmm" and storage != "float32":
        raise KernelError("Method 'spmm' stores float32; float16 needs 'fused'")
    if graph.indices.dtype != np.int32:
        raise KernelError(f"The graph's indices are {graph.indices.dtype}; on a device they are int32")
    if method == "spmm" and len(graph.indices) > INT32_MAX:
        raise KernelError(f"Method 'spmm' takes {INT32_MAX} stored edges, not {len(graph.indices)}")
