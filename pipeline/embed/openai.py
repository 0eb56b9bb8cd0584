"""Embedding by any OpenAI-compatible ``/embeddings``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import ModelError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed.base import ConfiguredEmbedder, Role, unit_vectors
from hippoindex.pipeline.llm.base import RequestFailedError, rough_token_spans
from hippoindex.pipeline.llm.endpoint import BadReplyError, Endpoint, EndpointSettings
from hippoindex.pipeline.llm.loop import LoopThread, run_all


class OpenAIEmbedder(ConfiguredEmbedder):
    """Asks an endpoint for vectors, some texts at a time, the longest first.

    Raises
    ------
    UsageError
        If the address or key cannot be used.
    """

    def __init__(self, config: EmbedConfig, fingerprint: str, dimension: int) -> None:
        super().__init__(config, fingerprint, dimension)
        self._endpoint = Endpoint(
            EndpointSettings(
                section="embed",
                base_url=config.base_url,
                api_key_env=config.api_key_env,
                model=config.model,
                concurrency=config.concurrency,
                timeout_s=config.timeout_s,
            )
        )
        self._loop = LoopThread("embedding")

    def encode(self, texts: Sequence[str], role: Role = "document") -> NDArray[np.float32]:
        """Embed texts; see :meth:`Embedder.encode`.

        Raises
        ------
        ModelError
            If the endpoint refuses a batch, or answers with other vectors than ``embed.dimension`` says.
        """
        return self._loop.run(self._encode(self._told(texts, role)))

    def token_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return about where the tokens of every text are: an endpoint does not say."""
        return [rough_token_spans(text) for text in texts]

    async def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        size = self._config.batch_texts
        batches = [order[start : start + size] for start in range(0, len(order), size)]

        async def one(rows: list[int]) -> None:
            vectors[rows] = await self._batch([texts[row] for row in rows])

        await run_all(map(one, batches))
        return vectors

    async def _batch(self, texts: list[str]) -> NDArray[np.float32]:
        body = {"model": self._config.model, "input": texts, "encoding_format": "float"}
        tokens = sum(len(rough_token_spans(text)) for text in texts)
        try:
            reply = await self._endpoint.post("embeddings", body, tokens, lambda text: (_read(text), tokens))
        except RequestFailedError as error:
            raise ModelError(
                f"The endpoint {self._config.base_url} cannot embed a batch of {len(texts)} texts: {error} "
                f"{error.raw[:200]}"
            ) from error
        return unit_vectors(reply.value, len(texts), self.dimension, self._config.model)


def _read(body: str) -> NDArray[np.float32]:
    try:
        items = json.loads(body)["data"]
        rows = sorted(items, key=lambda item: item["index"])
        if [row["index"] for row in rows] != list(range(len(rows))):
            raise BadReplyError("the response does not hold every vector once", body[:500])
        return np.array([row["embedding"] for row in rows], dtype=np.float32)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadReplyError("the response is not a list of embeddings", body[:500]) from None
