r"""Personalized PageRank by RAPIDS cuGraph, one restart vector a call: it has no batched call.

What :func:`pylibcugraph.personalized_pagerank` (26.10) does, and what is done about it here:

- It scales the personalization to sum 1, and returns the mass of nodes without outgoing weight to it, as the
  specification has it. Nodes without edges are unknown to a graph made of edges, though, so the walk from
  isolated nodes is solved in closed form: with the share :math:`m` of the restart :math:`s` on them,

  .. math:: x = \frac{(1 - m) \, PPR(s_{rest} / (1 - m)) + (1 - d) \, s_{isolated}}{1 - d m}

- It starts from 1 / N and stops when an iterate changes by less than ``epsilon`` in L1; the error is then
  below ``epsilon d / (1 - d)``. It gets half of what the tolerance allows, for its sums are float32.
- Its flag says "not converged" where the last allowed iteration converged, and it reports no number of
  iterations. So the flag is not used: one step of our own measures the residual of what it returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import cupy_backend
from hippoindex.kernels.ppr.cupy_backend import Device, Solver, cuda_device
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.restart import normalised_restart, return_factor
from hippoindex.kernels.ppr.result import PPRResult

INSTALL = "pip install 'hippoindex[cugraph]' (CUDA 13) or pip install pylibcugraph-cu12 (CUDA 12)"
NOT_REPORTED = -1


def unavailable() -> str | None:
    """Return why cuGraph cannot be used on this machine, with what to do about it, or ``None``."""
    try:
        import pylibcugraph  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed. Run: {INSTALL}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"pylibcugraph is installed but cannot be loaded ({error}). Run: {INSTALL}"
    return cupy_backend.unavailable()


def solve(
    graph: Graph,
    restart: ArrayLike,
    damping: float = 0.5,
    tolerance: float = 1e-6,
    max_iterations: int = 200,
    *,
    library: Any = None,
    device: Device | None = None,
) -> PPRResult:
    """Solve Personalized PageRank for restart vectors, one after the other.

    Parameters
    ----------
    graph : Graph
        Fewer than 2**31 nodes.
    restart : array_like, shape (N, B)
        Not negative, finite, every column with a positive sum.
    damping : float
    tolerance : float
        L1 error to reach.
    max_iterations : int
    library : module, optional
        By default ``pylibcugraph``.
    device : Device, optional
        By default the current CUDA device.

    Returns
    -------
    PPRResult
        float32 scores, in host memory. The residual is measured, at most the L1 change of one more step
        divided by ``1 - damping``; ``iterations`` is -1, as the library does not report them.

    Raises
    ------
    KernelError
        If the restart or the damping is not as described, or cuGraph cannot be used.
    """
    library = _library() if library is None else library
    device = cuda_device() if device is None else device
    s = normalised_restart(graph, restart, damping, np.float32)  # (N, B)
    mass = s[graph.isolated].sum(axis=0, dtype=np.float64)  # (B,)
    x = np.zeros_like(s)
    x[graph.isolated] = np.float32(1 - damping) * s[graph.isolated]
    call = _Call(graph, library, device)
    epsilon = tolerance * (1 - damping) / damping / 2
    for column in range(s.shape[1]):
        seeds = np.flatnonzero((s[:, column] > 0) & (graph.degrees > 0))
        if len(seeds):
            nodes, scores = call(seeds, s[seeds, column], damping, epsilon, max_iterations)
            x[nodes, column] += np.float32(1 - mass[column]) * scores
    factor = return_factor(mass, damping)
    # x so far is the solution that loses the mass of isolated nodes, as the step does
    residual = factor / (1 - damping) * Solver(graph, device=device).change(x, s, damping)
    x *= factor.astype(np.float32)
    iterations = np.full(s.shape[1], NOT_REPORTED, dtype=np.int64)
    return PPRResult(x, residual, iterations, residual <= tolerance)


def _library() -> Any:
    reason = unavailable()
    if reason is not None:
        raise KernelError(f"cuGraph cannot be used here: {reason}")
    import pylibcugraph

    return pylibcugraph


class _Call:
    """A graph in cuGraph's form, and the call for one vector over it."""

    def __init__(self, graph: Graph, library: Any, device: Device) -> None:
        self._library, self._device = library, device
        if not len(graph.indices):
            return
        xp = device.xp
        sources = np.repeat(np.arange(graph.n_nodes, dtype=np.int32), np.diff(graph.indptr))
        self._handle = library.ResourceHandle()
        self._graph = library.SGGraph(
            self._handle,
            library.GraphProperties(is_symmetric=True, is_multigraph=False),
            xp.asarray(sources),
            xp.asarray(graph.indices),
            weight_array=xp.asarray(graph.weights),
            store_transposed=True,
            renumber=True,
            do_expensive_check=False,
        )

    def __call__(
        self,
        seeds: NDArray[np.int64],
        weights: NDArray[np.float32],
        damping: float,
        epsilon: float,
        max_iterations: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the nodes that have edges, and their scores."""
        xp, to_host = self._device.xp, self._device.to_host
        nodes, scores, _ = self._library.personalized_pagerank(
            resource_handle=self._handle,
            graph=self._graph,
            precomputed_vertex_out_weight_vertices=None,
            precomputed_vertex_out_weight_sums=None,
            initial_guess_vertices=None,
            initial_guess_values=None,
            personalization_vertices=xp.asarray(seeds.astype(np.int32)),
            personalization_values=xp.asarray(weights),
            alpha=damping,
            epsilon=epsilon,
            max_iterations=max_iterations,
            do_expensive_check=False,
            fail_on_nonconvergence=False,
        )
        return to_host(nodes), to_host(scores)
