"""IRCoT: retrieval that is interleaved with a chain of thought (Trivedi et al., ACL 2023), over any method.

A step retrieves for every open question at once. Between two steps a language model writes one sentence
for each, out of the question, its best passages so far and its earlier sentences; the next step retrieves
with that sentence. A question is closed when the sentence says "So the answer is", when there is none, or
after the last step.

The scores of a step are scaled to 0..1 over the passages that it retrieves, since a cosine and a probability
do not compare; a passage keeps the best score of all steps. Of equal ones the earlier step comes first. A
step whose scores are all equal has told no passage from another: they count 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hippoindex.errors import UsageError
from hippoindex.pipeline.chunk import sentence_spans
from hippoindex.pipeline.extract.answers import without_thoughts
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.answers import passage_texts
from hippoindex.pipeline.reader.model import Asking, Failure, ReaderModel
from hippoindex.pipeline.reader.prompts import END_OF_THOUGHT
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, min_max
from hippoindex.pipeline.retrieve.engine import Retriever

POOL = 100
"""Passages that a step retrieves for a question, at least."""


@dataclass
class Chain:
    """One question on its way.

    Attributes
    ----------
    question : str
    scores : dict of int to float
        Passage row to its best scaled score so far, in the order in which they were found.
    thoughts : list of str
    error : str or None
        Why a thought failed: what was retrieved until then is kept.
    is_open : bool
    """

    question: str
    scores: dict[int, float] = field(default_factory=dict)
    thoughts: list[str] = field(default_factory=list)
    error: str | None = None
    is_open: bool = True

    def add(self, rows: Sequence[int], scores: Sequence[float]) -> None:
        """Take what a step has retrieved."""
        for row, score in zip(rows, scores, strict=True):
            self.scores[row] = max(score, self.scores.get(row, score))

    def best(self, k: int) -> list[int]:
        """Return the rows of the k best passages so far."""
        return sorted(self.scores, key=lambda row: -self.scores[row])[:k]

    def think(self, thought: str | Failure) -> None:
        """Take the next sentence, or why there is none."""
        if isinstance(thought, Failure):
            self.error, self.is_open = thought.reason, False
            return
        self.thoughts.append(thought)
        self.is_open = END_OF_THOUGHT.lower() not in thought.lower()


@dataclass(frozen=True, eq=False)
class Interleaved:
    """What came of the questions.

    Attributes
    ----------
    ranking : Ranking
        ``fell_back`` is of the first step, ``recognition`` of all.
    chains : list of Chain
    steps : int
        Most retrievals of a question.
    """

    ranking: Ranking
    chains: list[Chain]
    steps: int

    def summary(self) -> dict[str, int]:
        """Return how many sentences there are, how many questions ended by one, and how many failed."""
        ended = sum(not chain.is_open and chain.error is None for chain in self.chains)
        return {
            "steps": self.steps,
            "thoughts": sum(len(chain.thoughts) for chain in self.chains),
            "ended_by_an_answer": ended,
            "failed": sum(chain.error is not None for chain in self.chains),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return the chain of thought of each question, JSON-ready."""
        return [
            {"thoughts": chain.thoughts} | ({} if chain.error is None else {"error": chain.error})
            for chain in self.chains
        ]


def interleave(
    retriever: Retriever,
    model: ReaderModel,
    batch: QueryBatch,
    method: str,
    *,
    steps: int,
    top_k: int | None = None,
) -> Interleaved:
    """Retrieve and think by turns.

    Parameters
    ----------
    retriever : Retriever
    model : ReaderModel
    batch : QueryBatch
        From ``retriever.encode``.
    method : str
    steps : int
        Most retrievals of a question: the authors of HippoRAG take 2 for HotpotQA and 2WikiMultiHopQA, and 4
        for MuSiQue.
    top_k : int, optional
        By default ``retriever.config.top_k``.

    Raises
    ------
    UsageError
        If there is no such method, or fewer than one step.
    """
    if steps < 1:
        raise UsageError(f"IRCoT takes at least one step, not {steps}")
    top_k = top_k or retriever.config.top_k
    chains = [Chain(question) for question in batch.questions]
    rankings = [_step(retriever, batch, chains, method, top_k)]
    for _ in range(steps - 1):
        asked = [chain for chain in chains if chain.is_open]
        thoughts = model.ask_all([_asking(model, retriever, chain) for chain in asked])
        for chain, thought in zip(asked, thoughts, strict=True):
            chain.think(thought)
        still_open = [chain for chain in asked if chain.is_open]
        if not still_open:
            break
        queries = [Query(str(n), chain.thoughts[-1]) for n, chain in enumerate(still_open)]
        rankings.append(_step(retriever, retriever.encode(queries), still_open, method, top_k))
    return Interleaved(_joined(rankings, chains, top_k), chains, steps)


def _step(
    retriever: Retriever, batch: QueryBatch, chains: Sequence[Chain], method: str, top_k: int
) -> Ranking:
    """Retrieve for questions that are open."""
    ranking = retriever.rank(batch, method, top_k=max(top_k, POOL))
    low, high = ranking.scores.min(axis=1, keepdims=True), ranking.scores.max(axis=1, keepdims=True)
    scaled = np.where(high > low, min_max(ranking.scores), 0.0)
    for chain, rows, scores in zip(chains, ranking.rows.tolist(), scaled.tolist(), strict=True):
        chain.add(rows, scores)
    return ranking


def _joined(rankings: Sequence[Ranking], chains: Sequence[Chain], top_k: int) -> Ranking:
    best = [chain.best(top_k) for chain in chains]
    scores = [[chain.scores[row] for row in rows] for chain, rows in zip(chains, best, strict=True)]
    counts: Counter[str] = Counter()
    for ranking in rankings:
        counts.update(ranking.recognition if isinstance(ranking.recognition, dict) else {})
    shape = (len(chains), min(top_k, rankings[0].rows.shape[1]))
    return replace(
        rankings[0],
        rows=np.array(best, dtype=np.int64).reshape(shape),
        scores=np.array(scores, dtype=np.float64).reshape(shape),
        certified_k=None,
        recognition=dict(counts) if counts else rankings[0].recognition,
    )


def _asking(model: ReaderModel, retriever: Retriever, chain: Chain) -> Asking[str]:
    rows = chain.best(model.config.passages)
    thoughts = tuple(chain.thoughts)

    def conversation(passages: int) -> list[dict[str, str]]:
        texts = passage_texts(retriever.index, rows[:passages])
        return model.prompts.thought.ask(texts, chain.question, thoughts)

    return Asking(conversation, lambda text, _: first_sentence(text), passages=len(rows))


def first_sentence(text: str) -> str | None:
    """Return the first sentence of a language model's answer, ``None`` if there is none.

    It ends with its line at the latest; one with "So the answer is" ends there, as answers have full stops.
    """
    text = without_thoughts(text).strip()
    spans = sentence_spans(text)
    if not spans:
        return None
    start, end = spans[0]
    line = text[start:].splitlines()[0].strip()
    sentence = text[start:end].splitlines()[0].strip()
    return line if END_OF_THOUGHT.lower() in sentence.lower() else sentence
