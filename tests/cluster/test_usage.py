from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hippoindex.cluster import usage

MIB = 2**20


def test_peak_is_kept_after_memory_is_freed() -> None:
    with usage.PeakMemory(interval_s=0.01) as memory:
        before = memory.peak_bytes
        block = np.ones(200 * MIB, dtype=np.uint8)
        time.sleep(0.2)
        del block
        time.sleep(0.05)
    assert 180 * MIB < memory.peak_bytes - before < 300 * MIB


def test_memory_of_children_counts() -> None:
    code = "import time; block = bytearray(b'x') * (150 * 2**20); print('ready', flush=True); time.sleep(60)"
    with usage.PeakMemory(interval_s=0.01) as memory:
        before = memory.peak_bytes
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        child.kill()
        child.communicate()
    assert 140 * MIB < memory.peak_bytes - before < 250 * MIB


def test_a_short_block_has_a_figure_too() -> None:
    with usage.PeakMemory(interval_s=60) as memory:
        pass
    assert memory.peak_bytes > MIB


def test_machine_is_described_in_json_values() -> None:
    described = json.loads(json.dumps(usage.machine()))
    assert set(described) == {"cpu", "cores", "memory_bytes", "python", "platform"}
    assert described["cpu"]
    assert described["memory_bytes"] > 2**28
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))


def test_cores_respect_the_affinity_mask() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from hippoindex.cluster.usage import available_cores; print(available_cores())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert output.strip() == "1"
    assert 1 <= usage.available_cores() <= len(os.sched_getaffinity(0))


@pytest.fixture
def control_groups(tmp_path: Path) -> Path:
    (tmp_path / "root" / "slice" / "job").mkdir(parents=True)
    (tmp_path / "root" / "cpu" / "job").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/slice/job", {"slice/job/cpu.max": "150000 100000"}, 1.5),
        ("0::/slice/job", {"slice/job/cpu.max": "max 100000", "slice/cpu.max": "400000 100000"}, 4.0),
        ("0::/slice/job", {"slice/job/cpu.max": "300000 100000", "slice/cpu.max": "200000 100000"}, 2.0),
        ("0::/slice/job", {"slice/job/cpu.max": "max 100000"}, None),
        ("0::/../elsewhere", {"cpu.max": "200000 100000"}, 2.0),
        (
            "3:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (
            "3:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("4:memory:/job", {"cpu/job/cpu.cfs_quota_us": "1", "cpu/job/cpu.cfs_period_us": "1"}, None),
        ("", {}, None),
    ],
)
def test_cpu_quota_of_a_control_group(
    control_groups: Path, membership: str, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (control_groups / "root" / name).write_text(text + "\n")
    (control_groups / "membership").write_text(membership + "\n" if membership else "")
    assert usage.cpu_quota(control_groups / "root", control_groups / "membership") == cores
