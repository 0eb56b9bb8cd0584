"""An HTTP endpoint that is asked for JSON: as fast as it takes, and again where that can help.

What goes wrong with one request (it is refused, or fails ``attempts`` times) is that request's error. What
would go wrong with every request stops the work: nobody at the address, a wrong key, an unknown model, a
server that has too much to do for ``patience_s``, or one that fails or refuses request after request.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import email.utils
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
import tenacity

from hippoindex.errors import HippoIndexError, UsageError
from hippoindex.pipeline.llm.base import PromptTooLongError, RequestFailedError
from hippoindex.pipeline.llm.limits import AdaptiveLimit, Pace

CONNECT_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 300.0
_MAX_WAIT_S = 30.0
#: Connections that are refused before any was made: then there is no server, rather than a busy one.
_FIRST_CONNECTIONS = 3
#: Requests that may fail one after the other before the server, not a request, is to blame.
_LEAST_FAILURES = 16

_REPEATED = frozenset({408, 409, 425})
_BUSY = frozenset({429, 503, 529})
_NO_MONEY = re.compile(r"insufficient_quota|billing", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context.{0,20}(length|size|window|exceed)|exceed.{0,20}context|prompt.{0,20}too long|too many tokens",
    re.IGNORECASE | re.DOTALL,
)

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointSettings:
    """How an endpoint is used.

    Attributes
    ----------
    section : str
        Section of the configuration that messages refer to.
    base_url : str
        Usually ends in ``/v1``.
    api_key_env : str
        Environment variable of the key.
    model : str
        For messages.
    concurrency : int
        Most requests at once.
    timeout_s : float
        For one attempt.
    attempts : int
        Times that a request is sent before it has failed; refusals for load do not count.
    patience_s : float
        How long a request may be refused for load, or the server not be reached, before the work stops.
    requests_per_s, tokens_per_s : float or None
    """

    section: str
    base_url: str
    api_key_env: str
    model: str
    concurrency: int = 16
    timeout_s: float = 120.0
    attempts: int = 8
    patience_s: float = 600.0
    requests_per_s: float | None = None
    tokens_per_s: float | None = None


class Reply(NamedTuple, Generic[T]):
    """What an endpoint answered, the seconds that took, and how often it was asked."""

    value: T
    latency_s: float
    attempts: int


class RefusedError(RequestFailedError):
    """The server does not accept the request (a status of 4xx)."""

    def __init__(self, status: int, raw: str) -> None:
        super().__init__(f"the server refused the request: HTTP {status}", raw)
        self.status = status


class BadReplyError(RequestFailedError):
    """A response is not what this kind of request is answered with; the server may do better next time."""


class _FailedAttemptError(RequestFailedError):
    """5xx, a timeout, a lost connection."""


class _BusyError(RequestFailedError):
    """The server has too much to do, and may have said when it will not."""

    def __init__(self, reason: str, raw: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(reason, raw)
        self.retry_after_s = retry_after_s


class _UnreachableError(_BusyError):
    """No connection could be made."""


class Endpoint:
    """A client of one endpoint; to be used from one event loop.

    Parameters
    ----------
    settings : EndpointSettings

    Raises
    ------
    UsageError
        If the address is not an HTTP URL, or the key cannot be one.
    """

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._base_url = checked_url(settings)
        self._key = read_api_key(settings)
        self._limit = AdaptiveLimit(settings.concurrency)
        self._requests = Pace(settings.requests_per_s)
        self._tokens = Pace(settings.tokens_per_s)
        self._typical_s = 0.5
        self._connected = False
        self._failures_in_a_row = 0
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=settings.concurrency, keepalive_expiry=60.0),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(
        self, path: str, body: Mapping[str, Any], tokens: int, read: Callable[[str], tuple[T, int]]
    ) -> Reply[T]:
        """Send a request until it is answered.

        Parameters
        ----------
        path : str
            Below the base URL.
        body : mapping
            Sent as JSON.
        tokens : int
            That it will probably use, for the limit of tokens a second.
        read : callable
            Makes of the response's text the answer and the tokens that it did use, or raises
            :class:`BadReplyError`.

        Raises
        ------
        RequestFailedError
            If this request is refused, or has failed ``attempts`` times.
        HippoIndexError
            If no request can succeed.
        """
        course = _Course(self, time.monotonic())
        retrying = tenacity.AsyncRetrying(
            stop=course.is_over,
            wait=course.wait_s,
            retry=tenacity.retry_if_exception_type((_FailedAttemptError, _BusyError, BadReplyError)),
            reraise=True,
        )
        try:
            answered: tuple[T, float] = await retrying(
                self._attempt, f"{self._base_url}/{path}", body, tokens, read
            )
        except _UnreachableError as error:
            raise self._nobody_there(error) from None
        except _BusyError as error:
            raise HippoIndexError(
                f"{self._base_url} has refused a request for {self._settings.patience_s:g} s "
                f"({error}). What was done is kept: run again when it has less to do, or lower "
                f"{self._settings.section}.concurrency or its limits a second"
            ) from None
        except (_FailedAttemptError, BadReplyError) as error:
            self.count_failure(error)
            raise
        self._failures_in_a_row = 0
        return Reply(*answered, course.sent)

    async def _attempt(
        self, url: str, body: Mapping[str, Any], tokens: int, read: Callable[[str], tuple[T, int]]
    ) -> tuple[T, float]:
        await self._requests.wait(1)
        await self._tokens.wait(tokens)
        async with self._limit.slot():
            started = time.monotonic()
            try:
                value, used = read(await self._send(url, body))
            except _BusyError:
                self._limit.note(refused=True)
                self._tokens.give_back(tokens)
                raise
            except BadReplyError as error:
                raise type(error)(str(error), self._redacted(error.raw)) from None
            self._limit.note(refused=False)
        latency_s = time.monotonic() - started
        self._typical_s += (latency_s - self._typical_s) / 16
        self._tokens.give_back(tokens - used)
        return value, latency_s

    async def _send(self, url: str, body: Mapping[str, Any]) -> str:
        """Return the body of a successful response."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._client.post(url, json=body)
        except TimeoutError:
            raise _FailedAttemptError(
                f"no answer within {self._settings.section}.timeout_s={self._settings.timeout_s:g} s"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _UnreachableError(str(error) or type(error).__name__) from None
        except httpx.HTTPError as error:
            raise _FailedAttemptError(f"connection lost: {error or type(error).__name__}") from None
        self._connected = True
        if response.is_success:
            return response.text
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> Exception:
        """Return the error that a response without success stands for."""
        status, raw, section = response.status_code, self._redacted(response.text), self._settings.section
        if status == 401:
            return HippoIndexError(
                f"{self._base_url} refuses the API key (HTTP 401). Set the environment variable "
                f"{self._settings.api_key_env} ({section}.api_key_env)."
            )
        if status == 402 or (status == 429 and _NO_MONEY.search(raw)):
            return HippoIndexError(
                f"{self._base_url} wants to be paid (HTTP {status}): {raw[:300]!r}. What was done is kept: "
                "run again to go on"
            )
        if status == 404:
            return HippoIndexError(
                f"{self._base_url} answers HTTP 404 to the model {self._settings.model!r}: {raw[:300]!r}. "
                f"Check {section}.base_url (it usually ends in /v1) and {section}.model."
            )
        if status in _BUSY:
            return _BusyError(f"the server answered HTTP {status}", raw, _retry_after_s(response))
        if status in _REPEATED or status >= 500:
            return _FailedAttemptError(f"the server answered HTTP {status}", raw)
        if status in (400, 413, 422) and _TOO_LONG.search(raw):
            return PromptTooLongError(f"the prompt is too long for the model: HTTP {status}", raw)
        return RefusedError(status, raw)

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _nobody_there(self, error: Exception) -> HippoIndexError:
        section = self._settings.section
        return HippoIndexError(
            f"No model server can be reached at {self._base_url}: {error}. Check that it runs and that "
            f"{section}.base_url is its address, e.g. http://127.0.0.1:8000/v1."
        )

    def count_failure(self, error: RequestFailedError) -> None:
        """Take a request that has failed for good, or was refused.

        Raises
        ------
        HippoIndexError
            If it is one of very many in a row: that is not the requests' fault.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= max(_LEAST_FAILURES, 2 * self._settings.concurrency):
            raise HippoIndexError(
                f"{self._base_url} has failed or refused {self._failures_in_a_row} requests one after the "
                f"other; the last one: {error} {error.raw[:200]!r}. What was done is kept: mend the server, "
                "or what it is asked, and run again"
            ) from None


class _Course:
    """How often and when one request is sent."""

    def __init__(self, endpoint: Endpoint, started: float) -> None:
        self._endpoint = endpoint
        self._deadline = started + endpoint._settings.patience_s
        self._failed = 0
        self.sent = 1

    def is_over(self, state: tenacity.RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        self.sent = state.attempt_number + 1
        if isinstance(error, _UnreachableError) and not self._endpoint._connected:
            return state.attempt_number >= _FIRST_CONNECTIONS
        if isinstance(error, _BusyError):
            return time.monotonic() >= self._deadline
        self._failed += 1
        return self._failed >= self._endpoint._settings.attempts

    def wait_s(self, state: tenacity.RetryCallState) -> float:
        """Return what the server asks for, else a random part of a time that grows.

        It begins with what an answer takes, at least a hundredth and at most a second: a fast server is asked
        again soon. It doubles where the server has too much to do, and grows by half where it failed.
        """
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, _BusyError) and error.retry_after_s is not None:
            return error.retry_after_s
        first_s = min(max(self._endpoint._typical_s, 0.01), 1.0)
        base = 2.0 if isinstance(error, _BusyError) else 1.5
        return tenacity.wait_random_exponential(first_s, max=_MAX_WAIT_S, exp_base=base)(state)


def checked_url(settings: EndpointSettings) -> str:
    """Return the address without a slash at its end, if it is one."""
    name = f"{settings.section}.base_url"
    try:
        url = httpx.URL(settings.base_url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{name} is not a URL: {error}") from error
    if url.userinfo:
        raise UsageError(
            f"{name} holds a user or password; name a key with {settings.section}.api_key_env instead"
        )
    if url.query or url.fragment:
        raise UsageError(f"{name} has a query or fragment; give the address alone, such as http://host/v1")
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"{name} is not an HTTP URL: {settings.base_url!r}; e.g. http://127.0.0.1:8000/v1")
    return settings.base_url.rstrip("/")


def read_api_key(settings: EndpointSettings) -> str:
    """Return the key, or an empty string. One that is no header value is refused here, without quoting it."""
    key = os.environ.get(settings.api_key_env, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"The environment variable {settings.api_key_env} ({settings.section}.api_key_env) holds no "
            "usable API key"
        )
    return key


def _retry_after_s(response: httpx.Response) -> float | None:
    """Read ``Retry-After`` (RFC 9110, section 10.2.3): seconds or a date; at most ``MAX_RETRY_AFTER_S``."""
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:  # "-0000": UTC of unknown local time
        moment = moment.replace(tzinfo=dt.UTC)
    wait_s = (moment - dt.datetime.now(dt.UTC)).total_seconds()
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
