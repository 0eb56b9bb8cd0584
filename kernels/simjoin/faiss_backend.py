r"""The exact join by the nearest neighbours that faiss finds on GPUs.

faiss has no range search on a GPU, only k nearest neighbours with :math:`k \le 2048`, and its float32
products are off by up to :func:`~hippoindex.kernels.simjoin.cupy_backend.margin`. Yet what a node keeps can
be proven: with :math:`m` the margin and :math:`v` the k-th product, no node that was not returned has a
cosine above :math:`v + m`. So all that the node may keep was returned if :math:`v + m` is below the
threshold, or below the float64 cosine of the last neighbour that the cap lets it keep. Where neither holds, k
is doubled; where neither holds at 2048, because the cap is nearly that high or because so many neighbours are
within the margin of the last one kept, an error names the row.

Each GPU holds all vectors in float32 and answers its share of the queries. faiss tells cuBLAS not to reduce
precision; the margin holds unless ``NVIDIA_TF32_OVERRIDE=1`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin.cupy_backend import margin
from hippoindex.kernels.simjoin.duplicates import Found, cosines, distinct
from hippoindex.kernels.simjoin.problem import MEMORY_BYTES, Problem, Progress, pose
from hippoindex.kernels.simjoin.reference import Pairs
from hippoindex.kernels.simjoin.threads import n_threads

LIMIT = 2048
"""Most neighbours that faiss returns on a GPU."""
SPARE_NEIGHBORS = 27
"""Neighbours asked for beyond the cap and the node itself, so that ties seldom need another search."""
QUERY_ROWS = 4096

INSTALL = "pip install 'hippoindex[faiss-gpu]' (CUDA 12)"

Search = Callable[[NDArray[np.float32], int], tuple[NDArray[np.float32], NDArray[np.int64]]]


@dataclass(frozen=True)
class Devices:
    """What the join needs of faiss. Tests put indexes on the host here.

    Attributes
    ----------
    count : int
        GPUs.
    make_index : callable
        ``make_index(number of the GPU, dimension)`` returns an empty index of inner products, with faiss's
        ``add`` and ``search``. Different indexes are used by different threads at once.
    """

    count: int
    make_index: Callable[[int, int], Any]


def unavailable() -> str | None:
    """Return why faiss cannot be used on GPUs of this machine, with what to do about it, or ``None``."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed. Run: {INSTALL}"
    except (ImportError, OSError) as error:
        return f"faiss is installed but cannot be loaded ({error}). Run: {INSTALL}"
    if not hasattr(faiss, "StandardGpuResources"):
        return (
            "the faiss that is installed has no GPU code: it is faiss-cpu, which the extra 'bench' brings "
            "and which shares its module with faiss-gpu, so that only one of them can be installed. "
            f"Run: pip uninstall faiss-cpu faiss-gpu; {INSTALL}"
        )
    if faiss.get_num_gpus() == 0:
        return "faiss sees no CUDA device; see CUDA_VISIBLE_DEVICES and the NVIDIA driver"
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        return "NVIDIA_TF32_OVERRIDE=1 makes products less precise than the join allows for; unset it"
    return None


def gpu_devices() -> Devices:
    """Return all GPUs that faiss sees.

    Raises
    ------
    KernelError
        If there are none; the message says why.
    """
    reason = unavailable()
    if reason is not None:
        raise KernelError(f"faiss cannot be used on a GPU here: {reason}")
    import faiss

    def make_index(number: int, dimension: int) -> Any:
        config = faiss.GpuIndexFlatConfig()
        config.device = number
        config.use_cuvs = False  # whose arithmetic is another
        return faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), dimension, config)

    return Devices(faiss.get_num_gpus(), make_index)


def exact(
    vectors: ArrayLike,
    threshold: float = 0.8,
    max_neighbors: int = 100,
    searches: ArrayLike | None = None,
    *,
    devices: Devices | None = None,
    on_progress: Progress | None = None,
) -> Pairs:
    """Return all pairs with cosine >= threshold that survive the per-node cap.

    Result as of :func:`hippoindex.kernels.simjoin.reference.reference`.

    Parameters
    ----------
    vectors : array_like, shape (N, d)
        L2-normalised rows; float16, float32 or float64. A float32 copy goes to every GPU.
    threshold, max_neighbors, searches
        See the reference. With a cap of 2047 or more, a node with more neighbours than that cannot be
        answered.
    devices : Devices, optional
        By default all GPUs that faiss sees.
    on_progress : callable, optional
        Called with the share of the work done, 0 to 1.

    Returns
    -------
    Pairs

    Raises
    ------
    KernelError
        If the arguments are not as described, faiss sees no GPU, the vectors do not fit a GPU, or what a row
        keeps cannot be proven with 2048 neighbours; the message names the row.
    """
    problem = pose(vectors, threshold, max_neighbors, searches, None, None, MEMORY_BYTES)
    devices = gpu_devices() if devices is None else devices
    asking = np.flatnonzero(problem.node_searches())
    if len(asking) == 0:
        none = np.empty(0, np.int64)
        return problem.finish((none, none, np.empty(0)))
    x = np.ascontiguousarray(problem.x[problem.groups.first_row], dtype=np.float32)
    return problem.finish(_by_neighbors(problem, x, asking, _indexes(x, devices), on_progress))


def _indexes(x: NDArray[np.float32], devices: Devices) -> list[Any]:
    indexes = []
    for number in range(devices.count):
        try:
            index = devices.make_index(number, x.shape[1])
            index.add(x)
        except RuntimeError as error:
            raise KernelError(
                f"faiss could not put {len(x)} vectors of dimension {x.shape[1]} ({x.nbytes} bytes) on GPU "
                f"{number}: {error}. The backend 'cupy' sends vectors in blocks"
            ) from error
        indexes.append(index)
    return indexes


def _by_neighbors(
    problem: Problem,
    x: NDArray[np.float32],
    asking: NDArray[np.int64],
    indexes: list[Any],
    on_progress: Progress | None,
) -> Found:
    """Return the pairs that the asking nodes keep; an index is used by one thread at a time."""
    idle: SimpleQueue[Any] = SimpleQueue()
    for index in indexes:
        idle.put(index)

    def search(queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        index = idle.get()
        try:
            return index.search(queries, k)
        finally:
            idle.put(index)

    def task(start: int) -> list[Found]:
        return _neighbors(problem, x, asking[start : start + QUERY_ROWS], search)

    found: list[Found] = []
    with ThreadPoolExecutor(len(indexes) + n_threads()) as pool:
        try:
            starts = range(0, len(asking), QUERY_ROWS)
            for start, part in zip(starts, pool.map(task, starts), strict=True):
                found += part
                if on_progress is not None:
                    on_progress(min(start + QUERY_ROWS, len(asking)) / len(asking))
        finally:
            pool.shutdown(cancel_futures=True)
    first, second, cosine = (np.concatenate(column) for column in zip(*found, strict=True))
    return distinct(first, second, cosine, problem.n_nodes)


def _neighbors(
    problem: Problem, x: NDArray[np.float32], nodes: NDArray[np.int64], search: Search
) -> list[Found]:
    """Return the pairs that some nodes keep, asking for more neighbours until they are proven."""
    m = margin(problem.x.dtype, "float32", x.shape[1])
    most = min(problem.n_nodes, LIMIT)
    k = min(problem.max_neighbors + 1 + SPARE_NEIGHBORS, most)
    found = []
    while len(nodes):
        products, others = search(x[nodes], k)
        query, other, cosine, worst = _kept(problem, nodes, products, others, m)
        beyond = products[:, -1].astype(np.float64) + m  # what was not returned has no cosine above
        proven = (beyond < np.maximum(worst, problem.threshold)) | (k == problem.n_nodes)
        sure = proven[query]
        node, other = nodes[query[sure]], other[sure]
        found.append((np.minimum(node, other), np.maximum(node, other), cosine[sure]))
        nodes = nodes[~proven]
        if len(nodes) and k == most:
            row = problem.groups.first_row[nodes[0]]
            raise KernelError(
                f"Row {row} has so many neighbours above the threshold, or so close to the last of its "
                f"{problem.max_neighbors}, that {most} do not show which it keeps, and faiss returns no more "
                f"on a GPU ({len(nodes)} such rows in this block). Use the backend 'cupy' or 'exact'"
            )
        k = min(2 * k, most)
    return found


def _kept(
    problem: Problem,
    nodes: NDArray[np.int64],
    products: NDArray[np.float32],
    others: NDArray[np.int64],
    m: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Recheck the neighbours of some nodes in float64 and apply the cap.

    Parameters
    ----------
    nodes : ndarray of int64, shape (Q,)
    products : ndarray of float32, shape (Q, k)
    others : ndarray of int64, shape (Q, k)
        Nodes that were returned; negative where there are none.
    m : float
        How far a product can be from the cosine.

    Returns
    -------
    query, other : ndarray of int64, shape (P,)
        Positions in ``nodes``, ascending, and the neighbours that these keep.
    cosine : ndarray of float64, shape (P,)
    worst : ndarray of float64, shape (Q,)
        Least cosine kept by a node that keeps as many as the cap lets it; minus infinity for the others.
    """
    near = (others >= 0) & (others != nodes[:, None]) & (products >= problem.threshold - m)
    query, place = np.nonzero(near)
    other = others[query, place]
    cosine = cosines(problem.x, nodes[query], other, problem.groups.first_row)
    above = cosine >= problem.threshold
    query, other, cosine = query[above], other[above], cosine[above]
    order = np.lexsort((other, -cosine, query))
    query, other, cosine = query[order], other[order], cosine[order]
    rank = np.arange(len(query)) - np.searchsorted(query, query)
    worst = np.full(len(nodes), -np.inf)
    last = rank == problem.max_neighbors - 1
    worst[query[last]] = cosine[last]
    kept = rank < problem.max_neighbors
    return query[kept], other[kept], cosine[kept], worst
