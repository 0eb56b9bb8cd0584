"""Models and GPUs that are known by name (``configs/models.yaml``, ``configs/gpus.yaml``)."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Literal

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


class KnownGpu(Section):
    """A kind of GPU."""

    device: str
    """The word of the driver's name for it that tells it from others."""
    memory_gb: int = pydantic.Field(ge=1)
    hour_usd: float = pydantic.Field(ge=0)
    """US dollars for an hour of one."""


class _KnownGpus(Section):
    gpus: dict[Gpu, KnownGpu]


@functools.cache
def known_models() -> KnownModels:
    """Read ``configs/models.yaml``."""
    return KnownModels.model_validate(_read("models.yaml"))


@functools.cache
def known_gpus() -> dict[Gpu, KnownGpu]:
    """Read ``configs/gpus.yaml``."""
    return _KnownGpus.model_validate(_read("gpus.yaml")).gpus


def known_gpu(device_name: str) -> KnownGpu | None:
    """Return the kind of a GPU by the driver's name for it, such as ``NVIDIA H100 80GB HBM3``."""
    words = device_name.split()
    return next((gpu for gpu in known_gpus().values() if gpu.device in words), None)


def _read(name: str) -> Any:
    text = (resources.files("hippoindex") / "configs" / name).read_text(encoding="utf-8")
    return yaml.safe_load(text)


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
