"""Counters that Prometheus reads off the nodes of a Ray cluster; outside Ray nothing is counted."""

from __future__ import annotations

import functools
import sys
from typing import Any


def count(name: str, description: str, value: float, **tags: str) -> None:
    """Add to a counter.

    Parameters
    ----------
    name, description : str
    value : float
        Nothing is counted unless it is positive.
    **tags : str
        The same names for a counter at all times.
    """
    ray = sys.modules.get("ray")
    if value > 0 and ray is not None and ray.is_initialized():
        _counter(name, description, tuple(tags)).inc(value, tags)


@functools.cache
def _counter(name: str, description: str, tag_names: tuple[str, ...]) -> Any:
    from ray.util.metrics import Counter

    return Counter(name, description=description, tag_keys=tag_names)
