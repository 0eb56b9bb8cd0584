"""Embedding by sentence-transformers: any of its models, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import MissingPackageError, ModelError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed.base import ConfiguredEmbedder, Role, tokenizer_offsets, unit_vectors


class SentenceTransformersEmbedder(ConfiguredEmbedder):
    """A model of sentence-transformers; it sorts texts by length itself.

    Raises
    ------
    MissingPackageError
        If sentence-transformers is not installed.
    ModelError
        If the model cannot be loaded.
    """

    def __init__(self, config: EmbedConfig, fingerprint: str, dimension: int) -> None:
        try:
            import sentence_transformers
        except ImportError as error:
            raise MissingPackageError(
                "sentence_transformers",
                "embed.engine=sentence-transformers",
                "pip install 'hippoindex[sentence-transformers]'",
            ) from error
        super().__init__(config, fingerprint, dimension)
        try:
            self._model = sentence_transformers.SentenceTransformer(
                config.model, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot load the embedding model {config.model!r}: {error}") from error
        self._model.max_seq_length = config.max_tokens

    def encode(self, texts: Sequence[str], role: Role = "document") -> NDArray[np.float32]:
        """Embed texts; see :meth:`Embedder.encode`."""
        vectors = self._model.encode(
            self._told(texts, role),
            batch_size=self._config.batch_texts,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        found = np.asarray(vectors, dtype=np.float32).reshape(
            len(texts), -1 if len(texts) else self.dimension
        )
        return unit_vectors(found, len(texts), self.dimension, self._config.model)

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return where the tokens of every text are."""
        return tokenizer_offsets(self._model.tokenizer, texts)
