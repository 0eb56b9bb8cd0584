"""The two baselines: BM25 over words, and cosine of passage embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, joined, top_k

BLOCK_QUERIES = 256


def bm25(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank by BM25 (Lucene's variant, k1 1.5, b 0.75, English stop words) over title and text."""
    titles, texts = (index.passages[name].to_pylist() for name in ("title", "text"))
    documents = [f"{title}\n{text}" for title, text in zip(titles, texts, strict=True)]
    tokens = _words(documents)
    retriever = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    if any(tokens):
        retriever.index(tokens, show_progress=False)
    vocabulary = retriever.vocab_dict if any(tokens) else {}
    parts = []
    for start in range(0, len(queries), BLOCK_QUERIES):
        asked = _words(queries.questions[start : start + BLOCK_QUERIES])
        scores = np.zeros((len(asked), len(documents)), dtype=np.float32)
        for row, question in enumerate(asked):
            known = [word for word in question if word in vocabulary]
            if known:
                scores[row] = retriever.get_scores(known)
        parts.append(top_k(scores, config.top_k, config.ties))
    return joined(parts)


def _words(texts: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )
    return found


def dense(index: Index, queries: QueryBatch, config: RetrieveConfig) -> Ranking:
    """Rank by the cosine of question and passage embeddings."""
    parts = [
        top_k(dense_scores(index, queries.vectors[start : start + BLOCK_QUERIES]), config.top_k, config.ties)
        for start in range(0, len(queries), BLOCK_QUERIES)
    ]
    return joined(parts)


def dense_scores(index: Index, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return cosines of questions and all passages, shape (Q, passages)."""
    return vectors @ index.float_vectors("passages").T
