"""Answers to questions out of their best passages, by a chain of thought."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.extract.answers import without_thoughts
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.model import Asking, Failure, ReaderModel
from hippoindex.pipeline.reader.prompts import END_OF_THOUGHT, PassageText
from hippoindex.pipeline.reader.squad import exact_match, token_f1

_ANSWER = re.compile(rf"(?:\banswer\W*?:|\b{END_OF_THOUGHT}\b:?)[*_\s]*", re.IGNORECASE)
_THOUGHT = re.compile(r"^thought:\s*", re.IGNORECASE)
_AROUND = re.compile(r"\A[\s*_`]+|[\s*_`]+\Z")


@dataclass(frozen=True)
class ReadAnswer:
    """What a language model says to one question.

    Attributes
    ----------
    answer : str
        Empty if there is none.
    text : str
        Everything it said, the chain of thought with it.
    passages : sequence of str
        Ids of the passages that it was given.
    marked : bool
        Whether the answer was marked as such; else it is the last line.
    error : str or None
        Why there is no answer.
    """

    answer: str
    text: str
    passages: Sequence[str]
    marked: bool = True
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        found = {"answer": self.answer, "text": self.text, "passages": list(self.passages)}
        return found if self.error is None else found | {"error": self.error}


def passage_texts(index: Index, rows: Sequence[int]) -> list[PassageText]:
    """Return titles and texts of passages."""
    titles, texts = index.passages["title"], index.passages["text"]
    return [PassageText(titles[row].as_py(), texts[row].as_py()) for row in rows]


def answer_questions(
    model: ReaderModel, index: Index, questions: Sequence[str], rows: NDArray[np.int64]
) -> list[ReadAnswer]:
    """Answer questions, each out of its best passages.

    Parameters
    ----------
    model : ReaderModel
        ``model.config.passages`` says how many of them.
    index : Index
    questions : sequence of str, length Q
    rows : ndarray of int64, shape (Q, k)
        Passage rows, best first.

    Returns
    -------
    list of ReadAnswer, length Q
    """
    best = rows[:, : model.config.passages].tolist()
    askings = [_asking(model, index, question, top) for question, top in zip(questions, best, strict=True)]
    ids = index.passages["passage_id"]
    answers = []
    replies = model.ask_all(askings)
    for found, top in zip(replies, best, strict=True):
        given = ids.take(top).to_pylist()
        if isinstance(found, Failure):
            answers.append(ReadAnswer("", found.raw, given, error=found.reason))
        else:
            text, answer, marked = found
            answers.append(ReadAnswer(answer, text, given, marked))
    return answers


def _asking(
    model: ReaderModel, index: Index, question: str, rows: Sequence[int]
) -> Asking[tuple[str, str, bool]]:
    def read(text: str, is_cut: bool) -> tuple[str, str, bool] | None:
        answer, marked = extract_answer(text)
        return (text, answer, marked) if answer and (marked or not is_cut) else None

    def conversation(passages: int) -> list[dict[str, str]]:
        return model.prompts.answer.ask(passage_texts(index, rows[:passages]), question)

    return Asking(conversation, read, passages=len(rows))


def extract_answer(text: str) -> tuple[str, bool]:
    """Return the answer at the end of a chain of thought, and whether it was marked.

    It follows the last "Answer:" or "So the answer is", up to the end of its line; without either it is the
    last line. Emphasis around it and a full stop behind it are dropped.
    """
    text = without_thoughts(text).strip()
    marks = list(_ANSWER.finditer(text))
    lines = (text[marks[-1].end() :] if marks else text).splitlines()
    line = next((line for line in (lines if marks else reversed(lines)) if _AROUND.sub("", line)), "")
    answer = _AROUND.sub("", line)
    answer = answer if marks else _THOUGHT.sub("", answer)
    return _AROUND.sub("", answer.removesuffix(".")), bool(marks)


@dataclass(frozen=True)
class AnswerScores:
    """Scores of answers.

    Attributes
    ----------
    exact_match, f1 : list of float or None, length Q
        In percent; ``None`` where the right answer is not known. A question without an answer has 0.
    """

    exact_match: list[float | None]
    f1: list[float | None]

    def summary(self) -> dict[str, float | None]:
        """Return the means over the questions whose right answer is known."""
        return {"exact_match": _mean(self.exact_match), "f1": _mean(self.f1)}


def score_answers(answers: Sequence[ReadAnswer], queries: Sequence[Query]) -> AnswerScores:
    """Compare answers with the right ones."""
    pairs = [(found.answer, query.answers) for found, query in zip(answers, queries, strict=True)]
    return AnswerScores(
        [round(100 * exact_match(answer, right), 4) if right else None for answer, right in pairs],
        [round(100 * token_f1(answer, right), 4) if right else None for answer, right in pairs],
    )


def counts_of(answers: Sequence[ReadAnswer], queries: Sequence[Query]) -> dict[str, int]:
    """Return how many questions were answered, failed, have no known answer, or no mark at the answer."""
    failed = [answer for answer in answers if answer.error is not None]
    return {
        "questions": len(answers),
        "answered": len(answers) - len(failed),
        "failed": len(failed),
        "unmarked": sum(not answer.marked for answer in answers),
        "without_reference": sum(not query.answers for query in queries),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 2) if known else None
