"""Scores of OpenIE: CaRB against gold tuples, and agreement with another extraction.

CaRB (Bhardwaj, Aggarwal and Mausam, EMNLP 2019) compares words, not whole arguments. Every extraction is held
against every gold tuple of its sentence; precision uses each gold tuple once, recall may use an extraction
for several gold tuples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hippoindex.pipeline.extract.base import Triple
from hippoindex.pipeline.normalise import unicode_phrase

BE_FORMS = frozenset({"be", "is", "am", "are", "was", "were", "been", "being"})
#: Verbs whose speaker and statement may stand on either side.
SAYING_VERBS = frozenset({"said", "told", "added", "adds", "says"})


class OpenTuple(NamedTuple):
    """A relation with its arguments, the subject first; ``confidence`` orders extractions."""

    relation: str
    arguments: tuple[str, ...]
    confidence: float = 1.0


class Match(NamedTuple):
    """Share of an extraction's words that the gold tuple has, and of the gold tuple's that it has."""

    precision: float
    recall: float


NO_MATCH = Match(0.0, 0.0)


def match(gold: OpenTuple, found: OpenTuple) -> Match:
    """Compare an extraction with a gold tuple word by word.

    Words are separated by white space and compared as they are written, relation with relation, first
    argument with first, and all further arguments together. Every word counts as often as both sides have
    it. The word "be" in the extraction's relation, which stands for one that the sentence does not say,
    matches any form of it. Without a common word in the relation nothing matches. If the gold relation is
    one of saying, the arguments may also be swapped.

    Parameters
    ----------
    gold, found : OpenTuple

    Returns
    -------
    Match
        Both zero if nothing matches.
    """
    straight = _ordered_match(gold, found, found.arguments)
    if SAYING_VERBS.isdisjoint(gold.relation.split()):
        return straight
    return max(straight, _ordered_match(gold, found, (" ".join(found.arguments[1:]), *found.arguments[:1])))


def _ordered_match(gold: OpenTuple, found: OpenTuple, arguments: Sequence[str]) -> Match:
    if len(arguments) < min(2, len(gold.arguments)):
        return NO_MATCH
    gold_words, found_words = Counter(gold.relation.split()), Counter(found.relation.split())
    common = (gold_words & found_words).total()
    if found_words["be"] > gold_words["be"] and BE_FORMS & (gold_words - found_words).keys():
        common += 1
    if not common:
        return NO_MATCH
    n_gold, n_found = gold_words.total(), found_words.total()
    for gold_slot, slot in zip(_two_slots(gold.arguments), _two_slots(arguments), strict=True):
        common += (gold_slot & slot).total()
        n_gold += gold_slot.total()
        n_found += slot.total()
    return Match(common / n_found, common / n_gold)


def _two_slots(arguments: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    return Counter(" ".join(arguments[:1]).split()), Counter(" ".join(arguments[1:]).split())


class Point(NamedTuple):
    """Scores of all extractions with at least this confidence."""

    confidence: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if both are."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class CarbScore:
    """CaRB scores of a set of sentences.

    Attributes
    ----------
    curve : sequence of Point
        One point per distinct confidence, the highest first.
    n_gold, n_found : int
        Gold tuples, and extractions of sentences that have gold tuples.
    losses : mapping of str to float
        What is missing from a recall and a precision of 1 at the lowest confidence, by cause, in shares of
        the gold tuples (``recall: ...``) and of the extractions (``precision: ...``).
    """

    curve: Sequence[Point]
    n_gold: int
    n_found: int
    losses: dict[str, float]

    @cached_property
    def best(self) -> Point:
        """Point with the highest F1; of equals the one with the highest confidence."""
        return max(self.curve, key=lambda point: point.f1, default=Point(math.nan, 0.0, 0.0))

    @property
    def auc(self) -> float:
        """Area under precision over recall by trapezoids from (recall 0, precision 1), as CaRB has it.

        Of extractions that all have the same confidence it is recall * (1 + precision) / 2, and says nothing
        about how well confidences order them.
        """
        precision = [1.0, *(point.precision for point in self.curve)]
        recall = [0.0, *(point.recall for point in self.curve)]
        return float(np.trapezoid(precision, recall))

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON-ready values, 0 to 1."""
        return {
            "precision": round(self.best.precision, 4),
            "recall": round(self.best.recall, 4),
            "f1": round(self.best.f1, 4),
            "auc": round(self.auc, 4),
            "confidence": None if math.isnan(self.best.confidence) else self.best.confidence,
            "curve_points": len(self.curve),
            "curve": [[round(value, 4) for value in point] for point in self.curve],
            "gold_tuples": self.n_gold,
            "extractions": self.n_found,
            "losses": {name: round(value, 4) for name, value in self.losses.items()},
        }


def carb_score(gold: Sequence[Sequence[OpenTuple]], found: Sequence[Sequence[OpenTuple]]) -> CarbScore:
    """Score extractions by CaRB.

    Precision is the mean, over extractions, of their precision against the gold tuple that they are given:
    the pair with the highest precision first, no gold tuple twice, and 0 for extractions that are left over.
    Recall is the mean, over gold tuples, of the best recall of any extraction. Of pairs with the same
    precision that with the higher recall is taken first, then by the words of the tuples, so that the order
    of neither side matters and a set scores 1 against itself.

    Parameters
    ----------
    gold : sequence of sequence of OpenTuple
        Gold tuples of each sentence.
    found : sequence of sequence of OpenTuple
        Extractions of the same sentences; those of a sentence without gold tuples are left out.

    Returns
    -------
    CarbScore
    """
    n_gold = sum(map(len, gold))
    n_found, changes, losses = 0, [], Counter[str]()
    for gold_tuples, extractions in zip(gold, found, strict=True):
        if gold_tuples:
            sentence = _Sentence(sorted(gold_tuples), sorted(extractions))
            n_found += len(extractions)
            changes += sentence.changes()
            losses.update(sentence.losses())
    shares = {
        name: value / (n_gold if name.startswith("recall") else n_found)
        for name, value in sorted(losses.items())
    }
    return CarbScore(_curve(changes, n_gold), n_gold, n_found, shares)


def _curve(changes: Iterable[tuple[float, float, int, float]], n_gold: int) -> list[Point]:
    by_confidence: dict[float, list[tuple[float, int, float]]] = {}
    for confidence, *change in changes:
        by_confidence.setdefault(confidence, []).append((change[0], int(change[1]), change[2]))
    precision, n_found, recall = 0.0, 0, 0.0
    curve = []
    for confidence in sorted(by_confidence, reverse=True):
        parts = list(zip(*by_confidence[confidence], strict=True))
        precision += math.fsum(parts[0])
        n_found += int(sum(parts[1]))
        recall += math.fsum(parts[2])
        curve.append(Point(confidence, precision / n_found, recall / n_gold))
    return curve


class _Sentence:
    """All matches of one sentence."""

    def __init__(self, gold: Sequence[OpenTuple], found: Sequence[OpenTuple]) -> None:
        self._gold, self._found = gold, found
        self._matches = [[match(one, other) for other in found] for one in gold]

    def changes(self) -> list[tuple[float, float, int, float]]:
        """Return confidence, added precision, added extractions and added recall at each confidence."""
        states = [(0.0, 0, 0.0)]
        confidences = sorted({one.confidence for one in self._found}, reverse=True)
        for confidence in confidences:
            kept = [j for j, one in enumerate(self._found) if one.confidence >= confidence]
            precision = math.fsum(value for _, _, value in self._assigned(kept))
            recall = math.fsum(max(row[j].recall for j in kept) for row in self._matches)
            states.append((precision, len(kept), recall))
        return [
            (confidence, after[0] - before[0], after[1] - before[1], after[2] - before[2])
            for confidence, before, after in zip(confidences, states, states[1:], strict=False)
        ]

    def _assigned(self, kept: Sequence[int]) -> list[tuple[int, int, float]]:
        """Give each extraction a gold tuple, greedily: (gold, extraction, precision), no zeros."""
        pairs = [(row[j], -i, -j) for i, row in enumerate(self._matches) for j in kept if row[j].precision]
        taken_gold: set[int] = set()
        taken_found: set[int] = set()
        assigned = []
        for value, minus_i, minus_j in sorted(pairs, reverse=True):
            if -minus_i not in taken_gold and -minus_j not in taken_found:
                taken_gold.add(-minus_i)
                taken_found.add(-minus_j)
                assigned.append((-minus_i, -minus_j, value.precision))
        return assigned

    def losses(self) -> dict[str, float]:
        """Return what is missing from a recall of 1 and a precision of 1, in gold tuples and extractions."""
        lost = Counter[str]()
        for row in self._matches:
            best = max(row, default=NO_MATCH, key=lambda value: value.recall).recall
            if not row:
                lost["recall: nothing extracted from the sentence"] += 1
            elif not best:
                lost["recall: no extraction has a word of the relation"] += 1
            else:
                lost["recall: words missing from the best extraction"] += 1 - best
        assigned = {j: value for _, j, value in self._assigned(range(len(self._found)))}
        for j in range(len(self._found)):
            if j in assigned:
                lost["precision: words that the gold tuple has not"] += 1 - assigned[j]
            elif any(row[j].precision for row in self._matches):
                lost["precision: its gold tuples are taken by other extractions"] += 1
            else:
                lost["precision: no gold tuple has a word of its relation"] += 1
        return dict(lost)


class Extracted(NamedTuple):
    """What one extraction has of a passage."""

    entities: Sequence[str]
    triples: Sequence[Triple]


@dataclass(frozen=True)
class Agreement:
    """How much of a reference extraction another one has too.

    Attributes
    ----------
    arguments, entities, triples : tuple of (int, int)
        How many of the reference were found, and how many it has. Arguments (subjects and objects) and
        entities are distinct normalised phrases of a passage.
    """

    arguments: tuple[int, int]
    entities: tuple[int, int]
    pairs: tuple[int, int]

    def record(self) -> dict[str, Any]:
        """Return counts, and shares from 0 to 1; the share of nothing is ``None``."""
        counts = {"arguments": self.arguments, "entities": self.entities, "pairs": self.pairs}
        return {
            name: {
                "found": found,
                "reference": total,
                "share": round(found / total, 4) if total else None,
            }
            for name, (found, total) in counts.items()
        }
