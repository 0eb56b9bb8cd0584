"""Triples with whole arguments, one construction at a time."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Passage
from hippoindex.pipeline.extract.rules import RulesExtractor
from hippoindex.pipeline.extract.stage import ExtractStage


@pytest.fixture(scope="module")
def extractor() -> RulesExtractor:
    return RulesExtractor(whole_arguments=True)


# Each case: sentence, triples that must be there.
CONSTRUCTIONS = {
    "object and adjunct": (
        "In May the small firm bought an old mill near the river.",
        {("the small firm", "bought", "an old mill near the river In May")},
    ),
    "preposition joins the relation": (
        "Maria Lopez moved to the coast.",
        {("Maria Lopez", "moved to", "the coast")},
    ),
    "passive with an agent": (
        "The bridge was designed by a young engineer.",
        {("The bridge", "was designed by", "a young engineer")},
    ),
    "negation and auxiliaries": (
        "The farmers have not sold their land.",
        {("The farmers", "have not sold", "their land")},
    ),
    "adverb between the verbs": (
        "The village was first mentioned in an old letter.",
        {("The village", "was first mentioned in", "an old letter")},
    ),
    "chain of verbs": ("Jonas wanted to build a boat.", {("Jonas", "wanted to build", "a boat")}),
    "object that does what follows": (
        "The owner asked the boys to sing a song.",
        {("The owner", "asked", "the boys to sing a song")},
    ),
    "statement": ("The report says that prices rose.", {("The report", "says that", "prices rose")}),
    "coordinated verbs": (
        "The team won the cup and lost the league.",
        {("The team", "lost", "the league")},
    ),
    "relative clause": (
        "Ines found a tunnel that led to a cave.",
        {("Ines", "found", "a tunnel"), ("a tunnel", "led to", "a cave")},
    ),
    "relative clause with its own subject": (
        "The songs that the old choir sang were lost.",
        {("the old choir", "sang", "The songs")},
    ),
    "relative clause of a predicate": (
        "Ada Stone is a chemist who works in Oslo.",
        {("Ada Stone", "is", "a chemist"), ("Ada Stone", "works in", "Oslo")},
    ),
    "apposition": (
        "Ada Stone, a quiet chemist, left Oslo.",
        {("Ada Stone", "is", "a quiet chemist"), ("Ada Stone", "left", "Oslo")},
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_construction(extractor: RulesExtractor, name: str) -> None:
    text, expected = CONSTRUCTIONS[name]
    [extraction] = extractor.extract([Passage("p", "", text)])
    assert expected <= {tuple(triple) for triple in extraction.triples}


def test_what_has_no_name_is_kept_and_nothing_is_resolved(extractor: RulesExtractor) -> None:
    [whole] = extractor.extract([Passage("p", "Ada Stone", "She met old friends.")])
    [short] = RulesExtractor().extract([Passage("p", "Ada Stone", "She met old friends.")])
    assert [tuple(triple) for triple in whole.triples] == [("She", "met", "old friends")]
    assert [tuple(triple) for triple in short.triples] == [("Ada Stone", "met", "old friends")]
    assert whole.entities == short.entities


def test_only_the_rules_have_whole_arguments() -> None:
    with pytest.raises(ValidationError, match=r"needs extract\.engine=rules"):
        ExtractConfig(engine="openai", model="m", arguments="clauses")


def test_the_kind_of_arguments_is_part_of_the_key() -> None:
    names, clauses = (ExtractStage(ExtractConfig(arguments=kind)).key_part() for kind in ("names", "clauses"))
    assert names.items() < clauses.items()
