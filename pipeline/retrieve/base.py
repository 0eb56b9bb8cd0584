"""What every retrieval method takes and returns."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import UsageError
from hippoindex.kernels.ppr.top import largest_of_rows
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig

PARTS = ("entities", "embedding", "seeds", "ranking")
"""What retrieval is made of; the seeds are a part of the ranking."""


class Clock:
    """Adds up how long the parts of retrieval take, by their names in :data:`PARTS`.

    Attributes
    ----------
    seconds_s : dict of str to float
    """

    def __init__(self) -> None:
        self.seconds_s: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block of code as a part, in addition to what the part has taken so far."""
        started = time.perf_counter()
        yield
        self.seconds_s[name] = self.seconds_s.get(name, 0.0) + time.perf_counter() - started


class Fact(NamedTuple):
    """A fact of the index, in words."""

    subject: str
    predicate: str
    object: str


FactFilter = Callable[[Sequence[str], Sequence[Sequence[Fact]]], Sequence[Sequence[int]]]
"""Recognition memory (HippoRAG 2, section 3.3): for each of many questions, which of its facts to keep.

It is given the questions, and for each its facts, nearest first; it returns the positions of those it keeps.
"""


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Questions with what the methods need of them.

    Attributes
    ----------
    questions : sequence of str, length Q
    vectors : ndarray of float32, shape (Q, d)
        L2-normalised embeddings of the questions, to find passages.
    entities : sequence of sequence of str
        Normalised phrases of each question's entities.
    entity_vectors : sequence of ndarray of float32, shape (entities of the question, d)
    entity_rows : sequence of ndarray of int64, shape (entities of the question,)
        Rows of the phrases that the entities are, -1 where the index has none of that name.
    fact_vectors : ndarray of float32, shape (Q, d), or None
        Embeddings to find facts and phrases; ``None`` where they are ``vectors``.
    fact_filter : FactFilter or None
    clock : Clock
    recognised : Counter
        What recognition memory has been given and has kept: "questions", "facts", "kept_facts", and
        "questions_without_facts", those of which it kept none.
    """

    questions: Sequence[str]
    vectors: NDArray[np.float32]
    entities: Sequence[Sequence[str]]
    entity_vectors: Sequence[NDArray[np.float32]]
    entity_rows: Sequence[NDArray[np.int64]]
    fact_vectors: NDArray[np.float32] | None = None
    fact_filter: FactFilter | None = None
    clock: Clock = field(default_factory=Clock)
    recognised: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def linking_vectors(self) -> NDArray[np.float32]:
        """What facts and phrases are compared with, shape (Q, d)."""
        return self.vectors if self.fact_vectors is None else self.fact_vectors

    def take(self, numbers: NDArray[np.int64]) -> QueryBatch:
        """Return some of the questions."""
        return replace(
            self,
            questions=[self.questions[n] for n in numbers],
            vectors=self.vectors[numbers],
            entities=[self.entities[n] for n in numbers],
            entity_vectors=[self.entity_vectors[n] for n in numbers],
            entity_rows=[self.entity_rows[n] for n in numbers],
            fact_vectors=None if self.fact_vectors is None else self.fact_vectors[numbers],
        )


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
    fell_back : ndarray of bool, shape (Q,), or None
        Questions that no phrase could be found for, ranked by the cosine of their passages; ``None`` where
        the method does not look for phrases.
    notes : str
        What a reader of the figures must know.
    recognition : mapping, "off" or None
        What recognition memory was given and kept (see :class:`QueryBatch`), that the method would use it and
        there is none, or that the method does not look for facts.
    parts_s : ndarray of float64, shape (shards, len(PARTS)), or None
        Seconds of each part in each shard of the questions; ``None`` where they were not ranked in shards.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    solver: str = ""
    certified_k: NDArray[np.int64] | None = None
    fell_back: NDArray[np.bool_] | None = None
    notes: str = ""
    recognition: Mapping[str, int] | Literal["off"] | None = None
    parts_s: NDArray[np.float64] | None = None

    @property
    def fallbacks(self) -> int | None:
        """Number of questions that fell back; ``None`` where the method does not look for phrases."""
        return None if self.fell_back is None else int(self.fell_back.sum())

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
    origins : sequence of int or str, length S
        What led to each phrase: the row of a fact, an entity, or "" for the question as a whole.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    origins: Sequence[int | str]


Method = Callable[[Index, QueryBatch, RetrieveConfig], Ranking]


def top_k(scores: NDArray[np.floating], k: int, ties: Literal["first", "last"] = "first") -> Ranking:
    """Return the k highest scores of each row.

    Parameters
    ----------
    scores : ndarray, shape (Q, passages)
    k : int
    ties : {"first", "last"}
        Which of equal scores comes first, by column.

    Returns
    -------
    Ranking
        With ``min(k, passages)`` columns.
    """
    ordered = scores if ties == "first" else scores[:, ::-1]
    order = largest_of_rows(np.ascontiguousarray(ordered), k)
    if ties == "last":
        order = scores.shape[1] - 1 - order
    return Ranking(order, np.take_along_axis(scores, order, axis=1).astype(np.float64))


def joined(rankings: Sequence[Ranking], **values: object) -> Ranking:
    """Return rankings of consecutive questions as one, with other values of its remaining attributes."""
    rows, scores = (np.concatenate([getattr(r, name) for r in rankings]) for name in ("rows", "scores"))
    return replace(Ranking(rows, scores), **values)  # type: ignore[arg-type]


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
