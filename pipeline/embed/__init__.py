"""Vectors of phrases, facts, passages and queries."""

from __future__ import annotations

import hashlib
import json

from hippoindex.errors import ModelError, UsageError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed.base import Embedder
from hippoindex.pipeline.embed.minilm_graph import read_shape
from hippoindex.pipeline.embed.onnx import OnnxEmbedder, onnx_fingerprint
from hippoindex.pipeline.llm.known import with_known
from hippoindex.pipeline.llm.vllm import vllm_fingerprint
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
    if config.engine != "onnx":
        return _open_other(with_known(config))
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
    if config.engine != "onnx":
        return _other_fingerprint(with_known(config))
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
    if config.engine == "onnx":
        return read_shape(model_path(config.model)).hidden
    dimension = with_known(config).dimension
    if dimension is None:
        raise UsageError(
            f"embed.engine={config.engine} needs the width of the model's vectors: --set embed.dimension=N"
        )
    return dimension


def _open_other(config: EmbedConfig) -> Embedder:
    dimension, fingerprint = embedder_dimension(config), _other_fingerprint(config)
    if config.engine == "openai":
        from hippoindex.pipeline.embed.openai import OpenAIEmbedder

        return OpenAIEmbedder(config, fingerprint, dimension)
    if config.engine == "vllm":
        from hippoindex.pipeline.embed.vllm import VllmEmbedder

        return VllmEmbedder(config, fingerprint, dimension)
    from hippoindex.pipeline.embed.sentence_transformers import SentenceTransformersEmbedder

    return SentenceTransformersEmbedder(config, fingerprint, dimension)


def _other_fingerprint(config: EmbedConfig) -> str:
    """Digest of the engine, the model, its longest input and its instructions."""
    model = config.model if config.engine == "openai" else vllm_fingerprint(config.model)
    parts = [config.engine, model, config.dimension, config.max_tokens, config.instructions.model_dump()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
