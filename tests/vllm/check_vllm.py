"""Extraction by vLLM on the CPU, in a worker of Ray: run by ``make test-vllm`` in an environment of its own.

The file's name keeps it out of the ordinary test run, whose environment has no vLLM.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import structlog

from hippoindex.cluster.executor import Executor, LocalExecutor
from hippoindex.cluster.ray_executor import RayExecutor
from hippoindex.cluster.storage import open_storage
from hippoindex.cluster.task_queue import Limits
from hippoindex.errors import UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import EmbedConfig, ExtractConfig, VllmConfig
from hippoindex.pipeline.embed import open_embedder
from hippoindex.pipeline.embed_stage import EmbedStage
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.llm.accounting import read_usage, usage_report
from hippoindex.pipeline.llm.vllm import require_vllm
from hippoindex.pipeline.models import fetch_models
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.shards import ShardStore

HERE = Path(__file__).parent

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PASSAGES = 64
SETTINGS: dict[str, Any] = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "max_num_seqs": 32,
    "dtype": "bfloat16",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def model() -> str:
    sys.path.insert(0, str(HERE))
    return str(importlib.import_module("smollm2").folder())


def _passages() -> pa.Table:
    rows = [
        {
            "passage_id": str(i),
            "doc_id": str(i),
            "title": "",
            "text": f"Ann Lee built mill number {i} in Oslo.",
            "span_start": 0,
            "span_end": 36,
        }
        for i in range(PASSAGES)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.PASSAGE)


def _extract(model: str, folder: Path, executor: Executor, **more: Any) -> tuple[pa.Table, dict[str, Any]]:
    config = ExtractConfig(
        engine="vllm",
        model=model,
        max_output_tokens=24,
        max_attempts=2,
        vllm=VllmConfig(**SETTINGS),
        cache=str(folder.parent / "answers"),
        **more,
    )
    store = ShardStore(open_storage(folder), folder, Monitor())
    shards = store.write_slices(_passages(), PASSAGES // 2)
    stage = ExtractStage(config, usage=store.storage)
    with executor:
        outputs = store.run(executor, stage, "passages", shards)
    rows = pa.concat_tables([shard.read() for shard in outputs])
    lost = [row["row_id"] for row in store.all_quarantine().to_pylist() if row["kind"] == "passage"]
    assert sorted([*rows["passage_id"].to_pylist(), *lost], key=int) == [str(i) for i in range(PASSAGES)]
    return rows, usage_report(read_usage(store.storage, "extract").values())


def test_extraction_in_a_worker_of_ray_and_again_for_nothing(model: str, tmp_path: Path) -> None:
    rows, usage = _extract(model, tmp_path / "ray", RayExecutor(1))
    assert rows.num_rows > 0
    assert usage["passages"] == PASSAGES
    assert usage["requests"] >= PASSAGES
    assert usage["cached_share"] > 0.5
    sys.stdout.write(
        f"\n{PASSAGES} passages, {usage['requests']} requests, {usage['prompt_tokens']} prompt tokens "
        f"({usage['cached_share']:.0%} from the cache), {usage['generated_tokens']} generated, "
        f"{usage['seconds_s']:.0f} s, {rows.num_rows} extracted\n"
    )
    again, usage = _extract(model, tmp_path / "again", LocalExecutor(1))
    assert again.equals(rows)
    assert (usage["requests"], usage["known"] > 0) == (0, True)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a cluster of two nodes, which are to have two GPUs and one; vLLM takes CPUs for them."""
    from ray._private.authentication import authentication_token_setup

    plugin = tmp_path / "cpu_as_gpu-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_as_gpu\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu = cpu_as_gpu:register\n")
    monkeypatch.syspath_prepend(str(HERE.parent / "cluster"))
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    authentication_token_setup._enable_token_auth()
    made = importlib.import_module("ray_nodes").Cluster()
    path = f"{HERE}{os.pathsep}{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    try:
        for gpus in (2, 1):
            made.add_node(f"--num-gpus={gpus}", PYTHONPATH=path, VLLM_CPU_OMP_THREADS_BIND="nobind")
        yield made.address
    finally:
        made.remove()


def test_one_engine_on_several_nodes(model: str, tmp_path: Path, two_nodes: str) -> None:
    """Three ranks of tensor parallelism: the model has nine heads."""
    vllm = VllmConfig(**SETTINGS, tensor_parallel=3)
    config = ExtractConfig(
        engine="vllm", model=model, mode="joint", max_output_tokens=16, max_attempts=1, vllm=vllm
    )
    store = ShardStore(open_storage(tmp_path / "work"), tmp_path / "work", Monitor())
    stage = importlib.import_module("spread").SpreadExtractStage(config, usage=store.storage)
    with (
        structlog.testing.capture_logs() as log,
        RayExecutor(address=two_nodes, limits=Limits(1)) as executor,
    ):
        (output,) = store.run(executor, stage, "passages", store.write_slices(_passages().slice(0, 1), 1))
    (gpus,) = [entry["by_node"] for entry in log if entry["event"] == "a worker's GPUs"]
    assert gpus == [2, 1]
    (usage,) = read_usage(store.storage, "extract").values()
    assert usage.passages == 1
    assert output.n_rows == 1
    sys.stdout.write(
        f"\n{usage.passages} passage, {usage.requests} requests, by one engine on {gpus} GPUs of two nodes\n"
    )


def test_embedding_in_a_worker(model: str, tmp_path: Path) -> None:
    config = EmbedConfig(
        engine="vllm", model=model, dimension=576, dtype="float32", vllm=VllmConfig(**SETTINGS)
    )
    store = ShardStore(open_storage(tmp_path), tmp_path, Monitor())
    stage = EmbedStage(config)
    texts = [f"Mill number {i} in Oslo." for i in range(PASSAGES - 1)] + ["Mill number 0 in Oslo."]
    shards = store.write_slices(pa.table({"text": texts}, schema=stage.reads), PASSAGES)
    with LocalExecutor(2) as executor:
        (output,) = store.run(executor, stage, "texts", shards)
    vectors = np.array(output.read()["vector"].to_pylist())
    assert vectors.shape == (PASSAGES, 576)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[-1] > 0.999 > vectors[0] @ vectors[1]


def test_sentence_transformers_agree_with_onnx() -> None:
    (model,) = fetch_models(["all-MiniLM-L6-v2"])
    texts = ["Ann Lee built a mill in Oslo.", "", "Rivers, mills and the people who own them. " * 30]
    other = EmbedConfig(engine="sentence-transformers", model=str(model.path), dimension=384)
    found = open_embedder(other).encode(texts)
    expected = open_embedder(EmbedConfig(precision="fp32")).encode(texts)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    rounded = open_embedder(EmbedConfig(precision="int8")).encode(texts)
    assert (found * rounded).sum(axis=1).min() > 0.97


def test_without_a_gpu_it_fails_at_once() -> None:
    with pytest.raises(UsageError, match="finds no GPU"):
        require_vllm(VllmConfig(), "extract.engine=vllm")
