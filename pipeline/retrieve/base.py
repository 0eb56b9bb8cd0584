"""What every retrieval method takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import UsageError
from hippoindex.kernels.ppr.top import largest_of_rows
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Questions with what the methods need of them.

    Attributes
    ----------
    questions : sequence of str, length Q
    vectors : ndarray of float32, shape (Q, d)
        L2-normalised embeddings of the questions.
    entities : sequence of sequence of str
        Normalised phrases of each question's entities.
    entity_vectors : sequence of ndarray of float32, shape (entities of the question, d)
    """

    questions: Sequence[str]
    vectors: NDArray[np.float32]
    entities: Sequence[Sequence[str]]
    entity_vectors: Sequence[NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.questions)


@dataclass(frozen=True, eq=False)
class Ranking:
    """The best passages of each question.

    Attributes
    ----------
    rows : ndarray of int64, shape (Q, k)
        Passage rows, best first; equal scores in row order.
    scores : ndarray of float64, shape (Q, k)
    solver : str
        How PPR was solved; empty where there was none.
    certified_k : ndarray of int64, shape (Q,), or None
        The first so many passages of each question are proven to be the best, as a set, up to rounding;
        ``None`` where the solver proves nothing.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    solver: str = ""
    certified_k: NDArray[np.int64] | None = None

    @property
    def certified_share(self) -> float | None:
        """Share of questions all of whose passages are proven to be the best."""
        if self.certified_k is None or not len(self.rows):
            return None
        return float(np.mean(self.certified_k >= self.rows.shape[1]))


@dataclass(frozen=True, eq=False)
class Seeds:
    """Phrase nodes from which the walk of one question starts.

    Attributes
    ----------
    rows : ndarray of int64, shape (S,)
    weights : ndarray of float64, shape (S,)
        Positive, not scaled.
    origins : sequence of str, length S
        The entity or fact that led to each phrase.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    origins: Sequence[str]


Method = Callable[[Index, QueryBatch, RetrieveConfig], Ranking]


def top_k(scores: NDArray[np.floating], k: int) -> Ranking:
    """Return the k highest scores of each row; equal scores in column order.

    Parameters
    ----------
    scores : ndarray, shape (Q, passages)
    k : int

    Returns
    -------
    Ranking
        With ``min(k, passages)`` columns.
    """
    order = largest_of_rows(np.ascontiguousarray(scores), k)
    return Ranking(order, np.take_along_axis(scores, order, axis=1).astype(np.float64))


def min_max(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scale the last axis to 0..1; an axis without any spread becomes ones, as in HippoRAG's code."""
    low, high = scores.min(axis=-1, keepdims=True), scores.max(axis=-1, keepdims=True)
    spread = high - low
    return np.where(spread > 0, (scores - low) / np.where(spread > 0, spread, 1), 1.0)


def find_method(methods: dict[str, Method], name: str) -> Method:
    """Return a method by name.

    Raises
    ------
    UsageError
        Naming the methods there are.
    """
    if name not in methods:
        raise UsageError(f"There is no method {name!r}; there are {', '.join(methods)}")
    return methods[name]
