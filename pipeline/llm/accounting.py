"""What engines have used and cost, by stage and worker, while they are at work and in ``stats.json``."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hippoindex.cluster.metrics import count
from hippoindex.cluster.storage import Storage
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.llm.base import ChatResponse, Price

#: How often, at most, a worker leaves its sums while it is at a shard.
WRITE_INTERVAL_S = 5.0
#: Time over which a rate is taken.
_WINDOW_S = 60.0
_SECONDS_PER_HOUR = 3600
_OF_A_WORKER = ("passages", "requests", "generated_tokens", "seconds_s", "gpu_s", "usd")

_COUNTERS = {
    "passages": "Passages given to a language model.",
    "requests": "Requests answered by a language model.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were in the prefix cache.",
    "generated_tokens": "Tokens of answers.",
    "gpu_s": "Seconds, times the GPUs of the engine.",
    "usd": "US dollars, by the prices that were given or are known.",
}


@dataclass
class Usage:
    """Sums over requests, and over the time of workers.

    Attributes
    ----------
    requests : int
        Answered by the engine.
    attempts : int
        Sent to it.
    known : int
        Answered from the cache of answers, for nothing.
    prompt_tokens, cached_tokens, generated_tokens : int
        Of the ``requests``; ``cached_tokens`` of the ``prompt_tokens`` were in the engine's prefix cache.
    latency_s : float
        Sum over the ``requests``, which overlap.
    seconds_s, gpu_s : float
        Time in which a worker was at shards, and that times the GPUs of its engine.
    passages : int
        Done with by the engine.
    repaired, cut, split, invalid : int
        Answers that were JSON only after a repair; cut at the token limit; passages asked about in parts;
        answers that were not what was asked for.
    usd : float
        By the prices that were given or are known.
    rejected : Counter
        Entities and triples that are none, by reason.
    """

    requests: int = 0
    attempts: int = 0
    known: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    seconds_s: float = 0.0
    gpu_s: float = 0.0
    passages: int = 0
    repaired: int = 0
    cut: int = 0
    split: int = 0
    invalid: int = 0
    usd: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)

    def count(self, response: ChatResponse, price: Price | None) -> None:
        """Add a completion."""
        if response.attempts == 0:
            self.known += 1
            return
        self.requests += 1
        self.attempts += response.attempts
        self.prompt_tokens += response.prompt_tokens
        self.cached_tokens += response.cached_tokens
        self.generated_tokens += response.generated_tokens
        self.latency_s += response.latency_s
        if price is not None:
            self.usd += price.usd(response.prompt_tokens, response.cached_tokens, response.generated_tokens)

    def count_time(self, seconds_s: float, gpus: int, gpu_hour_usd: float | None) -> None:
        """Add time in which a worker was at work, with so many GPUs at a price each."""
        gpu_s = seconds_s * gpus
        self.seconds_s = round(self.seconds_s + seconds_s, 6)
        self.gpu_s = round(self.gpu_s + gpu_s, 6)
        self.usd += gpu_s * (gpu_hour_usd or 0.0) / _SECONDS_PER_HOUR

    def add(self, other: Usage) -> None:
        """Add the sums of another."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def record(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self) | {"rejected": dict(sorted(self.rejected.items()))}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Usage:
        """Read :meth:`record`, also another version's: what it lacks is 0, what is not known is left out."""
        known = {item.name: record[item.name] for item in fields(cls) if item.name in record}
        return cls(**known | {"rejected": Counter(record.get("rejected", {}))})


class UsageLog:
    """Where a worker leaves what it has used, for the program to add up: one object, written again and again.

    Parameters
    ----------
    storage : Storage
        Of the run.
    stage : str
        Name of the stage.
    """

    def __init__(self, storage: Storage, stage: str) -> None:
        self._storage = storage
        self._stage = stage
        self._worker = secrets.token_hex(4)
        self._written = Usage()
        self._written_at_s = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last writing is a while ago."""
        return time.monotonic() - self._written_at_s >= WRITE_INTERVAL_S

    def write(self, total: Usage) -> None:
        """Leave the worker's sums so far, if it has used anything."""
        self._written_at_s = time.monotonic()
        if not (total.requests or total.known or total.gpu_s):
            return
        for name, description in _COUNTERS.items():
            more = getattr(total, name) - getattr(self._written, name)
            count(f"hippoindex_{name}", description, more, worker=self._worker, stage=self._stage)
        record = total.record()
        self._written = Usage.of(record)
        with self._storage.write(f"{_folder(self._stage)}{self._worker}.json") as file:
            file.write(json.dumps(record).encode())


class LiveUsage:
    """Says in a few words what the workers of a stage are using now.

    Parameters
    ----------
    storage : Storage
        Of the run.
    stage : str
        Name of the stage.
    """

    def __init__(self, storage: Storage, stage: str) -> None:
        self._storage = storage
        self._stage = stage
        self._seen = deque([(time.monotonic(), _used(storage, stage))])

    def __call__(self) -> str:
        """Return tokens a second over the last minute and, where there is a price, US dollars so far."""
        now_s, total = time.monotonic(), _used(self._storage, self._stage)
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()
        self._seen.append((now_s, total))
        then_s, before = self._seen[0]
        seconds_s = max(now_s - then_s, 1e-9)
        read = (total.prompt_tokens - before.prompt_tokens) / seconds_s
        written = (total.generated_tokens - before.generated_tokens) / seconds_s
        rates = f"{read:,.0f} tokens/s in, {written:,.0f} out"
        return f"{rates}, {total.usd:,.2f} USD" if total.usd else rates


def read_usage(storage: Storage, stage: str) -> dict[str, Usage]:
    """Return the sums of every worker of a stage that left any in the storage of a run."""
    folder = _folder(stage)
    return {
        entry.name.removeprefix(folder).removesuffix(".json"): Usage.of(
            json.loads(storage.read_bytes(entry.name))
        )
        for entry in storage.entries(folder)
    }


def _folder(stage: str) -> str:
    return f"usage/{stage}/"


def _used(storage: Storage, stage: str) -> Usage:
    return _sum(read_usage(storage, stage).values())


def _sum(parts: Iterable[Usage]) -> Usage:
    total = Usage()
    for part in parts:
        total.add(part)
    return total


def stage_usage(storage: Storage, stage: str) -> dict[str, Any]:
    """Return a stage's tokens, GPU seconds and US dollars for ``stats.json``; empty if its engine has none.

    What an interrupted run used for shards that were taken over, or has lost, is counted.
    """
    total = _used(storage, stage)
    names = ("prompt_tokens", "cached_tokens", "generated_tokens", "gpu_s", "usd")
    return {} if total == Usage() else {name: getattr(total, name) for name in names}


def language_model_stats(config: ExtractConfig, storage: Storage) -> dict[str, Any]:
    """Return the part of ``stats.json`` about the language model; empty where none was asked."""
    if config.engine in ("rules", "import"):
        return {}
    return {"language_model": usage_report(read_usage(storage, "extract").values())}


def usage_report(workers: Iterable[Usage]) -> dict[str, Any]:
    """Return what ``stats.json`` says of a language model: sums, rates, and the share of each worker."""
    parts = list(workers)
    total = _sum(parts)
    seconds_s = max((part.seconds_s for part in parts), default=0.0)
    record = total.record()
    record["cached_share"] = _ratio(total.cached_tokens, total.prompt_tokens)
    record["passages_per_s"] = _ratio(total.passages, seconds_s)
    record["generated_tokens_per_s"] = _ratio(total.generated_tokens, seconds_s)
    record["prompt_tokens_per_s"] = _ratio(total.prompt_tokens, seconds_s)
    record["workers"] = [{name: part.record()[name] for name in _OF_A_WORKER} for part in parts]
    return record


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
