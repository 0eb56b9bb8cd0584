"""Phrase text and phrase ids, and the words of a text.

HippoRAG lower-cases and replaces every character outside ``[A-Za-z0-9 ]`` by a space, which erases text in
other scripts and makes "C++" and "C" one node. The default here keeps letters, marks and digits of every
script, and the symbols that tell names apart.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

Normalise = Callable[[str], str]

TITLE_QUALIFIER = re.compile(r"\s*\(([^()]*)\)\s*$")
KEPT_PUNCTUATION = frozenset("&#%@*")
_INNER_APOSTROPHE = re.compile(r"(?<=\w)['’‘ʼ](?=\w)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DECIMAL = re.compile(r"(?<=\d)\.(?=\d)")
_PLAIN = re.compile(r"[a-z0-9]+(?: [a-z0-9]+)*")
_HIPPORAG = re.compile(r"[^a-z0-9 ]")
_WORD = re.compile(r"\w\w+")


class _Table(dict[int, str]):
    """Translation table for ``str.translate``, filled with a character's fate when it is first seen."""

    def __missing__(self, codepoint: int) -> str:
        character = chr(codepoint)
        kept = _kept(character, unicodedata.category(character))
        self[codepoint] = character if kept else " "
        return self[codepoint]


def _kept(character: str, category: str) -> bool:
    """Letters, marks, digits; currency and mathematical symbols (C++, US$); a few punctuation marks."""
    return category[0] in "LMN" or category in {"Sc", "Sm"} or character in KEPT_PUNCTUATION


# Private-use characters stand in for an apostrophe or a point inside a word while punctuation is removed.
_APOSTROPHE, _POINT = "\ue000", "\ue001"
_TABLE = _Table({ord(_APOSTROPHE): "'", ord(_POINT): "."})


def unicode_phrase(text: str) -> str:
    """Normalise a phrase: NFKC, casefold, punctuation to spaces, white space collapsed.

    Apostrophes and decimal points stay inside a word or number, thousands separators go.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
        Empty if nothing but punctuation was there.
    """
    if text.isascii() and _PLAIN.fullmatch(lowered := text.lower()):
        return lowered
    folded = _fold(text)
    folded = folded.replace(_APOSTROPHE, " ").replace(_POINT, " ")
    folded = _INNER_APOSTROPHE.sub(_APOSTROPHE, folded)
    folded = _DECIMAL.sub(_POINT, _THOUSANDS.sub("", folded))
    return " ".join(folded.translate(_TABLE).split())


def _fold(text: str) -> str:
    """Return a text in Unicode's compatibility form NFKC, case folded."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def hipporag_phrase(text: str) -> str:
    """Normalise a phrase as HippoRAG's code does: lower case, all but ``[a-z0-9 ]`` to spaces, stripped.

    Inner runs of spaces are kept, as there.
    """
    return _HIPPORAG.sub(" ", text.lower()).strip()


def normaliser(mode: Literal["unicode", "hipporag"]) -> Normalise:
    """Return the function for ``graph.normalisation``."""
    return unicode_phrase if mode == "unicode" else hipporag_phrase


def clean_title(title: str) -> str:
    """Return a title without the qualifier in brackets: "Mercury (planet)" -> "Mercury"."""
    collapsed = " ".join(title.split())
    return TITLE_QUALIFIER.sub("", collapsed) or collapsed


def phrase_id(phrase: str) -> int:
    """64-bit xxh3 of the UTF-8 bytes of a normalised phrase."""
    return xxhash.xxh3_64_intdigest(phrase.encode("utf-8"))


def fact_id(subject: int, predicate: str, obj: int) -> int:
    """64-bit xxh3 of subject id, object id (little-endian) and the normalised predicate in UTF-8."""
    ends = subject.to_bytes(8, "little") + obj.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(ends + predicate.encode("utf-8"))


def fact_ids(
    subjects: NDArray[np.uint64], objects: NDArray[np.uint64], predicates: Sequence[str]
) -> NDArray[np.uint64]:
    """Return :func:`fact_id` of many facts, shape (facts,)."""
    ends = np.stack([subjects, objects], axis=1).astype("<u8", copy=False).tobytes()
    digest = xxhash.xxh3_64_intdigest
    hashed = (
        digest(ends[start : start + 16] + predicate.encode("utf-8"))
        for start, predicate in zip(range(0, len(ends), 16), predicates, strict=True)
    )
    return np.fromiter(hashed, np.uint64, len(predicates))


def count_alphanumerics(phrase: str) -> int:
    """Count letters and digits of any script."""
    return sum(character.isalnum() for character in phrase)


def words(text: str) -> list[str]:
    """Return the distinct words of a text, in the order in which they come.

    A word is a run of two or more letters, digits or underscores, in NFKC and case folded, unless it is one
    of spaCy's English stop words.
    """
    return [word for word in dict.fromkeys(_WORD.findall(_fold(text))) if word not in _stop_words()]


@functools.cache
def _stop_words() -> frozenset[str]:
    from spacy.lang.en.stop_words import STOP_WORDS

    return frozenset(STOP_WORDS)
