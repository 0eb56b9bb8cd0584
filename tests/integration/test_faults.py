"""The script behind ``make faults``, in its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
def test_an_index_survives_every_fault(tmp_path: Path) -> None:
    results = tmp_path / "faults.json"
    command = [sys.executable, SCRIPT, "--quick", "--kills", "5", "--json", results]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["fault"]: row for row in json.loads(results.read_text("utf-8"))["rows"]}
    assert rows["SIGKILL of the whole run"]["injected"] == 5
    for row in rows.values():
        assert row["survived"] == row["injected"] > 0
        assert row["lost"] == 0
