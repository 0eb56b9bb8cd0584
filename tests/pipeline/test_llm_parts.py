"""The parts of the language-model layer: limits, feed, answers, cache, accounting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.errors import HippoIndexError, SpendLimitError
from hippoindex.pipeline.config import ExtractConfig, VllmConfig
from hippoindex.pipeline.extract.answers import read_answer, salvage_answer
from hippoindex.pipeline.extract.base import Passage
from hippoindex.pipeline.extract.llm import LlmExtractor
from hippoindex.pipeline.llm import accounting
from hippoindex.pipeline.llm.accounting import (
    LiveUsage,
    Usage,
    UsageLog,
    read_usage,
    stage_usage,
    usage_report,
)
from hippoindex.pipeline.llm.base import ChatRequest, ChatResponse, Price, rough_token_spans, rough_tokens
from hippoindex.pipeline.llm.cache import ResponseCache, request_key
from hippoindex.pipeline.llm.feed import Feed
from hippoindex.pipeline.llm.known import Gpu, known_gpu, known_gpus
from hippoindex.pipeline.llm.limits import AdaptiveLimit, Budget, Pace
from hippoindex.pipeline.llm.loop import LoopThread
from hippoindex.pipeline.llm.vllm import gpu_hour_usd


def test_a_limit_is_never_passed_and_all_get_their_turn() -> None:
    async def work() -> tuple[int, int]:
        limit, running, most, done = AdaptiveLimit(5), 0, 0, 0

        async def one() -> None:
            nonlocal running, most, done
            async with limit.slot():
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(0.001)
                finally:
                    running -= 1
                done += 1

        tasks = [asyncio.create_task(one()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[3:9]:  # some hold a slot, some wait for one
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1), limit.slot():
            pass
        return most, done

    assert asyncio.run(work()) == (5, 44)


@pytest.mark.parametrize(
    ("refused_share", "least", "most"), [(1.0, 1, 1), (0.5, 4, 12), (0.05, 60, 64), (0.0, 64, 64)]
)
def test_the_limit_follows_the_share_of_refusals(refused_share: float, least: int, most: int) -> None:
    limit = AdaptiveLimit(64)
    every = round(1 / refused_share) if refused_share else 0
    seen = []
    for number in range(10_000):
        limit.note(refused=bool(every) and number % every == 0)
        seen.append(limit.value)
    settled = seen[5_000:]
    assert least <= sum(settled) / len(settled) <= most
    for _ in range(10_000):
        limit.note(refused=False)
    assert limit.value == 64


def test_a_pace_is_kept_over_more_than_a_burst() -> None:
    async def work() -> float:
        pace = Pace(100.0)
        start_s = time.monotonic()
        await asyncio.gather(*(pace.wait(1) for _ in range(130)))
        pace.give_back(1)
        return time.monotonic() - start_s

    assert 0.29 <= asyncio.run(work()) < 2.0


def test_a_budget_waits_for_what_may_turn_out_cheaper() -> None:
    async def work() -> list[str]:
        budget, events = Budget(1.0), []

        async def one(name: str, usd: float) -> None:
            async with budget.reserve(0.6):
                events.append(f"begin {name}")
                await asyncio.sleep(0.01)
                budget.spent_usd += usd
                events.append(f"end {name}")

        await asyncio.gather(one("a", 0.1), one("b", 0.5))
        with pytest.raises(SpendLimitError):
            await one("c", 0.0)
        return events

    assert asyncio.run(work()) == ["begin a", "end a", "begin b", "end b"]


async def _order(feed: Feed, sizes: list[int], running_s: float = 0.001) -> tuple[list[int], int]:
    order: list[int] = []
    held = most = 0

    async def one(size: int) -> None:
        nonlocal held, most
        async with feed.admitted(size):
            order.append(size)
            held += size
            most = max(most, held)
            await asyncio.sleep(running_s)
            held -= size

    await asyncio.gather(*map(one, sizes))
    return order, most


def test_the_longest_that_waits_goes_first() -> None:
    async def work() -> list[int]:
        feed, order, all_wait = Feed(1, None), list[int](), asyncio.Event()

        async def one(size: int) -> None:
            async with feed.admitted(size):
                order.append(size)
                await all_wait.wait()

        async with asyncio.TaskGroup() as group:
            for sizes in ((1, 5, 3), (4, 2)):
                for size in sizes:
                    group.create_task(one(size))
                while not order:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            all_wait.set()
        return order

    assert asyncio.run(work()) == [5, 4, 3, 2, 1]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 5), st.integers(1, 40))
def test_all_are_admitted_within_the_token_budget(sizes: list[int], slots: int, tokens: int) -> None:
    order, most = asyncio.run(_order(Feed(slots, tokens), sizes, 0.0))
    assert sorted(order) == sorted(sizes)
    assert most <= max(tokens, *sizes, 0)


def test_what_gives_up_its_wait_holds_nothing() -> None:
    async def work() -> int:
        feed = Feed(1, None)

        async def one() -> None:
            async with feed.admitted(1):
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0.001)
        tasks[0].cancel()
        tasks[2].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1), feed.admitted(1):
            pass
        return sum(result is None for result in done)

    assert asyncio.run(work()) == 2


_items = st.one_of(
    st.text(max_size=8),
    st.none(),
    st.integers(),
    st.lists(st.text(max_size=5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.lists(_items, max_size=6), st.lists(_items, max_size=6), st.data())
def test_a_cut_answer_keeps_a_beginning_of_its_items(
    entities: list[Any], triples: list[Any], data: st.DataObject
) -> None:
    whole = json.dumps({"entities": entities, "triples": triples}, ensure_ascii=data.draw(st.booleans()))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    found = salvage_answer(cut, ("entities", "triples"))
    assert found.cut
    for key, items in (("entities", entities), ("triples", triples)):
        assert found.lists[key] == items[: len(found.lists[key])]
    if len(cut) >= len(whole) - 1:  # only the last bracket is missing
        assert found.lists == {"entities": entities, "triples": triples}


@given(st.text(max_size=200))
def test_any_text_is_an_answer_or_none(text: str) -> None:
    answer = read_answer(text, ("entities",))
    assert answer is None or isinstance(answer.lists["entities"], list)
    assert isinstance(salvage_answer(text, ("entities",)).lists["entities"], list)


def test_thoughts_before_an_answer_are_passed_over() -> None:
    answer = read_answer('<think>{"entities": ["no"]}</think>\n\n{"entities": ["yes"]}', ("entities",))
    assert answer is not None
    assert (answer.lists, answer.repaired) == ({"entities": ["yes"]}, False)


def test_thoughts_that_were_cut_are_no_answer() -> None:
    thoughts = '<think>I could say {"entities": ["no", "never"'
    assert salvage_answer(thoughts, ("entities",)).lists == {"entities": []}
    assert read_answer(thoughts, ("entities",)) is None


@given(st.text(max_size=200))
def test_rough_tokens_cover_all_but_white_space(text: str) -> None:
    spans = rough_token_spans(text)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert "".join(text[slice(*span)] for span in spans) == "".join(c for c in text if not c.isspace())
    assert rough_tokens([{"role": "user", "content": text}]) == 4 + len(spans)


def test_answers_are_kept_across_processes_and_threads(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "a" / "b")
    key = request_key({"model": "m", "seed": 1})
    assert key == request_key({"seed": 1, "model": "m"})
    assert cache.get(key) is None
    cache.put(key, {"text": "ä\u2028"})
    cache.put(key, {"text": "another"})
    other = ResponseCache(tmp_path / "a" / "b")
    threads = [
        threading.Thread(target=lambda i=i: other.put(request_key({"i": i}), {"i": i})) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.get(key) == {"text": "ä\u2028"}
    assert [cache.get(request_key({"i": i})) for i in range(20)] == [{"i": i} for i in range(20)]


def test_a_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(HippoIndexError, match=r"responses\.sqlite.*extract\.cache"):
        ResponseCache(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(HippoIndexError, match="Cannot make the folder"):
        ResponseCache(tmp_path / "file")
    assert sqlite3.sqlite_version_info >= (3, 37)  # strict tables


def test_usage_of_workers_adds_up(tmp_path: Path) -> None:
    price = Price(prompt=2.0, cached=1.0, generated=4.0)
    storage = open_storage(tmp_path)
    logs = [UsageLog(storage, "extract") for _ in range(2)]
    logs[0].write(Usage(passages=9))  # nothing was used
    live = LiveUsage(storage, "extract")
    assert live() == "0 tokens/s in, 0 out"
    for log, shards in zip(logs, (1, 2), strict=True):
        usage = Usage()
        for _ in range(shards):
            usage.passages += 10
            usage.count_time(2.0, 0, None)
            usage.rejected["object is empty"] += 1
            usage.count(ChatResponse("", "stop", 100, 50, 10, 0.5, 3), price)
            usage.count(ChatResponse("", "stop", 100, 50, 10, 0.0, 0), price)
            log.write(usage)
    workers = read_usage(storage, "extract")
    assert sorted(worker.passages for worker in workers.values()) == [10, 20]
    report = usage_report(workers.values())
    assert report["requests"] == report["known"] == 3
    assert report["attempts"] == 9
    assert report["usd"] == pytest.approx(3 * (50 * 2 + 50 + 10 * 4) / 1e6)
    assert report["cached_share"] == 0.5
    assert report["rejected"] == {"object is empty": 3}
    assert report["passages_per_s"] == 30 / 4
    assert sorted(worker["usd"] for worker in report["workers"]) == pytest.approx([190e-6, 380e-6])
    assert usage_report([])["passages_per_s"] == 0.0
    of_stage = stage_usage(storage, "extract")
    assert of_stage == {name: report[name] for name in of_stage}
    assert (of_stage["prompt_tokens"], of_stage["gpu_s"]) == (300, 0)
    assert stage_usage(storage, "embed") == {}
    assert re.fullmatch(r"[1-9][\d,]* tokens/s in, [1-9][\d,]* out, 0\.00 USD", live())


class _LocalEngine:
    """An engine on two GPUs; at each request it looks what is known of its use so far."""

    slots, gpus, gpu_hour_usd = 1, 2, 3600.0

    def __init__(self, storage: Storage) -> None:
        self.known: list[int] = []
        self._storage = storage

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        return rough_token_spans(text)

    async def complete(self, request: ChatRequest) -> ChatResponse:  # noqa: ARG002
        self.known.append(sum(used.requests for used in read_usage(self._storage, "extract").values()))
        return ChatResponse('{"entities": ["Ann"], "triples": []}', "stop", 10, 5, 5)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(("interval_s", "known"), [(0.0, [0, 1, 2, 3]), (60.0, [0, 0, 0, 0])])
def test_a_worker_leaves_what_it_uses_while_it_is_at_a_shard(
    tmp_path: Path, interval_s: float, known: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "WRITE_INTERVAL_S", interval_s)
    storage = open_storage(tmp_path)
    engine = _LocalEngine(storage)

    async def opened() -> _LocalEngine:
        return engine

    config = ExtractConfig(engine="vllm", model="m")
    with contextlib.closing(LlmExtractor(config, opened, UsageLog(storage, "extract"))) as extractor:
        extractor.extract([Passage("a", "", "Ann."), Passage("b", "", "Bo.")])
    assert engine.known == known
    (used,) = read_usage(storage, "extract").values()
    assert (used.passages, used.requests, used.prompt_tokens) == (2, 4, 40)
    assert used.gpu_s == pytest.approx(2 * used.seconds_s, abs=1e-4)
    assert used.usd == pytest.approx(used.gpu_s, abs=1e-4)  # a dollar a second


class _SlowLog(UsageLog):
    """The first writing waits for a request to be answered meanwhile."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, "extract")
        self.begun, self.answered = threading.Event(), threading.Event()

    def write(self, total: Usage) -> None:
        self.begun.set()
        assert self.answered.wait(30)
        super().write(total)


class _QuickEngine(_LocalEngine):
    slots = 2

    def __init__(self, log: _SlowLog) -> None:
        self._log = log

    async def complete(self, request: ChatRequest) -> ChatResponse:
        if "Bo." in request.messages[5]["content"]:
            while not self._log.begun.is_set():
                await asyncio.sleep(0.01)
            self._log.answered.set()
        return ChatResponse('{"entities": ["Ann"], "triples": []}', "stop", 10, 5, 5)


def test_an_engine_does_not_wait_until_its_use_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "WRITE_INTERVAL_S", 0.0)
    storage = open_storage(tmp_path)
    log = _SlowLog(storage)

    async def opened() -> _QuickEngine:
        return _QuickEngine(log)

    config = ExtractConfig(engine="vllm", model="m")
    with contextlib.closing(LlmExtractor(config, opened, log)) as extractor:
        extractor.extract([Passage("a", "", "Ann."), Passage("b", "", "Bo.")])
    (used,) = read_usage(storage, "extract").values()
    assert used.requests == 4


def test_the_sums_of_another_version_are_read() -> None:
    assert Usage.of({"requests": 3, "smiles": 1, "rejected": {"a": 2}}) == Usage(
        requests=3, rejected=Counter({"a": 2})
    )


@pytest.mark.parametrize(
    ("settings", "hour_usd"),
    [
        ({}, 3.0),
        ({"gpu_hour_usd": 2.5}, 2.5),
        ({"device": "cpu", "gpu_hour_usd": 2.5}, None),
    ],
)
def test_the_price_of_a_gpu_is_that_given_or_that_of_its_kind(
    settings: dict[str, Any], hour_usd: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself is a stand-in here: only the driver's name of the device counts."""
    platform = types.SimpleNamespace(get_device_name=lambda: "NVIDIA H100 80GB HBM3")
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = platform  # type: ignore[attr-defined]
    assert gpu_hour_usd(VllmConfig(**settings)) == hour_usd


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("NVIDIA H100 PCIe", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_known_gpus_are_told_apart(device: str, kind: Gpu | None) -> None:
    assert known_gpu(device) == (known_gpus()[kind] if kind else None)


def test_a_loop_runs_for_several_threads_and_passes_errors_on() -> None:
    loop = LoopThread("test")

    async def fail() -> None:
        raise ValueError("mill")

    def run(coroutine: Coroutine[Any, Any, Any]) -> None:
        results.append(loop.run(coroutine))

    results: list[Any] = []
    threads = [threading.Thread(target=run, args=(asyncio.sleep(0.01, i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2]
    with pytest.raises(ValueError, match="mill"):
        loop.run(fail())
    loop.stop()
