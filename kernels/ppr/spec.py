"""The specification of Personalized PageRank and its backends."""

from __future__ import annotations

import numpy as np

from hippoindex.errors import KernelError
from hippoindex.kernels.ppr import cugraph_backend, cupy_backend
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.power import power
from hippoindex.kernels.ppr.push import push_columns
from hippoindex.kernels.ppr.reference import reference
from hippoindex.kernels.ppr.result import PPRResult
from hippoindex.kernels.spec import Backend, Inputs, KernelSpec, add_spec

TOLERANCE = {"float32": 2e-6, "float64": 1e-11}
"""Largest L1 distance of a column to the reference, per dtype of the scores."""


def generate(rng: np.random.Generator, size: int) -> Inputs:
    """Return a random graph of ``size`` nodes with heavy-tailed degrees, some isolated, and 5 restarts."""
    n = max(size, 2)
    edges = int(rng.integers(0, 6 * n))
    popular = (n * rng.random(edges) ** 3).astype(np.int64)
    weights = rng.choice([1.0, 2.0, 0.8, 0.95], size=edges)
    graph = Graph.from_edges(n, popular, rng.integers(0, n, edges), weights)
    restart = rng.random((n, 5)) * (rng.random((n, 5)) < rng.random())
    restart[rng.integers(0, n, 5), np.arange(5)] += 1.0
    return {"graph": graph, "restart": restart, "damping": float(rng.uniform(0.1, 0.7))}


def check(result: PPRResult, expected: PPRResult, inputs: Inputs) -> None:
    """Compare scores in L1 and the solver's claims with each other."""
    distance = np.abs(result.scores.astype(np.float64) - expected.scores).sum(axis=0)
    allowed = TOLERANCE[result.scores.dtype.name] + result.residual
    if not np.all(distance <= allowed):
        raise KernelError(f"PPR is off by {distance.max():.2e} in L1, allowed {allowed.min():.2e}")
    if not np.all(result.converged):
        raise KernelError(f"PPR did not converge: residual {result.residual.max():.2e}")
    if inputs["restart"].shape[1] != len(result.iterations):
        raise KernelError("PPR must report its iterations for every column")


spec = add_spec(
    KernelSpec(
        name="ppr",
        axes={"N": "nodes", "E": "stored edges, two per undirected edge", "B": "restart vectors in a block"},
        inputs={
            "graph": "Graph of N nodes",
            "restart": "(N, B) float, not negative, column sums > 0",
            "damping": "probability of continuing",
            "tolerance": "L1 error at which to stop",
            "max_iterations": "int",
        },
        outputs={"result": "PPRResult: scores (N, B), residual, iterations, converged (B,)"},
        reference=reference,
        generate=generate,
        check=check,
    )
)
spec.register(Backend("reference", reference))
spec.register(Backend("power", power))
spec.register(Backend("push", push_columns))
spec.register(Backend("cupy", cupy_backend.solve, cupy_backend.unavailable))
spec.register(Backend("cupy-float16", cupy_backend.solve_float16, cupy_backend.unavailable))
spec.register(Backend("cugraph", cugraph_backend.solve, cugraph_backend.unavailable))
