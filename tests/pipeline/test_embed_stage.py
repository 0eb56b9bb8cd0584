from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed import open_embedder
from hippoindex.pipeline.embed_stage import TEXT, EmbedStage
from hippoindex.pipeline.stage import (
    ShardRunner,
    ShardTask,
    Stage,
    completion_key,
    quarantine_path,
    read_table,
    write_table,
)

pytestmark = pytest.mark.slow  # the real model

TEXTS = ["a lake in the mountains", "", "北京", "the opening of the canal in 1869"]


def shard(folder: Path, texts: list[str]) -> Path:
    path = folder / "texts.arrow"
    write_table(pa.table({"text": texts}, schema=TEXT), path)
    return path


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stage_writes_the_vectors_of_its_texts(tmp_path: Path, dtype: Any) -> None:
    config = EmbedConfig(dtype=dtype)
    stage: Stage = pickle.loads(pickle.dumps(EmbedStage(config)))  # noqa: S301 - as sent to a worker
    task = ShardTask(0, str(shard(tmp_path, TEXTS)), str(tmp_path / "vectors.arrow"))
    ShardRunner(stage)(task)
    table = read_table(Path(task.output))
    assert table.schema == stage.writes
    assert str(table.schema.field("vector").type.value_type) == {"float16": "halffloat"}.get(dtype, "float")
    vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, 384)
    expected = open_embedder(config).encode(TEXTS)
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, expected.astype(dtype))
    assert read_table(quarantine_path(Path(task.output))).num_rows == 0


def test_empty_shard(tmp_path: Path) -> None:
    task = ShardTask(0, str(shard(tmp_path, [])), str(tmp_path / "vectors.arrow"))
    stage = EmbedStage(EmbedConfig())
    ShardRunner(stage)(task)
    assert read_table(Path(task.output)).schema == stage.writes
    assert read_table(Path(task.output)).num_rows == 0


def test_key_follows_what_decides_the_output(tmp_path: Path) -> None:
    path = shard(tmp_path, TEXTS)
    configs = [
        EmbedConfig(),
        EmbedConfig(dtype="float32"),
        EmbedConfig(precision="int8"),
        EmbedConfig(max_tokens=64),
    ]
    stages = [EmbedStage(config) for config in configs]
    keys = [completion_key(stage, path) for stage in stages]
    assert len(set(keys)) == len(keys)
    assert keys == [completion_key(stage, path) for stage in stages]
