"""The stage that turns texts into vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hippoindex.cluster.task_queue import Resources
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed import embedder_dimension, embedder_fingerprint, open_embedder
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table

#: What the stage reads: one column of texts.
TEXT = pa.schema([pa.field("text", pa.string(), nullable=False)])


@dataclass(frozen=True)
class EmbedStage:
    """Embed texts, whatever they are texts of. Rows keep their order; none is ever quarantined.

    Attributes
    ----------
    config : EmbedConfig
        Model, precision and type of the stored vectors.
    """

    config: EmbedConfig

    name: ClassVar[str] = "embed"
    version: ClassVar[int] = 1
    reads: ClassVar[pa.Schema] = TEXT

    @property
    def resources(self) -> Resources:
        """What a worker needs: the GPUs of its engine, where it runs one."""
        return Resources(num_gpus=self.config.vllm.gpus if self.config.engine == "vllm" else 0)

    @property
    def dimension(self) -> int:
        """Width of a vector."""
        return embedder_dimension(self.config)

    @property
    def writes(self) -> pa.Schema:
        """One column ``vector``: a list of ``dimension`` numbers of ``config.dtype``, L2-normalised."""
        numbers = pa.float16() if self.config.dtype == "float16" else pa.float32()
        vector = pa.list_(numbers, self.dimension)
        return pa.schema([pa.field("vector", vector, nullable=False)])

    def key_part(self) -> Mapping[str, Any]:
        """Fingerprint of the embedder, and the type of the stored vectors."""
        return {"embedder": embedder_fingerprint(self.config), "dtype": self.config.dtype}

    def open(self) -> Process:
        """Load the model."""
        embedder = open_embedder(self.config)
        writes = self.writes

        def process(table: pa.Table) -> StageOutput:
            vectors = embedder.encode(table["text"].to_pylist())
            flat = pa.array(vectors.astype(np.dtype(self.config.dtype), copy=False).reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(flat, embedder.dimension)
            return StageOutput(pa.Table.from_arrays([column], schema=writes), quarantine_table())

        return process
