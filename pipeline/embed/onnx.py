"""Embedding on the CPU with onnxruntime.

Texts are grouped by their exact number of tokens and each group runs in batches of bounded size. Nothing is
padded, so no work is wasted, and a text's vector does not depend on the texts around it, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from hippoindex.errors import InputError, ModelError, UsageError
from hippoindex.pipeline.embed.base import Role
from hippoindex.pipeline.embed.minilm_graph import (
    GRAPH_VERSION,
    INPUT_NAME,
    OUTPUT_NAME,
    Precision,
    build_graph,
    read_shape,
    read_weights,
)
from hippoindex.pipeline.models import model_fingerprint

_BATCH_TOKENS = 2048  # intermediate values of a batch then stay in the CPU's caches


class OnnxEmbedder:
    """A sentence-transformers model of the BERT family: mean of the last hidden states, L2-normalised.

    Parameters
    ----------
    path : Path
        Folder with ``config.json``, ``tokenizer.json`` and ``model.safetensors``.
    precision : {"fp32", "int8"}
        Arithmetic of the linear layers. int8 is about twice as fast; the cosine of its vectors to those of
        fp32 is 0.996 on average and 0.978 at the least (all-MiniLM-L6-v2, phrases and passages of MuSiQue).
    max_tokens : int
        Longer texts are cut to this many tokens, the two special ones included.
    threads : int
        Threads of onnxruntime. Vectors are bit-reproducible with any number on the same kind of CPU.

    Attributes
    ----------
    dimension : int
        Width of a vector.
    fingerprint : str
        See :func:`onnx_fingerprint`.

    Raises
    ------
    ModelError
        If the folder does not hold a complete model of this architecture.
    UsageError
        If ``max_tokens`` is more than the model has positions for.
    """

    def __init__(
        self, path: Path, precision: Precision = "fp32", max_tokens: int = 256, threads: int = 1
    ) -> None:
        # One worker runs per core: the tokenizer must not start threads of its own (nor warn after a fork).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        shape = read_shape(path)
        if not 2 < max_tokens <= shape.max_tokens:
            raise UsageError(f"embed.max_tokens is {max_tokens}; {path} allows 3 to {shape.max_tokens}")
        self.dimension = shape.hidden
        self.fingerprint = onnx_fingerprint(model_fingerprint(str(path)), precision, max_tokens)
        self._plain_tokenizer = _load_tokenizer(path)
        self._tokenizer = _load_tokenizer(path)
        self._tokenizer.enable_truncation(max_tokens)
        graph, initialisers = build_graph(shape, read_weights(path), precision)
        # onnxruntime reads these in place: they must live as long as the session.
        self._initialisers = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in initialisers.items()
        }
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_external_initializers(list(self._initialisers), list(self._initialisers.values()))
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def encode(self, texts: Sequence[str], role: Role = "document") -> NDArray[np.float32]:  # noqa: ARG002
        """Embed texts.

        Parameters
        ----------
        texts : sequence of str
            Any texts; an empty one gets the vector of the special tokens alone.
        role : str
            These models are not told what a text is: it changes nothing.

        Returns
        -------
        numpy.ndarray
            L2-normalised vectors, float32, shape ``(len(texts), dimension)``, in the order of the texts.

        Raises
        ------
        InputError
            If a text is not valid Unicode (a lone surrogate).
        """
        ids = [encoding.ids for encoding in self._encodings(self._tokenizer, texts, add_special_tokens=True)]
        vectors = np.empty((len(ids), self.dimension), dtype=np.float32)
        for rows in _batches(np.array([len(i) for i in ids], dtype=np.int64)):
            vectors[rows] = self._embed(np.array([ids[row] for row in rows], dtype=np.int64))
        return vectors

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return where the tokens of every text are.

        Parameters
        ----------
        texts : sequence of str
            Any texts.

        Returns
        -------
        list of list of (int, int)
            For every text the character span ``[start, end)`` of each token. Special tokens are left out and
            nothing is truncated.

        Raises
        ------
        InputError
            If a text is not valid Unicode (a lone surrogate).
        """
        encodings = self._encodings(self._plain_tokenizer, texts, add_special_tokens=False)
        return [encoding.offsets for encoding in encodings]

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        hidden = self._session.run([OUTPUT_NAME], {INPUT_NAME: ids})[0]  # (B, T, H)
        pooled = hidden.mean(axis=1)  # (B, H)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    @staticmethod
    def _encodings(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list:
        try:
            return tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise _invalid_text(texts) from error


def onnx_fingerprint(model: str, precision: Precision, max_tokens: int) -> str:
    """Return a digest of all that decides a vector of :class:`OnnxEmbedder`.

    Parameters
    ----------
    model : str
        Fingerprint of the model's files.
    precision : {"fp32", "int8"}
        Arithmetic.
    max_tokens : int
        Longest input.

    Returns
    -------
    str
        SHA-256 in hex.
    """
    parts = ["onnx", GRAPH_VERSION, model, precision, max_tokens]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for any malformed file
        raise ModelError(f"Cannot read {file}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _batches(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield row numbers of texts of equal length, at most :data:`_BATCH_TOKENS` tokens at a time."""
    order = np.argsort(lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if len(group):
            texts = max(1, _BATCH_TOKENS // int(lengths[group[0]]))
            yield from (group[start : start + texts] for start in range(0, len(group), texts))


def _invalid_text(texts: Sequence[str]) -> InputError:
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return InputError(
                f"Text {number} of the batch cannot be embedded, it is not valid Unicode: {error}"
            )
        except AttributeError:
            return InputError(f"Text {number} of the batch is a {type(text).__name__}, not a string")
    return InputError("The tokenizer refused a batch of texts")
