"""How fast is every backend of every kernel, next to the reference, and is its result right?

Walks the registry: random inputs of three sizes, each backend in turn within a pass, the median of passes.
Ratios to the reference come from the same pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from common import digest, write_record
from rich.console import Console
from rich.table import Table

from hippoindex.kernels import ppr, simjoin
from hippoindex.kernels.spec import KernelSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 1000, 3000])
    arguments = parser.parse_args()
    table = Table("kernel", "size", "backend", "median s", "reference / this", "digest of the result")
    results = []
    for spec in (ppr.spec, simjoin.spec):
        for size in arguments.sizes:
            for row in measure(spec, size, arguments.passes):
                results.append(row)
                table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print("record:", write_record("kernels", results))


def measure(spec: KernelSpec, size: int, passes: int) -> list[dict[str, Any]]:
    inputs = spec.generate(np.random.default_rng(size), size)
    expected = spec.reference(**inputs)
    reasons = {name: backend.unavailable() for name, backend in spec.backends.items()}
    usable = [name for name, reason in reasons.items() if reason is None]
    outputs = {name: spec.get(name).run(**inputs) for name in usable}  # also compiles
    times: dict[str, list[float]] = {name: [] for name in outputs}
    for _ in range(passes):
        for name in outputs:
            started = time.perf_counter()
            spec.get(name).run(**inputs)
            times[name].append(time.perf_counter() - started)
    rows = []
    for name, output in outputs.items():
        spec.check(output, expected, inputs)
        ratios = [a / b for a, b in zip(times["reference"], times[name], strict=True)]
        arrays = vars(output).values() if hasattr(output, "__dict__") else output
        rows.append(
            {
                "kernel": spec.name,
                "size": size,
                "backend": name,
                "median_s": round(statistics.median(times[name]), 6),
                "reference_ratio": round(statistics.median(ratios), 2),
                "digest": digest(*arrays),
            }
        )
    for name, reason in reasons.items():
        if reason is not None:
            rows.append({"kernel": spec.name, "size": size, "backend": name, "unavailable": reason})
    return rows


if __name__ == "__main__":
    main()
