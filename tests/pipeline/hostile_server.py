"""A chat endpoint that does wrong whatever a real one can, at a rate and with a seed that are chosen.

What it answers when it does answer depends on the request alone, as a model's greedy decoding does.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def good_answer(messages: list[dict[str, str]]) -> str:
    """Return an answer that follows from the passage: its capitalised words, in a chain."""
    passage = messages[5]["content"].rsplit("Passage:\n", 1)[1]
    names = list(dict.fromkeys(re.findall(r"[A-Z]\w+", passage)))
    if len(messages) == 6:
        return json.dumps({"entities": names}, ensure_ascii=False)
    return json.dumps(
        {"triples": [[a, "leads to", b] for a, b in itertools.pairwise(names)]}, ensure_ascii=False
    )


def completion(text: str | None, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}} | more


async def _too_many(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=429, text="slow down")


async def _too_many_for_a_while(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "0.05"}, text="slow down")


async def _html(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=500, text="<html><h1>Internal Server Error</h1>", content_type="text/html")


async def _unavailable(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=503, headers={"Retry-After": "soon"})


async def _hang_up(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Promise more than is sent, then close the connection."""
    data = json.dumps(completion(good_answer(body["messages"]))).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    assert request.transport is not None
    request.transport.close()
    return response


async def _no_json(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text='{"choices": [{"message"')


async def _no_choices(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(completion("") | {"choices": []})


async def _no_utf8(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(body=b"\xff\xfe\x00{}", content_type="application/json")


async def _error_as_success(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "CUDA out of memory", "code": 500}})


async def _hang(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


#: Faults after which the same request may well be answered.
TRANSIENT: tuple[Handler, ...] = (
    _too_many,
    _too_many_for_a_while,
    _html,
    _unavailable,
    _hang_up,
    _half,
    _no_json,
    _no_choices,
    _no_utf8,
    _error_as_success,
)
HANGS: tuple[Handler, ...] = (_hang,)


def _says(text: str | None, finish_reason: str = "stop", **more: Any) -> Handler:
    async def handler(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(completion(text, finish_reason, **more))

    return handler


async def _refuse(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": "no"}, status=400)


async def _too_long(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)


async def _twice(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with two choices, of which the second is nonsense."""
    tree = completion(good_answer(body["messages"]))
    return web.json_response(tree | {"choices": [*tree["choices"], {"message": None}]})


#: Answers that may be no use, now or ever.
NONSENSE: tuple[Handler, ...] = (
    _says("I am afraid I cannot do that."),
    _says(""),
    _says(None),
    _says('{"entities": ["\ud83d", null, 7, ["x"], ""], "triples": [["a"], null, ["a", "b", null], {}]}'),
    _says('{"entities": "none", "triples": {}}'),
    _says("[" * 100_000),
    _says('{"entities": ["Mill", "Ri', "length"),
    _says('{"triples": [["Mill", "is", "old"], ["Mi', "length"),
    _says("", "length"),
    _says('{"entities": []}', "content_filter"),
    _says(
        '{"entities": ["Zoë 北京 \u202e"], "triples": [["北京", "ist", "groß"]]}',
        usage={"prompt_tokens": "x"},
    ),
    _says('{"entities": [], "triples": []}', usage=None),
    _refuse,
    _too_long,
    _twice,
)


class HostileServer:
    """The server, in a thread of its own.

    Parameters
    ----------
    faults : sequence of handlers
    rate : float
        Share of the requests that meet a fault.
    seed : int
        Decides which.
    latency_s : float
        Of a good answer; it varies by half of itself with the request.

    Attributes
    ----------
    base_url : str
    met : Counter
        How often each fault, and ``"good"``, was the answer.
    """

    def __init__(
        self, faults: tuple[Handler, ...] = (), rate: float = 0.0, *, seed: int = 0, latency_s: float = 0.0
    ) -> None:
        self._faults = faults
        self._rate = rate
        self._random = random.Random(seed)
        self._latency_s = latency_s
        self.met: Counter[str] = Counter()
        self.base_url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)

    @property
    def requests(self) -> int:
        return self.met.total()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._until_stopped())
        self._loop.close()

    async def _until_stopped(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ConnectionError:  # the client has gone
            return web.Response()
        if self._random.random() < self._rate:
            fault = self._random.choice(self._faults)
            self.met[fault.__name__] += 1
            return await fault(request, body)
        self.met["good"] += 1
        digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        await asyncio.sleep(self._latency_s * (0.75 + 0.5 * digest[0] / 255))
        return web.json_response(completion(good_answer(body["messages"])))
