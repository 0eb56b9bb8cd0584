"""Embedding engines behind the one interface; the endpoint is a server of this test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hippoindex.cluster.storage import open_storage
from hippoindex.errors import HippoIndexError, MissingPackageError, ModelError, UsageError
from hippoindex.pipeline import embed_stage
from hippoindex.pipeline.config import EmbedConfig, VllmConfig
from hippoindex.pipeline.embed import embedder_dimension, embedder_fingerprint, open_embedder
from hippoindex.pipeline.embed.base import unit_vectors
from hippoindex.pipeline.embed_stage import TEXT, EmbedStage
from hippoindex.pipeline.llm.accounting import read_usage

WIDTH = 5


def vector(text: str) -> list[float]:
    """A vector that says what a text begins with and how long it is."""
    return [float(len(text)), float(ord(text[0]) if text else 1), 1.0, 0.0, -2.0]


def well(texts: list[str]) -> Any:
    data = [{"index": i, "embedding": vector(text)} for i, text in enumerate(texts)]
    return {"data": data[::-1]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: Callable[[list[str]], Any] = staticmethod(well)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[list[str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body["input"])
        answer = self.server.answer(body["input"])
        data = json.dumps(answer).encode()
        self.send_response(answer.get("status", 200) if isinstance(answer, dict) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def config(server: _Server, **settings: Any) -> EmbedConfig:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return EmbedConfig(engine="openai", **{"model": "m", "base_url": url, "dimension": WIDTH, **settings})


def test_vectors_come_in_order_and_have_length_one(server: _Server) -> None:
    texts = [chr(97 + i % 26) * (i % 7) for i in range(50)]
    found = open_embedder(config(server, batch_texts=8)).encode(texts)
    expected = np.array([vector(text) for text in texts])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32
    assert max(map(len, server.asked)) == 8
    lengths = [len(text) for batch in sorted(server.asked, key=lambda b: -len(b[0])) for text in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert open_embedder(config(server)).encode([]).shape == (0, WIDTH)


def test_a_model_is_told_what_a_text_is(server: _Server) -> None:
    told = {"query_to_fact": "Find facts: ", "query_to_passage": "Find passages: "}
    embedder = open_embedder(config(server, instructions=told))
    for role in ("document", "query_to_fact", "query_to_passage"):
        embedder.encode(["Who?"], role)
    assert server.asked == [["Who?"], ["Find facts: Who?"], ["Find passages: Who?"]]


def test_the_stage_writes_them(server: _Server) -> None:
    stage = EmbedStage(config(server, dtype="float32"))
    output = stage.open()(pa.table({"text": ["ab", "c"]}, schema=stage.reads))
    assert output.rows.schema == stage.writes
    assert stage.dimension == WIDTH


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda texts: {"data": [{"index": 0, "embedding": [1.0, 2.0]} for _ in texts]}, r"embed\.dimension"),
        (
            lambda texts: {"data": [{"index": i, "embedding": [0.0] * WIDTH} for i in range(len(texts))]},
            "zero",
        ),
        (lambda texts: {"data": well(texts)["data"][:0]}, "shape"),
        (lambda texts: {"data": well(texts)["data"] * 2}, "every vector once"),
        (lambda _texts: {"error": "no"}, "not a list of embeddings"),
        (lambda _texts: {"status": 400}, "refused the request: HTTP 400"),
    ],
)
def test_wrong_vectors_are_refused(server: _Server, answer: Any, message: str) -> None:
    server.answer = answer
    with pytest.raises(HippoIndexError, match=message):
        open_embedder(config(server)).encode(["a"])


def test_the_fingerprint_is_of_what_decides_a_vector(server: _Server) -> None:
    same = [{}, {"base_url": "http://127.0.0.1:1/v1"}, {"batch_texts": 3}, {"dtype": "float32"}]
    assert len({embedder_fingerprint(config(server, **settings)) for settings in same}) == 1
    other = [{}, {"model": "n"}, {"max_tokens": 99}, {"instructions": {"document": "x"}}]
    assert len({embedder_fingerprint(config(server, **settings)) for settings in other}) == 4


@pytest.mark.parametrize("engine", ["openai", "sentence-transformers", "vllm"])
def test_the_width_must_be_known(engine: Any) -> None:
    with pytest.raises(UsageError, match=r"--set embed\.dimension="):
        embedder_dimension(EmbedConfig(engine=engine, model="m"))


@pytest.mark.parametrize(
    ("engine", "package"), [("sentence-transformers", "sentence_transformers"), ("vllm", "vllm")]
)
def test_a_missing_package_is_named(engine: Any, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingPackageError, match=rf"pip install 'hippoindex\[{engine}\]'"):
        open_embedder(EmbedConfig(engine=engine, model="m", dimension=3))


def test_unit_vectors_refuses_what_is_not_finite() -> None:
    with pytest.raises(ModelError, match="text 1 of its batch"):
        unit_vectors(np.array([[1.0, 0.0], [np.nan, 1.0]]), 2, 2, "m")


class _Flat:
    """An encoder to which all texts are the same."""

    dimension = WIDTH

    def encode(self, texts: list[str]) -> np.ndarray:
        return np.full((len(texts), WIDTH), WIDTH**-0.5, dtype=np.float32)


def test_the_time_of_gpus_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is a stand-in: there is no GPU here, and what is counted is the stage's own time."""
    monkeypatch.setattr(embed_stage, "open_embedder", lambda _config: _Flat())
    vllm = VllmConfig(tensor_parallel=2, gpu_hour_usd=3600.0)
    config, storage = (
        EmbedConfig(engine="vllm", model="m", dimension=WIDTH, vllm=vllm),
        open_storage(tmp_path),
    )
    process = EmbedStage(config, usage=storage).open()
    for _ in range(2):
        assert process(pa.table([["a", "b"]], schema=TEXT)).rows.num_rows == 2
    (used,) = read_usage(storage, "embed").values()
    assert used.gpu_s == pytest.approx(2 * used.seconds_s, abs=1e-5)
    assert used.usd == pytest.approx(used.gpu_s, abs=1e-5) != 0  # a dollar a second
