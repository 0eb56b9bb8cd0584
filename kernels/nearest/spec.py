"""The specification of the search for nearest rows and its backends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.nearest.codes import LEAST_CODED, NearestRows
from hippoindex.kernels.nearest.reference import Nearest, reference
from hippoindex.kernels.spec import Backend, Inputs, KernelSpec, add_spec

TOLERANCE = 1e-5
"""Largest difference of a product to the reference, relative to the norms of both vectors."""


def generate(rng: np.random.Generator, size: int) -> Inputs:
    """Return ``size`` clustered vectors of any length, some of them equal or zero, and a few queries."""
    n, d = int(rng.integers(0, max(size, 1) + 1)), int(rng.integers(1, 40))
    centres = rng.standard_normal((max(n // 8, 1), d))
    x = centres[rng.integers(0, len(centres), n)] + rng.uniform(0.01, 0.6) * rng.standard_normal((n, d))
    if rng.random() < 0.5:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    if n:
        x[rng.integers(0, n, n // 10)] = x[0]
        x[rng.integers(0, n, n // 20)] = 0
    queries = centres[rng.integers(0, len(centres), 9)] + 0.3 * rng.standard_normal((9, d))
    return {
        "vectors": x.astype(np.float16 if rng.random() < 0.5 else np.float32),
        "queries": queries[: rng.integers(0, 10)].astype(np.float32),
        "k": int(rng.integers(1, 12)),
    }


def check(result: Nearest, expected: Nearest, inputs: Inputs) -> None:
    """Demand rows whose products are the greatest up to rounding, in their order, and the least product."""
    x, q = (np.asarray(inputs[name], dtype=np.float64) for name in ("vectors", "queries"))
    allowed = TOLERANCE * np.linalg.norm(q, axis=1) * np.linalg.norm(x, axis=1).max(initial=1e-30)
    if result.rows.shape != expected.rows.shape:
        raise KernelError(f"nearest: rows of shape {result.rows.shape}, expected {expected.rows.shape}")
    if any(len(set(rows)) != len(rows) for rows in result.rows.tolist()):
        raise KernelError("nearest: a row is listed twice")
    true = np.einsum("qkd,qd->qk", x[result.rows], q)
    pairs = ((result.products, expected.products), (true, expected.products))
    for got, wanted in (*pairs, (result.least[:, None], expected.least[:, None])):
        if np.any(np.abs(got - wanted) > allowed[:, None]):
            raise KernelError("nearest: products differ from the reference")
    steps, equal = np.diff(result.rows, axis=1), np.diff(result.products, axis=1) == 0
    if np.any(np.diff(result.products, axis=1) > 0) or np.any(steps[equal] < 0):
        raise KernelError("nearest: not in order")


def by_codes(vectors: NDArray[np.floating], queries: NDArray[np.float32], k: int) -> Nearest:
    """Search with rounded rows, however few queries there are."""
    repeats = -(-LEAST_CODED // max(len(queries), 1))
    rows, products, least = NearestRows(vectors).find(np.tile(queries, (repeats, 1)), k)
    return Nearest(rows[: len(queries)], products[: len(queries)], least[: len(queries)])


def by_rows(vectors: NDArray[np.floating], queries: NDArray[np.float32], k: int) -> Nearest:
    """Search with whole products, as for a few queries."""
    return NearestRows(vectors).find(queries, k)


spec = add_spec(
    KernelSpec(
        name="nearest",
        axes={"N": "vectors", "Q": "queries", "d": "dimension"},
        inputs={
            "vectors": "(N, d) float16 or float32",
            "queries": "(Q, d) float32",
            "k": "rows to find for each query",
        },
        outputs={
            "nearest": "Nearest: rows (Q, k) int64 and products (Q, k) float32, greatest first; least (Q,)"
        },
        reference=reference,
        generate=generate,
        check=check,
    )
)
spec.register(Backend("reference", reference))
spec.register(Backend("codes", by_codes))
spec.register(Backend("rows", by_rows))
