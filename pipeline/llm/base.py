"""The interface of an engine that completes conversations, and what it says of every request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, str]

#: Sent with every request; a question that is put again is put with the next one.
SEED = 20_240_501
#: Decoding is greedy; a question whose answer was not what was asked for is put again with another seed and
#: so much more temperature, since the same request would bring the same answer.
TEMPERATURE_STEP = 0.4

#: Tokens that a chat template puts around a message.
_MESSAGE_TOKENS = 4
#: A generous guess where no tokenizer is at hand: four letters, a character of a script without spaces, or a
#: symbol.
_ROUGH_TOKEN = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"
    r"|\w{1,4}|[^\w\s]"
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One completion that is asked for.

    Attributes
    ----------
    messages : sequence of mapping
        Each with ``role`` and ``content``.
    max_tokens : int
        Longest answer.
    temperature : float
        0 decodes greedily.
    seed : int
    schema : mapping, optional
        JSON schema of the answer, for an engine that can hold its model to one.
    """

    messages: Sequence[Message]
    max_tokens: int
    temperature: float = 0.0
    seed: int = SEED
    schema: Mapping[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """One completion.

    Attributes
    ----------
    text : str
        Valid Unicode; a lone surrogate has become its JSON escape.
    finish_reason : str
        ``stop``, ``length`` (cut at the token limit), ``content_filter``, or what else the engine says.
    prompt_tokens, cached_tokens, generated_tokens : int
        ``cached_tokens`` of the ``prompt_tokens`` were in the engine's prefix cache.
    latency_s : float
        Of the attempt that succeeded.
    attempts : int
        Times that the request was sent; 0 where the answer was known.
    """

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    attempts: int = 1


class RequestFailedError(Exception):
    """A request got no answer; other requests may. ``raw`` is what the server sent instead."""

    def __init__(self, reason: str, raw: str = "") -> None:
        super().__init__(reason)
        self.raw = raw


class PromptTooLongError(RequestFailedError):
    """The prompt, or prompt and answer together, do not fit into the model's context."""


class ChatEngine(Protocol):
    """An opened engine. All its methods are called from one event loop.

    Attributes
    ----------
    slots : int
        Conversations to have begun at once, so that it is never idle.
    gpus : int
        That it occupies here.
    gpu_hour_usd : float or None
        What an hour of one of them costs, where that is known.
    """

    slots: int
    gpus: int
    gpu_hour_usd: float | None

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Return a completion.

        Raises
        ------
        RequestFailedError
            If there is none, which says nothing about other requests.
        HippoIndexError
            If there can be none for any request.
        """
        ...

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the character spans of a text's tokens, at least roughly."""
        ...

    async def aclose(self) -> None:
        """Release connections and memory."""
        ...


def rough_token_spans(text: str) -> list[tuple[int, int]]:
    """Return character spans of about a text's tokens, without a tokenizer; rather too many than too few."""
    return [match.span() for match in _ROUGH_TOKEN.finditer(text)]


def rough_tokens(messages: Sequence[Message]) -> int:
    """Return about the number of tokens of a conversation."""
    return sum(
        _MESSAGE_TOKENS + sum(1 for _ in _ROUGH_TOKEN.finditer(message["content"])) for message in messages
    )


class Price(NamedTuple):
    """US dollars for a million tokens of each kind."""

    prompt: float
    cached: float
    generated: float

    def usd(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> float:
        """Return the price of a request; ``cached_tokens`` are among the ``prompt_tokens``."""
        fresh = prompt_tokens - cached_tokens
        return (fresh * self.prompt + cached_tokens * self.cached + generated_tokens * self.generated) / 1e6
