"""The specification of the similarity join and its backends."""

from __future__ import annotations

from functools import partial

import numpy as np

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin import cupy_backend, faiss_backend
from hippoindex.kernels.simjoin.exact import exact
from hippoindex.kernels.simjoin.ivf import ivf
from hippoindex.kernels.simjoin.reference import Pairs, reference
from hippoindex.kernels.spec import Backend, Inputs, KernelSpec, add_spec

TOLERANCE = 1e-6
"""Largest difference of a cosine to the reference."""


def generate(rng: np.random.Generator, size: int) -> Inputs:
    """Return ``size`` clustered unit vectors, some of them equal, and a random mask of searching nodes."""
    n, d = max(size, 1), int(rng.integers(2, 24))
    centres = rng.standard_normal((max(n // 8, 1), d))
    x = centres[rng.integers(0, len(centres), n)] + rng.uniform(0.05, 0.6) * rng.standard_normal((n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x[rng.integers(0, n, n // 10)] = x[0]
    return {
        "vectors": x.astype(np.float16 if rng.random() < 0.5 else np.float32),
        "threshold": float(rng.uniform(0.5, 0.95)),
        "max_neighbors": int(rng.integers(1, 12)),
        "searches": rng.random(n) < 0.9,
    }


def check(result: Pairs, expected: Pairs, inputs: Inputs) -> None:
    """Demand the same pairs and the same cosines up to rounding."""
    same = np.array_equal(result.first, expected.first) and np.array_equal(result.second, expected.second)
    if not same:
        got, wanted = set(zip(*result[:2], strict=True)), set(zip(*expected[:2], strict=True))
        raise KernelError(
            f"simjoin at threshold {inputs['threshold']}: missing {sorted(wanted - got)[:3]}, "
            f"extra {sorted(got - wanted)[:3]}"
        )
    if len(result.cosine) and np.abs(result.cosine - expected.cosine).max() > TOLERANCE:
        raise KernelError("simjoin: cosines differ from the reference")


spec = add_spec(
    KernelSpec(
        name="simjoin",
        axes={"N": "vectors", "d": "dimension", "P": "pairs"},
        inputs={
            "vectors": "(N, d) float16, float32 or float64, rows of norm 1",
            "threshold": "least cosine of a pair",
            "max_neighbors": "pairs kept per searching node",
            "searches": "(N,) bool, nodes that keep neighbours",
        },
        outputs={"pairs": "Pairs: first, second (P,) int64 with first < second, cosine (P,) float32; sorted"},
        reference=reference,
        generate=generate,
        check=check,
    )
)
spec.register(Backend("reference", reference))
spec.register(Backend("exact", exact))
spec.register(
    Backend("ivf", partial(ivf, target_recall=1.0))
)  # at that target it owes the reference's result
spec.register(Backend("cupy", cupy_backend.exact, cupy_backend.unavailable))
spec.register(
    Backend("cupy-float32", partial(cupy_backend.exact, storage="float32"), cupy_backend.unavailable)
)
spec.register(Backend("faiss-gpu", faiss_backend.exact, faiss_backend.unavailable))
