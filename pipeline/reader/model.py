"""The language model that questions are put to, many at once.

A request that fails is that question's failure, with its reason; what would go wrong with every request is an
error. An answer that was cut is asked for again with twice the length, one that is not what was asked for is
asked for again less greedily, and a prompt that is too long is put with fewer passages.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from hippoindex.errors import UsageError
from hippoindex.pipeline.config import ReaderConfig
from hippoindex.pipeline.llm.accounting import Usage
from hippoindex.pipeline.llm.base import (
    SEED,
    TEMPERATURE_STEP,
    ChatEngine,
    ChatRequest,
    ChatResponse,
    PromptTooLongError,
    RequestFailedError,
    rough_tokens,
)
from hippoindex.pipeline.llm.engines import open_engine, price_of
from hippoindex.pipeline.llm.feed import Feed
from hippoindex.pipeline.llm.loop import LoopThread, awaited, run_all
from hippoindex.pipeline.llm.prompts import Message
from hippoindex.pipeline.preflight import check_language_model
from hippoindex.pipeline.reader.prompts import load_reader_prompts

T = TypeVar("T")


@dataclass(frozen=True)
class Asking(Generic[T]):
    """A question to a language model.

    Attributes
    ----------
    conversation : callable
        Makes the messages, of so many passages at most.
    read : callable
        Makes of an answer, and whether it was cut, what was asked for; ``None`` if it is not that.
    passages : int
        As many as the conversation would have; fewer where the prompt is too long.
    schema : mapping, optional
        JSON schema of the answer.
    """

    conversation: Callable[[int], list[Message]]
    read: Callable[[str, bool], T | None]
    passages: int = 0
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Failure:
    """Why there is no answer, and what the model said last, if anything."""

    reason: str
    raw: str = ""


class ReaderModel:
    """A language model for questions; the engine is opened when it is first needed.

    Parameters
    ----------
    config : ReaderConfig
        With an engine.

    Attributes
    ----------
    config : ReaderConfig
    prompts : ReaderPrompts
    usage : Usage
        Sums so far.
    shortened : int
        Questions that were put with fewer passages, since the prompt was too long.

    Raises
    ------
    HippoIndexError
        If the model's server or packages are not there, or a setting is missing.
    """

    def __init__(self, config: ReaderConfig) -> None:
        if config.max_usd is not None and config.cache is None:
            raise UsageError(
                "A spend limit (reader.max_usd) needs a folder that keeps what was paid for when it is "
                "reached: set reader.cache"
            )
        check_language_model(config)
        self.config = config
        self.prompts = load_reader_prompts(config.prompts)
        self.usage = Usage()
        self.shortened = 0
        self._price = price_of(config)

    @cached_property
    def _loop(self) -> LoopThread:
        return LoopThread("reader")

    @cached_property
    def _engine(self) -> ChatEngine:
        return self._loop.run(awaited(functools.partial(open_engine, self.config)))

    @cached_property
    def _feed(self) -> Feed:
        slots = self._engine.slots
        return Feed(slots, self.config.tokens_in_flight)

    def close(self) -> None:
        """Release the engine, if it was opened."""
        if "_engine" in self.__dict__:
            self._loop.run(self._engine.aclose())
        if "_loop" in self.__dict__:
            self._loop.stop()

    def ask_all(self, askings: Sequence[Asking[T]]) -> list[T | Failure]:
        """Put questions, many at once, and return what is made of the answers, in order.

        Raises
        ------
        HippoIndexError
            If the engine can do nothing for any of them.
        """
        if not askings:
            return []
        feed, started = self._feed, time.perf_counter()
        try:
            return self._loop.run(run_all(self._ask(asking, feed) for asking in askings))
        finally:
            engine = self._engine
            self.usage.count_time(time.perf_counter() - started, engine.gpus, engine.gpu_hour_usd)

    def report(self) -> dict[str, Any]:
        """Return which model was asked, with which prompts, and what that took and cost."""
        spent = self.usage.record()
        for name in ("passages", "split", "rejected"):  # of extraction
            del spent[name]
        return {
            "engine": self.config.engine,
            "model": self.config.model,
            "prompts": {"version": self.prompts.version, "digest": self.prompts.digest},
            "usage": spent | {"shortened": self.shortened},
        }

    async def _ask(self, asking: Asking[Any], feed: Feed) -> Any:
        passages = asking.passages
        while True:
            messages = asking.conversation(passages)
            try:
                async with feed.admitted(rough_tokens(messages) + self.config.max_output_tokens):
                    return await self._answer(asking, messages)
            except PromptTooLongError as error:
                if passages <= 1:
                    return Failure(str(error), error.raw)
                self.shortened += passages == asking.passages
                passages -= 1
            except RequestFailedError as error:
                return Failure(str(error), error.raw)

    async def _answer(self, asking: Asking[T], messages: list[Message]) -> T | Failure:
        """Ask until there is an answer, whole or, at twice the usual length, cut."""
        invalid = 0
        cut: ChatResponse | None = None
        while True:
            request = ChatRequest(
                messages,
                self.config.max_output_tokens * (1 if cut is None else 2),
                temperature=TEMPERATURE_STEP * invalid,
                seed=SEED + invalid,
                schema=asking.schema,
            )
            try:
                response = await self._engine.complete(request)
                self.usage.count(response, self._price)
            except PromptTooLongError:
                if cut is None:
                    raise
                response = cut  # there is no room for a longer answer
            is_cut = response.finish_reason == "length"
            if is_cut and cut is None:
                self.usage.cut += 1
                cut = response
                continue
            if response.finish_reason == "content_filter":
                return Failure("the answer was cut by the server's content filter", response.text)
            value = asking.read(response.text, is_cut)
            if value is not None:
                return value
            invalid += 1
            self.usage.invalid += 1
            if is_cut or invalid == self.config.max_attempts:
                return Failure("the answer is not what was asked for", response.text)
