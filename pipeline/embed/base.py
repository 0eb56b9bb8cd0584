"""The interface that every embedding engine implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import ModelError
from hippoindex.pipeline.config import EmbedConfig

#: What a text is to a model that is told: something that is found, or a question for facts or passages.
Role = Literal["document", "query_to_fact", "query_to_passage"]


class Embedder(Protocol):
    """An opened embedding model.

    Attributes
    ----------
    dimension : int
        Width of a vector.
    fingerprint : str
        Hex digest of everything that decides a vector (weights, tokenizer, precision, longest input).
    """

    dimension: int
    fingerprint: str

    def encode(self, texts: Sequence[str], role: Role = "document") -> NDArray[np.float32]:
        """Return L2-normalised vectors, shape ``(len(texts), dimension)``, in the order of the texts."""
        ...

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return the character span of every token of every text, special tokens and truncation left out."""
        ...


class ConfiguredEmbedder:
    """What embedders begin with whose model is told what a text is.

    Parameters
    ----------
    config : EmbedConfig
        ``dimension`` must be set.
    fingerprint : str
    dimension : int
    """

    def __init__(self, config: EmbedConfig, fingerprint: str, dimension: int) -> None:
        self.dimension = dimension
        self.fingerprint = fingerprint
        self._config = config

    def _told(self, texts: Sequence[str], role: Role) -> list[str]:
        """Return texts as the model is given them."""
        instruction = self._config.instructions.of(role)
        return [instruction + text for text in texts]


def tokenizer_offsets(tokenizer: Callable[..., Any], texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return the character spans of texts' tokens by a fast tokenizer of ``transformers``."""
    if not texts:
        return []
    found = tokenizer(list(texts), return_offsets_mapping=True, add_special_tokens=False)
    return [[(start, end) for start, end in spans if start < end] for spans in found["offset_mapping"]]


def unit_vectors(
    vectors: NDArray[np.floating], n_texts: int, dimension: int, model: str
) -> NDArray[np.float32]:
    """Check what a model returned and give every vector length 1.

    Parameters
    ----------
    vectors : numpy.ndarray
        Shape ``(n_texts, dimension)``, or else it is an error.
    n_texts, dimension : int
    model : str
        For messages.

    Returns
    -------
    numpy.ndarray
        float32, shape ``(n_texts, dimension)``.

    Raises
    ------
    ModelError
        If the shape is another, a value is not finite, or a vector is zero.
    """
    if vectors.ndim != 2 or vectors.shape != (n_texts, dimension):
        raise ModelError(
            f"The embedding model {model!r} made vectors of shape {vectors.shape} of {n_texts} texts; "
            f"expected ({n_texts}, {dimension}). Is embed.dimension right?"
        )
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    bad = np.flatnonzero(~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0))
    if len(bad):
        raise ModelError(
            f"The embedding model {model!r} made {len(bad)} vectors that are zero or not finite, the "
            f"first of text {bad[0]} of its batch"
        )
    return (vectors / norms).astype(np.float32)
