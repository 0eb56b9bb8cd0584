from __future__ import annotations

import sys
import types

import pytest

from hippoindex.cluster.metrics import count


def test_counters_are_kept_on_ray_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is a stand-in here: that it has been started takes many seconds."""
    counted: list[tuple[str, float, dict[str, str]]] = []

    class Counter:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self._name = name
            self._tag_keys = tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self._tag_keys
            counted.append((self._name, value, tags))

    started = [False]
    metrics = types.ModuleType("ray.util.metrics")
    metrics.Counter = Counter  # type: ignore[attr-defined]
    ray = types.ModuleType("ray")
    ray.is_initialized = lambda: started[0]  # type: ignore[attr-defined]
    for name, module in (
        ("ray", ray),
        ("ray.util", types.ModuleType("ray.util")),
        ("ray.util.metrics", metrics),
    ):
        monkeypatch.setitem(sys.modules, name, module)

    count("test_tokens", "Tokens.", 5, worker="a")
    started[0] = True
    count("test_tokens", "Tokens.", 5, worker="a")
    count("test_tokens", "Tokens.", 0, worker="a")
    count("test_tokens", "Tokens.", 2.5, worker="b")
    assert counted == [("test_tokens", 5, {"worker": "a"}), ("test_tokens", 2.5, {"worker": "b"})]
