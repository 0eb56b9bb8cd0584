r"""Short vectors whose products bound cosines from above, so that most pairs are never looked at in full.

With the rows of an orthogonal matrix split into the first m and the rest, a unit vector is
:math:`x = (x_1, x_2)`, and by Cauchy and Schwarz

.. math:: \langle x, y \rangle \le \langle x_1, y_1 \rangle + \|x_2\| \|y_2\|,

which is the product of the sketches :math:`(x_1, \|x_2\|)`. The bound is tight if the m axes hold most of the
vectors' energy: they are the principal axes of a sample (as in Teflioudi et al., "LEMP", SIGMOD 2015, and Li
et al., "FEXIPRO", SIGMOD 2017). A join by sketches is exact; only its speed depends on the sample.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.simjoin.threads import in_threads, one_blas_thread
from hippoindex.kernels.simjoin.tile import dot

BLOCK_ROWS = 2048
SAMPLE_ROWS = 4096
ASKING_ROWS = 512
ROUNDING = 1e-6
MAIN_ENERGY = 0.6
MOST_OF_DIMENSION = 0.75
RANKS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)

# Costs in multiplications of a GEMM that take as long, measured on a machine with AVX-512
SCAN_COST = 40.0  # to fetch sketches and scan, per bound
RECHECK_COST = 5_000.0  # to fetch two rows from memory
RECHECK_COST_PER_DIMENSION = 12.0
NODE_COST = 300_000.0  # to check, group and sketch one node


@dataclass(frozen=True)
class Sketch:
    """Sketches of vectors.

    Attributes
    ----------
    values : ndarray, shape (N, m + 1), or the vectors themselves, shape (M, d), if nothing shorter pays
    rank : int
        m, or d.
    main_rank : int
        Leading axes that hold most of the energy; k-means looks at these.
    rows : ndarray of int64, shape (N,), or None
        Rows of ``values`` of the nodes, if they are not in order.
    """

    values: NDArray[np.floating]
    rank: int
    main_rank: int
    rows: NDArray[np.int64] | None = None

    def take(self, nodes: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return the sketches of nodes."""
        chosen = nodes if self.rows is None else self.rows[nodes]
        return np.ascontiguousarray(self.values[chosen], dtype=np.float32)

    def main(self, nodes: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return the leading axes of nodes, L2-normalised, shape (len(nodes), main_rank)."""
        block = self.take(nodes)[:, : self.main_rank]
        norm = np.sqrt(np.einsum("ij,ij->i", block, block))[:, None]
        norm[norm == 0] = 1.0
        return block / norm


def whole(x: NDArray[np.floating], rows: NDArray[np.int64]) -> Sketch:
    """Return the vectors themselves as their sketch; the bound is then the cosine."""
    in_order = len(rows) == len(x)  # rows ascend
    return Sketch(x, x.shape[1], x.shape[1], None if in_order else rows)


@dataclass(frozen=True, eq=False)
class Plan:
    """How to sketch vectors.

    Attributes
    ----------
    axes : ndarray of float32, shape (d, m), or None
        Principal axes of a sample; ``None`` if nothing shorter than the vectors pays.
    main_rank : int
        Leading axes that hold most of the energy.
    pair_cost : float
        Expected multiplications per pair of nodes.
    """

    axes: NDArray[np.float32] | None
    main_rank: int
    pair_cost: float


def plan(
    x: NDArray[np.floating],
    rows: NDArray[np.int64],
    threshold: float,
    share: float,
    rng: np.random.Generator,
) -> Plan:
    """Choose the rank that promises the fastest join.

    Parameters
    ----------
    x : ndarray, shape (M, d)
    rows : ndarray of int64, shape (N,)
        Ascending rows of ``x`` to be joined.
    threshold : float
    share : float
        Share of all pairs whose bounds the join will compute.
    rng : numpy.random.Generator
        Draws the sample.

    Returns
    -------
    Plan
    """
    d = x.shape[1]
    if len(rows) < SAMPLE_ROWS:
        return Plan(None, d, share * (d + SCAN_COST))
    sample = x[np.sort(rng.choice(rows, SAMPLE_ROWS, replace=False))].astype(np.float32)
    with one_blas_thread():
        energy, axes = np.linalg.eigh((sample.T @ sample).astype(np.float64))
        axes = np.ascontiguousarray(axes[:, ::-1], dtype=np.float32)
        rank, pair_cost = _fastest_rank(rng.permutation(sample) @ axes, threshold, share)
    if rank == d:
        return Plan(None, d, pair_cost)
    gathered = np.cumsum(energy[::-1]) / energy.sum()
    main_rank = min(rank, int(np.searchsorted(gathered, MAIN_ENERGY)) + 1)
    return Plan(np.ascontiguousarray(axes[:, :rank]), main_rank, pair_cost)


def build(x: NDArray[np.floating], rows: NDArray[np.int64], how: Plan, memory_bytes: int) -> Sketch:
    """Sketch the given ascending rows of ``x``; what exceeds the budget lies in a temporary file."""
    if how.axes is None:
        return whole(x, rows)
    rank = how.axes.shape[1]
    values = allocate((len(rows), rank + 1), np.float32, memory_bytes)
    in_order = len(rows) == len(x)
    axes = how.axes

    def task(_: None, start: int) -> None:
        part = slice(start, start + BLOCK_ROWS)
        block = np.asarray(x[part if in_order else rows[part]], np.float32)
        leading = block @ axes
        values[part, :rank] = leading
        values[part, rank] = _rest(block, leading)

    for _ in in_threads(lambda: None, task, range(0, len(rows), BLOCK_ROWS)):
        pass
    return Sketch(values, rank, how.main_rank)


def _rest(x: NDArray[np.float32], leading: NDArray[np.float32]) -> NDArray[np.float64]:
    """Norm of what the leading coordinates leave out, rounded up, shape (B,)."""
    square, of_leading = np.empty(len(x)), np.empty(len(x))
    squares(np.ascontiguousarray(x), square)
    squares(np.ascontiguousarray(leading), of_leading)
    return np.sqrt(np.maximum(square - of_leading, 0.0) + ROUNDING)


@numba.njit(nogil=True, cache=True)
def squares(x: Any, out: Any) -> None:
    """Write the squared norms of the rows of ``x``, shape (B, d), summed in float64."""
    for r in range(len(x)):
        out[r] = dot(x[r], x[r])


def _fastest_rank(turned: NDArray[np.float32], threshold: float, share: float) -> tuple[int, float]:
    """Weigh the cost of computing bounds against that of rechecking what they let through, on a sample.

    Returns
    -------
    rank : int
    cost : float
        Multiplications per pair of nodes.
    """
    d = turned.shape[1]
    recheck_cost = RECHECK_COST + RECHECK_COST_PER_DIMENSION * d
    best_rank, best_cost = d, share * (d + SCAN_COST)
    ask, answer = turned[:ASKING_ROWS], turned[ASKING_ROWS:]
    for rank in RANKS:
        floor = share * (rank + 1 + SCAN_COST)
        if rank > MOST_OF_DIMENSION * d or floor >= best_cost:
            break
        bound = ask[:, :rank] @ answer[:, :rank].T
        bound += np.outer(_rest(ask, ask[:, :rank]), _rest(answer, answer[:, :rank])).astype(np.float32)
        cost = floor + recheck_cost * np.count_nonzero(bound >= threshold) / bound.size
        if cost < best_cost:
            best_rank, best_cost = rank, cost
    return best_rank, float(best_cost)


def allocate(shape: tuple[int, int], dtype: type[np.floating], memory_bytes: int) -> NDArray[Any]:
    """Return an array in memory, or in an unnamed temporary file if it is larger than the budget."""
    if np.dtype(dtype).itemsize * shape[0] * shape[1] <= memory_bytes:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
