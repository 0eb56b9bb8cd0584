"""Recognition memory, IRCoT and answers over a chat endpoint of our own, on the sample index."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from aiohttp import web

from hippoindex.errors import HippoIndexError, InputError, SpendLimitError, UsageError
from hippoindex.pipeline.answer import answer_queries, evaluate_queries, open_retriever, read_gold
from hippoindex.pipeline.compare import compare
from hippoindex.pipeline.config import ClusterConfig, ReaderConfig
from hippoindex.pipeline.display import evaluation_table
from hippoindex.pipeline.evaluate import evaluate
from hippoindex.pipeline.evaluation_report import markdown, write_report
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.answers import answer_questions
from hippoindex.pipeline.reader.ircot import POOL, interleave
from hippoindex.pipeline.reader.model import ReaderModel
from hippoindex.pipeline.retrieve.base import min_max
from hippoindex.pipeline.retrieve.engine import Retriever

Messages = list[dict[str, str]]
Script = Callable[[str, Messages], "str | int | tuple[str, str]"]
Run = Callable[..., Any]


class ReaderServer:
    """A chat endpoint whose answers are a function of the request.

    The script is given what is asked for ("facts", "thought" or "answer") and the messages. It returns the
    text, a status, or text and finish reason.

    Attributes
    ----------
    seen : list of (str, list of dict)
        Every request.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[tuple[str, Messages]] = []
        self.base_url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.seen)

    def settings(self, **more: Any) -> list[str]:
        values = {
            "engine": "openai",
            "model": "tiny",
            "base_url": self.base_url,
            "request_attempts": 2,
            **more,
        }
        return [f"reader.{name}={json.dumps(value)}" for name, value in values.items()]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        kind = kind_of(messages[0]["content"])
        self.seen.append((kind, messages))
        said = self.script(kind, messages)
        if isinstance(said, int):
            return web.json_response({"error": "context_length_exceeded"}, status=said)
        text, reason = said if isinstance(said, tuple) else (said, "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"choices": [choice], "usage": usage})


def kind_of(system: str) -> str:
    return {"You select": "facts", "You answer a question step": "thought"}.get(
        next(
            (start for start in ("You select", "You answer a question step") if system.startswith(start)), ""
        ),
        "answer",
    )


def facts_in(messages: Messages) -> list[list[str]]:
    line = next(line for line in messages[-1]["content"].splitlines() if line.startswith('{"facts"'))
    return json.loads(line)["facts"]


def question_in(messages: Messages) -> str:
    return re.findall(r"^Question: (.*)$", messages[-1]["content"], re.MULTILINE)[-1]


def titles_in(messages: Messages) -> list[str]:
    return re.findall(r"^\[\d+\] (.*)$", messages[-1]["content"], re.MULTILINE)


def plain(kind: str, messages: Messages) -> str:
    """Keep the first fact, think of the best passage and then end, answer with its title."""
    if kind == "facts":
        return json.dumps({"facts": facts_in(messages)[:1]})
    title = titles_in(messages)[0]
    if kind == "answer":
        return f"Thought: It is in the first passage.\nAnswer: {title}."
    return (
        f"It is about {title}. And more."
        if " none\n" in messages[-1]["content"]
        else f"So the answer is: {title}."
    )


@pytest.fixture
def server() -> Iterator[ReaderServer]:
    with ReaderServer(plain) as server:
        yield server


@pytest.fixture(scope="module")
def bare(sample_index: Path) -> Retriever:
    return open_retriever(sample_index)


@pytest.fixture(scope="module")
def queries(bare: Retriever, sample: Path) -> list[Query]:
    return read_gold(bare.index, sample / "questions.jsonl").queries


@pytest.fixture
def reading(server: ReaderServer, bare: Retriever) -> Iterator[Retriever]:
    with closing(open_retriever(bare.index.path, server.settings())) as retriever:
        retriever.__dict__["_embedder"] = bare._embedder  # loaded once for all tests
        retriever.__dict__["_nlp"] = bare._nlp
        yield retriever


# --- recognition memory


def test_facts_are_those_that_the_model_keeps(
    server: ReaderServer, reading: Retriever, bare: Retriever, queries: list[Query]
) -> None:
    def shouted_and_invented(_: str, messages: Messages) -> str:
        last = [part.upper() for part in facts_in(messages)[-1]]
        return json.dumps({"facts": [last, ["nobody", "knows", "this"]]})

    server.script = shouted_and_invented
    n = len(queries)
    ranking = reading.rank(reading.encode(queries), "hipporag2", top_k=8)
    batch = replace(bare.encode(queries), fact_filter=lambda _, facts: [[len(given) - 1] for given in facts])
    expected = bare.rank(batch, "hipporag2", top_k=8)
    np.testing.assert_array_equal(ranking.rows, expected.rows)
    assert ranking.recognition == {
        "questions": n,
        "facts": 5 * n,
        "kept_facts": n,
        "questions_without_facts": 0,
    }
    assert ranking.notes == ""
    # the same questions and facts are not asked about again, whatever the method
    assert reading.rank(reading.encode(queries), "hippoindex").recognition == ranking.recognition
    assert server.kinds == {"facts": n}
    report = reading.reader_report()
    assert report is not None
    assert report["recognition_memory"] == {"questions": n, "unknown_facts": n, "failed": 0, "reasons": {}}
    assert report["usage"]["requests"] == n
    assert report["usage"]["prompt_tokens"] == 100 * n


def test_no_fact_kept_falls_back_to_dense_and_is_counted(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    server.script = lambda *_: '{"facts": []}'
    batch = reading.encode(queries)
    ranking = reading.rank(batch, "hipporag2", top_k=5)
    assert ranking.fallbacks == len(queries)
    assert ranking.recognition is not None
    assert ranking.recognition["questions_without_facts"] == len(queries)  # type: ignore[index]
    np.testing.assert_array_equal(ranking.rows, reading.rank(batch, "dense", top_k=5).rows)
    assert reading.rank(batch, "dense").recognition is None


def test_a_failed_request_keeps_the_facts_and_is_counted(
    server: ReaderServer, reading: Retriever, bare: Retriever, queries: list[Query]
) -> None:
    server.script = lambda *_: "I would rather not."
    ranking = reading.rank(reading.encode(queries), "hipporag2", top_k=8)
    expected = bare.rank(bare.encode(queries), "hipporag2", top_k=8)
    np.testing.assert_array_equal(ranking.rows, expected.rows)
    report = reading.reader_report()
    assert report is not None
    assert report["recognition_memory"]["failed"] == len(queries)
    assert report["recognition_memory"]["reasons"] == {"the answer is not what was asked for": len(queries)}
    assert report["usage"]["invalid"] == 3 * len(queries)  # each asked three times, less greedily
    assert expected.recognition == "off"
    assert expected.notes == "recognition memory off"


def test_a_cut_answer_keeps_its_complete_facts(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    server.script = lambda _, messages: (json.dumps({"facts": facts_in(messages)})[:-20], "length")
    ranking = reading.rank(reading.encode(queries[:2]), "hipporag2", top_k=5)
    assert ranking.recognition is not None
    assert ranking.recognition["kept_facts"] == 2 * 4  # type: ignore[index]
    assert len(server.seen) == 4  # once more with twice the length


# --- IRCoT


def test_a_step_retrieves_with_the_thought_and_the_best_score_is_kept(
    reading: Retriever, queries: list[Query]
) -> None:
    assert reading.reader is not None
    batch = reading.encode(queries)
    found = interleave(reading, reading.reader, batch, "dense", steps=3, top_k=6)
    first = reading.rank(batch, "dense", top_k=POOL)
    titles = [reading.index.passages["title"][int(row)].as_py() for row in first.rows[:, 0]]
    assert [chain.thoughts[0] for chain in found.chains] == [f"It is about {title}." for title in titles]
    assert all(chain.thoughts[1].startswith("So the answer is") for chain in found.chains)
    n = len(queries)
    assert found.summary() == {"steps": 3, "thoughts": 2 * n, "ended_by_an_answer": n, "failed": 0}
    second = reading.rank(
        reading.encode([Query("t", chain.thoughts[0]) for chain in found.chains]), "dense", top_k=POOL
    )
    for number in range(n):
        best: dict[int, float] = {}
        for ranking in (first, second):
            for row, score in zip(ranking.rows[number], min_max(ranking.scores[number]), strict=True):
                best[int(row)] = max(best.get(int(row), 0.0), float(score))
        np.testing.assert_allclose(found.ranking.scores[number], sorted(best.values(), reverse=True)[:6])
        assert [best[int(row)] for row in found.ranking.rows[number]] == found.ranking.scores[number].tolist()


def test_steps_end_and_one_step_is_the_method_itself(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    assert reading.reader is not None
    batch = reading.encode(queries)
    one = interleave(reading, reading.reader, batch, "dense", steps=1, top_k=5)
    np.testing.assert_array_equal(one.ranking.rows, reading.rank(batch, "dense", top_k=5).rows)
    assert server.kinds == {}
    server.script = lambda *_: "There is more to find."
    found = interleave(reading, reading.reader, batch, "dense", steps=4, top_k=5)
    assert server.kinds == {"thought": 3 * len(queries)}
    assert found.summary()["ended_by_an_answer"] == 0
    with pytest.raises(UsageError, match="at least one step"):
        interleave(reading, reading.reader, batch, "dense", steps=0)


def test_a_step_that_finds_nothing_moves_no_passage(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    assert reading.reader is not None
    server.script = lambda *_: "Xyzzy plugh."  # words of no passage: BM25 has 0 for all
    batch = reading.encode(queries)
    one, two = (interleave(reading, reading.reader, batch, "bm25", steps=n, top_k=5) for n in (1, 2))
    np.testing.assert_array_equal(two.ranking.rows, one.ranking.rows)
    np.testing.assert_array_equal(two.ranking.scores, one.ranking.scores)


def test_a_failed_thought_keeps_what_was_retrieved(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    assert reading.reader is not None
    wrong = queries[0].question
    server.script = lambda kind, messages: 400 if question_in(messages) == wrong else plain(kind, messages)
    batch = reading.encode(queries)
    found = interleave(reading, reading.reader, batch, "dense", steps=2, top_k=5)
    assert found.summary()["failed"] == 1
    assert "too long" in str(found.records()[0]["error"])
    rows = reading.rank(batch, "dense", top_k=5).rows
    np.testing.assert_array_equal(found.ranking.rows[0], rows[0])


# --- answers


def test_a_prompt_that_is_too_long_is_put_with_fewer_passages(
    server: ReaderServer, reading: Retriever, queries: list[Query]
) -> None:
    assert reading.reader is not None
    server.script = lambda kind, messages: 400 if len(titles_in(messages)) > 2 else plain(kind, messages)
    rows = reading.rank(reading.encode(queries[:2]), "dense", top_k=5).rows
    answers = answer_questions(reading.reader, reading.index, [q.question for q in queries[:2]], rows)
    assert all(answer.error is None for answer in answers)
    assert [len(titles_in(messages)) for _, messages in server.seen].count(2) == 2
    assert reading.reader.report()["usage"]["shortened"] == 2


def test_evaluation_with_answers_and_chains(
    server: ReaderServer,
    queries: list[Query],
    sample_index: Path,
    sample: Path,
    tmp_path: Path,
) -> None:
    right = {query.question: query.answers for query in queries}
    failing, aliased = queries[1].question, queries[0].question

    def mostly_right(kind: str, messages: Messages) -> str | int:
        question = question_in(messages)
        if kind != "answer":
            return plain(kind, messages)
        if question == failing:
            return 418
        return f"Thought: So.\nAnswer: the {right[question][-1 if question == aliased else 0]}"

    server.script = mostly_right
    price = {"prompt": 10.0, "generated": 100.0}
    settings = server.settings(cache=str(tmp_path / "answers"), price_usd=price, max_usd=1.0)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    reports = []
    for file in files:
        report = evaluate_queries(
            sample_index,
            sample / "questions.jsonl",
            ["hipporag2", "dense"],
            overrides=settings,
            qa=True,
            ircot_steps=2,
        )
        write_report(report, file)
        reports.append(report)
        if file is files[0]:
            asked = len(server.seen)
    n = len(queries)
    report = reports[0]
    assert list(report["methods"]) == ["hipporag2", "dense", "hipporag2+ircot", "dense+ircot"]
    for name, row in report["methods"].items():
        assert row["exact_match"] == row["f1"] == round(100 * (n - 1) / n, 2)
        assert row["qa"] == {
            "questions": n,
            "answered": n - 1,
            "failed": 1,
            "unmarked": 0,
            "without_reference": 0,
        }
        by_question = report["questions"]["methods"][name]
        assert by_question["exact_match"] == [100.0, 0.0] + [100.0] * (n - 2)
        answers = report["questions"]["answers"][name]
        assert len(answers) == n
        assert "HTTP 418" in answers[1]["error"]
        assert all(len(answer["passages"]) == 5 for answer in answers)
        assert ("ircot" in row) == name.endswith("+ircot") == (name in report["questions"]["thoughts"])
    assert report["methods"]["hipporag2"]["recognition_memory"]["kept_facts"] == n
    assert report["methods"]["dense"]["recognition_memory"] is None
    usage = report["reader"]["usage"]
    assert usage["usd"] == pytest.approx(usage["requests"] * (100 * 10 + 10 * 100) / 1e6)
    # a rerun pays nothing, and asks again only what had failed
    assert reports[1]["reader"]["usage"]["usd"] == 0
    assert {question_in(messages) for _, messages in server.seen[asked:]} == {failing}
    same = [{**report["questions"]} for report in reports]
    assert same[0] == same[1]
    # what people are shown
    text = markdown(report)
    assert "| method | R@2 | R@5 | R@10 | all@2 | all@5 | EM | F1 |" in text
    assert f"hipporag2: recognition memory kept {n} of {5 * n} facts" in text
    assert f"{n - 1} of {n} questions answered, 1 failed" in text
    assert evaluation_table(report)
    rows = compare(files[0], files[1], "hipporag2:dense+ircot")["rows"]
    assert {"exact_match", "f1", "recall@5"} <= {row["metric"] for row in rows}


def test_a_spend_limit_stops_and_what_was_paid_is_kept(
    server: ReaderServer, sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    price = {"prompt": 10.0, "generated": 100.0}
    settings = server.settings(cache=str(tmp_path), price_usd=price, max_usd=0.08, concurrency=1)
    arguments: Any = (sample_index, sample / "questions.jsonl", ["dense"])
    with pytest.raises(SpendLimitError, match=r"reader\.max_usd"):
        evaluate_queries(*arguments, overrides=settings, qa=True)
    paid = len(server.seen)
    assert paid > 0
    free = server.settings(cache=str(tmp_path))
    assert evaluate_queries(*arguments, overrides=free, qa=True)["reader"]["usage"]["known"] == paid


# --- wrong usage


def test_without_a_reader_the_steps_are_off_and_it_is_said(
    bare: Retriever, queries: list[Query], sample_index: Path, sample: Path
) -> None:
    report = evaluate(bare, queries, ["hipporag2", "hippoindex", "hipporag1"])
    states = {name: row["recognition_memory"] for name, row in report["methods"].items()}
    assert states == {"hipporag2": "off", "hippoindex": "off", "hipporag1": None}
    assert report["reader"] is None
    assert "hipporag2: recognition memory off." in markdown(report)
    found = answer_queries(sample_index, sample / "questions.jsonl", method="hipporag2")
    assert found.summary()["recognition_memory"] == "off"
    assert found.remarks() == ["hipporag2: recognition memory off"]
    for wrong in ({"qa": True}, {"ircot_steps": 2}):
        with pytest.raises(UsageError, match=r"reader\.engine=openai"):
            evaluate(bare, queries, ["dense"], **wrong)  # type: ignore[arg-type]


def test_answers_need_right_ones_to_compare_with(reading: Retriever, queries: list[Query]) -> None:
    without = [Query(query.query_id, query.question, query.gold) for query in queries]
    with pytest.raises(InputError, match="No query has an answer"):
        evaluate(reading, without, ["dense"], qa=True)


def test_a_reader_that_cannot_be_asked_is_refused_at_once(
    server: ReaderServer, sample_index: Path, sample: Path
) -> None:
    with pytest.raises(UsageError, match=r"--set reader\.model=NAME"):
        open_retriever(sample_index, ["reader.engine=openai"])
    with pytest.raises(UsageError, match=r"set reader\.cache"):
        open_retriever(sample_index, server.settings(max_usd=1.0))
    with pytest.raises(UsageError, match=r"set reader\.price_usd"):
        open_retriever(sample_index, server.settings(max_usd=1.0, cache="answers"))
    with pytest.raises(HippoIndexError, match=r"reader\.base_url"):
        ReaderModel(ReaderConfig(engine="openai", model="tiny", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(UsageError, match=r"reader\.recognition=false"):
        answer_queries(
            sample_index,
            sample / "questions.jsonl",
            overrides=server.settings(),
            cluster=ClusterConfig(workers=1),
        )
    assert server.seen == []


@pytest.mark.slow
def test_the_command_line_answers(
    run_cli: Run, server: ReaderServer, sample_index: Path, sample: Path, tmp_path: Path
) -> None:
    config = tmp_path / "reader.yaml"
    config.write_text(f"reader: {{engine: openai, model: tiny, base_url: '{server.base_url}'}}")
    done = run_cli(
        "evaluate", "--index", sample_index, "--queries", sample / "questions.jsonl", "--methods",
        "hipporag2", "--config", config, "--qa", "--ircot-steps", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("EM", "F1", "hipporag2+ircot", "recognition memory kept", "reader tiny:"):
        assert words in done.stdout
    assert set(server.kinds) == {"facts", "thought", "answer"}
