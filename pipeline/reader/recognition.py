"""Recognition memory (HippoRAG 2): a language model chooses among the facts nearest to a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hippoindex.pipeline.extract.answers import Answer, read_answer, salvage_answer
from hippoindex.pipeline.normalise import unicode_phrase
from hippoindex.pipeline.reader.model import Asking, Failure, ReaderModel
from hippoindex.pipeline.reader.prompts import FACTS_SCHEMA
from hippoindex.pipeline.retrieve.base import Fact

_FACT_PARTS = 3


@dataclass(frozen=True)
class _Decision:
    """Positions that are kept, how many facts of the answer are none of the given, and why there is none."""

    kept: list[int]
    unknown: int = 0
    error: str | None = None


class FactRecogniser:
    """A :data:`FactFilter` that asks a language model.

    A kept fact must be one of those given: the same, or else the same when normalised. What is neither is
    dropped and counted. A question whose request fails keeps its facts as they are, and is counted. The same
    question with the same facts is asked once.

    Parameters
    ----------
    model : ReaderModel
    """

    def __init__(self, model: ReaderModel) -> None:
        self._model = model
        self._decisions: dict[tuple[str, tuple[Fact, ...]], _Decision] = {}

    def __call__(self, questions: Sequence[str], facts: Sequence[Sequence[Fact]]) -> list[list[int]]:
        """Return the positions of the facts to keep, for each question."""
        keys = [(question, tuple(given)) for question, given in zip(questions, facts, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key[1] and key not in self._decisions]
        answers = self._model.ask_all([self._asking(*key) for key in new])
        for key, answer in zip(new, answers, strict=True):
            self._decisions[key] = _decide(answer, key[1])
        return [self._decisions[key].kept if key[1] else [] for key in keys]

    def report(self) -> dict[str, Any]:
        """Return how many questions were asked about, how many requests failed, and for what reasons."""
        decisions = self._decisions.values()
        errors = [decision.error for decision in decisions if decision.error is not None]
        return {
            "questions": len(self._decisions),
            "unknown_facts": sum(decision.unknown for decision in decisions),
            "failed": len(errors),
            "reasons": {reason: errors.count(reason) for reason in sorted(set(errors))},
        }

    def _asking(self, question: str, facts: tuple[Fact, ...]) -> Asking[Answer]:
        def read(text: str, is_cut: bool) -> Answer | None:
            if is_cut:
                return salvage_answer(text, ["facts"])
            answer = read_answer(text, ["facts"])
            self._model.usage.repaired += answer is not None and answer.repaired
            return answer

        prompt = self._model.prompts.recognition
        return Asking(lambda _: prompt.ask(question, facts), read, schema=FACTS_SCHEMA)


def _decide(answer: Answer | Failure, facts: tuple[Fact, ...]) -> _Decision:
    if isinstance(answer, Failure):
        return _Decision(list(range(len(facts))), error=answer.reason)
    kept, unknown = match_facts(answer.lists["facts"], facts)
    return _Decision(kept, unknown)


def match_facts(named: Sequence[object], facts: Sequence[Fact]) -> tuple[list[int], int]:
    """Return the positions of the facts that are named, in order, and how many named ones are none of them.

    Parameters
    ----------
    named : sequence
        Lists of subject, predicate and object; anything else is none of the facts.
    facts : sequence of Fact
    """
    exact = {tuple(fact): [position] for position, fact in enumerate(facts)}
    alike: dict[tuple[str, ...], list[int]] = {}
    for position, fact in enumerate(facts):
        alike.setdefault(_normalised(fact), []).append(position)
    kept: set[int] = set()
    unknown = 0
    for item in named:
        parts = _parts(item)
        found = [] if parts is None else exact.get(parts) or alike.get(_normalised(parts), [])
        kept.update(found)
        unknown += not found
    return sorted(kept), unknown


def _parts(item: object) -> tuple[str, ...] | None:
    is_fact = isinstance(item, list) and len(item) == _FACT_PARTS and all(isinstance(p, str) for p in item)
    return tuple(item) if is_fact else None  # type: ignore[arg-type]


def _normalised(parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(unicode_phrase(part) for part in parts)
