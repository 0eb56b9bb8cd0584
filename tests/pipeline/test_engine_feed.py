"""The benchmark of the feed, on a small engine: what it promises holds there as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_feed.py"


@pytest.mark.slow
def test_the_engine_is_kept_full_at_little_cost(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ["--passages", "3000", "--slots", "32", "--shard", "128"]
    command = [sys.executable, str(BENCHMARK), *sizes, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["occupancy"] >= 0.95
    assert found["overhead"] <= 0.03
    assert found["prompt_tokens_ratio"] <= 0.6
