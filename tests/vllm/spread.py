"""A stage whose workers need three GPUs, which may be of several nodes."""

from __future__ import annotations

from dataclasses import dataclass

from hippoindex.cluster.task_queue import Resources
from hippoindex.pipeline.extract.stage import ExtractStage


@dataclass(frozen=True)
class SpreadExtractStage(ExtractStage):
    @property
    def resources(self) -> Resources:
        return Resources(num_gpus=3, one_node=False)
