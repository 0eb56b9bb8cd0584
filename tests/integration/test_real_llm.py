"""Extraction by a real language model over HTTP. It is far too small to be right; the plumbing has to be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.extract.prompts import answer_schema
from hippoindex.pipeline.llm.base import ChatRequest, ChatResponse, PromptTooLongError
from hippoindex.pipeline.llm.endpoint import EndpointSettings
from hippoindex.pipeline.llm.openai import OpenAIEngine
from hippoindex.pipeline.models import fetch_models
from hippoindex.pipeline.verify import verify_index

MODEL = "SmolLM2-135M-Instruct"
HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
CONTEXT_TOKENS = 768

pytestmark = pytest.mark.slow

#: Short, so that little is computed.
PROMPTS = {
    "version": 1,
    "two_turn": {
        "system": "You answer in JSON.",
        "entities": 'List the names in this text as {"entities": [...]}. Text: {passage}',
        "triples": 'List its facts as {"triples": [[subject, predicate, object]]}.',
    },
    "joint": {"system": "You answer in JSON.", "instruction": "List names and facts. Text: {passage}"},
    "examples": [
        {
            "passage": "Ann was born in Oslo.",
            "entities": ["Ann", "Oslo"],
            "triples": [["Ann", "born in", "Oslo"]],
        }
    ],
}


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    (model,) = fetch_models([MODEL])
    (file,) = model.path.glob("*.gguf")
    command = [sys.executable, str(HERE / "llm_server.py"), str(file), str(CONTEXT_TOKENS), "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip() + "/v1"
        server.kill()


def ask(base_url: str, *requests: ChatRequest, **settings: Any) -> list[ChatResponse]:
    async def work() -> list[ChatResponse]:
        engine = OpenAIEngine(
            EndpointSettings("extract", base_url, "NO_KEY", MODEL, concurrency=4), **settings
        )
        async with contextlib.aclosing(engine):
            return await asyncio.gather(*map(engine.complete, requests))

    return asyncio.run(work())


def question(text: str, **settings: Any) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": text}], **{"max_tokens": 24, **settings})


def test_answers_follow_the_schema_and_are_the_same_again(base_url: str) -> None:
    schema = answer_schema("triples")
    asked = question("State a fact about Ann Lee of Oslo.", schema=schema, max_tokens=20)
    first, again = ask(base_url, asked)[0], ask(base_url, asked)[0]
    assert first.text == again.text
    assert first.text.lstrip().startswith("{")
    assert '"triples"' in first.text
    assert again.cached_tokens > 0
    assert 0 < first.generated_tokens <= 20
    assert first.finish_reason in ("stop", "length")


def test_several_requests_at_once_and_a_cut_answer(base_url: str) -> None:
    answers = ask(base_url, *(question(f"Count to one hundred from {i}.", max_tokens=8) for i in range(4)))
    assert ("length", 8) in [(answer.finish_reason, answer.generated_tokens) for answer in answers]
    assert all(answer.text and answer.latency_s > 0 for answer in answers)


def test_a_prompt_that_is_too_long_is_known_as_such(base_url: str) -> None:
    with pytest.raises(PromptTooLongError):
        ask(base_url, question("rye " * 2 * CONTEXT_TOKENS))


def test_an_index_through_the_shipped_configuration_and_again_for_nothing(
    base_url: str, tmp_path: Path
) -> None:
    corpus, prompts, output = tmp_path / "few.jsonl", tmp_path / "prompts.yaml", tmp_path / "index"
    texts = {"lee": "Ann Lee built a mill in Oslo.", "ek": "Bo Ek sold it to Ada Holm."}
    corpus.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in texts.items()))
    prompts.write_text(yaml.safe_dump(PROMPTS))
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--config", str(CONFIGS / "openai.yaml")]
    command += ["--corpus", str(corpus), "--output", str(output), "--max-quarantine-rate", "0.5"]
    settings = {
        "extract.model": MODEL,
        "extract.base_url": base_url,
        "extract.prompts": prompts,
        "extract.max_output_tokens": 16,
        "extract.max_attempts": 1,
        "extract.cache": tmp_path / "answers",
        "cluster.workers": 1,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    command += ["--json", *(f"--set={setting}" for setting in overrides)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)["stats"]["language_model"]
    assert verify_index(output).record()["sound"]
    first = open_index(output).manifest
    assert first.counts.passages + first.counts.quarantined_passages == len(texts)
    assert used["passages"] == 2
    assert used["requests"] == used["attempts"] >= 4
    assert used["cached_tokens"] > 0
    assert used["generated_tokens"] > 0

    config = load_config(
        CONFIGS / "openai.yaml",
        overrides,
        corpus__path=[str(corpus)],
        output=str(output),
        max_quarantine_rate=0.5,
    )
    again = build_index(config, overwrite=True).stats["language_model"]
    assert (again["requests"], again["attempts"], again["known"]) == (0, 0, used["requests"])
    assert open_index(output).manifest.files == first.files
