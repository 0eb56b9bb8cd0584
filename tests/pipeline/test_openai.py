from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import email.utils
import functools
import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hippoindex.errors import HippoIndexError, SpendLimitError, UsageError
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Extraction, Passage, Triple
from hippoindex.pipeline.extract.llm import LlmExtractor, llm_fingerprint
from hippoindex.pipeline.extract.prompts import answer_schema, load_prompts
from hippoindex.pipeline.llm.engines import open_engine

MILL = Passage("m", "Corbel Mill", "Corbel Mill grinds rye in Aldery.")
ENTITIES = '{"entities": ["Corbel Mill", "Aldery"]}'
TRIPLES = '{"triples": [["Corbel Mill", "grinds", "rye"], ["Corbel Mill", "is in", "Aldery"]]}'
GOOD = Extraction(
    ["Corbel Mill", "Aldery"],
    [Triple("Corbel Mill", "grinds", "rye"), Triple("Corbel Mill", "is in", "Aldery")],
    [],
)


@dataclass
class Reply:
    """What the server sends: a chat completion around ``content``, or ``body`` as it is."""

    content: str | None = None
    status: int = 200
    finish_reason: str | None = "stop"
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    delay_s: float = 0.0
    hang_up: bool = False

    def encode(self) -> bytes:
        if self.body is not None:
            return self.body.encode()
        message = {"role": "assistant", "content": self.content}
        return json.dumps(
            {"choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}]}
        ).encode()


@dataclass
class Request:
    """One request as the server saw it. ``turn`` is 0 for the entities and 1 for the triples."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.body["messages"]

    @property
    def turn(self) -> int:
        return 0 if len(self.messages) == 6 else 1


class ChatServer(ThreadingHTTPServer):
    """A chat-completions endpoint on loopback that answers as a script says."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: Callable[[Request, int], Reply] = answer_well
        self.requests: list[Request] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, request: Request) -> Reply:
        with self.lock:
            earlier = sum(seen.messages == request.messages for seen in self.requests)
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        reply = self.script(request, earlier)
        self.closing.wait(reply.delay_s)
        with self.lock:
            self.in_flight -= 1
        return reply

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet when a client has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.server.answer(Request(self.path, dict(self.headers), body, time.monotonic()))
        if reply.hang_up:
            self.close_connection = True
            return
        data = reply.encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        """Keep quiet."""


def answer_well(request: Request, _earlier: int) -> Reply:
    return Reply(TRIPLES if request.turn else ENTITIES)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def config(server: ChatServer, **settings: Any) -> ExtractConfig:
    return ExtractConfig(
        engine="openai",
        **{
            "model": "tiny",
            "base_url": server.base_url,
            "max_attempts": 2,
            "request_attempts": 2,
            **settings,
        },
    )


def opened(settings: ExtractConfig) -> LlmExtractor:
    return LlmExtractor(settings, functools.partial(open_engine, settings))


def extract(server: ChatServer, *passages: Passage, **settings: Any) -> list[Extraction]:
    with contextlib.closing(opened(config(server, **settings))) as extractor:
        return extractor.extract(passages or [MILL])


def test_two_turns_of_one_conversation(server: ChatServer) -> None:
    assert extract(server, max_output_tokens=99) == [GOOD]
    first, second = server.requests
    assert first.path == "/v1/chat/completions"
    assert first.body | {"messages": 0} == {
        "model": "tiny",
        "messages": 0,
        "temperature": 0.0,
        "seed": second.body["seed"],
        "max_tokens": 99,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": answer_schema("entities")},
        },
    }
    assert "Corbel Mill\nCorbel Mill grinds rye in Aldery." in first.messages[-1]["content"]
    assert second.messages[:-1] == [*first.messages, {"role": "assistant", "content": ENTITIES}]


def test_all_passages_share_the_beginning_and_results_keep_their_order(server: ChatServer) -> None:
    def script(request: Request, _earlier: int) -> Reply:
        number = request.messages[5]["content"].rsplit(" ", 1)[1]
        delay_s = 0.05 if int(number) % 3 == 0 else 0.0
        return Reply(
            json.dumps({"triples": [["mill", "is", number]]} if request.turn else {"entities": [number]}),
            delay_s=delay_s,
        )

    server.script = script
    passages = [Passage(str(i), "", f"This is mill {i}") for i in range(20)]
    found = extract(server, *passages, concurrency=4)
    assert [extraction.entities for extraction in found] == [[str(i)] for i in range(20)]
    assert [extraction.triples for extraction in found] == [[("mill", "is", str(i))] for i in range(20)]
    assert len({json.dumps(request.messages[:5]) for request in server.requests}) == 1
    assert 1 < server.most_in_flight <= 4


def test_an_extractor_that_nobody_has_releases_its_engine(server: ChatServer) -> None:
    def loops() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "language-model"}

    gc.collect()
    before = loops()
    extractor = opened(config(server))
    assert extractor.extract([MILL]) == [GOOD]
    (loop,) = loops() - before
    del extractor
    gc.collect()
    loop.join(5)
    assert not loop.is_alive()


def test_no_passages_need_no_server(server: ChatServer) -> None:
    assert opened(config(server)).extract([]) == []
    assert server.requests == []


def test_works_inside_a_running_event_loop(server: ChatServer) -> None:
    async def caller() -> list[Extraction]:
        return extract(server)

    assert asyncio.run(caller()) == [GOOD]


def test_the_key_is_sent_and_a_local_server_needs_none(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILL_KEY", "mill-secret\n")
    assert extract(server, api_key_env="MILL_KEY") == [GOOD]
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer mill-secret"}
    server.requests.clear()
    monkeypatch.delenv("MILL_KEY")
    assert extract(server, api_key_env="MILL_KEY") == [GOOD]
    assert not any("Authorization" in request.headers for request in server.requests)


@pytest.mark.parametrize("key", ["mill\nsecret", "mühle-secret"])
def test_a_key_that_cannot_be_sent_is_refused_unquoted(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILL_KEY", key)
    with pytest.raises(UsageError, match="MILL_KEY") as caught:
        opened(ExtractConfig(engine="openai", model="tiny", api_key_env="MILL_KEY"))
    assert "secret" not in str(caught.value)


def test_malformed_items_are_rejected_and_the_passage_kept(server: ChatServer) -> None:
    server.script = lambda request, _: Reply(
        '{"triples": [["a", "b"], ["a", null, "c"], ["a", "b", " c "]]}'
        if request.turn
        else '{"entities": ["a", {"b": 1}]}'
    )
    (extraction,) = extract(server)
    assert (extraction.entities, extraction.triples, extraction.error) == (["a"], [("a", "b", "c")], None)
    assert [item.reason for item in extraction.rejected] == [
        "entity is not a string (dict)",
        "triple has 2 fields instead of 3",
        "predicate is null",
    ]


def test_almost_json_is_repaired_counted_and_shown_to_the_model_as_json(server: ChatServer) -> None:
    server.script = lambda request, _: Reply(
        TRIPLES if request.turn else 'Here they are:\n```json\n{"entities": ["Corbel Mill", "Aldery",]}\n```'
    )
    extractor = opened(config(server))
    assert extractor.extract([MILL]) == [GOOD]
    assert extractor.usage.repaired == 1
    assert server.requests[1].messages[6]["content"] == ENTITIES


def test_lone_surrogates_in_an_answer_reject_only_their_item(server: ChatServer) -> None:
    server.script = lambda request, _: Reply(
        TRIPLES if request.turn else '{"entities": ["Aldery", "\ud83d"]}'
    )
    (extraction,) = extract(server)
    assert extraction.entities == ["Aldery"]
    assert [item.reason for item in extraction.rejected] == ["entity is not valid Unicode (lone surrogate)"]
    assert len(extraction.triples) == 2


def test_an_answer_that_is_no_json_is_asked_for_again_in_another_way(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply("I would rather not.") if earlier == 0 else answer_well(request, earlier)
    )
    assert extract(server) == [GOOD]
    assert [request.turn for request in server.requests] == [0, 0, 1, 1]
    assert [request.body["temperature"] for request in server.requests] == [0.0, 0.4, 0.0, 0.4]
    assert server.requests[0].body["seed"] != server.requests[1].body["seed"]


@pytest.mark.parametrize(
    ("reply", "reason", "raw"),
    [
        (Reply("I would rather not."), 'not a JSON object with a list "triples"', "I would rather not."),
        (Reply('{"entities": []}'), 'not a JSON object with a list "triples"', '{"entities": []}'),
        (Reply('[["a", "b", "c"]]'), 'not a JSON object with a list "triples"', '[["a", "b", "c"]]'),
        (Reply(None), "the answer has no text", '"content": null'),
        (Reply(body="<html>"), "not a chat completion", "<html>"),
        (Reply(body='{"choices": []}'), "not a chat completion", '{"choices": []}'),
    ],
)
def test_an_answer_that_stays_bad_fails_its_passage_alone(
    server: ChatServer, reply: Reply, reason: str, raw: str
) -> None:
    server.script = lambda request, earlier: (
        reply if request.turn and "rye" in request.messages[5]["content"] else answer_well(request, earlier)
    )
    bad, good = extract(server, MILL, Passage("n", "", "Nothing else."))
    assert good == GOOD
    assert bad.error is not None
    assert reason in bad.error
    assert bad.raw.startswith(ENTITIES)
    assert raw in bad.raw
    assert len(server.requests) == 1 + 2 + 2


def test_what_the_content_filter_cut_is_an_error_even_where_it_could_be_repaired(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply(TRIPLES[:40], finish_reason="content_filter") if request.turn else answer_well(request, earlier)
    )
    (extraction,) = extract(server)
    assert extraction.error == "the answer with the triples was cut by the server's content filter"
    assert extraction.raw == f"{ENTITIES}\n{TRIPLES[:40]}"
    assert len(server.requests) == 2


def test_a_cut_answer_is_asked_for_at_twice_the_length(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply(TRIPLES[:50], finish_reason="length")
        if request.turn and request.body["max_tokens"] == 64
        else answer_well(request, earlier)
    )
    assert extract(server, max_output_tokens=64) == [GOOD]
    assert [request.body["max_tokens"] for request in server.requests] == [64, 64, 128]


def test_what_stays_cut_keeps_its_complete_triples_and_is_flagged(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply(TRIPLES[:60], finish_reason="length") if request.turn else answer_well(request, earlier)
    )
    (extraction,) = extract(server, max_output_tokens=64)
    assert extraction.entities == GOOD.entities
    assert extraction.triples == GOOD.triples[:1]
    assert [item.reason for item in extraction.rejected] == ["an answer was cut; its complete items are kept"]
    assert extraction.rejected[0].raw.count(TRIPLES[:60]) == 2
    assert len(server.requests) == 3


TWO = Passage("t", "Mills", "Corbel Mill grinds rye in Aldery. Tarn Mill grinds wheat in Oake.")


def _by_mill(request: Request) -> str:
    """Answer about the mills that a question names."""
    text = request.messages[5]["content"]
    names = [name for name in ("Corbel Mill", "Tarn Mill") if name in text]
    if request.turn:
        return json.dumps({"triples": [[name, "is", "mill"] for name in names]})
    return json.dumps({"entities": names})


def test_a_passage_whose_answer_stays_cut_is_asked_about_in_parts(server: ChatServer) -> None:
    def script(request: Request, _earlier: int) -> Reply:
        text = request.messages[5]["content"]
        whole = "Corbel Mill" in text and "Tarn Mill" in text
        answer = _by_mill(request)
        return Reply(answer[:30], finish_reason="length") if whole else Reply(answer)

    server.script = script
    (extraction,) = extract(server, TWO)
    assert extraction.entities == ["Corbel Mill", "Tarn Mill"]
    assert extraction.triples == [("Corbel Mill", "is", "mill"), ("Tarn Mill", "is", "mill")]
    assert extraction.rejected == []
    assert len(server.requests) == 2 + 2 * 2
    assert all("Mills\n" in request.messages[5]["content"] for request in server.requests)


def test_a_prompt_that_is_too_long_is_halved_until_it_fits(server: ChatServer) -> None:
    text = " ".join(f"Mill number {i} grinds rye." for i in range(8))

    def script(request: Request, _earlier: int) -> Reply:
        asked = request.messages[5]["content"]
        if asked.count("grinds rye") > 2:
            return Reply(status=400, body='{"error": "exceeds the available context size"}')
        ids = [i for i in range(8) if f"number {i} " in asked]
        key, items = ("triples", [["mill", "is", str(i)] for i in ids]) if request.turn else ("entities", ids)
        return Reply(json.dumps({key: list(map(str, items)) if key == "entities" else items}))

    server.script = script
    (extraction,) = extract(server, Passage("l", "", text))
    assert extraction.error is None
    assert extraction.entities == [str(i) for i in range(8)]
    assert [triple.object for triple in extraction.triples] == [str(i) for i in range(8)]


def test_a_prompt_that_never_fits_is_an_error(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(status=400, body="prompt is too long")
    (extraction,) = extract(server)
    assert extraction.error == "the prompt is too long for the model: HTTP 400"
    assert len(server.requests) < 20


def test_long_passages_are_asked_about_in_parts_with_overlap(server: ChatServer) -> None:
    server.script = lambda request, _earlier: Reply(_by_mill(request))
    passage = Passage("t", "", "Corbel Mill is very old. Tarn Mill is new. Rye is cheap here today.")
    (extraction,) = extract(server, passage, max_passage_tokens=16, passage_overlap_tokens=6)
    assert extraction.entities == ["Corbel Mill", "Tarn Mill"]
    assert extraction.triples == [("Corbel Mill", "is", "mill"), ("Tarn Mill", "is", "mill")]
    asked = [request.messages[5]["content"] for request in server.requests if request.turn == 0]
    assert sum("Tarn Mill is new" in question for question in asked) == 2
    assert {item.reason for item in extraction.rejected} == {"triple repeats one of the same passage"}


def test_a_part_that_fails_costs_that_part(server: ChatServer) -> None:
    server.script = lambda request, _earlier: (
        Reply("No.") if "Tarn" in request.messages[5]["content"] else Reply(_by_mill(request))
    )
    (extraction,) = extract(server, TWO, max_passage_tokens=16, passage_overlap_tokens=0)
    assert extraction.entities == ["Corbel Mill"]
    (note,) = extraction.rejected
    assert note.reason == (
        'no answer about characters 34 to 65: the answer is not a JSON object with a list "entities"'
    )
    assert note.raw == "No.\nNo."


def test_joint_mode_asks_once(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(
        json.dumps({**json.loads(ENTITIES), **json.loads(TRIPLES)})
    )
    assert extract(server, mode="joint") == [GOOD]
    (request,) = server.requests
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "user"]
    assert request.body["response_format"]["json_schema"]["schema"] == answer_schema("entities", "triples")


@pytest.mark.parametrize("refused", [["json_schema"], ["json_schema", "json_object"]])
def test_a_server_without_a_response_format_is_asked_without(server: ChatServer, refused: list[str]) -> None:
    def script(request: Request, earlier: int) -> Reply:
        way = request.body.get("response_format", {}).get("type", "none")
        if way in refused:
            return Reply(status=400, body=f"response_format {way} is not supported")
        return answer_well(request, earlier)

    server.script = script
    assert extract(server, *[MILL] * 3) == [GOOD] * 3
    ways = [request.body.get("response_format", {}).get("type", "none") for request in server.requests]
    assert set(ways[-3:]) == {["json_object", "none"][len(refused) - 1]}
    server.requests.clear()
    (extraction,) = extract(server, structured="json_schema")
    assert extraction.error == "the server refused the request: HTTP 400"


def test_what_was_answered_is_not_asked_again(server: ChatServer, tmp_path: Path) -> None:
    passages = [Passage(str(i), "", f"This is mill {i}.") for i in range(5)]
    first = extract(server, *passages, cache=str(tmp_path / "answers"))
    assert len(server.requests) == 10
    again = opened(config(server, cache=str(tmp_path / "answers")))
    assert again.extract(passages) == first
    assert len(server.requests) == 10
    assert (again.usage.known, again.usage.requests, again.usage.prompt_tokens) == (10, 0, 0)
    extract(server, *passages, cache=str(tmp_path / "answers"), max_output_tokens=99)
    assert len(server.requests) == 20


def test_the_spend_limit_stops_before_it_is_passed_and_keeps_what_was_paid(
    server: ChatServer, tmp_path: Path
) -> None:
    price = {"prompt": 1.0, "generated": 1000.0}
    settings = {"cache": str(tmp_path), "price_usd": price, "max_output_tokens": 64}
    passages = [Passage(str(i), "", f"This is mill {i}.") for i in range(12)]
    with pytest.raises(SpendLimitError, match="What was done is kept") as stopped:
        extract(server, *passages, max_usd=0.3, concurrency=3, **settings)
    assert 0.2 < stopped.value.spent_usd <= 0.3
    paid = len(server.requests)
    assert 0 < paid < 24
    assert extract(server, *passages, **settings) == [GOOD] * 12
    assert len(server.requests) == 24


def test_a_spend_limit_needs_prices(server: ChatServer) -> None:
    with pytest.raises(UsageError, match=r"extract\.price_usd"):
        extract(server, max_usd=1.0)


def test_tokens_and_attempts_are_counted(server: ChatServer) -> None:
    def script(request: Request, earlier: int) -> Reply:
        if earlier == 0 and not request.turn:
            return Reply(status=500, body="")
        usage = {
            "prompt_tokens": 100 + request.turn,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 60},
        }
        text = TRIPLES if request.turn else ENTITIES
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return Reply(body=json.dumps({"choices": [choice], "usage": usage}))

    server.script = script
    extractor = opened(config(server, price_usd={"prompt": 1e6, "cached": 1e5, "generated": 2e6}))
    assert extractor.extract([MILL]) == [GOOD]
    usage = extractor.usage
    assert (usage.requests, usage.attempts, usage.known, usage.passages) == (2, 3, 0, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (201, 120, 14)
    assert usage.usd == pytest.approx(81 + 120 * 0.1 + 28)
    assert usage.latency_s > 0


def test_a_server_that_fails_request_after_request_stops_the_work(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(status=500, body="out of memory")
    with pytest.raises(HippoIndexError, match=r"one after the other.*HTTP 500"):
        extract(server, *[MILL] * 60, concurrency=4)


def test_a_server_that_refuses_request_after_request_stops_the_work(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(status=403, body="not in your country")
    with pytest.raises(HippoIndexError, match=r"refused 16 requests one after the other.*HTTP 403.*country"):
        extract(server, *[MILL] * 60, concurrency=4)
    assert len(server.requests) < 30
    server.script = lambda request, _: (
        Reply(status=400, body="bad words") if "Mill 7" in str(request.messages) else answer_well(request, 0)
    )
    passages = [MILL._replace(text=f"Mill {i}") for i in range(40)]
    failed = [found.error for found in extract(server, *passages, concurrency=1) if found.error]
    assert failed == ["the server refused the request: HTTP 400"], "that one alone"


@pytest.mark.parametrize("end", ["?key=secret", "#part"])
def test_an_address_is_nothing_but_an_address(server: ChatServer, end: str) -> None:
    with pytest.raises(UsageError, match=r"extract\.base_url has a query or fragment") as caught:
        extract(server, base_url=f"{server.base_url}{end}")
    assert "secret" not in str(caught.value)


def test_a_server_that_stays_too_busy_stops_the_work(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(status=429, body="slow down")
    with pytest.raises(HippoIndexError, match=r"has refused a request for 0\.3 s.*kept"):
        extract(server, patience_s=0.3)


def test_a_server_that_wants_money_stops_the_work_at_once(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(status=429, body='{"code": "insufficient_quota"}')
    with pytest.raises(HippoIndexError, match="wants to be paid"):
        extract(server)
    assert len(server.requests) == 1


def test_requests_a_second_are_limited(server: ChatServer) -> None:
    start_s = time.monotonic()
    extract(server, *[Passage(str(i), "", f"Mill {i}.") for i in range(8)], requests_per_s=10.0)
    assert time.monotonic() - start_s >= 0.5


def test_a_busy_server_is_asked_again_the_same_way_after_the_time_it_names(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply(status=429, headers={"Retry-After": "1"}, body="slow down")
        if earlier == 0 and request.turn == 0
        else answer_well(request, earlier)
    )
    assert extract(server) == [GOOD]
    first, again, _ = server.requests
    assert again.body == first.body
    assert 1.0 <= again.at_s - first.at_s < 3.0


@pytest.mark.parametrize("zone", [dt.UTC, None])
def test_retry_after_may_be_a_date(server: ChatServer, zone: dt.tzinfo | None) -> None:
    past = email.utils.format_datetime(dt.datetime(2020, 5, 17, 8, 30, tzinfo=zone))
    server.script = lambda request, earlier: (
        Reply(status=503, headers={"Retry-After": past}, body="")
        if earlier == 0
        else answer_well(request, earlier)
    )
    assert extract(server) == [GOOD]
    assert [request.turn for request in server.requests] == [0, 0, 1, 1]
    assert server.requests[1].at_s - server.requests[0].at_s < 0.4


def test_a_lost_connection_is_tried_again(server: ChatServer) -> None:
    server.script = lambda request, earlier: (
        Reply(hang_up=True) if request.turn == 0 and earlier == 0 else answer_well(request, earlier)
    )
    assert extract(server) == [GOOD]
    server.script = lambda _request, _earlier: Reply(hang_up=True)
    (extraction,) = extract(server, max_attempts=1)
    assert extraction.error is not None
    assert extraction.error.startswith("connection lost")


def test_a_server_that_stays_broken_fails_the_passage_after_max_attempts(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(
        status=500, body="out of memory", headers={"Retry-After": "next week, perhaps"}
    )
    assert extract(server) == [Extraction(error="the server answered HTTP 500", raw="out of memory")]
    assert len(server.requests) == 2


def test_a_hanging_server_is_a_timeout(server: ChatServer) -> None:
    server.script = lambda _request, _earlier: Reply(ENTITIES, delay_s=30.0)
    start_s = time.monotonic()
    (extraction,) = extract(server, timeout_s=0.2)
    assert extraction.error == "no answer within extract.timeout_s=0.2 s"
    assert len(server.requests) == 2
    assert time.monotonic() - start_s < 10


def test_a_refused_request_is_not_repeated_and_the_key_stays_secret(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mill-secret")
    server.script = lambda request, earlier: (
        Reply(status=400, body="too long; asked by mill-secret")
        if "rye" in request.messages[5]["content"]
        else answer_well(request, earlier)
    )
    refused, good = extract(server, MILL, Passage("n", "", "Nothing else."))
    assert refused == Extraction(
        error="the server refused the request: HTTP 400", raw="too long; asked by ***"
    )
    assert good == GOOD
    assert Counter(request.turn for request in server.requests) == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, r"API key .*OPENAI_API_KEY"), (404, r"'tiny'.*no such model.*extract\.model")],
)
def test_what_would_fail_every_passage_stops_the_work(server: ChatServer, status: int, message: str) -> None:
    server.script = lambda _request, _earlier: Reply(status=status, body="no such model")
    with pytest.raises(HippoIndexError, match=message):
        extract(server, *[MILL] * 50, concurrency=2)
    assert len(server.requests) <= 4


def test_an_unreachable_endpoint_is_one_clear_error() -> None:
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        extractor = opened(ExtractConfig(engine="openai", model="tiny", base_url=url))
        with pytest.raises(HippoIndexError, match=rf"can be reached at {url}.*extract\.base_url"):
            extractor.extract([MILL] * 3)


def test_the_model_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"--set extract\.model="):
        llm_fingerprint(ExtractConfig(engine="openai"))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "ftp://mill/v1", "http:///v1", "http://me:pw@mill/v1", "http://m:x/"]
)
def test_an_address_that_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"extract\.base_url") as caught:
        opened(ExtractConfig(engine="openai", model="tiny", base_url=url))
    assert "pw" not in str(caught.value)


def test_the_fingerprint_is_of_what_decides_an_answer(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.yaml"
    content = load_prompts().model_dump(mode="json")
    prompts.write_text(json.dumps(content), encoding="utf-8")

    def fingerprint(**settings: Any) -> str:
        return llm_fingerprint(ExtractConfig(engine="openai", **{"model": "tiny", **settings}))

    same: list[dict[str, Any]] = [
        {},
        {"base_url": "http://127.0.0.1:9/v1"},
        {"timeout_s": 1.0},
        {"prompts": str(prompts)},
    ]
    assert len({fingerprint(**settings) for settings in same}) == 1
    other: list[dict[str, Any]] = [{}, {"model": "small"}, {"max_output_tokens": 99}]
    assert len({fingerprint(**settings) for settings in other}) == 3
    before = fingerprint(prompts=str(prompts))
    content["two_turn"]["triples"] += " Be brief."
    prompts.write_text(json.dumps(content), encoding="utf-8")
    assert fingerprint(prompts=str(prompts)) != before


def test_the_packaged_example_is_consistent() -> None:
    prompts = load_prompts()
    (example,) = prompts.examples
    passage = " ".join(example.passage.split())
    assert all(entity in passage for entity in example.entities)
    named = {end for s, _, o in example.triples for end in (s, o) if end in example.entities}
    assert named == set(example.entities)
    assert '{"entities": []}' in prompts.two_turn.entities
    assert '{"triples": []}' in prompts.two_turn.triples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "extra: Extra inputs"),
        ({"joint": {"instruction": "List: {passage}"}}, r"joint\.system: Field required"),
        (
            {"two_turn": load_prompts().two_turn.model_dump() | {"entities": "No place."}},
            r"two_turn\.entities: .*\{passage\}",
        ),
        ({"examples": [{"passage": "x", "entities": [], "triples": [["a", "b"]]}]}, r"examples\.0\.triples"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(json.dumps(load_prompts().model_dump(mode="json") | change), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_prompts(path)


def test_unreadable_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read the prompts"):
        load_prompts(tmp_path / "nowhere.yaml")
    path = tmp_path / "broken.yaml"
    path.write_text("ner: [", encoding="utf-8")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_prompts(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="file: "):
        load_prompts(path)


def test_a_passage_may_hold_braces_and_the_placeholder(server: ChatServer) -> None:
    text = 'Use {passage} and {"a": {}} as they are.'
    assert extract(server, Passage("b", "", text)) == [GOOD]
    assert server.requests[0].messages[-1]["content"].endswith(f"Passage:\n{text}")
