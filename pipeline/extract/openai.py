"""OpenIE by a language model behind an OpenAI-compatible chat endpoint.

Two requests per passage, entities and then triples, as two turns of one conversation
(:mod:`hippoindex.pipeline.extract.prompts`). What goes wrong with one passage (an answer that is no JSON or
was cut, a request that is refused) is that passage's error. What would go wrong with every passage (no server
at the address, a wrong key, an unknown model) stops the work.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import email.utils
import hashlib
import json
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import httpx
import json_repair
import tenacity

from hippoindex.errors import HippoIndexError, UsageError
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Extraction, Passage
from hippoindex.pipeline.extract.imported import parse_entities, parse_triples, raw_json
from hippoindex.pipeline.extract.prompts import Message, load_prompts

#: Sent with every request. Decoding is greedy; only a question whose answer was no JSON is put again at
#: ``RETRY_TEMPERATURE`` and another seed, since the same request would bring the same answer.
SEED = 20_240_501
TEMPERATURE = 0.0
RETRY_TEMPERATURE = 0.5

CONNECT_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 300.0
_BACKOFF = tenacity.wait_exponential(multiplier=0.5, max=30.0) + tenacity.wait_random(0.0, 0.5)

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class _FailedError(Exception):
    """A passage could not be processed. ``raw`` is what the server answered."""

    def __init__(self, reason: str, raw: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.raw = raw
        self.retry_after_s = retry_after_s


class _BusyError(_FailedError):
    """The server had no answer this time: 429, 5xx, a timeout or a lost connection."""


class _UnreachableError(_BusyError):
    """No connection could be made."""


class _BadAnswerError(_FailedError):
    """The answer is not what was asked for."""


class _Answer(NamedTuple):
    values: list[object]
    text: str


class OpenAIExtractor:
    """Asks an OpenAI-compatible endpoint for entities and triples.

    Parameters
    ----------
    config : ExtractConfig
        ``model`` is required. The key is read from the environment variable named by ``api_key_env``; a local
        server needs none.

    Attributes
    ----------
    fingerprint : str
        Hex digest of what decides an answer: model name, prompts, longest answer. The address is not in it.
    repaired : int
        Answers so far that were JSON only after a repair.

    Raises
    ------
    UsageError
        If no model is named, the address is not an HTTP URL, the key cannot be one, or the prompts cannot be
        used.
    """

    def __init__(self, config: ExtractConfig) -> None:
        self.fingerprint = fingerprint(config)
        self.repaired = 0
        self._config = config
        self._prompts = load_prompts(config.prompts)
        self._url = _chat_url(config.base_url)
        self._key = _api_key(config.api_key_env)

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Return one extraction per passage, in order.

        Raises
        ------
        HippoIndexError
            If the endpoint cannot be reached, refuses the key, or does not know the model.
        """
        before = self.repaired
        extractions = _run(self._extract(passages))
        if self.repaired > before:
            _LOG.warning("%d answers were JSON only after a repair", self.repaired - before)
        return extractions

    async def _extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        gate = asyncio.Semaphore(self._config.concurrency)
        try:
            async with self._client() as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._extract_one(client, gate, passage)) for passage in passages]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=self._config.concurrency),
        )

    async def _extract_one(
        self, client: httpx.AsyncClient, gate: asyncio.Semaphore, passage: Passage
    ) -> Extraction:
        text = f"{passage.title}\n{passage.text}" if passage.title else passage.text
        answered: list[str] = []
        try:
            async with gate:
                conversation = self._prompts.ask_entities(text)
                first = await self._ask(client, conversation, "entities")
                answered.append(first.text)
                conversation = self._prompts.ask_triples(conversation, first.text)
                second = await self._ask(client, conversation, "triples")
        except _UnreachableError as error:
            raise HippoIndexError(
                f"No language model can be reached at {self._url}: {error}. Check that the server runs and "
                "that extract.base_url is its address, e.g. http://127.0.0.1:8000/v1."
            ) from None
        except _FailedError as error:
            return Extraction(error=str(error), raw="\n".join(filter(None, [*answered, error.raw])))
        entities, bad_entities = parse_entities(first.values)
        triples, bad_triples = parse_triples(second.values)
        return Extraction(entities, triples, [*bad_entities, *bad_triples])

    async def _ask(self, client: httpx.AsyncClient, messages: list[Message], key: str) -> _Answer:
        """Return the list under ``key`` of the model's answer, after at most ``max_attempts`` requests."""
        bad_answers = 0

        async def attempt() -> _Answer:
            nonlocal bad_answers
            completion = await self._post(client, messages, bad_answers)
            try:
                return self._read(completion, key)
            except _BadAnswerError:
                bad_answers += 1
                raise

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.max_attempts),
            wait=_wait_s,
            retry=tenacity.retry_if_exception_type((_BusyError, _BadAnswerError)),
            reraise=True,
        )
        return await retrying(attempt)

    async def _post(self, client: httpx.AsyncClient, messages: list[Message], bad_answers: int) -> str:
        """Return the body of a successful response."""
        body = {
            "model": self._config.model,
            "messages": messages,
            "temperature": RETRY_TEMPERATURE if bad_answers else TEMPERATURE,
            "seed": SEED + bad_answers,
            "max_tokens": self._config.max_output_tokens,
        }
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await client.post(self._url, json=body)
        except TimeoutError:
            raise _BusyError(f"no answer within extract.timeout_s={self._config.timeout_s:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _UnreachableError(str(error) or type(error).__name__) from None
        except httpx.RequestError as error:
            raise _BusyError(f"connection lost: {error or type(error).__name__}") from None
        if not response.is_success:
            raise self._refusal(response)
        return response.text

    def _refusal(self, response: httpx.Response) -> Exception:
        """Return the error that a response without success stands for."""
        status = response.status_code
        raw = response.text.replace(self._key, "***") if self._key else response.text
        if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return _BusyError(f"the server answered HTTP {status}", raw, _retry_after_s(response))
        if status == httpx.codes.UNAUTHORIZED:
            return HippoIndexError(
                f"{self._url} refuses the API key (HTTP 401). Set the environment variable "
                f"{self._config.api_key_env} (extract.api_key_env)."
            )
        if status == httpx.codes.NOT_FOUND:
            return HippoIndexError(
                f"{self._url} answers HTTP 404 to the model {self._config.model!r}: {raw[:300]!r}. Check "
                "extract.base_url (it usually ends in /v1) and extract.model."
            )
        return _FailedError(f"the server refused the request: HTTP {status}", raw)

    def _read(self, body: str, key: str) -> _Answer:
        """Take the list under ``key`` out of a chat completion."""
        try:
            choice = json.loads(body)["choices"][0]
            text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise _BadAnswerError("the response is not a chat completion", body) from None
        if finish_reason == "length":
            raise _FailedError(
                f"the answer with the {key} was cut at extract.max_output_tokens="
                f"{self._config.max_output_tokens}; raise it, or split passages with chunk.max_tokens",
                str(text or ""),
            )
        if finish_reason == "content_filter":
            raise _FailedError(
                f"the answer with the {key} was cut by the server's content filter", str(text or "")
            )
        if not isinstance(text, str):
            raise _BadAnswerError(f"the answer with the {key} has no text", body)
        return self._parse(text, key)

    def _parse(self, text: str, key: str) -> _Answer:
        text = text.encode(errors="backslashreplace").decode()  # a lone surrogate becomes its JSON escape
        values = _list_under(key, text, json.loads)
        if values is not None:
            return _Answer(values, text)
        values = _list_under(key, text, json_repair.loads)
        if values is None:
            raise _BadAnswerError(f'the answer is not a JSON object with a list "{key}"', text)
        self.repaired += 1
        return _Answer(values, raw_json({key: values}))


def fingerprint(config: ExtractConfig) -> str:
    """Return the hex digest of what decides an answer: model name, prompts and longest answer.

    Raises
    ------
    UsageError
        If no model is named or the prompts cannot be used.
    """
    if not config.model:
        raise UsageError(
            "extract.engine=openai needs the name of the model that the endpoint serves: "
            "--set extract.model=NAME"
        )
    parts = [config.model, load_prompts(config.prompts).digest, config.max_output_tokens]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _chat_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise UsageError(f"extract.base_url is not a URL: {error}") from error
    if url.userinfo:
        raise UsageError(
            "extract.base_url holds a user or password; name a key with extract.api_key_env instead"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"extract.base_url is not an HTTP URL: {base_url!r}; e.g. http://127.0.0.1:8000/v1")
    return f"{base_url.rstrip('/')}/chat/completions"


def _api_key(variable: str) -> str:
    """Return the key, or an empty string. One that is no header value is refused here, without quoting it."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"The environment variable {variable} (extract.api_key_env) holds no usable API key")
    return key


def _list_under(key: str, text: str, loads: Callable[[str], Any]) -> list[object] | None:
    try:
        tree = loads(text)
    except (ValueError, RecursionError):
        return None
    values = tree.get(key) if isinstance(tree, dict) else None
    return values if isinstance(values, list) else None


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Return how long to wait before the next attempt: what the server asks for, else a growing time."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, _BadAnswerError):
        return 0.0
    if isinstance(error, _BusyError) and error.retry_after_s is not None:
        return error.retry_after_s
    return _BACKOFF(state)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Read ``Retry-After`` (RFC 9110, section 10.2.3): seconds or a date; at most ``MAX_RETRY_AFTER_S``."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:  # "-0000": UTC of unknown local time
        moment = moment.replace(tzinfo=dt.UTC)
    wait_s = (moment - dt.datetime.now(dt.UTC)).total_seconds()
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also in a thread that has a running loop (a notebook, an async actor)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
