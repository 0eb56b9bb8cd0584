"""Vectors of phrases, facts, passages and queries."""

from __future__ import annotations

from hippoindex.errors import ModelError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed.base import Embedder
from hippoindex.pipeline.embed.minilm_graph import read_shape
from hippoindex.pipeline.embed.onnx import OnnxEmbedder, onnx_fingerprint
from hippoindex.pipeline.models import model_fingerprint, model_path

__all__ = ["Embedder", "embedder_dimension", "embedder_fingerprint", "open_embedder"]


def open_embedder(config: EmbedConfig, threads: int = 1) -> Embedder:
    """Load the embedding model that a configuration asks for.

    Parameters
    ----------
    config : EmbedConfig
        Engine, model and precision.
    threads : int
        CPU threads of this embedder.

    Returns
    -------
    Embedder

    Raises
    ------
    ModelError
        If the model is not there, or its files are not the expected ones.
    UsageError
        If ``config.max_tokens`` is more than the model can read.
    """
    embedder = OnnxEmbedder(model_path(config.model), config.precision, config.max_tokens, threads)
    if embedder.fingerprint != embedder_fingerprint(config):
        raise ModelError(
            f"The files of the model {config.model!r} in {model_path(config.model)} are not the expected "
            "ones: they were changed after they were fetched. Run: hippoindex models fetch"
        )
    return embedder


def embedder_fingerprint(config: EmbedConfig) -> str:
    """Return the fingerprint of the embedder of a configuration without loading its weights.

    Parameters
    ----------
    config : EmbedConfig
        Engine, model and precision.

    Returns
    -------
    str
        The ``fingerprint`` of what :func:`open_embedder` returns.

    Raises
    ------
    ModelError
        If the model is neither known nor a folder.
    """
    return onnx_fingerprint(model_fingerprint(config.model), config.precision, config.max_tokens)


def embedder_dimension(config: EmbedConfig) -> int:
    """Return the width of the vectors of a configuration without loading weights.

    Parameters
    ----------
    config : EmbedConfig
        Engine, model and precision.

    Returns
    -------
    int
        The ``dimension`` of what :func:`open_embedder` returns.

    Raises
    ------
    ModelError
        If the model is not there.
    """
    return read_shape(model_path(config.model)).hidden
