"""A run that is killed again and again, at random moments, ends with the index of one that was not."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hippoindex.cluster.storage import open_storage
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.verify import verify_index

KILLS = 20
Digests = Callable[[Path], dict[str, str]]


def small_world(folder: Path, passages: int) -> tuple[Path, list[str]]:
    """Write a corpus and what was extracted from it; return it and the settings to index it with."""
    rng = np.random.default_rng(7)
    places = [
        f"{a} {b}" for a in ("Port", "Saint", "Upper", "Old") for b in ("Calder", "Orrin", "Sele", "Marsh")
    ]
    records, docs = [], []
    for number in range(passages):
        here, there = rng.choice(places, 2, replace=False)
        text = f"The road of the year {number} leads from {here} to {there}."
        records.append({"id": f"p{number}", "title": f"Road {number}", "text": text})
        triples = [[here, "has a road to", there], [f"Road {number}", "begins in", here]]
        docs.append(
            {"passage": f"Road {number}\n{text}", "extracted_entities": [here], "extracted_triples": triples}
        )
    corpus, results = folder / "corpus.jsonl", folder / "openie.json"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    results.write_text(json.dumps({"docs": docs}))
    settings = ["extract.engine=import", f"extract.path={results}", "cluster.shard_passages=3"]
    return corpus, [*settings, "cluster.shard_texts=8", "cluster.workers=1", "embed.precision=int8"]


@pytest.fixture
def start() -> Callable[..., Any]:
    """Start a run as the leader of its own process group, without waiting for imports."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    runs = importlib.import_module("killed_runs")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_runs"])

    def begin(*arguments: object) -> Any:
        process = context.Process(target=runs.index, args=arguments)
        process.start()
        return process

    return begin


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(
    tmp_path: Path, start: Callable[..., Any], digests: Digests
) -> None:
    corpus, settings = small_world(tmp_path, 60)
    began = time.monotonic()
    build_index(load_config(overrides=settings, corpus__path=[str(corpus)], output=str(tmp_path / "whole")))
    takes_s = time.monotonic() - began
    output, rng = tmp_path / "killed", np.random.default_rng()
    work = open_storage(f"{output}.work")
    kills = finished = 0
    before: dict[str, bytes] = {}
    while True:
        process = start(settings, str(corpus), str(output))
        if kills < KILLS:
            process.join(rng.uniform(0.0, takes_s))
        else:
            process.join()
        if process.exitcode is None:
            kills += 1
            kill_group(process)
        done = {entry.name: work.read_bytes(entry.name) for entry in work.entries() if "/done/" in entry.name}
        if output.exists():
            verify_index(output).require_sound()
            if kills < KILLS:  # on to the next run
                finished += 1
                output.rename(tmp_path / f"done-{finished}")
                done = {}
            elif process.exitcode == 0:
                break
        else:
            assert before.items() <= done.items(), "what was committed stays, and is not written again"
        assert process.exitcode in {0, -signal.SIGKILL}
        before = done
    expected = digests(tmp_path / "whole")
    for made in [output, *tmp_path.glob("done-*")]:
        assert digests(made) == expected
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(("done-", ".killed."))}
    assert left == {"corpus.jsonl", "openie.json", "whole", "killed"}


def kill_group(process: Any) -> None:
    """Kill a run and all that it has started; before it is the leader of a group, it alone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()
