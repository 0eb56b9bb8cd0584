"""The engine behind any OpenAI-compatible ``/chat/completions``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from hippoindex.errors import UsageError
from hippoindex.pipeline.llm.base import (
    ChatRequest,
    ChatResponse,
    Price,
    rough_token_spans,
    rough_tokens,
)
from hippoindex.pipeline.llm.cache import ResponseCache, request_key
from hippoindex.pipeline.llm.endpoint import BadReplyError, Endpoint, EndpointSettings, RefusedError
from hippoindex.pipeline.llm.limits import Budget

Structured = Literal["auto", "json_schema", "json_object", "none"]

#: How ``auto`` asks for structured output, until a server takes one of them.
_WAYS: tuple[Structured, ...] = ("json_schema", "json_object", "none")

_LOG = logging.getLogger(__name__)


class OpenAIEngine:
    """Sends conversations to a chat endpoint.

    Parameters
    ----------
    settings : EndpointSettings
    structured : {"auto", "json_schema", "json_object", "none"}
        How an answer is held to its schema: by ``response_format`` of one of the two types, or by the prompt
        alone. ``auto`` begins with ``json_schema`` and goes on to the next where the server refuses it, which
        is logged.
    cache : ResponseCache, optional
        Answers that are known already, and where new ones go.
    price : Price, optional
    max_usd : float, optional
        What this engine may spend; needs a price.

    Attributes
    ----------
    slots : int
        Twice ``settings.concurrency``: a conversation that waits to be tried again leaves no request out.
    gpus : int
        0: those of a server are not ours.
    gpu_hour_usd : None

    Raises
    ------
    UsageError
        If the address or key cannot be used, or there is a spend limit and no price.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        structured: Structured = "auto",
        cache: ResponseCache | None = None,
        price: Price | None = None,
        max_usd: float | None = None,
    ) -> None:
        if max_usd is not None and price is None:
            raise UsageError(
                f"A spend limit ({settings.section}.max_usd) needs the endpoint's prices: set "
                f"{settings.section}.price_usd to {{prompt: ..., cached: ..., generated: ...}}, US dollars "
                "for a million tokens"
            )
        self.gpus = 0
        self.gpu_hour_usd: float | None = None
        self.slots = 2 * settings.concurrency
        self._model = settings.model
        self._endpoint = Endpoint(settings)
        self._way: Structured = "json_schema" if structured == "auto" else structured
        self._may_change_way = structured == "auto"
        self._cache = cache
        self._price = price
        self._budget = Budget(max_usd, settings.section)

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return about the tokens of a text: an endpoint does not say."""
        return rough_token_spans(text)

    async def aclose(self) -> None:
        """Close connections and cache."""
        await self._endpoint.aclose()
        if self._cache is not None:
            self._cache.close()

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Return a completion; see :meth:`ChatEngine.complete`.

        Raises
        ------
        SpendLimitError
            If it is not affordable; nothing is in flight then.
        """
        while True:
            way = self._way
            try:
                return await self._complete(request, self._body(request, way))
            except RefusedError as error:
                if not (self._may_change_way and _is_about_format(error, way, request)):
                    self._endpoint.count_failure(error)
                    raise
                self._go_on_from(way, error)

    async def _complete(self, request: ChatRequest, body: dict[str, Any]) -> ChatResponse:
        key = request_key(body)
        known = None if self._cache is None else self._cache.get(key)
        if known is not None:
            return ChatResponse(**known | {"attempts": 0, "latency_s": 0.0})
        prompt_tokens = rough_tokens(request.messages)
        most_usd = 0.0 if self._price is None else self._price.usd(prompt_tokens, 0, request.max_tokens)
        async with self._budget.reserve(most_usd):
            reply = await self._endpoint.post(
                "chat/completions",
                body,
                prompt_tokens + request.max_tokens // 2,
                lambda text: _read_completion(text, prompt_tokens),
            )
            answer = reply.value
            if self._price is not None:
                self._budget.spent_usd += self._price.usd(
                    answer.prompt_tokens, answer.cached_tokens, answer.generated_tokens
                )
            if self._cache is not None:
                self._cache.put(key, asdict(answer))
        return ChatResponse(**asdict(answer) | {"latency_s": reply.latency_s, "attempts": reply.attempts})

    def _body(self, request: ChatRequest, way: Structured) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
        }
        if request.schema is not None and way != "none":
            body["response_format"] = _response_format(request.schema, way)
        return body

    def _go_on_from(self, way: Structured, error: RefusedError) -> None:
        """Ask in the next way from now on, if no other request has found that out already."""
        if way == self._way:
            self._way = _WAYS[_WAYS.index(way) + 1]
            _LOG.warning(
                "the server refuses response_format %s (%s): asking with %s", way, error.raw[:200], self._way
            )


def _response_format(schema: Mapping[str, Any], way: Structured) -> dict[str, Any]:
    if way == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _is_about_format(error: RefusedError, way: Structured, request: ChatRequest) -> bool:
    words = ("response_format", "json_schema", "json_object", "grammar", "schema", "structured", "guided")
    said = error.raw.lower()
    return way != "none" and request.schema is not None and any(word in said for word in words)


def _read_completion(body: str, prompt_tokens: int) -> tuple[ChatResponse, int]:
    """Read a chat completion; what it does not say of its tokens is guessed."""
    try:
        tree = json.loads(body)
        choice = tree["choices"][0]
        text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        usage = tree.get("usage")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadReplyError("the response is not a chat completion", body) from None
    if text is None and finish_reason in ("length", "content_filter"):
        text = ""
    if not isinstance(text, str):
        raise BadReplyError("the answer has no text", body)
    text = text.encode(errors="backslashreplace").decode()
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    prompt = _count(usage, "prompt_tokens", prompt_tokens)
    answer = ChatResponse(
        text=text,
        finish_reason=finish_reason if isinstance(finish_reason, str) else "stop",
        prompt_tokens=prompt,
        cached_tokens=min(prompt, _count(details, "cached_tokens", 0)),
        generated_tokens=_count(usage, "completion_tokens", len(rough_token_spans(text))),
    )
    return answer, answer.prompt_tokens + answer.generated_tokens


def _count(usage: object, name: str, otherwise: int) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
