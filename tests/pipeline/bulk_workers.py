"""What the tests of bulk work run in worker processes, in a module that those can import."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import scipy.sparse as sp

from hippoindex.cluster.executor import LocalExecutor
from hippoindex.kernels.ppr import Graph, solve


class WatchedExecutor(LocalExecutor):
    """Local processes, each of which reports what memory a task took.

    Parameters
    ----------
    workers : int
    folder : Path
        Receives one ``<pid>.json`` per process.
    method : str
        Solver whose compiled code is loaded before memory is measured.
    """

    def __init__(self, workers: int, folder: Path, method: str) -> None:
        super().__init__(workers)
        self._folder, self._method = folder, method

    def run(self, factory: Any, tasks: Sequence[Any], on_done: Callable[[Any], None]) -> None:
        super().run(
            functools.partial(make_watched_worker, factory, str(self._folder), self._method), tasks, on_done
        )


def make_watched_worker(factory: Any, folder: str, method: str) -> Callable[[Any], None]:
    warm_up(method)
    before = anonymous_bytes()
    worker = factory()

    def watched(task: Any) -> None:
        worker(task)
        mine = Path(folder, f"{os.getpid()}.json")
        mine.write_text(json.dumps({"grown_bytes": anonymous_bytes() - before, "mapped": mapped_bytes()}))
        deadline = time.monotonic() + 60
        while len(list(Path(folder).glob("*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # so that the other process gets a task too

    return watched


def warm_up(method: str) -> None:
    graph = Graph.from_edges(4, [0, 1], [1, 2], np.float32([1, 2]))
    for array in (graph.indptr, graph.indices, graph.weights, graph.transition):
        array.setflags(write=False)  # a memory map's arrays are of this type, for which code is compiled
    solve(graph, sp.csr_array([[1.0, 0.0, 0.0, 0.0]]), method)  # type: ignore[arg-type]


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    return sum(region.anonymous for region in psutil.Process().memory_maps())


def mapped_bytes() -> dict[str, list[int]]:
    """For each mapped array, how much of it is in memory, and how much is a copy of this process's own."""
    return {
        Path(region.path).name: [region.rss, region.anonymous + region.private_dirty]
        for region in psutil.Process().memory_maps()
        if region.path.endswith(".npy")
    }
