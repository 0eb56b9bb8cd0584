from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.pipeline.normalise import (
    count_alphanumerics,
    fact_id,
    hipporag_phrase,
    phrase_id,
    unicode_phrase,
)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("  The  Old\tMill ", "the old mill"),
        ("C++", "c++"),
        ("C#", "c#"),
        ("北京 大学", "北京 大学"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
        ("Straße", "strasse"),
        ("Ｔｏｋｙｏ", "tokyo"),
        ("well-known", "well known"),
        ("Saint Orrin’s", "saint orrin's"),
        ("'quoted'", "quoted"),
        ("1,234,567", "1234567"),
        ("3.14", "3.14"),
        ("end.", "end"),
        ("AT&T", "at&t"),
        ("...", ""),
        ("", ""),
    ],
)
def test_unicode_phrases(text: str, phrase: str) -> None:
    assert unicode_phrase(text) == phrase


@given(st.text())
def test_unicode_normalisation_is_idempotent_and_keeps_every_letter(text: str) -> None:
    phrase = unicode_phrase(text)
    assert unicode_phrase(phrase) == phrase
    assert phrase == phrase.strip()
    assert "  " not in phrase
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    assert letters(phrase) == letters(folded)


def letters(text: str) -> list[str]:
    """All letters but the modifier letter that is written as an apostrophe."""
    return [c for c in text if c.isalpha() and c != "ʼ"]


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_hipporag_normalisation_is_theirs(text: str) -> None:
    kept = "".join(c if c.isalnum() or c == " " else " " for c in text.lower())
    assert hipporag_phrase(text) == kept.strip()


def test_hipporag_normalisation_erases_other_scripts() -> None:
    assert hipporag_phrase("北京") == ""
    assert hipporag_phrase("C++") == hipporag_phrase("C")


def test_ids_are_pinned() -> None:
    """They are part of the artifact's format: a change makes indexes that cannot be merged."""
    assert phrase_id("the old mill") == 1_974_853_513_076_194_607
    assert fact_id(1, "stands in", 2) == 5_668_502_516_845_408_608
    assert fact_id(1, "stands in", 2) != fact_id(2, "stands in", 1)


def test_letters_and_digits_of_every_script_are_counted() -> None:
    assert count_alphanumerics("c++") == 1
    assert count_alphanumerics("北京 大学") == 4
