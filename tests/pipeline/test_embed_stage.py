from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hippoindex.cluster.executor import LocalExecutor
from hippoindex.cluster.storage import open_storage
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed import open_embedder
from hippoindex.pipeline.embed_stage import TEXT, EmbedStage
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.shards import ShardStore
from hippoindex.pipeline.stage import Stage, completion_key

pytestmark = pytest.mark.slow  # the real model

TEXTS = ["a lake in the mountains", "", "北京", "the opening of the canal in 1869"]


def run(folder: Path, stage: Stage, texts: list[str]) -> tuple[pa.Table, pa.Table]:
    """Return the rows and the quarantine of one shard."""
    store = ShardStore(open_storage(folder), folder, Monitor())
    shard = store.write(pa.table({"text": texts}, schema=TEXT))
    (output,) = store.run(LocalExecutor(1), stage, "texts", [shard])
    return output.read(), store.all_quarantine()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stage_writes_the_vectors_of_its_texts(tmp_path: Path, dtype: Any) -> None:
    config = EmbedConfig(dtype=dtype)
    stage: Stage = pickle.loads(pickle.dumps(EmbedStage(config)))  # noqa: S301 - as sent to a worker
    table, quarantine = run(tmp_path, stage, TEXTS)
    assert table.schema == stage.writes
    assert str(table.schema.field("vector").type.value_type) == {"float16": "halffloat"}.get(dtype, "float")
    vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, 384)
    expected = open_embedder(config).encode(TEXTS)
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, expected.astype(dtype))
    assert quarantine.num_rows == 0


def test_empty_shard(tmp_path: Path) -> None:
    stage = EmbedStage(EmbedConfig())
    table, _ = run(tmp_path, stage, [])
    assert (table.schema, table.num_rows) == (stage.writes, 0)


def test_key_follows_what_decides_the_output() -> None:
    content = "5" * 64
    configs = [
        EmbedConfig(),
        EmbedConfig(dtype="float32"),
        EmbedConfig(precision="fp32"),
        EmbedConfig(max_tokens=64),
    ]
    stages = [EmbedStage(config) for config in configs]
    keys = [completion_key(stage, content) for stage in stages]
    assert len(set(keys)) == len(keys)
    assert keys == [completion_key(stage, content) for stage in stages]
