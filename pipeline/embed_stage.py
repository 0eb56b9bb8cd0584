"""The stage that turns texts into vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hippoindex.cluster.storage import Storage
from hippoindex.cluster.task_queue import Resources
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed import embedder_dimension, embedder_fingerprint, open_embedder
from hippoindex.pipeline.llm.accounting import Usage, UsageLog
from hippoindex.pipeline.llm.vllm import gpu_hour_usd, vllm_resources
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
    usage : Storage, optional
        Where workers leave the time of GPUs that they have used.
    """

    config: EmbedConfig
    usage: Storage | None = None

    name: ClassVar[str] = "embed"
    version: ClassVar[int] = 1
    reads: ClassVar[pa.Schema] = TEXT

    @property
    def resources(self) -> Resources:
        """What a worker needs: the GPUs of its engine, where it runs one."""
        return vllm_resources(self.config.vllm) if self.config.engine == "vllm" else Resources()

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
        count_time = self._gpu_meter()

        def process(table: pa.Table) -> StageOutput:
            started_s = time.perf_counter()
            vectors = embedder.encode(table["text"].to_pylist())
            count_time(time.perf_counter() - started_s)
            flat = pa.array(vectors.astype(np.dtype(self.config.dtype), copy=False).reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(flat, embedder.dimension)
            return StageOutput(pa.Table.from_arrays([column], schema=writes), quarantine_table())

        return process

    def _gpu_meter(self) -> Callable[[float], None]:
        """Return what counts the seconds of a worker and leaves their sums, where it has GPUs."""
        gpus = int(self.resources.num_gpus)
        if self.usage is None or not gpus:
            return lambda _: None
        used, log = Usage(), UsageLog(self.usage, self.name)
        hour_usd = gpu_hour_usd(self.config.vllm)

        def count(seconds_s: float) -> None:
            used.count_time(seconds_s, gpus, hour_usd)
            log.write(used)

        return count
