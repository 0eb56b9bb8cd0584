"""Shares of a question's words against sets of words."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.pipeline import pairs
from hippoindex.pipeline.pairs import PassagePairs, words

VOCABULARY = ["river", "bridge", "mason", "apple", "tower", "orchard"]
PHRASES = ["river", "mason tower", "apple"]
texts = st.lists(st.sampled_from(VOCABULARY), max_size=4).map(" ".join)
passages = st.lists(st.tuples(texts, st.integers(-1, 2), st.sets(st.integers(0, 2))), min_size=1, max_size=6)


def made(rows: list[tuple[str, int, set[int]]]) -> PassagePairs:
    held = np.zeros((len(PHRASES), len(rows)), np.float32)
    for passage, (_, title, phrases) in enumerate(rows):
        held[list(phrases | ({title} - {-1})), passage] = 1
    return PassagePairs(
        pa.table({"title": [""] * len(rows), "text": [text for text, _, _ in rows]}),
        np.array([title for _, title, _ in rows]),
        sp.csr_matrix(held),
        pa.table({"phrase": PHRASES}),
    )


@settings(max_examples=200, deadline=None)
@given(rows=passages, question=texts)
def test_shares_are_those_of_sets_of_words(rows: list[tuple[str, int, set[int]]], question: str) -> None:
    found = made(rows).shares([question])[0]
    said = [set(text.split()) for text, _, _ in rows]
    weight = {}
    for word in set(question.split()):
        holders = sum(word in known for known in said)
        if holders:
            weight[word] = math.log1p((len(rows) - holders + 0.5) / (holders + 0.5))
    whole = sum(weight.values())

    def share(known: set[str]) -> float:
        return sum(weight.get(word, 0.0) for word in known) / whole if whole else 0.0

    expected = [share(known) for known in said]
    for (a, one), (b, other) in permutations(enumerate(rows), 2):
        title = other[1]
        named = title >= 0 and set(PHRASES[title].split()) <= set(question.split())
        if title >= 0 and title in one[2] | {one[1]} and not named:
            together = share(said[a] | said[b])
            expected[a], expected[b] = max(expected[a], together), max(expected[b], together)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_title_that_many_hold_joins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("river", 2, set[int]()), ("bridge", -1, {2}), ("orchard", -1, {2})]
    np.testing.assert_allclose(made(rows).shares(["river bridge"])[0][:2], [1, 1])
    monkeypatch.setattr(pairs, "MOST_HOLDERS", 2)
    assert made(rows).shares(["river bridge"])[0].max() < 1


def test_of_more_words_than_bits_the_rarest_count() -> None:
    many = [f"word{number}" for number in range(80)]
    rows = [(" ".join(many), -1, set[int]()), (" ".join(many[:79]), -1, set[int]()), ("", -1, set[int]())]
    found = made(rows).shares([" ".join(many), "unknown", ""])
    assert found[0, 0] == pytest.approx(1)
    assert found[0, 1] < 1  # the last word is the rarest
    assert not found[1:].any()


def test_words_are_lower_case_without_stop_words() -> None:
    assert words(["The Bridge, by a MASON!"]) == [["bridge", "mason"]]
