"""Against a server that does everything wrong: nothing is lost, and transient faults leave no trace."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Extraction, Passage
from hippoindex.pipeline.extract.llm import LlmExtractor
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.llm.accounting import Usage
from hippoindex.pipeline.llm.engines import open_engine


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("hostile_server")


def config(server: Any, **settings: Any) -> ExtractConfig:
    return ExtractConfig(
        engine="openai",
        **{"model": "m", "base_url": server.base_url, "timeout_s": 5.0, "request_attempts": 12, **settings},
    )


def passages(number: int) -> list[Passage]:
    return [
        Passage(str(i), f"Mill {i}", f"Mill{i} stands in Town{i % 7} on River{i % 5}. Zoë{i} owns it.")
        for i in range(number)
    ]


def extract(server: Any, number: int, **settings: Any) -> tuple[list[Extraction], Usage, float]:
    chosen = config(server, **settings)
    with contextlib.closing(LlmExtractor(chosen, functools.partial(open_engine, chosen))) as extractor:
        start_s = time.monotonic()
        found = extractor.extract(passages(number))
        return found, extractor.usage, time.monotonic() - start_s


@pytest.mark.parametrize("seed", range(3))
def test_what_goes_in_is_extracted_or_quarantined(hostile: ModuleType, seed: int) -> None:
    """Whatever the server does: every passage is in the rows or in the quarantine, once, and none in both."""
    faults = hostile.TRANSIENT + hostile.HANGS + hostile.NONSENSE * 2
    with hostile.HostileServer(faults, 0.5, seed=seed) as server:
        stage = ExtractStage(config(server, timeout_s=0.3, request_attempts=3, max_attempts=2))
        table = pa.Table.from_pylist(
            [p._asdict() | {"doc_id": p.passage_id, "span_start": 0, "span_end": 1} for p in passages(80)],
            schema=schemas.PASSAGE,
        )
        output = stage.open()(table)
    output.rows.validate(full=True)
    output.quarantine.validate(full=True)
    extracted = output.rows["passage_id"].to_pylist()
    lost = [row["row_id"] for row in output.quarantine.to_pylist() if row["kind"] == "passage"]
    assert sorted(extracted + lost, key=int) == [p.passage_id for p in passages(80)]
    assert extracted == sorted(extracted, key=int)
    assert extracted
    assert lost
    assert len(server.met) > 12
    assert all(row["reason"] for row in output.quarantine.to_pylist())


def test_transient_faults_change_nothing_and_cost_little(hostile: ModuleType) -> None:
    """30 % of the requests fail at random: the same result, in at most 1.6 times the time."""
    with hostile.HostileServer(latency_s=0.1) as server:
        calm, usage, calm_s = extract(server, 300)
    assert usage.requests == usage.attempts == server.requests == 600
    with hostile.HostileServer(hostile.TRANSIENT, 0.3, latency_s=0.1) as server:
        stormy, usage, stormy_s = extract(server, 300)
    assert server.requests == usage.attempts > 800
    assert usage.requests == 600
    assert stormy == calm
    assert all(extraction.error is None for extraction in calm)
    assert stormy_s <= 1.6 * calm_s


def test_a_rerun_sends_nothing(hostile: ModuleType, tmp_path: Path) -> None:
    with hostile.HostileServer(hostile.TRANSIENT, 0.3) as server:
        first, _, _ = extract(server, 40, cache=str(tmp_path))
        sent = server.requests
        again, usage, _ = extract(server, 40, cache=str(tmp_path))
        assert server.requests == sent
    assert again == first
    assert (usage.known, usage.attempts) == (80, 0)


def test_a_storm_of_refusals_passes(hostile: ModuleType) -> None:
    """A server that refuses 60 % of the requests gets its time; no passage is lost for it."""
    with hostile.HostileServer(hostile.TRANSIENT[1:2], 0.6) as server:
        found, usage, _ = extract(server, 20, request_attempts=1)
    assert all(extraction.error is None for extraction in found)
    assert usage.attempts > 2 * usage.requests
