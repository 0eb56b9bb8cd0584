"""Passages are embedded while a language model extracts; that changes no byte."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import structlog
from aiohttp import web
from rich.console import Console

from hippoindex.cluster.executor import LocalExecutor
from hippoindex.cluster.storage import open_storage
from hippoindex.errors import HippoIndexError
from hippoindex.pipeline.build import BuildResult, build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.embed_stage import TEXT
from hippoindex.pipeline.overlap import meanwhile, on_other_devices
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.shards import ShardStore
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("hostile_server")


@dataclass(frozen=True)
class Copy:
    """A stage that gives back what it gets; it fails on a text, and lets itself be held up."""

    name: ClassVar[str] = "copy"
    version: ClassVar[int] = 1
    reads: ClassVar[pa.Schema] = TEXT
    writes: ClassVar[pa.Schema] = TEXT

    bad: str = ""
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def key_part(self) -> Mapping[str, Any]:
        return {}

    def open(self) -> Process:
        def process(table: pa.Table) -> StageOutput:
            self.begun.release()
            assert self.may_go_on.acquire(timeout=30)
            if self.bad in table["text"].to_pylist():
                raise HippoIndexError("a bad text")
            return StageOutput(table, quarantine_table())

        return process


def shards_of(store: ShardStore, number: int) -> list[Any]:
    return store.write_slices(pa.table([[str(i) for i in range(number)]], schema=TEXT), 1)


def test_no_shard_is_begun_after_the_block_and_the_stage_does_the_rest(tmp_path: Path) -> None:
    store, stage = ShardStore(open_storage(tmp_path), tmp_path, Monitor()), Copy()
    shards = shards_of(store, 4)
    with meanwhile(stage, store.pending(stage, shards)) as done:
        stage.may_go_on.release()
        for _ in range(2):  # the first is done, the second in work
            assert stage.begun.acquire(timeout=30)
        threading.Timer(1.0, stage.may_go_on.release).start()
    assert [task.index for task in done] == [0, 1]
    assert [task.index for task in store.pending(stage, shards)] == [2, 3]
    stage.may_go_on.release(2)
    with structlog.testing.capture_logs() as log, LocalExecutor(1) as executor:
        outputs = store.run(executor, stage, "texts", shards)
    assert [shard.read()["text"].to_pylist() for shard in outputs] == [["0"], ["1"], ["2"], ["3"]]
    assert [entry["done"] for entry in log if entry["event"] == "shards found done"] == [2]


def test_an_error_ahead_is_logged_and_raised_by_the_stage(tmp_path: Path) -> None:
    store, stage = ShardStore(open_storage(tmp_path), tmp_path, Monitor()), Copy(bad="1")
    shards = shards_of(store, 3)
    stage.may_go_on.release(9)
    with structlog.testing.capture_logs() as log, meanwhile(stage, store.pending(stage, shards)) as done:
        for _ in range(2):
            assert stage.begun.acquire(timeout=30)
    assert [task.index for task in done] == [0]
    assert [(entry["stage"], entry["error"]) for entry in log] == [("copy", "a bad text")]
    with LocalExecutor(1) as executor, pytest.raises(HippoIndexError, match="a bad text"):
        store.run(executor, stage, "texts", shards)


@dataclass(frozen=True)
class Grouped(Copy):
    shards_in_flight: ClassVar[int] = 4


def test_shards_of_a_group_are_told_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hippoindex.pipeline.shards._LOOK_INTERVAL_S", 0.05)
    monitor = Monitor(Console(file=io.StringIO()), log_interval_s=0.05)
    store, stage = ShardStore(open_storage(tmp_path), tmp_path, monitor), Grouped()
    with structlog.testing.capture_logs() as log:

        def told() -> list[int]:
            return [entry["done"] for entry in log if entry["event"] == "stage at work"]

        def let_go() -> None:
            for number in range(1, 5):
                stage.may_go_on.release()
                deadline = time.monotonic() + 30
                while number < 4 and number not in told() and time.monotonic() < deadline:
                    time.sleep(0.01)

        letting_go = threading.Thread(target=let_go)
        letting_go.start()
        with LocalExecutor(1) as executor:
            store.run(executor, stage, "texts", shards_of(store, 4), lambda: "")
        letting_go.join()
    assert [number for number in dict.fromkeys(told()) if 0 < number < 4] == [1, 2, 3]
    assert monitor.times[0].items == 4


@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        ([], False),
        (["extract.engine=openai"], True),
        (["extract.engine=vllm"], True),
        (["extract.engine=vllm", "extract.vllm.device=cpu"], False),
        (["extract.engine=openai", "embed.engine=sentence-transformers"], False),
        (["extract.engine=openai", "embed.engine=openai"], False),
        (["extract.engine=openai", "embed.engine=openai", "embed.base_url=http://other/v1"], True),
        (["extract.engine=vllm", "embed.engine=vllm"], False),
    ],
)
def test_what_takes_nothing_from_extraction(settings: list[str], apart: bool) -> None:
    config = load_config(overrides=settings)
    assert on_other_devices(config.extract, config.embed) is apart


def build(server: Any, output: Path, corpus: Path, *, overlap: bool) -> BuildResult:
    settings = ["extract.engine=openai", "extract.model=m", f"extract.base_url={server.base_url}"]
    settings += ["cluster.shard_passages=4", "cluster.workers=1", f"cluster.overlap={overlap}"]
    config = load_config(
        overrides=[*settings, "max_quarantine_rate=0.5"], corpus__path=[str(corpus)], output=str(output)
    )
    return build_index(config)


def test_an_index_has_the_same_bytes_and_only_a_shard_that_lost_a_passage_is_embedded_again(
    hostile: ModuleType, tmp_path: Path
) -> None:
    """The server answers when all three shards of passages are embedded, and refuses one passage."""
    corpus, embedded = tmp_path / "mills.jsonl", tmp_path / "together.work" / "embed" / "done"
    corpus.write_text(
        "\n".join(json.dumps({"id": str(i), "text": f"Mill{i} stands in Town{i % 3}."}) for i in range(12))
    )

    async def answer(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while is_awaited and len(list(embedded.glob("*.json"))) < 3:
            await asyncio.sleep(0.05)
        if "Mill5 " in body["messages"][5]["content"]:
            return web.json_response(hostile.completion("{}", "content_filter"))
        return web.json_response(hostile.completion(hostile.good_answer(body["messages"])))

    with hostile.HostileServer((answer,), 1.0) as server:
        is_awaited = True
        with structlog.testing.capture_logs() as log:
            together = build(server, tmp_path / "together", corpus, overlap=True)
        is_awaited = False
        apart = build(server, tmp_path / "apart", corpus, overlap=False)
    told = {entry["event"]: entry for entry in log}
    assert told["embedded during extraction"]["shards"] == 3
    assert (told["shards found done"]["stage"], told["shards found done"]["done"]) == ("embed", 2)
    assert together.manifest.counts.quarantined_passages == 1
    assert together.manifest.files == apart.manifest.files
