"""Are the GPU backends of the kernels right on this machine, and which one is fastest?

Runs from a checkout without installing it, on a machine with a CUDA device: it needs numpy, scipy, numba,
threadpoolctl, structlog (the CPU path that results are compared with), cupy and, for their backends,
pylibcugraph and faiss-gpu.

    python benchmarks/gpu_check.py --json out.json

First every GPU backend that can run here solves random inputs of its kernel's specification and is held to
the float64 reference. Then Personalized PageRank over a power-law graph is solved in blocks of growing width
by cuSPARSE, by the fused kernel and by the fused kernel with float16 storage, and clustered vectors are
joined, each compared with the CPU's result. Exits with 3 if there is no device, with 1 if a check failed or a
join found other pairs than the CPU. ``--dry-run`` takes numpy for CuPy and for the join's kernel, which does
the work of the cuSPARSE path and of the join's tiles; the kernels themselves are not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hippoindex.errors import KernelError
from hippoindex.kernels import simjoin
from hippoindex.kernels.ppr import Graph, PPRResult, cupy_backend, power, spec
from hippoindex.kernels.ppr.cupy_backend import Device, Solver
from hippoindex.kernels.simjoin import cupy_backend as join_backend
from hippoindex.kernels.spec import KernelSpec

KINDS = (("spmm", "float32"), ("fused", "float32"), ("fused", "float16"))
GPU_BACKENDS = ("cupy", "cupy-float16", "cugraph")
JOIN_BACKENDS = ("cupy", "cupy-float32", "faiss-gpu")
DRY_VECTORS = 2000
PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "pylibcugraph-cu13",
    "pylibcugraph-cu12",
    "faiss-gpu",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges-per-node", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--vectors", type=int, default=100_000, help=f"at most {DRY_VECTORS} if dry")
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--examples", type=int, default=50, help="random inputs for each backend")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    reason = cupy_backend.unavailable()
    if reason is not None and not arguments.dry_run:
        print(f"gpu_check: nothing was checked: {reason}", file=sys.stderr)
        return 3
    record = {
        "benchmark": "gpu_check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": arguments.dry_run,
        "machine": machine(),
        "gpu": None if arguments.dry_run else gpu(),
        "graph": {"nodes": arguments.nodes, "edges_per_node": arguments.edges_per_node, "seed": 0},
        "checks": dry_checks(arguments.examples) if arguments.dry_run else checks(arguments.examples),
        "timings": timings(arguments),
        "joins": join_timings(arguments),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print("record:", arguments.json)
    failed = any(text.startswith("FAILED") for text in record["checks"].values())
    return int(failed or not all(row.get("same_pairs", True) for row in record["joins"]))


def machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": versions,
    }


def gpu() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": driver(),
        "cuda_of_driver": runtime.driverGetVersion(),
        "cuda_of_cupy": runtime.runtimeGetVersion(),
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
    }


def driver() -> str | None:
    """Version of the driver as ``nvidia-smi`` names it, where there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def checks(examples: int) -> dict[str, str]:
    results = {}
    for name in GPU_BACKENDS:
        reason = spec.backends[name].unavailable()
        results[name] = f"not run: {reason}" if reason else check(spec, spec.backends[name].run, examples)
    results["spmm"] = check(spec, solver_of("spmm", "float32", None), examples)
    for name in JOIN_BACKENDS:
        backend = simjoin.spec.backends[name]
        reason = backend.unavailable()
        results[f"simjoin {name}"] = (
            f"not run: {reason}" if reason else check(simjoin.spec, backend.run, examples)
        )
    for name, text in results.items():
        print(f"check {name}: {text}")
    return results


def dry_checks(examples: int) -> dict[str, str]:
    results = dict.fromkeys(GPU_BACKENDS, "not run: dry run")
    results["spmm with numpy"] = check(spec, solver_of("spmm", "float32", numpy_device()), examples)
    results["simjoin tiles with numpy"] = check(simjoin.spec, numpy_join, examples)
    return results


def check(kernel: KernelSpec, run: Callable[..., Any], examples: int) -> str:
    """Hold a backend to the specification's reference, on random inputs of growing size."""
    for seed in range(examples):
        size = 2 + seed * seed * 2 if kernel is spec else 2 + seed * seed // 2  # a slow reference
        inputs = kernel.generate(np.random.default_rng(seed), size)
        try:
            kernel.check(run(**inputs), kernel.reference(**inputs), inputs)
        except KernelError as error:
            return f"FAILED with seed {seed}: {error}"
    return "passed"


def solver_of(method: Any, storage: Any, device: Device | None) -> Callable[..., PPRResult]:
    def run(graph: Graph, restart: np.ndarray, damping: float) -> PPRResult:
        return Solver(graph, storage, method, device=device).solve(restart, damping)

    return run


def numpy_device() -> Device:
    def launch(*_: Any) -> None:
        raise KernelError("Kernels need a CUDA device")

    return Device(np, sp.csr_matrix, launch, np.asarray, lambda: 2**33)


def power_law_graph(n: int, edges_per_node: int) -> Graph:
    rng = np.random.default_rng(0)
    edges = n * edges_per_node
    popular = (n * rng.random(edges) ** 3).astype(np.int64)
    return Graph.from_edges(n, popular, rng.integers(0, n, edges), rng.choice([1.0, 2.0, 0.9], edges))


def timings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    graph = power_law_graph(arguments.nodes, arguments.edges_per_node)
    rng = np.random.default_rng(1)
    kinds = KINDS[:1] if arguments.dry_run else KINDS
    rows = []
    for width in arguments.widths:
        shape = graph.n_nodes, width
        restart = rng.random(shape, np.float32) * (rng.random(shape, np.float32) < 5 / graph.n_nodes)
        restart[rng.integers(0, graph.n_nodes, width), np.arange(width)] += 1.0
        started = time.perf_counter()
        expected = power(graph, restart)
        cpu_s = time.perf_counter() - started
        for method, storage in kinds:
            device = numpy_device() if arguments.dry_run else None
            row = {"width": width, "method": method, "storage": storage, "cpu_solve_s": round(cpu_s, 4)}
            row |= timed(graph, restart, expected, method, storage, device, arguments.passes)
            print(json.dumps(row))
            rows.append(row)
    return rows


def timed(
    graph: Graph,
    restart: np.ndarray,
    expected: PPRResult,
    method: Any,
    storage: Any,
    device: Device | None,
    passes: int,
) -> dict[str, Any]:
    """Time whole solves, transfers included, and single steps; compare the result with the CPU's."""
    try:
        solver = Solver(graph, storage, method, device=device)
    except KernelError as error:
        return {"not_run": str(error)}
    result = solver.solve(restart)  # also compiles
    solves, steps = [], []
    for _ in range(passes):
        started = time.perf_counter()
        solver.solve(restart)
        solves.append(time.perf_counter() - started)
        steps.append(step_s(solver, restart))
    distance = np.abs(result.scores.astype(np.float64) - expected.scores).sum(axis=0)
    return {
        "fits_columns": solver.width,
        "solve_s": round(statistics.median(solves), 6),
        "step_s": round(statistics.median(steps), 9),
        "iterations": int(result.iterations.max()),
        "residual": float(result.residual.max()),
        "l1_to_cpu": float(distance.max()),
        "top20_kept": float(
            np.mean([kept(*pair) for pair in zip(result.scores.T, expected.scores.T, strict=True)])
        ),
    }


def step_s(solver: Solver, restart: np.ndarray, steps: int = 10) -> float:
    """Seconds of one step on the device; a step ends with its changes in host memory, so it has run."""
    xp, order = solver.device.xp, "F" if solver.method == "spmm" else "C"
    block = restart[:, : solver.width]
    s = xp.asarray(np.array(block, order=order))
    x = s.astype(solver.storage)
    y, active = xp.empty_like(x), np.ones(block.shape[1], dtype=bool)
    step = solver.step(s, 0, 0.5)
    step(x, y, active)
    started = time.perf_counter()
    for _ in range(steps):
        x, y = y, x
        step(x, y, active)
    return (time.perf_counter() - started) / steps


def kept(scores: np.ndarray, expected: np.ndarray) -> float:
    """Share of the best 20 that are among the CPU's, by score; equal scores count."""
    best = np.argpartition(-scores, min(20, len(scores)) - 1)[:20]
    twentieth = np.sort(expected)[-20:].min()
    return float(np.mean(expected[best] >= twentieth * (1 - 1e-5)))


def numpy_join(*vectors: Any, **options: Any) -> simjoin.Pairs:
    return join_backend.exact(*vectors, **options, device=numpy_join_device())


def numpy_join_device() -> join_backend.Device:
    def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        np.matmul(a.astype(np.float32), b.astype(np.float32).T, out=out)

    def launch(_name: str, _grid: Any, _block: Any, arguments: tuple[Any, ...]) -> None:
        _, _, products, rows, first_column, asks, row_low, column_low, capacity, count, cells = arguments
        columns = first_column + np.arange(products.shape[1])
        taken = np.where(asks.astype(bool), rows[:, None] < columns, rows[:, None] != columns)
        hits = np.flatnonzero(taken & (products >= np.minimum(row_low[:, None], column_low)))
        count[0] = len(hits)
        cells[: min(len(hits), capacity)] = hits[:capacity]

    def write(target: np.ndarray, values: np.ndarray) -> None:
        target[...] = values

    return join_backend.Device(np, multiply, launch, write, np.array, lambda: 2**30)


def clustered_vectors(n: int, dimension: int) -> np.ndarray:
    """Unit vectors around n / 12 random centres with most energy on the first axes, as embeddings have."""
    rng = np.random.default_rng(2)
    scale = (1.0 / np.sqrt(1.0 + np.arange(dimension))).astype(np.float32)
    centres = rng.standard_normal((max(n // 12, 1), dimension), np.float32) * scale
    x = centres[rng.integers(0, len(centres), n)]
    spread = rng.uniform(0.2, 0.8, (n, 1)).astype(np.float32)  # cosines within a cluster from 0.6 to 0.96
    x += spread * scale * rng.standard_normal(x.shape, np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def join_timings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    n = min(arguments.vectors, DRY_VECTORS) if arguments.dry_run else arguments.vectors
    x = clustered_vectors(n, arguments.dimension)
    simjoin.exact(x[:100])  # compiles
    started = time.perf_counter()
    expected = simjoin.exact(x)
    cpu_s = time.perf_counter() - started
    common = {"vectors": n, "dimension": arguments.dimension, "pairs": len(expected.first)}
    rows = []
    for name in ("tiles with numpy",) if arguments.dry_run else JOIN_BACKENDS:
        row = {"backend": name, **common, "cpu_exact_s": round(cpu_s, 4)}
        reason = None if arguments.dry_run else simjoin.spec.backends[name].unavailable()
        if reason is None:
            run = numpy_join if arguments.dry_run else simjoin.spec.backends[name].run
            row |= timed_join(run, x, expected, arguments.passes)
        else:
            row["not_run"] = reason
        print(json.dumps(row))
        rows.append(row)
    return rows


def timed_join(
    run: Callable[..., simjoin.Pairs], x: np.ndarray, expected: simjoin.Pairs, passes: int
) -> dict[str, Any]:
    """Time whole joins, transfers and rechecks included; compare the result with the CPU's."""
    try:
        result = run(x)  # also compiles
    except KernelError as error:
        return {"not_run": str(error)}
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - started)
    same = np.array_equal(result.first, expected.first) and np.array_equal(result.second, expected.second)
    return {"join_s": round(statistics.median(seconds), 6), "same_pairs": same}


if __name__ == "__main__":
    sys.exit(main())
