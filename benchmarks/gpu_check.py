"""Are the GPU backends of Personalized PageRank right on this machine, and which one is fastest?

Runs from a checkout without installing it, on a machine with a CUDA device: it needs numpy, scipy, numba (the
CPU path that results are compared with), cupy and, for its backend, pylibcugraph.

    python benchmarks/gpu_check.py --json out.json

First every GPU backend that can run here solves random inputs of the kernel's specification and is held to
the float64 reference. Then a power-law graph is solved in blocks of growing width by cuSPARSE, by the fused
kernel and by the fused kernel with float16 storage, each compared with the CPU's result. Exits with 3 if
there is no device, with 1 if a check failed. ``--dry-run`` takes numpy for CuPy where that does the same
work, which is the cuSPARSE path; the kernels themselves are not run.
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
from hippoindex.kernels.ppr import Graph, PPRResult, cupy_backend, power, spec
from hippoindex.kernels.ppr.cupy_backend import Device, Solver

KINDS = (("spmm", "float32"), ("fused", "float32"), ("fused", "float16"))
GPU_BACKENDS = ("cupy", "cupy-float16", "cugraph")
PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "pylibcugraph-cu13",
    "pylibcugraph-cu12",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges-per-node", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 256])
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
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print("record:", arguments.json)
    return int(any(text.startswith("FAILED") for text in record["checks"].values()))


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
        results[name] = f"not run: {reason}" if reason else check(spec.backends[name].run, examples)
    results["spmm"] = check(solver_of("spmm", "float32", None), examples)
    for name, text in results.items():
        print(f"check {name}: {text}")
    return results


def dry_checks(examples: int) -> dict[str, str]:
    results = dict.fromkeys(GPU_BACKENDS, "not run: dry run")
    results["spmm with numpy"] = check(solver_of("spmm", "float32", numpy_device()), examples)
    return results


def check(run: Callable[..., PPRResult], examples: int) -> str:
    """Hold a backend to the specification's reference, on random inputs of growing size."""
    for seed in range(examples):
        inputs = spec.generate(np.random.default_rng(seed), 2 + seed * seed * 2)
        try:
            spec.check(run(**inputs), spec.reference(**inputs), inputs)
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


if __name__ == "__main__":
    sys.exit(main())
