"""How full our layer keeps an inference engine, and what it costs, with a simulated engine in virtual time.

The engine batches continuously: it holds up to ``--slots`` sequences, decodes one token of each at a step,
and prefills what its prefix cache does not hold. Passages and answers have lognormal lengths with the means
that HippoRAG 2's authors report of MuSiQue. Our layer (admission, two turns, parsing) runs as it does in
production; only the clock is the simulation's. Its own CPU time is added in full to what it takes, as if the
engine stood still meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import itertools
import json
import selectors
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import write_record

from hippoindex.pipeline.config import ClusterConfig, ExtractConfig
from hippoindex.pipeline.extract.base import Passage
from hippoindex.pipeline.extract.llm import LlmExtractor
from hippoindex.pipeline.extract.prompts import load_prompts
from hippoindex.pipeline.llm.base import ChatRequest, ChatResponse, rough_token_spans
from hippoindex.pipeline.llm.loop import LoopThread

#: An 8B model on one H100, roughly: a step of n sequences, a token of prefill, and the KV cache.
STEP_S, STEP_PER_SEQUENCE_S, PREFILL_S, KV_TOKENS = 0.012, 0.00003, 0.00005, 400_000

WORDS = (
    *("mill", "river", "town", "bridge", "king", "ferry", "tower", "road"),
    *("school", "poet", "battle", "island", "church", "band", "film"),
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._loop.now_s += timeout
        return ready


@dataclass(order=True)
class Running:
    """One running request: ``end`` is the decoding step at which it is complete."""

    end: float
    number: int
    prompt_tokens: int = field(compare=False)
    cached_tokens: int = field(compare=False)
    text: str = field(compare=False)
    tokens: int = field(compare=False)
    conversation: str = field(compare=False)
    done: asyncio.Future[ChatResponse] = field(compare=False)


class SimulatedEngine:
    """A continuously batching engine with a prefix cache, on the clock of its loop."""

    def __init__(self, slots: int, answers: dict[str, tuple[str, str]]) -> None:
        self.slots = slots
        self.gpus, self.gpu_hour_usd = 0, None
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.history: list[tuple[float, int]] = [(0.0, 0)]
        self._answers = answers
        self._numbers = itertools.count()
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._running_tokens = 0
        self._kept: OrderedDict[str, int] = OrderedDict()  # finished conversations in the cache, oldest first
        self._kept_tokens = 0
        self._step = 0.0
        self._prefill_s = 0.0
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._called = False

    async def aclose(self) -> None:
        pass

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        return rough_token_spans(text)

    async def complete(self, request: ChatRequest) -> ChatResponse:
        loop = asyncio.get_running_loop()
        turn = (len(request.messages) - 6) // 2
        conversation = request.messages[5]["content"]
        text = self._answers[conversation.rsplit("Passage:\n", 1)[1]][turn]
        sizes = [_tokens(message["content"]) for message in request.messages]
        done: asyncio.Future[ChatResponse] = loop.create_future()
        self._waiting.append(
            Running(
                0.0, next(self._numbers), sum(sizes), sum(sizes[:5]), text, _tokens(text), conversation, done
            )
        )
        if not self._called:
            self._called = True
            loop.call_soon(self._schedule)
        return await done

    def _schedule(self) -> None:
        self._called = False
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        while self._running and self._running[0].end <= self._step + 1e-6:
            self._finish(heapq.heappop(self._running))
        if self._waiting and len(self._running) < self.slots:
            free = self.slots - len(self._running)
            for sequence in self._waiting[:free]:
                self._start(sequence)
            del self._waiting[:free]
        self.history.append((loop.time(), len(self._running)))
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            steps = self._running[0].end - self._step
            self._timer = loop.call_later(self._prefill_s + steps * self._step_s(), self._schedule)

    def _step_s(self) -> float:
        return STEP_S + STEP_PER_SEQUENCE_S * len(self._running)

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        prefill_s = min(self._prefill_s, elapsed_s)
        self._prefill_s -= prefill_s
        if self._running:
            self._step += (elapsed_s - prefill_s) / self._step_s()

    def _start(self, sequence: Running) -> None:
        kept = self._kept.pop(sequence.conversation, 0)
        self._kept_tokens -= kept
        sequence.cached_tokens = min(sequence.prompt_tokens, max(sequence.cached_tokens, kept))
        self._prefill_s += (sequence.prompt_tokens - sequence.cached_tokens) * PREFILL_S
        sequence.end = self._step + sequence.tokens
        heapq.heappush(self._running, sequence)
        self._running_tokens += sequence.prompt_tokens + sequence.tokens
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += sequence.cached_tokens
        while self._kept and self._kept_tokens + self._running_tokens > KV_TOKENS:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def _finish(self, sequence: Running) -> None:
        held = sequence.prompt_tokens + sequence.tokens
        self._running_tokens -= held
        self._kept[sequence.conversation] = held
        self._kept_tokens += held
        self.generated_tokens += sequence.tokens
        sequence.done.set_result(
            ChatResponse(
                sequence.text, "stop", sequence.prompt_tokens, sequence.cached_tokens, sequence.tokens
            )
        )

    def occupancy(self, first: float = 0.02, last: float = 0.98) -> float:
        """Mean share of the slots that are taken, between two shares of the run's time."""
        times, counts = np.array(self.history).T
        begin, end = first * times[-1], last * times[-1]
        spans = np.diff(np.clip(times, begin, end))
        return float(spans @ counts[:-1] / spans.sum() / self.slots)


@functools.cache
def _tokens(text: str) -> int:
    return len(rough_token_spans(text))


def make_passages(number: int, seed: int) -> tuple[list[Passage], dict[str, tuple[str, str]]]:
    """Passages of 100 tokens in the mean and up to some 1,500, and what is answered about each."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(75), 0.75, number), 10, 1500).astype(int)
    shares = random.lognormal(np.log(0.9), 0.4, (number, 2)) * (0.6, 2.0)
    passages, answers = [], {}
    for i, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(length // 2)]
        text = f"number {i} " + " ".join(words) + "."
        names = [f"{WORDS[(i + j) % 15]} {j}" for j in range(max(1, int(length * share[0] / 6)))]
        triples = [[f"{a} {j}", "is near", "town"] for j, a in enumerate(words * 9)]
        kept = triples[: max(1, int(length * share[1] / 14))]
        answers[text] = json.dumps({"entities": names}), json.dumps({"triples": kept})
        passages.append(Passage(str(i), "", text))
    return passages, answers


@dataclass(frozen=True)
class Measurement:
    """One run: seconds of the engine, CPU seconds of this process, and how full the engine was."""

    engine_s: float
    cpu_s: float
    occupancy: float
    cached_share: float
    prompt_tokens: int
    uncached_tokens: int


def measure(
    loop: VirtualLoop, thread: LoopThread, engine: SimulatedEngine, work: Coroutine[Any, Any, Any]
) -> Measurement:
    start_s, started = loop.now_s, time.process_time()
    thread.run(work)
    cpu_s = time.process_time() - started
    return Measurement(
        engine.history[-1][0] - start_s,
        cpu_s,
        engine.occupancy(),
        engine.cached_tokens / engine.prompt_tokens,
        engine.prompt_tokens,
        engine.prompt_tokens - engine.cached_tokens,
    )


def run_layer(
    passages: Sequence[Passage], answers: dict[str, tuple[str, str]], slots: int, shard: int, in_flight: int
) -> Measurement:
    """Extract through our layer, some shards at a time."""
    loop = VirtualLoop()
    thread = LoopThread("engine", loop)
    engine = SimulatedEngine(slots, answers)

    async def opened() -> SimulatedEngine:
        return engine

    extractor = LlmExtractor(ExtractConfig(engine="openai", model="m"), opened, loop=thread)
    shards: Iterator[Sequence[Passage]] = iter(
        [passages[start : start + shard] for start in range(0, len(passages), shard)]
    )

    async def worker() -> None:
        for part in shards:
            found = await extractor.extract_async(part)
            if any(extraction.error for extraction in found):
                raise SystemExit("an extraction failed")

    async def work() -> None:
        await asyncio.gather(*(worker() for _ in range(in_flight)))

    measured = measure(loop, thread, engine, work())
    extractor.close()
    return measured


def run_bare(
    passages: Sequence[Passage], answers: dict[str, tuple[str, str]], slots: int, *, sort: bool
) -> Measurement:
    """Keep as many conversations as there are slots: no shards, no admission, no parsing."""
    loop = VirtualLoop()
    thread = LoopThread("engine", loop)
    engine, prompts = SimulatedEngine(slots, answers), load_prompts()
    todo = iter(sorted(passages, key=lambda passage: -len(passage.text)) if sort else passages)

    async def worker() -> None:
        for passage in todo:
            messages = prompts.ask_entities(passage.text)
            first = await engine.complete(ChatRequest(messages, 2048))
            await engine.complete(ChatRequest(prompts.ask_triples(messages, first.text), 2048))

    async def work() -> None:
        await asyncio.gather(*(worker() for _ in range(slots)))

    measured = measure(loop, thread, engine, work())
    thread.stop()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--shard", type=int, default=ClusterConfig().shard_passages, help="its passages")
    parser.add_argument(
        "--in-flight", type=int, default=ExtractConfig().shards_in_flight, help="shards at a time"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/engine_feed.json")
    given = parser.parse_args()
    passages, answers = make_passages(given.passages, given.seed)
    for text in answers.values():  # so that no run pays for counting tokens
        for answer in text:
            _tokens(answer)
    bare = run_bare(passages, answers, given.slots, sort=False)
    best = run_bare(passages, answers, given.slots, sort=True)
    print(f"{given.passages:,} passages, {given.slots} slots, shards of {given.shard:,}")
    print(
        "| fed by | engine s | layer's CPU s | occupancy 2-98 % | overhead | prompt tokens from the cache |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    print(_row("the bare engine, passages in their order", bare, bare))
    print(_row("the bare engine, the longest of all passages first", best, bare))
    results: dict[str, Any] = {}
    for in_flight in sorted({1, max(1, given.in_flight // 4), given.in_flight}):
        layer = run_layer(passages, answers, given.slots, given.shard, in_flight)
        print(_row(f"our layer, {in_flight} shard{'s' * (in_flight > 1)} in flight", layer, bare))
        results = {
            "occupancy": round(layer.occupancy, 4),
            "overhead": round(_overhead(layer, bare), 4),
            "overhead_over_sorted": round(_overhead(layer, best), 4),
            "prompt_tokens_ratio": round(layer.uncached_tokens / layer.prompt_tokens, 4),
        }
    print(f"overhead against the longest of all first: {results['overhead_over_sorted']:.1%}")
    print(
        f"prompt tokens not cached, of those of two independent calls: {results['prompt_tokens_ratio']:.1%}"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if given.record:
        write_record("engine_feed", results)


def _overhead(layer: Measurement, bare: Measurement) -> float:
    return (layer.engine_s + max(0.0, layer.cpu_s - bare.cpu_s)) / bare.engine_s - 1


def _row(name: str, run: Measurement, bare: Measurement) -> str:
    cpu = "" if run is bare else f"{run.cpu_s - bare.cpu_s:.1f}"
    overhead = "" if run is bare else f"{_overhead(run, bare):.1%}"
    figures = (f"{run.engine_s:,.0f}", cpu, f"{run.occupancy:.1%}", overhead, f"{run.cached_share:.1%}")
    return f"| {name} | {' | '.join(figures)} |"


if __name__ == "__main__":
    main()
