"""Shares of a question's words against sets of words."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.kernels.coverage import Cells
from hippoindex.pipeline import pairs, schemas
from hippoindex.pipeline.normalise import words
from hippoindex.pipeline.pairs import PassagePairs
from hippoindex.pipeline.words import write_words

VOCABULARY = ["river", "bridge", "mason", "apple", "tower", "orchard"]
PHRASES = ["river", "mason tower", "apple"]
texts = st.lists(st.sampled_from(VOCABULARY), max_size=4).map(" ".join)
passages = st.lists(st.tuples(texts, st.integers(-1, 2), st.sets(st.integers(0, 2))), min_size=1, max_size=6)


def told(rows: list[tuple[str, int, set[int]]]) -> list[set[str]]:
    return [set(words(f"{PHRASES[title] if title >= 0 else ''} {text}")) for text, title, _ in rows]


def cells(rows: list[list[int]]) -> Cells:
    ends = np.cumsum([0, *map(len, rows)])
    return Cells(ends, np.array([cell for row in rows for cell in row], np.int64))


def made(rows: list[tuple[str, int, set[int]]]) -> PassagePairs:
    said = told(rows)
    known = sorted(set().union(*said))
    counts = [sum(word in one for one in said) for word in known]
    held = [sorted(phrases | ({title} - {-1})) for _, title, phrases in rows]
    return PassagePairs(
        pa.table([known, pa.array(counts, pa.int32())], schema=schemas.WORD),
        cells([[known.index(word) for word in sorted(one)] for one in said]),
        cells(held),
        cells([[row for row, one in enumerate(held) if phrase in one] for phrase in range(len(PHRASES))]),
        np.array([title for _, title, _ in rows]),
        pa.chunked_array([PHRASES]),
    )


def shares(rows: list[tuple[str, int, set[int]]], *questions: str) -> np.ndarray:
    every = np.tile(np.arange(len(rows)), (len(questions), 1))
    return made(rows).shares(questions, every)


@settings(max_examples=200, deadline=None)
@given(rows=passages, question=texts)
def test_shares_are_those_of_sets_of_words(rows: list[tuple[str, int, set[int]]], question: str) -> None:
    found = shares(rows, question)[0]
    said = told(rows)
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
    some = np.array([[len(rows) - 1, 0]])
    np.testing.assert_array_equal(made(rows).shares([question], some), found[some])


def test_a_title_that_many_hold_joins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("river", 2, set[int]()), ("bridge", -1, {2}), ("orchard", -1, {2})]
    np.testing.assert_allclose(shares(rows, "river bridge")[0][:2], [1, 1])
    monkeypatch.setattr(pairs, "MOST_HOLDERS", 2)
    assert shares(rows, "river bridge")[0].max() < 1


def test_of_more_words_than_bits_the_rarest_count() -> None:
    many = [f"word{number}" for number in range(80)]
    rows = [(" ".join(many), -1, set[int]()), (" ".join(many[:79]), -1, set[int]()), ("", -1, set[int]())]
    found = shares(rows, " ".join(many), "unknown", "")
    assert found[0, 0] == pytest.approx(1)
    assert found[0, 1] < 1  # the last word is the rarest
    assert not found[1:].any()


def test_words_are_lower_case_without_stop_words() -> None:
    assert words("The Bridge, by a MASON!") == ["bridge", "mason"]
    assert words("Which Ｂｒｉｄｇｅ in STRASSE or Straße, bridge 7 x?") == ["bridge", "strasse"]


@settings(max_examples=50, deadline=None)
@given(said=st.lists(st.tuples(st.text(max_size=30), texts), max_size=5))
def test_written_words_are_those_of_each_passage(
    said: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, done = tmp_path_factory.mktemp("index"), []
    titles, bodies = ([pair[side] for pair in said] for side in (0, 1))
    table = pa.table({"title": pa.array(titles, pa.string()), "text": pa.array(bodies, pa.string())})
    write_words(table, folder, done.append)
    vocabulary = pq.read_table(folder / "words" / "part-00000.parquet")
    assert vocabulary.schema.equals(schemas.WORD)
    indptr, indices = (np.load(folder / "passage_words" / f"{name}.npy") for name in ("indptr", "indices"))
    known = vocabulary["word"].to_pylist()
    assert known == sorted(set(known))
    assert vocabulary["passage_count"].to_pylist() == np.bincount(indices, minlength=len(known)).tolist()
    assert len(indptr) == len(said) + 1
    for row, (title, text) in enumerate(said):
        held = indices[indptr[row] : indptr[row + 1]].tolist()
        assert [known[word] for word in held] == sorted(words(f"{title}\n{text}"))
    assert sum(done) == len(said)
