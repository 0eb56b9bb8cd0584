"""OpenIE by a language model, whatever the engine it runs on.

A passage is one conversation of two turns, entities and then triples, or of one (``extract.mode``). An answer
that was cut keeps what was complete in it and is asked for again with twice the length, then the passage is
asked about in parts; an answer that is not what was asked for is asked for again less greedily; a prompt that
is too long is split. What still fails is the passage's error, with every answer that was given.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hippoindex.errors import UsageError
from hippoindex.pipeline.chunk import chunk_spans, sentence_spans
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.answers import Answer, read_answer, salvage_answer
from hippoindex.pipeline.extract.base import Extraction, Passage, RejectedTriple, Triple
from hippoindex.pipeline.extract.imported import parse_entities, parse_triples, raw_json
from hippoindex.pipeline.extract.prompts import answer_schema, load_prompts
from hippoindex.pipeline.llm.accounting import Usage, UsageLog
from hippoindex.pipeline.llm.base import (
    SEED,
    TEMPERATURE_STEP,
    ChatEngine,
    ChatRequest,
    ChatResponse,
    PromptTooLongError,
    RequestFailedError,
)
from hippoindex.pipeline.llm.engines import price_of
from hippoindex.pipeline.llm.feed import Feed
from hippoindex.pipeline.llm.loop import LoopThread, awaited, run_all
from hippoindex.pipeline.llm.prompts import Message
from hippoindex.pipeline.schemas import MAX_RAW_CHARS

#: Raised when what is asked, or what is made of an answer, changes.
VERSION = 3

#: Tokens of the answers about a passage, per token of its text: what HippoRAG 2's authors report of MuSiQue.
_ANSWER_SHARE = 2.5
#: Times that a passage whose prompt is too long is halved.
_MAX_HALVINGS = 8

_LOG = logging.getLogger(__name__)


class Note(RejectedTriple):
    """An answer that is not whole, while its passage is kept; a type of its own, to be counted apart."""

    __slots__ = ()


class _FailedPartError(Exception):
    """A text could not be processed."""


class _TooMuchError(Exception):
    """A text has to be asked about in parts: its prompt is too long, or an answer was cut even so.

    Attributes
    ----------
    halves : list of (int, int)
    last : bool
        Whether what is cut in an answer about a half is to be lost.
    """

    def __init__(self, halves: list[tuple[int, int]], *, last: bool) -> None:
        super().__init__()
        self.halves = halves
        self.last = last


@dataclass
class _Part:
    """A part of a passage, from ``start`` to ``end``, what was found in it, and every answer about it.

    ``last`` says that what is cut in an answer is lost, rather than asked for about the halves.
    """

    title: str
    text: str
    start: int
    end: int
    last: bool = False
    may_be_halved: bool = True
    entities: list[Any] = field(default_factory=list)
    triples: list[Any] = field(default_factory=list)
    cut: bool = False
    error: str | None = None
    answers: list[str] = field(default_factory=list)


class LlmExtractor:
    """Asks a language model for entities and triples.

    Parameters
    ----------
    config : ExtractConfig
    open_engine : callable
        Opens the engine; awaited on the event loop on which it is used.
    log : UsageLog, optional
        Where the usage is left.
    loop : LoopThread, optional
        By default one of its own.

    Attributes
    ----------
    usage : Usage
        Sums so far, shards that are in work included.
    """

    def __init__(
        self,
        config: ExtractConfig,
        open_engine: Callable[[], Awaitable[ChatEngine]],
        log: UsageLog | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        self.usage = Usage()
        self._config = config
        self._repairs_told = 0
        self._prompts = load_prompts(config.prompts)
        self._price = price_of(config)
        self._log = log
        self._writing = asyncio.Lock()
        self._shards = 0
        self._counted_until_s = 0.0
        self._loop = loop or LoopThread("language-model")
        self._engine = self._loop.run(awaited(open_engine))
        self._release = weakref.finalize(self, _release, self._loop, self._engine)
        slots = self._engine.slots
        self._feed = Feed(slots, config.tokens_in_flight)

    def close(self) -> None:
        """Release the engine; it is released as well when nothing refers to this any more."""
        self._release()

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Return one extraction per passage, in order; several threads may call it at once.

        Raises
        ------
        HippoIndexError
            If the engine can do nothing for any passage.
        """
        return self._loop.run(self.extract_async(passages))

    async def extract_async(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Do the same on the engine's event loop."""
        if not self._shards:
            self._counted_until_s = time.perf_counter()
        self._shards += 1
        try:
            extractions = await run_all(map(self._passage, passages))
            for extraction in extractions:
                self.usage.rejected.update(item.reason for item in extraction.rejected)
        finally:
            self._shards -= 1
            await self._leave_usage()
        repaired = self.usage.repaired - self._repairs_told
        if repaired:
            self._repairs_told += repaired
            _LOG.warning("%d answers were JSON only after a repair", repaired)
        return extractions

    async def _leave_usage(self) -> None:
        """Count the time since it was last counted, in which a shard was in work, and leave the sums.

        They are written by a thread, one after the other: the engine must not wait for the storage.
        """
        now_s = time.perf_counter()
        self.usage.count_time(now_s - self._counted_until_s, self._engine.gpus, self._engine.gpu_hour_usd)
        self._counted_until_s = now_s
        if self._log is not None:
            async with self._writing:
                await asyncio.to_thread(self._log.write, Usage.of(self.usage.record()))

    async def _passage(self, passage: Passage) -> Extraction:
        spans = self._spans(passage.text)
        self.usage.split += len(spans) > 1
        parts = await run_all(self._part(passage, span) for span in spans)
        self.usage.passages += 1
        return _merge([part for found in parts for part in found])

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return the parts of a text that are asked about one by one; usually it is whole."""
        limit = self._config.max_passage_tokens
        tokens = self._engine.token_spans(text) if limit is not None else []
        if limit is None or len(tokens) <= limit:
            return [(0, len(text))]
        return chunk_spans(text, limit, self._config.passage_overlap_tokens, tokens)

    async def _part(
        self, passage: Passage, span: tuple[int, int], halvings: int = 0, last: bool = False
    ) -> list[_Part]:
        """Ask about a part of a passage, or about its halves where that is too much."""
        part = _Part(passage.title, passage.text[slice(*span)], *span, last=last)
        part.may_be_halved = halvings < _MAX_HALVINGS
        tokens = len(self._engine.token_spans(part.text))
        try:
            async with self._feed.admitted(int(tokens * (1 + _ANSWER_SHARE))):
                await self._converse(part)
        except _TooMuchError as error:
            self.usage.split += not halvings
            shift = part.start
            parts = await run_all(
                self._part(passage, (shift + start, shift + end), halvings + 1, error.last)
                for start, end in error.halves
            )
            return [half for found in parts for half in found]
        except (_FailedPartError, RequestFailedError) as error:
            part.error = str(error)
            if isinstance(error, RequestFailedError) and error.raw:
                part.answers.append(error.raw)
        return [part]

    async def _converse(self, part: _Part) -> None:
        """Fill a part with what the model finds in its text."""
        text = f"{part.title}\n{part.text}" if part.title else part.text
        try:
            if self._config.mode == "joint":
                await self._ask(part, self._prompts.ask_both(text), ("entities", "triples"))
                return
            conversation = self._prompts.ask_entities(text)
            first = await self._ask(part, conversation, ("entities",))
            await self._ask(part, self._prompts.ask_triples(conversation, first.text), ("triples",))
        except PromptTooLongError:
            halves = self._halves(part.text)
            if len(halves) < 2 or not part.may_be_halved:
                raise
            raise _TooMuchError(halves, last=part.last) from None

    def _halves(self, text: str) -> list[tuple[int, int]]:
        tokens = self._engine.token_spans(text)
        return chunk_spans(text, -(-len(tokens) // 2), 0, tokens) if len(tokens) > 1 else []

    async def _ask(self, part: _Part, messages: list[Message], keys: tuple[str, ...]) -> Answer:
        answer = await self._answer(part, messages, keys)
        if answer.cut and not part.last and part.may_be_halved and len(sentence_spans(part.text)) > 1:
            raise _TooMuchError(self._halves(part.text), last=True)
        part.cut = part.cut or answer.cut
        for key in keys:
            getattr(part, key).extend(answer.lists[key])
        return answer

    async def _answer(self, part: _Part, messages: list[Message], keys: tuple[str, ...]) -> Answer:
        """Ask until there is an answer, whole or, at twice the usual length, cut."""
        longest, invalid = self._config.max_output_tokens, 0
        cut: Answer | None = None
        while True:
            request = ChatRequest(
                messages,
                longest * (1 if cut is None else 2),
                temperature=TEMPERATURE_STEP * invalid,
                seed=SEED + invalid,
                schema=answer_schema(*keys),
            )
            try:
                response = await self._complete(part, request)
            except PromptTooLongError:
                if cut is None:
                    raise
                return cut  # there is no room for a longer answer
            what = " and ".join(keys)
            if response.finish_reason == "length":
                self.usage.cut += 1
                if cut is not None:
                    return salvage_answer(response.text, keys)
                cut = salvage_answer(response.text, keys)
                continue
            if response.finish_reason == "content_filter":
                raise _FailedPartError(f"the answer with the {what} was cut by the server's content filter")
            answer = read_answer(response.text, keys)
            if answer is not None:
                self.usage.repaired += answer.repaired
                return answer
            invalid += 1
            self.usage.invalid += 1
            if invalid == self._config.max_attempts:
                lists = " and ".join(f'"{key}"' for key in keys)
                raise _FailedPartError(f"the answer is not a JSON object with a list {lists}")

    async def _complete(self, part: _Part, request: ChatRequest) -> ChatResponse:
        response = await self._engine.complete(request)
        self.usage.count(response, self._price)
        if self._log is not None and self._log.due and not self._writing.locked():
            await self._leave_usage()
        part.answers.append(response.text)
        return response


def llm_fingerprint(config: ExtractConfig, model: str | None = None) -> str:
    """Return the hex digest of what decides an answer.

    Model, mode, prompts, structured output, how long an answer and a part of a passage may be, and how often
    a question is put. Where the model runs is not in it.

    Parameters
    ----------
    config : ExtractConfig
    model : str, optional
        Fingerprint of the model's files; by default its name.

    Raises
    ------
    UsageError
        If no model is named or the prompts cannot be used.
    """
    if not config.model:
        raise UsageError(
            f"extract.engine={config.engine} needs the name of the model that is to be asked: "
            "--set extract.model=NAME"
        )
    parts = [
        VERSION,
        config.engine,
        model or config.model,
        config.mode,
        config.structured,
        load_prompts(config.prompts).digest,
        config.max_output_tokens,
        config.max_passage_tokens,
        config.passage_overlap_tokens if config.max_passage_tokens is not None else None,
        config.max_attempts,
    ]
    if config.engine == "vllm":
        parts += [config.vllm.dtype, config.vllm.max_model_len]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _release(loop: LoopThread, engine: ChatEngine) -> None:
    loop.stop(engine.aclose())


def _merge(parts: Sequence[_Part]) -> Extraction:
    """Put a passage together from its parts, in their order; it has failed only if all of them have."""
    if all(part.error is not None for part in parts):
        answers = [answer for part in parts for answer in part.answers]
        return Extraction(error=parts[0].error if parts else "the passage is empty", raw=_raw(answers))
    entities, rejected = parse_entities(entity for part in parts for entity in part.entities)
    triples, bad_triples = parse_triples(triple for part in parts for triple in part.triples)
    triples, repeated = _distinct(triples)
    return Extraction(entities, triples, [*rejected, *bad_triples, *repeated, *_notes(parts)])


def _distinct(triples: Iterable[Triple]) -> tuple[list[Triple], list[RejectedTriple]]:
    """Keep the first of equal triples: repetition, or parts that overlap, say nothing new."""
    kept: dict[Triple, None] = {}
    repeated = []
    for triple in triples:
        if triple in kept:
            repeated.append(RejectedTriple("triple repeats one of the same passage", raw_json(triple)))
        kept.setdefault(triple)
    return list(kept), repeated


def _notes(parts: Sequence[_Part]) -> Iterable[Note]:
    for part in parts:
        where = "" if len(parts) == 1 else f" about characters {part.start} to {part.end}"
        if part.error is not None:
            yield Note(f"no answer{where}: {part.error}", _raw(part.answers))
        elif part.cut:
            yield Note(f"an answer{where} was cut; its complete items are kept", _raw(part.answers))


def _raw(answers: Sequence[str]) -> str:
    """Return all answers, each cut to its share where together they are too long for a quarantine row."""
    if sum(map(len, answers)) + len(answers) <= MAX_RAW_CHARS:
        return "\n".join(answers)
    share = max(1, MAX_RAW_CHARS // len(answers) - 1)
    return "\n".join(answer[:share] for answer in answers)
