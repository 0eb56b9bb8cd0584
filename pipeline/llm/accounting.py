"""What a language model has used and cost, by worker, from the first shard to ``stats.json``."""

from __future__ import annotations

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hippoindex.cluster.metrics import count
from hippoindex.cluster.storage import Storage
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.llm.base import ChatResponse, Price

_FOLDER = "usage/"

_COUNTERS = {
    "passages": "Passages given to a language model.",
    "requests": "Requests answered by a language model.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were in the prefix cache.",
    "generated_tokens": "Tokens of answers.",
    "usd": "US dollars, by the prices of the configuration.",
}


@dataclass
class Usage:
    """Sums over requests.

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
        Given to the engine.
    repaired, cut, split, invalid : int
        Answers that were JSON only after a repair; cut at the token limit; passages asked about in parts;
        answers that were not what was asked for.
    usd : float
        By the prices that were given.
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

    def add(self, other: Usage) -> None:
        """Add the sums of another."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def record(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self) | {"rejected": dict(sorted(self.rejected.items()))}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Usage:
        """Read :meth:`record`."""
        return cls(**record | {"rejected": Counter(record["rejected"])})


class UsageLog:
    """Where a worker leaves what its shards have used, for the program to add up.

    Parameters
    ----------
    storage : Storage
        Of the run.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._worker = secrets.token_hex(4)
        self._shards = itertools.count()

    def write(self, usage: Usage) -> None:
        """Leave the sums of one shard, if anything was used for it."""
        if usage.requests or usage.known:
            for field_name, description in _COUNTERS.items():
                count(
                    f"hippoindex_{field_name}", description, getattr(usage, field_name), worker=self._worker
                )
            name = f"{_FOLDER}{self._worker}-{next(self._shards):06d}.json"
            self._storage.create(name, json.dumps(usage.record()).encode())


def read_usage(storage: Storage) -> dict[str, Usage]:
    """Return the sums of every worker that left any in the storage of a run."""
    workers: dict[str, Usage] = {}
    for entry in storage.entries(_FOLDER):
        usage = Usage.of(json.loads(storage.read_bytes(entry.name)))
        workers.setdefault(entry.name.removeprefix(_FOLDER).partition("-")[0], Usage()).add(usage)
    return workers


def language_model_stats(config: ExtractConfig, storage: Storage) -> dict[str, Any]:
    """Return the part of ``stats.json`` about the language model; empty where none was asked.

    Shards of an interrupted run that were taken over are counted with what they used then.
    """
    if config.engine in ("rules", "import"):
        return {}
    return {"language_model": usage_report(read_usage(storage).values())}


def usage_report(workers: Iterable[Usage]) -> dict[str, Any]:
    """Return what ``stats.json`` says of a language model: sums, rates, and the share of each worker."""
    parts = list(workers)
    total = Usage()
    for part in parts:
        total.add(part)
    seconds_s = max((part.seconds_s for part in parts), default=0.0)
    record = total.record()
    record["cached_share"] = _ratio(total.cached_tokens, total.prompt_tokens)
    record["passages_per_s"] = _ratio(total.passages, seconds_s)
    record["generated_tokens_per_s"] = _ratio(total.generated_tokens, seconds_s)
    record["prompt_tokens_per_s"] = _ratio(total.prompt_tokens, seconds_s)
    record["workers"] = [
        {name: part.record()[name] for name in ("passages", "requests", "generated_tokens", "seconds_s")}
        for part in parts
    ]
    return record


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
