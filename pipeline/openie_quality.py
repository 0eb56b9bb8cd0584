"""Scores of OpenIE: CaRB against gold tuples, and agreement with another extraction.

CaRB (Bhardwaj, Aggarwal and Mausam, EMNLP 2019) compares words, not whole arguments. Every extraction is held
against every gold tuple of its sentence; precision uses each gold tuple once, recall may use an extraction
for several gold tuples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hippoindex.pipeline.extract.base import Triple
from hippoindex.pipeline.normalise import unicode_phrase

BE_FORMS = frozenset({"be", "is", "am", "are", "was", "were", "been", "being"})
#: Verbs whose speaker and statement may stand on either side.
SAYING_VERBS = frozenset({"said", "told", "added", "adds", "says"})

#: Why recall or precision is below 1.
LOSSES = {
    "recall_nothing_extracted": "recall: nothing was extracted from the sentence",
    "recall_relation": "recall: no extraction has a word of the relation",
    "recall_words": "recall: words missing from the best extraction",
    "precision_relation": "precision: no gold tuple has a word of the relation",
    "precision_taken": "precision: its gold tuples went to other extractions",
    "precision_words": "precision: words that the gold tuple has not",
}


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
        What is missing from a recall and a precision of 1 at the lowest confidence, by the causes of
        :data:`LOSSES`, in shares of the gold tuples or of the extractions.
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
    n_found = 0
    changes: list[_Change] = []
    losses = dict.fromkeys(LOSSES, 0.0)
    for gold_tuples, extractions in zip(gold, found, strict=True):
        if gold_tuples:
            sentence = _Sentence(sorted(gold_tuples), sorted(extractions))
            n_found += len(extractions)
            changes += sentence.changes()
            for name, lost in sentence.losses():
                losses[name] += lost
    totals = {"recall": n_gold, "precision": n_found}
    shares = {name: losses[name] / max(1, totals[name.partition("_")[0]]) for name in LOSSES}
    return CarbScore(_curve(changes, n_gold), n_gold, n_found, shares)


class _Change(NamedTuple):
    """What the extractions of one sentence with one confidence add to the sums."""

    confidence: float
    precision: float
    n_found: int
    recall: float


def _curve(changes: Iterable[_Change], n_gold: int) -> list[Point]:
    """Add up the changes from the highest confidence to the lowest."""
    precision, n_found, recall = 0.0, 0, 0.0
    curve = []
    ordered = sorted(changes, reverse=True)
    for confidence, group in itertools.groupby(ordered, key=lambda change: change.confidence):
        parts = list(group)
        precision += math.fsum(part.precision for part in parts)
        n_found += sum(part.n_found for part in parts)
        recall += math.fsum(part.recall for part in parts)
        curve.append(Point(confidence, precision / n_found, recall / n_gold))
    return curve


class _Sentence:
    """All matches of one sentence."""

    def __init__(self, gold: Sequence[OpenTuple], found: Sequence[OpenTuple]) -> None:
        self._gold, self._found = gold, found
        self._matches = [[match(one, other) for other in found] for one in gold]

    def changes(self) -> Iterator[_Change]:
        """Yield what every confidence adds, the highest first."""
        precision, n_found, recall = 0.0, 0, 0.0
        for confidence in sorted({one.confidence for one in self._found}, reverse=True):
            kept = [j for j, one in enumerate(self._found) if one.confidence >= confidence]
            precision_now = math.fsum(self._assigned(kept).values())
            recall_now = math.fsum(max(row[j].recall for j in kept) for row in self._matches)
            yield _Change(confidence, precision_now - precision, len(kept) - n_found, recall_now - recall)
            precision, n_found, recall = precision_now, len(kept), recall_now

    def _assigned(self, kept: Sequence[int]) -> dict[int, float]:
        """Give extractions a gold tuple each, greedily; map those that got one to their precision."""
        pairs = [(row[j], -i, -j) for i, row in enumerate(self._matches) for j in kept if row[j].precision]
        taken: set[int] = set()
        assigned: dict[int, float] = {}
        for value, minus_i, minus_j in sorted(pairs, reverse=True):
            if -minus_i not in taken and -minus_j not in assigned:
                taken.add(-minus_i)
                assigned[-minus_j] = value.precision
        return assigned

    def losses(self) -> Iterator[tuple[str, float]]:
        """Yield what is missing from a recall of 1 and a precision of 1, in gold tuples and extractions."""
        for row in self._matches:
            best = max((value.recall for value in row), default=0.0)
            if not row:
                yield "recall_nothing_extracted", 1.0
            elif not best:
                yield "recall_relation", 1.0
            else:
                yield "recall_words", 1 - best
        assigned = self._assigned(range(len(self._found)))
        for j in range(len(self._found)):
            if j in assigned:
                yield "precision_words", 1 - assigned[j]
            elif any(row[j].precision for row in self._matches):
                yield "precision_taken", 1.0
            else:
                yield "precision_relation", 1.0


class Extracted(NamedTuple):
    """What one extraction has of a passage."""

    entities: Sequence[str]
    triples: Sequence[Triple]


class Share(NamedTuple):
    """How many there are, and how many of them were found."""

    total: int
    found: int

    def record(self) -> dict[str, Any]:
        """Return counts and share as JSON-ready values; the share of nothing is ``None``."""
        share = round(self.found / self.total, 4) if self.total else None
        return {"total": self.total, "found": self.found, "share": share}


def agreement(reference: Sequence[Extracted], found: Sequence[Extracted]) -> dict[str, Share]:
    """Count how much of a reference extraction another one has too, passage by passage.

    Phrases are compared by their normalised text. ``arguments`` are the subjects and objects of the
    reference's triples, as often as they occur, and ``entities`` its distinct entities: found if any subject,
    object or entity of the other extraction is the same phrase, since then the graph has the node in that
    passage. ``pairs`` are the distinct unordered pairs of subject and object: found if a triple joins them.

    Parameters
    ----------
    reference, found : sequence of Extracted
        The two extractions of the same passages.

    Returns
    -------
    dict of str to Share
        ``arguments``, ``entities``, ``pairs``.
    """
    counts = {name: Counter[bool]() for name in ("arguments", "entities", "pairs")}
    for wanted, given in zip(reference, found, strict=True):
        pairs = [_pair(triple) for triple in given.triples]
        nodes = {unicode_phrase(entity) for entity in given.entities}.union(*pairs)
        wanted_pairs = [_pair(triple) for triple in wanted.triples]
        ends = [end for pair in wanted_pairs for end in pair if end]
        entities = {unicode_phrase(entity) for entity in wanted.entities} - {""}
        joined = {frozenset(pair) for pair in pairs}
        counts["arguments"].update(end in nodes for end in ends)
        counts["entities"].update(entity in nodes for entity in entities)
        counts["pairs"].update(pair in joined for pair in {frozenset(pair) for pair in wanted_pairs})
    return {name: Share(count.total(), count[True]) for name, count in counts.items()}


def _pair(triple: Triple) -> tuple[str, str]:
    return unicode_phrase(triple.subject), unicode_phrase(triple.object)
