"""Tasks for the tests on a cluster: they tell where they run, and wait for what the test does meanwhile."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hippoindex.cluster.ray_placement import is_spread

_DEADLINE_S = 45.0


@dataclass(frozen=True)
class PlacedTask:
    """Write ``output``; ``do`` is the name of a function of this module."""

    index: int
    output: str
    do: str = "place"

    @property
    def folder(self) -> Path:
        """Where the tasks of a run find each other."""
        return Path(self.output).parent


def place(task: PlacedTask) -> None:
    """Write the node and the process."""
    Path(task.output).write_text(f"{_node()} {os.getpid()}")


def meet(task: PlacedTask) -> None:
    """Go on when tasks run on two nodes."""
    _begin(task)
    _wait(lambda: len({file.read_text() for file in task.folder.glob("*.begun")}) > 1)
    place(task)


def gather(task: PlacedTask) -> None:
    """Go on when four tasks run at once."""
    _begin(task)
    _wait(lambda: len(list(task.folder.glob("*.begun"))) == 4)
    place(task)


def outlive(task: PlacedTask) -> None:
    """Go on when a node has been killed, but never on that node."""
    _begin(task)
    doomed = task.folder / "doomed"
    _wait(lambda: doomed.exists() and doomed.read_text() != _node())
    place(task)


def linger(task: PlacedTask) -> None:
    """Go on when the test says so."""
    _begin(task)
    _wait((task.folder / "enough").exists)
    place(task)


def sit(task: PlacedTask) -> None:
    """Start an actor on each GPU of the placement group; go on when a node has been killed that has none."""

    class Sitter:  # sent whole: where it goes this module is not found
        def where(self) -> tuple[str, int]:
            return ray.get_runtime_context().get_node_id(), os.getpid()

    group = ray.util.get_current_placement_group()
    assert is_spread()
    sitters = [
        ray.remote(Sitter)
        .options(
            num_cpus=0,
            num_gpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        )
        .remote()
        for i in range(group.bundle_count)
    ]
    found = ray.get([sitter.where.remote() for sitter in sitters])
    begun = Path(f"{task.output}.{os.getpid()}.begun")
    begun.with_suffix(".new").write_text(json.dumps({"node": _node(), "sitters": found}))
    begun.with_suffix(".new").rename(begun)
    doomed, nodes = task.folder / "doomed", {node for node, _ in found}
    _wait(lambda: doomed.exists() and doomed.read_text() not in nodes)
    place(task)


def _begin(task: PlacedTask) -> None:
    begun = Path(f"{task.output}.{os.getpid()}.begun")
    begun.with_suffix(".new").write_text(_node())
    begun.with_suffix(".new").rename(begun)


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("what the task waits for has not happened")
        time.sleep(0.02)


def _node() -> str:
    return ray.get_runtime_context().get_node_id()


def process(task: PlacedTask) -> None:
    globals()[task.do](task)


def make_worker() -> Callable[[PlacedTask], None]:
    return functools.partial(process)
