"""Embedding by vLLM's pooling models, for encoders that are as large as language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import ModelError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed.base import ConfiguredEmbedder, Role, tokenizer_offsets, unit_vectors
from hippoindex.pipeline.llm.vllm import engine_arguments, has_died, require_vllm


class VllmEmbedder(ConfiguredEmbedder):
    """A pooling model in this process.

    Raises
    ------
    MissingPackageError
        If vLLM is not installed.
    UsageError
        If there are too few GPUs.
    ModelError
        If the model cannot be loaded.
    """

    def __init__(self, config: EmbedConfig, fingerprint: str, dimension: int) -> None:
        require_vllm(config.vllm, "embed.engine=vllm")
        import vllm

        super().__init__(config, fingerprint, dimension)
        arguments = engine_arguments(config.model, config.vllm) | {
            "runner": "pooling",
            "convert": "embed",
            "max_model_len": config.max_tokens,
            "trust_remote_code": config.trust_remote_code,
        }
        try:
            self._model: Any = vllm.LLM(**arguments)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"vLLM cannot load the embedding model {config.model!r}: {error}") from error

    def encode(self, texts: Sequence[str], role: Role = "document") -> NDArray[np.float32]:
        """Embed texts, cut to ``max_tokens``; see :meth:`Embedder.encode`.

        Raises
        ------
        WorkerLostError
            If vLLM has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = self._model.embed(
                self._told(texts, role),
                use_tqdm=False,
                tokenization_kwargs={"truncation": True, "max_length": self._config.max_tokens},
            )
        except EngineDeadError as error:
            raise has_died(error) from error
        found = np.array([output.outputs.embedding for output in outputs], dtype=np.float32)
        found = found.reshape(len(texts), -1 if len(texts) else self.dimension)
        return unit_vectors(found, len(texts), self.dimension, self._config.model)

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return where the tokens of every text are."""
        return tokenizer_offsets(self._model.get_tokenizer(), texts)
