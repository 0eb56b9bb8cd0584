"""Exact match and token F1 of answers, as SQuAD scores them (Rajpurkar et al., 2016), best over aliases."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Return an answer in lower case without ASCII punctuation, English articles and needless white space."""
    text = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones when both are normalised, else 0."""
    return _best(lambda reference: float(normalise_answer(answer) == normalise_answer(reference)), references)


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of an answer's words, 0 to 1, best over right answers.

    If nothing is left of one of the two when normalised, it is 1 if nothing is left of both, else 0.
    """
    return _best(lambda reference: _f1(answer, reference), references)


def _f1(answer: str, reference: str) -> float:
    found, right = normalise_answer(answer).split(), normalise_answer(reference).split()
    if not found or not right:
        return float(found == right)
    common = (Counter(found) & Counter(right)).total()
    return 2 * common / (len(found) + len(right))


def _best(score: Callable[[str], float], references: Sequence[str]) -> float:
    """Return the highest score; without a right answer there is none.

    Raises
    ------
    ValueError
        If there are no references.
    """
    return max(score(reference) for reference in references)
