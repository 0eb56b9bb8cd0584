"""Models that are known by name (``configs/models.yaml``)."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

import pydantic
import yaml

from hippoindex.pipeline.config import EmbedConfig, EmbedInstructions, Section

Gpu = Literal["A6000-48GB", "H100-80GB", "H200-141GB"]


class KnownModel(Section):
    """What every model needs."""

    parameters_billion: float = pydantic.Field(gt=0)
    gpus: dict[Gpu, int] = pydantic.Field(default_factory=dict)
    """How many of a kind hold the weights and a useful cache."""

    @property
    def weights_bytes(self) -> int:
        """Size of the weights at two bytes each."""
        return int(self.parameters_billion * 2e9)


class KnownLlm(KnownModel):
    """A language model."""

    context_tokens: int = pydantic.Field(ge=1)
    dtype: Literal["bfloat16", "float16"]


class KnownEncoder(KnownModel):
    """An embedding model."""

    dimension: int = pydantic.Field(ge=1)
    max_tokens: int = pydantic.Field(ge=1)
    needs_remote_code: bool = False
    instructions: EmbedInstructions = EmbedInstructions()


class KnownModels(Section):
    """All of them, by name."""

    llms: dict[str, KnownLlm]
    encoders: dict[str, KnownEncoder]


@functools.cache
def known_models() -> KnownModels:
    """Read ``configs/models.yaml``."""
    text = (resources.files("hippoindex") / "configs" / "models.yaml").read_text(encoding="utf-8")
    return KnownModels.model_validate(yaml.safe_load(text))


def with_known(config: EmbedConfig) -> EmbedConfig:
    """Return a configuration whose width and instructions, where not given, are those known of its model."""
    encoder = known_models().encoders.get(config.model)
    if encoder is None or config.engine == "onnx":
        return config
    filled = {}
    if config.dimension is None:
        filled["dimension"] = encoder.dimension
    if config.instructions == EmbedInstructions():
        filled["instructions"] = encoder.instructions  # type: ignore[assignment]
    return config.model_copy(update=filled)
