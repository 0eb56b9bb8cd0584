"""Which names contradict each other by their numbers, and which do not."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.errors import UsageError
from hippoindex.pipeline.names_guard import contradicts, guard
from hippoindex.pipeline.normalise import hipporag_phrase, unicode_phrase

CONTRADICTING = [
    ("World War I", "World War II"),
    ("world war one", "world war ii"),
    ("First World War", "Second World War"),
    ("1963", "1964"),
    ("floods of 1953", "floods of 1962"),
    ("winter games 1998", "winter games 2002"),
    ("budget 2003-04", "budget 2004-05"),
    ("Elizabeth I of England", "Elizabeth II of England"),
    ("Pope Pius XI", "Pope Pius XII"),
    ("King Charles V of Spain", "King Charles III of Spain"),
    ("Henry VIII", "Henry the 7th"),
    ("Rocky III", "Rocky IV"),
    ("The Godfather Part II", "The Godfather Part III"),
    ("star wars episode v", "star wars episode vi"),
    ("Apollo 11", "Apollo 13"),
    ("Boeing 747", "Boeing 767"),
    ("Airbus A320", "Airbus A330"),
    ("iPhone 4", "iPhone 5"),
    ("Windows 3.1", "Windows 3.11"),
    ("python 2.7", "python 3.8"),
    ("route 66", "route 67"),
    ("Highway 1", "Highway 101"),
    ("Symphony No. 5", "Symphony No. 9"),
    ("fifth symphony", "ninth symphony"),
    ("vitamin b6", "vitamin b12"),
    ("type 1 diabetes", "type 2 diabetes"),
    ("hurricane category 3", "hurricane category 5"),
    ("21st century", "nineteenth century"),
    ("twenty-first amendment", "twenty-second amendment"),
    ("the 1980s", "the 1990s"),
    ("U-571 submarine", "U-96 submarine"),
    ("Super Bowl XLVIII", "Super Bowl XLIX"),
    ("Louis XIV", "Louis XVI"),
    ("10 Downing Street", "11 Downing Street"),
    ("جنگ ۱۹۱۴", "جنگ ۱۹۳۹"),
]

COMPATIBLE = [
    ("World War II", "World War 2"),
    ("World War II", "Second World War"),
    ("World War II", "world war"),
    ("World War I", "World War"),
    ("Louis XIV", "Louis the 14th"),
    ("Henry VIII", "Henry the Eighth"),
    ("the 1960s", "the 1960"),
    ("the 1960s", "the 60s"),
    ("Expo '67", "Expo 1967"),
    ("Euro 08", "Euro 2008"),
    ("season 2003-04", "season 2003-2004"),
    ("agent 7", "Agent 007"),
    ("twenty-first century", "21st century"),
    ("Ninety-Five Theses", "95 theses"),
    ("Apollo 11", "Apollo 11 mission 1969"),
    ("Windows 3", "Windows 3.1"),
    ("Boeing 747", "Boeing 747-400"),
    ("Malcolm X", "Malcolm"),
    ("Xi Jinping", "Jinping"),
    ("vi editor 2", "editor 2"),
    ("Vympel K-13", "AA-2 Atoll"),
    ("Route 61", "Blues Highway 49"),
    ("12th of July", "July 12"),
    ("Paris", "Paris, France"),
    ("٣ آب", "3 آب"),
    ("area 51", "nevada test range 4806"),
    ("i robot", "i robot 2004"),
    ("", "1963"),
    ("", ""),
]


@pytest.mark.parametrize(("a", "b"), CONTRADICTING)
def test_different_numbers_contradict(a: str, b: str) -> None:
    assert contradicts(a, b) is not None
    assert contradicts(b, a) is not None
    assert contradicts(unicode_phrase(a), unicode_phrase(b)) is not None


@pytest.mark.parametrize(("a", "b"), COMPATIBLE)
def test_names_of_one_thing_do_not(a: str, b: str) -> None:
    assert contradicts(a, b) is None
    assert contradicts(b, a) is None
    assert contradicts(unicode_phrase(a), unicode_phrase(b)) is None


def test_the_reason_quotes_numbers_as_they_are_written() -> None:
    assert contradicts("World War I", "World War II") == "numbers differ: i / ii"
    assert contradicts("floods of 1953", "floods of 1962") == "years differ: 1953 / 1962"
    assert contradicts("budget 2003-04", "budget 2004-05") == "numbers differ: 2003 04 / 2004 05"
    assert contradicts("intel 8253", "intel 8254") == "numbers differ: 8253 / 8254"


def test_hipporags_normalisation_is_read_as_well() -> None:
    pairs = [(a, b) for a, b in CONTRADICTING if a.isascii() and "." not in a]
    assert guard([hipporag_phrase(a) for a, _ in pairs], [hipporag_phrase(b) for _, b in pairs]).sum() == 0


def test_guard_agrees_with_contradicts_and_keeps_order() -> None:
    pairs = [*CONTRADICTING, *COMPATIBLE, *CONTRADICTING]
    mask = guard([a for a, _ in pairs], [b for _, b in pairs])
    assert mask.dtype == np.bool_
    assert mask.tolist() == [contradicts(a, b) is None for a, b in pairs]


def test_guard_of_nothing_is_empty() -> None:
    assert guard([], []).shape == (0,)


def test_ends_must_be_pairs() -> None:
    with pytest.raises(UsageError, match="2 first names and 1 second"):
        guard(["a", "b"], ["a"])


TOKENS = "i v x ii xiv li one first twenty 1st 07 7 1.5 1960s 60 1960 war of part b2 ٣"
NUMBERED = st.lists(st.sampled_from(TOKENS.split()), max_size=6).map(" ".join)


@given(NUMBERED | st.text(max_size=30), NUMBERED | st.text(max_size=30))
def test_any_text_is_read_and_order_does_not_matter(a: str, b: str) -> None:
    assert (contradicts(a, b) is None) == (contradicts(b, a) is None)
    assert contradicts(a, a) is None
    assert contradicts(a, f"{a} {b}") is None or any(map(str.isalnum, b))


@given(st.integers(1, 89))
def test_roman_and_arabic_numerals_agree(value: int) -> None:
    tens, units = divmod(value, 10)
    roman = ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX"][tens]
    roman += ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"][units]
    if roman != "L":  # fifty is read as a letter
        assert contradicts(f"Volume {roman}", f"Volume {value}") is None
        assert contradicts(f"Volume {roman}", f"Volume {value + 1}") is not None


def test_a_phrase_of_many_digits_is_no_trouble() -> None:
    assert contradicts("pi " + "31415926" * 2000, "pi 3") == f"numbers differ: {'31415926' * 2000} / 3"


@pytest.mark.slow
def test_fewer_than_one_in_a_hundred_aliases_are_rejected(data_dir: Path) -> None:
    path = data_dir / "entity_aliases" / "alias_canonical.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").replace("_", " ").split("\t") for line in lines][::20]
    assert len(pairs) > 30_000
    rejected = 1 - guard([a for a, _ in pairs], [b for _, b in pairs]).mean()
    assert 0.0005 < rejected < 0.01
