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

from hippoindex.cluster.executor import LocalExecutor
from hippoindex.cluster.storage import open_storage
from hippoindex.errors import SpendLimitError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Extraction, Passage
from hippoindex.pipeline.extract.llm import LlmExtractor
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.llm.accounting import Usage, read_usage, usage_report
from hippoindex.pipeline.llm.engines import open_engine
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.shards import ShardStore


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


def passage_table(number: int) -> pa.Table:
    rows = [p._asdict() | {"doc_id": p.passage_id, "span_start": 0, "span_end": 1} for p in passages(number)]
    return pa.Table.from_pylist(rows, schema=schemas.PASSAGE)


def extract(server: Any, number: int, **settings: Any) -> tuple[list[Extraction], Usage, float]:
    chosen = config(server, **settings)
    with contextlib.closing(LlmExtractor(chosen, functools.partial(open_engine, chosen))) as extractor:
        start_s = time.monotonic()
        found = extractor.extract(passages(number))
        return found, extractor.usage, time.monotonic() - start_s


@pytest.mark.parametrize("seed", range(2))
def test_what_goes_in_is_extracted_or_quarantined(hostile: ModuleType, seed: int) -> None:
    """Whatever the server does: every passage is in the rows or in the quarantine, once, and none in both."""
    faults = hostile.TRANSIENT + hostile.HANGS + hostile.NONSENSE * 2
    with hostile.HostileServer(faults, 0.5, seed=seed) as server:
        stage = ExtractStage(config(server, timeout_s=2.0, request_attempts=3, max_attempts=2))
        output = stage.open()(passage_table(60))
    output.rows.validate(full=True)
    output.quarantine.validate(full=True)
    extracted = output.rows["passage_id"].to_pylist()
    lost = [row["row_id"] for row in output.quarantine.to_pylist() if row["kind"] == "passage"]
    assert sorted(extracted + lost, key=int) == [p.passage_id for p in passages(60)]
    assert extracted == sorted(extracted, key=int)
    assert extracted
    assert lost
    assert len(server.met) > 12
    assert all(row["reason"] for row in output.quarantine.to_pylist())


@pytest.mark.slow
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
    assert stormy_s <= 1.6 * calm_s + 2.0  # seconds for what else the machine does


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


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_overlap_and_are_the_same(hostile: ModuleType, tmp_path: Path, workers: int) -> None:
    def run(folder: Path, workers: int, **settings: Any) -> tuple[list[pa.Table], float]:
        storage = open_storage(folder)
        store = ShardStore(storage, folder, Monitor())
        shards = store.write_slices(passage_table(24), 4)
        stage = ExtractStage(config(server, **settings), workers, usage=storage)
        start_s = time.monotonic()
        with LocalExecutor(workers) as executor:
            outputs = store.run(executor, stage, "passages", shards)
        used = usage_report(read_usage(storage, "extract").values())
        assert (used["passages"], used["requests"]) == (24, 48)
        return [shard.read() for shard in outputs], time.monotonic() - start_s

    with hostile.HostileServer(latency_s=0.2) as server:
        together, together_s = run(tmp_path / "together", workers, shards_in_flight=6)
        apart, apart_s = run(tmp_path / "apart", 1, shards_in_flight=1)
    assert all(a.equals(b) for a, b in zip(together, apart, strict=True))
    if workers == 1:
        assert together_s < apart_s - 1.0


def test_an_error_ends_a_group_and_what_is_done_is_not_done_again(
    hostile: ModuleType, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path)
    price = {"prompt": 0.0, "generated": 1000.0}
    with hostile.HostileServer() as server:

        def run(**settings: Any) -> None:
            store = ShardStore(storage, tmp_path, Monitor())
            shards = store.write_slices(passage_table(24), 4)
            stage = ExtractStage(config(server, **settings), usage=storage)
            with LocalExecutor(1) as executor:
                store.run(executor, stage, "passages", shards)

        with pytest.raises(SpendLimitError):
            run(shards_in_flight=2, concurrency=1, max_output_tokens=16, price_usd=price, max_usd=0.15)
        sent = server.requests
        assert 16 <= sent < 48
        run(max_output_tokens=16)
        assert server.requests < sent + 48 - 8
