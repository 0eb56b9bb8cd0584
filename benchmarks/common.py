"""What benchmarks share: records with machine, time and a digest of the result."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hippoindex import __version__
from hippoindex.cluster.usage import machine

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def data_folder() -> Path:
    """Folder of the real data; stops the script if it is not there."""
    folder = Path(os.environ.get("HIPPOINDEX_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        raise SystemExit(f"{folder} does not exist: set HIPPOINDEX_DATA to the folder of the data sets")
    return folder


def digest(*arrays: np.ndarray) -> str:
    """Digest of arrays, the same wherever their bytes are the same."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def write_record(name: str, results: Any) -> Path:
    """Write ``benchmarks/records/<name>.json``."""
    RECORDS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": dict(machine()),
        "results": results,
    }
    path = RECORDS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
