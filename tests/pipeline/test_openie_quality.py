"""CaRB by hand and by its properties, and agreement of two extractions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.pipeline.extract.base import Triple
from hippoindex.pipeline.openie_quality import (
    NO_MATCH,
    CarbScore,
    Extracted,
    Match,
    OpenTuple,
    agreement,
    carb_score,
    match,
)

WORDS = ("Ann", "Bob", "Rome", "is", "be", "said", "left", "for", "the", "old")
UNSEEN = OpenTuple("zoomed", ("Quux", "Xyzzy"))


def one(relation: str, *arguments: str, confidence: float = 1.0) -> OpenTuple:
    return OpenTuple(relation, arguments, confidence)


def score(gold: list[OpenTuple], found: list[OpenTuple]) -> CarbScore:
    return carb_score([gold], [found])


phrases = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
tuples = st.builds(
    OpenTuple,
    phrases,
    st.lists(phrases, min_size=2, max_size=3).map(tuple),
    st.sampled_from((0.25, 0.5, 1.0)),
)
sure_tuples = tuples.map(lambda value: value._replace(confidence=1.0))
sets = st.lists(tuples, min_size=1, max_size=5)
sure_sets = st.lists(sure_tuples, min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("gold", "found", "expected"),
    [
        (one("left", "Ann", "Rome"), one("left", "Ann", "Rome"), Match(1, 1)),
        (one("left", "Ann", "Rome"), one("left", "Ann", "the old Rome"), Match(3 / 5, 1)),
        (one("left for", "Ann", "Rome"), one("left", "Ann", "for Rome"), Match(3 / 4, 3 / 4)),
        (one("left", "Ann", "Rome", "in May"), one("left", "Ann", "in May Rome"), Match(1, 1)),
        (one("left", "Ann", "Rome"), one("left", "Rome", "Ann"), Match(1 / 3, 1 / 3)),
        (one("left", "Ann", "Rome"), one("quit", "Ann", "Rome"), NO_MATCH),
        (one("left", "Ann Ann", "Rome"), one("left", "Ann", "Rome"), Match(1, 3 / 4)),
        (one("was", "Ann", "a poet"), one("be", "Ann", "a poet"), Match(1, 1)),
        (one("was", "Ann", "a poet"), one("is", "Ann", "a poet"), NO_MATCH),
        (one("is", "Ann", "here"), one("be is", "Ann", "here"), Match(3 / 4, 1)),
        (one("said", "Ann", "it rains"), one("said", "it rains", "Ann"), Match(1, 1)),
        (one("left", "Ann"), one("left", "Ann", "Rome"), Match(2 / 3, 1)),
        (one("left", "Ann", "Rome"), one("left", "Ann"), NO_MATCH),
    ],
)
def test_matches_by_hand(gold: OpenTuple, found: OpenTuple, expected: Match) -> None:
    assert match(gold, found) == pytest.approx(expected)


def test_precision_uses_a_gold_tuple_once_and_recall_an_extraction_often() -> None:
    gold = [one("left", "Ann", "Rome"), one("left", "Ann", "Paris")]
    both = one("left", "Ann", "Rome and Paris")
    result = score(gold, [both])
    assert (result.best.precision, result.best.recall) == pytest.approx((3 / 5, 1))
    result = score(gold[:1], [gold[0], both])
    assert (result.best.precision, result.best.recall) == pytest.approx((1 / 2, 1))
    assert {name: lost for name, lost in result.losses.items() if lost} == {"precision_taken": 0.5}


def test_what_is_missing_is_told_by_cause() -> None:
    gold = [[one("left", "Ann", "Rome")], [one("sang", "Bob", "songs")], [one("met", "Cy", "Di", "at noon")]]
    found = [[], [one("wrote", "Bob", "songs")], [one("met", "Cy", "Di")]]
    result = carb_score(gold, found)
    assert result.losses == pytest.approx(
        {
            "precision_relation": 1 / 2,
            "precision_taken": 0,
            "precision_words": 0,
            "recall_relation": 1 / 3,
            "recall_nothing_extracted": 1 / 3,
            "recall_words": (2 / 5) / 3,
        }
    )


def test_the_curve_has_a_point_per_confidence() -> None:
    gold = [[one("left", "Ann", "Rome")], [one("sang", "Bob", "songs")]]
    found = [[one("left", "Ann", "Rome", confidence=0.9)], [one("flew", "Bob", "songs", confidence=0.4)]]
    result = carb_score(gold, found)
    assert [tuple(point) for point in result.curve] == [(0.9, 1.0, 0.5), (0.4, 0.5, 0.5)]
    assert result.best.confidence == 0.9
    assert result.auc == pytest.approx(0.5)
    one_point = carb_score(gold, [[value._replace(confidence=1.0) for value in row] for row in found])
    assert len(one_point.curve) == 1
    assert one_point.auc == pytest.approx(0.5 * (1 + 0.5) / 2)


def test_an_engine_that_finds_nothing_scores_zero() -> None:
    result = score([one("left", "Ann", "Rome")], [])
    record = result.record()
    assert (record["precision"], record["recall"], record["f1"], record["auc"]) == (0, 0, 0, 0)
    assert (record["confidence"], record["curve_points"]) == (None, 0)


def test_extractions_of_sentences_without_gold_tuples_are_left_out() -> None:
    gold, found = [[], [one("left", "Ann", "Rome")]], [[UNSEEN], [one("left", "Ann", "Rome")]]
    result = carb_score(gold, found)
    assert (result.n_gold, result.n_found, result.best.f1) == (1, 1, 1.0)


@given(sets)
def test_a_set_scores_one_against_itself(gold: list[OpenTuple]) -> None:
    last = score(gold, gold).curve[-1]
    assert (last.precision, last.recall) == (1.0, 1.0)


@given(sets, sets, st.randoms(use_true_random=False))
def test_the_order_of_neither_side_matters(gold: list[OpenTuple], found: list[OpenTuple], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = [random.sample(side, len(side)) for side in (gold, found)]
    assert score(*shuffled).record() == score(gold, found).record()


@given(sets, sure_sets)
def test_a_wrong_extraction_never_raises_precision(gold: list[OpenTuple], found: list[OpenTuple]) -> None:
    before, after = score(gold, found).best, score(gold, [*found, UNSEEN]).best
    assert after.precision < before.precision or before.precision == 0
    assert after.recall == before.recall


@given(sure_sets, sure_sets, st.data())
def test_a_gold_tuple_as_extraction_never_lowers_recall(
    gold: list[OpenTuple], found: list[OpenTuple], data: st.DataObject
) -> None:
    added = data.draw(st.sampled_from(gold))
    before, after = score(gold, found), score(gold, [*found, added])
    assert after.best.recall >= before.best.recall
    assert score([added], [*found, added]).best.recall == 1.0


@given(tuples, tuples)
def test_shares_lie_between_zero_and_one(gold: OpenTuple, found: OpenTuple) -> None:
    result = match(gold, found)
    assert all(0 <= share <= 1 for share in result)
    assert (result.precision == 0) == (result.recall == 0)


@given(st.lists(st.tuples(sets, st.lists(sure_tuples, max_size=5)), min_size=1, max_size=4))
@settings(max_examples=50)
def test_losses_add_up(rows: list[tuple[list[OpenTuple], list[OpenTuple]]]) -> None:
    result = carb_score(*zip(*rows, strict=True))
    lost = {side: sum(v for k, v in result.losses.items() if k.startswith(side)) for side in ("p", "r")}
    assert lost["r"] == pytest.approx(1 - result.best.recall)
    if result.n_found:
        assert lost["p"] == pytest.approx(1 - result.best.precision)


@given(sets, sets)
def test_recall_grows_as_less_sure_extractions_count(gold: list[OpenTuple], found: list[OpenTuple]) -> None:
    result = score(gold, found)
    recalls = [point.recall for point in result.curve]
    assert recalls == sorted(recalls)
    assert [point.confidence for point in result.curve] == sorted({t.confidence for t in found}, reverse=True)
    assert 0 <= result.auc <= 1


def test_agreement_by_hand() -> None:
    reference = Extracted(
        ["Ann Lee", "Rome"], [Triple("Ann Lee", "lives in", "Rome"), Triple("Ann Lee", "is", "poet")]
    )
    found = Extracted(["rome"], [Triple("ann lee", "related to", "ROME!"), Triple("Bob", "is", "baker")])
    shares = agreement([reference, Extracted(["Oslo"], [])], [found, Extracted([], [])])
    assert shares["arguments"] == (4, 3)
    assert shares["entities"] == (3, 2)
    assert shares["pairs"] == (2, 1)


triples = st.lists(st.builds(Triple, phrases, phrases, phrases), max_size=5)
extractions = st.lists(st.builds(Extracted, st.lists(phrases, max_size=4), triples), max_size=4)


@given(extractions)
def test_an_extraction_agrees_with_itself(extracted: list[Extracted]) -> None:
    assert all(share.found == share.total for share in agreement(extracted, extracted).values())


def test_the_share_of_nothing_is_none() -> None:
    assert agreement([], [])["pairs"].record() == {"total": 0, "found": 0, "share": None}
