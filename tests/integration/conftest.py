from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hippoindex
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config

SAMPLE = Path(hippoindex.__file__).parent / "sample"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def sample() -> Path:
    return SAMPLE


@pytest.fixture(scope="session")
def sample_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sample") / "index"
    config = load_config(
        corpus__path=[str(SAMPLE / "passages.jsonl")], output=str(output), cluster__workers=1
    )
    build_index(config)
    return output


@pytest.fixture(scope="session")
def run_cli() -> Run:
    """Run the command line as a process of its own."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hippoindex.cli", *map(str, arguments)]
        variables = os.environ | {"COLUMNS": "200", "TERM": "dumb"} | environment
        return subprocess.run(
            command, capture_output=True, text=True, env=variables, timeout=300, check=False
        )

    return run


def artifact_bytes(index: Path) -> dict[str, str]:
    """Return the digest of every file that must not differ between two runs."""
    return {
        file.relative_to(index).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(index.rglob("*"))
        if file.is_file() and file.name not in {"stats.json", "report.html", "SHA256SUMS"}
    }


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], dict[str, str]]:
    return artifact_bytes
