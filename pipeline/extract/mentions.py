"""Named entities of a parsed passage, put right where the recogniser cuts names off."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from spacy.tokens import Span, Token

#: Label of a run of proper nouns that the entity recogniser passed over.
NAME = "NAME"
NAMED_LABELS = frozenset(
    {"PERSON", "NORP", "FAC", "ORG", "GPE", "LOC", "PRODUCT", "EVENT", "WORK_OF_ART", "LAW", "LANGUAGE", NAME}
)
PLACE_LABELS = frozenset({"GPE", "LOC", "FAC"})
PROPER_TAGS = frozenset({"NNP", "NNPS"})

_KEPT_LABELS = NAMED_LABELS | {"DATE", "MONEY", "QUANTITY", "TIME", "PERCENT"}
_YEAR = re.compile(r"[12]\d{3}")


class Mention(NamedTuple):
    """A named entity as a half-open range of tokens."""

    start: int
    end: int
    label: str


def merged_mentions(tokens: list[Token], spans: Iterable[Span]) -> list[Mention]:
    """Return a document's entities with what the recogniser cut off put back.

    Proper nouns that modify a name from the left belong to it ("Summer" + "Olympics"), so do a year before
    it ("1920"), a number after it ("Route" + "103"), and a date after a hanging "of" ("Constitution of" +
    "1993"); a day belongs to its month. Longer runs of proper nouns without a label become mentions labelled
    :data:`NAME`.
    """
    labelled = [Mention(span.start, span.end, span.label_) for span in spans if span.label_ in _KEPT_LABELS]
    mentions: list[Mention] = []
    for start, end, label in sorted(labelled + _unlabelled_names(tokens, labelled)):
        free_from = mentions[-1].end if mentions else 0
        if start < free_from:
            continue
        if label in NAMED_LABELS:
            first = _whole_name_start(tokens, start, end, label, mentions)
            mentions.append(Mention(first, _whole_name_end(tokens, first, end), label))
        elif label == "DATE" and mentions and _ends_in_of(tokens, mentions[-1], start):
            mentions[-1] = Mention(mentions[-1].start, end, mentions[-1].label)
        elif label == "DATE" and start > free_from and _is_day(tokens[start - 1], tokens[start]):
            mentions.append(Mention(start - 1, end, label))
        else:
            mentions.append(Mention(start, end, label))
    return mentions


def _is_day(day: Token, month: Token) -> bool:
    return day.text.isdigit() and len(day) <= 2 and month.tag_ in PROPER_TAGS


def _whole_name_start(tokens: list[Token], start: int, end: int, label: str, mentions: list[Mention]) -> int:
    """Extend a name to the left; a mention of the year before it is taken out of ``mentions``."""
    if label in {"PERSON", "NORP"}:
        return start
    heads = range(start, end)
    free_from = mentions[-1].end if mentions else 0
    while start > free_from and tokens[start - 1].tag_ in PROPER_TAGS and tokens[start - 1].head.i in heads:
        start -= 1
    year = tokens[start - 1] if start else None
    if year is None or year.head.i not in heads or not _YEAR.fullmatch(year.text):
        return start
    if start > free_from:
        return start - 1
    if (
        mentions[-1].start == start - 1 or tokens[mentions[-1].start].tag_ == "DT"
    ):  # "1920" or "the 1920" alone
        mentions.pop()
        return start - 1
    return start


def _whole_name_end(tokens: list[Token], start: int, end: int) -> int:
    numbered = end < len(tokens) and tokens[end].tag_ == "CD" and start <= tokens[end].head.i < end
    return end + 1 if numbered else end


def _ends_in_of(tokens: list[Token], mention: Mention, following: int) -> bool:
    return mention.end == following and mention.label in NAMED_LABELS and tokens[following - 1].lower_ == "of"


def _unlabelled_names(tokens: list[Token], mentions: list[Mention]) -> list[Mention]:
    """Return runs of two or more capitalised proper nouns outside of ``mentions``."""
    taken = {i for mention in mentions for i in range(mention.start, mention.end)}
    names: list[Mention] = []
    start = 0
    for i in range(len(tokens) + 1):
        if i < len(tokens) and _is_capitalised_name(tokens[i]) and i not in taken:
            continue
        if i - start > 1:
            names.append(Mention(start, i, NAME))
        start = i + 1
    return names


def _is_capitalised_name(token: Token) -> bool:
    return token.tag_ in PROPER_TAGS and token.text[0].isupper()
