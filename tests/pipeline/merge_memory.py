"""Merge shards and build their graph in a process of its own; prints the memory that took and a digest."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline import artifact
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.graph import build_graph
from hippoindex.pipeline.merge import TABLES, merge
from hippoindex.pipeline.shards import Shard, column

NO_SYNONYMS = Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def build(shards: list[Path], folder: Path, memory_bytes: int) -> None:
    config = GraphConfig.model_construct(weights="plain", memory_bytes=memory_bytes)
    passage_ids = column([Shard(path.name, "", path) for path in shards], "passage_id")
    made = merge(shards, passage_ids, folder, memory_bytes=memory_bytes)
    build_graph(folder / "graph", made.fact_ends, made.fact_counts, made.occurrence, NO_SYNONYMS, config)


def resident_bytes(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def main(shards: list[Path], folder: Path, memory_bytes: int, rows_per_file: int) -> None:
    artifact.ROWS_PER_FILE = rows_per_file
    build(shards[:1], folder / "warm", memory_bytes)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    build(shards, folder / "made", memory_bytes)
    taken = resident_bytes("VmHWM") - before
    digest = hashlib.sha256()
    for name in sorted(f for table in (*TABLES, "graph") for f in (folder / "made" / table).iterdir()):
        digest.update(name.read_bytes())
    sys.stdout.write(json.dumps({"taken_bytes": taken, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    source, target, budget, rows = sys.argv[1:]
    main(sorted(Path(source).glob("*.arrow")), Path(target), int(budget), int(rows))
