"""The interface that every embedding engine implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return L2-normalised vectors, shape ``(len(texts), dimension)``, in the order of the texts."""
        ...

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return the character span of every token of every text, special tokens and truncation left out."""
        ...
