"""Where on a Ray cluster the GPUs of a worker are: on one node or, in a placement group, on several."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hippoindex.cluster.task_queue import Resources
from hippoindex.errors import ExecutorError

Nodes = Sequence[Mapping[str, Any]]
"""Those of ``ray.nodes()`` that are alive."""


def spans_nodes(nodes: Nodes, resources: Resources) -> bool:
    """Return whether a worker's GPUs have to be taken from several nodes, and may be.

    Where no node has a GPU, one with enough of them may come.
    """
    return not resources.one_node and 0 < _most_gpus(nodes) < resources.num_gpus


def require_gpus(nodes: Nodes, resources: Resources) -> None:
    """Refuse a worker whose GPUs the nodes do not have, if some node has any; else one with more may come.

    Raises
    ------
    ExecutorError
        With the GPUs that there are, and where.
    """
    most, spread = _most_gpus(nodes), spans_nodes(nodes, resources)
    if not 0 < most < resources.num_gpus or (spread and workers_that_fit(nodes, resources)):
        return
    there = ", ".join(
        f"{_has(node, 'GPU'):g} on {node['NodeManagerAddress']}" for node in nodes if _has(node, "GPU")
    )
    needs = f"{resources.num_gpus:g} GPUs{'' if spread else ' of one node'}"
    beside = f" and, beside one of them, {resources.num_cpus:g} CPUs" if spread else ""
    raise ExecutorError(
        f"A worker needs {needs}{beside}, which the cluster does not have: its GPUs are {there}. Ask for "
        "fewer GPUs a worker, or add nodes"
    )


def workers_that_fit(nodes: Nodes, resources: Resources) -> int:
    """Return how many workers fit on nodes on which nothing else runs."""
    if not spans_nodes(nodes, resources):
        return sum(_fit_on(node, resources) for node in nodes)
    gpus = sum(int(_has(node, "GPU")) for node in nodes)
    beside_one = Resources(resources.num_cpus, num_gpus=1)  # the worker itself
    return min(int(gpus // resources.num_gpus), sum(_fit_on(node, beside_one) for node in nodes))


def bundles(resources: Resources) -> list[dict[str, float]]:
    """Return the bundles of a worker's placement group: one for each GPU, the first for itself as well."""
    first = {"CPU": resources.num_cpus, "GPU": 1.0} if resources.num_cpus else {"GPU": 1.0}
    return [first] + [{"GPU": 1.0} for _ in range(math.ceil(resources.num_gpus) - 1)]


def bundle_nodes(group: Any) -> list[str]:
    """Return the id of the node of each bundle of a placement group, in their order."""
    from ray.util import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[number] for number in sorted(nodes)]


def is_spread() -> bool:
    """Return whether this process is a worker whose GPUs are in a placement group, not in the process."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.util.get_current_placement_group() is not None


def _most_gpus(nodes: Nodes) -> float:
    return max((_has(node, "GPU") for node in nodes), default=0)


def _has(node: Mapping[str, Any], kind: str) -> float:
    return float(node["Resources"].get(kind, 0))


def _fit_on(node: Mapping[str, Any], resources: Resources) -> int:
    needs = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    return min((int(_has(node, kind) / need) for kind, need in needs.items() if need), default=1)
