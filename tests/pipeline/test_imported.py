from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.errors import InputError
from hippoindex.pipeline.extract.base import Extraction, Passage, Triple
from hippoindex.pipeline.extract.imported import (
    MAX_STRING_CHARS,
    ImportedExtractor,
    RejectedEntity,
    parse_entities,
    parse_triples,
)

MILL = {
    "idx": 0,
    "passage": "Corbel Mill\nCorbel Mill grinds rye in Aldery.",
    "extracted_entities": ["Corbel Mill", "Aldery"],
    "extracted_triples": [["Corbel Mill", "grinds", "rye"], ["Corbel Mill", "is in", "Aldery"]],
}
MILL_PASSAGE = Passage("m", "Corbel Mill", "Corbel Mill grinds rye in Aldery.")


def write(folder: Path, docs: object) -> Path:
    path = folder / "openie_results_ner_test.json"
    path.write_text(json.dumps({"docs": docs, "avg_ent_chars": float("nan")}), encoding="utf-8")
    return path


def extract_one(folder: Path, doc: dict[str, object], passage: Passage = MILL_PASSAGE) -> Extraction:
    (extraction,) = ImportedExtractor(write(folder, [doc])).extract([passage])
    return extraction


@pytest.mark.parametrize(
    "keys",
    [
        {"passage": MILL["passage"]},
        {"passage": MILL["passage"], "title": "Corbel Mill", "text": "another text"},
        {"passage": "Corbel  Mill\n\nCorbel Mill grinds\trye in Aldery. "},
        {"passage": "Corbel Mill grinds rye in Aldery."},
        {"text": "Corbel Mill grinds rye in Aldery."},
        {"text": "Corbel Mill grinds rye in Aldery.", "title": "Corbel Mill"},
    ],
)
def test_joins_by_title_and_text_or_text_alone(tmp_path: Path, keys: dict[str, str]) -> None:
    doc = {name: MILL[name] for name in ("extracted_entities", "extracted_triples")} | keys
    assert extract_one(tmp_path, doc) == Extraction(
        entities=["Corbel Mill", "Aldery"],
        triples=[Triple("Corbel Mill", "grinds", "rye"), Triple("Corbel Mill", "is in", "Aldery")],
        rejected=[],
    )


def test_title_and_text_go_before_text_alone(tmp_path: Path) -> None:
    bare = MILL | {"passage": MILL_PASSAGE.text, "extracted_entities": ["bare"]}
    extractor = ImportedExtractor(write(tmp_path, [bare, MILL]))
    titled, untitled = extractor.extract([MILL_PASSAGE, MILL_PASSAGE._replace(title="")])
    assert titled.entities == ["Corbel Mill", "Aldery"]
    assert untitled.entities == ["bare"]


def test_a_passage_that_is_not_in_the_file_is_missing_and_an_empty_entry_is_not(tmp_path: Path) -> None:
    empty = MILL | {"extracted_entities": [], "extracted_triples": []}
    extractor = ImportedExtractor(write(tmp_path, [empty]))
    other = Passage("o", "", "A text that nobody has read.")
    assert extractor.extract([other, MILL_PASSAGE, MILL_PASSAGE]) == [
        Extraction(missing=True),
        Extraction([], [], []),
        Extraction([], [], []),
    ]
    assert (extractor.passages, extractor.joined) == (1, 2)


def test_malformed_triples_are_rejected_by_kind_and_the_others_kept(tmp_path: Path) -> None:
    triples = [
        ["Mira", "paints"],
        ["Mira", "paints", "boats", "at dawn"],
        [],
        None,
        "Mira paints boats",
        {"subject": "Mira"},
        [None, "paints", "boats"],
        ["Mira", "paints", 7],
        ["Mira", " \t", "boats"],
        ["Mira", "paints", "b" * (MAX_STRING_CHARS + 1)],
        ["Mira", "paints", "\ud83d"],
        [" Mira ", "paints", "boats\n"],
    ]
    extraction = extract_one(tmp_path, MILL | {"extracted_triples": triples})
    assert extraction.triples == [Triple("Mira", "paints", "boats")]
    assert [rejected.reason for rejected in extraction.rejected] == [
        "triple has 2 fields instead of 3",
        "triple has 4 fields instead of 3",
        "triple has 0 fields instead of 3",
        "triple is not a list (NoneType)",
        "triple is not a list (str)",
        "triple is not a list (dict)",
        "subject is null",
        "object is not a string (int)",
        "predicate is empty",
        "object is longer than 1,000 characters",
        "object is not valid Unicode (lone surrogate)",
    ]
    assert json.loads(extraction.rejected[0].raw) == ["Mira", "paints"]


def test_odd_entities_are_rejected_and_repeated_ones_dropped(tmp_path: Path) -> None:
    entities = ["Mira", {"name": "Mira"}, "湖", None, 1931, "", " Mira", "湖"]
    extraction = extract_one(tmp_path, MILL | {"extracted_entities": entities})
    assert extraction.entities == ["Mira", "湖"]
    assert [(type(r), r.reason, r.raw) for r in extraction.rejected] == [
        (RejectedEntity, "entity is not a string (dict)", '{"name": "Mira"}'),
        (RejectedEntity, "entity is null", "null"),
        (RejectedEntity, "entity is not a string (int)", "1931"),
        (RejectedEntity, "entity is empty", '""'),
    ]


def test_a_repeated_entry_is_harmless_and_a_contradicting_one_is_rejected_item_by_item(
    tmp_path: Path,
) -> None:
    contradicting = MILL | {"extracted_entities": ["Aldery"], "extracted_triples": [["rye", "is", "ground"]]}
    extractor = ImportedExtractor(write(tmp_path, [MILL, MILL, contradicting]))
    (extraction,) = extractor.extract([MILL_PASSAGE])
    assert extractor.passages == 1
    assert extraction.entities == ["Corbel Mill", "Aldery"]
    assert len(extraction.triples) == 2
    reason = "docs[2] repeats the passage of docs[0] with other results"
    assert extraction.rejected == [(reason, '"Aldery"'), (reason, '["rye", "is", "ground"]')]


def test_gzip_reads_as_plain(tmp_path: Path) -> None:
    plain = write(tmp_path, [MILL])
    packed = tmp_path / "results.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = ImportedExtractor(plain).extract([MILL_PASSAGE])
    assert ImportedExtractor(packed).extract([MILL_PASSAGE]) == expected
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-9])
    with pytest.raises(InputError, match="damaged gzip"):
        ImportedExtractor(packed)


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        ("a text", r"docs\[1\] is not a JSON object but str"),
        (
            {"extracted_entities": [], "extracted_triples": []},
            r'docs\[1\] has neither a "passage" nor a "text"',
        ),
        (MILL | {"passage": "  "}, r'docs\[1\] has neither a "passage" nor a "text"'),
        (MILL | {"extracted_triples": None}, r'docs\[1\].*"extracted_triples", got NoneType'),
        ({"passage": "x", "extracted_triples": []}, r'docs\[1\].*"extracted_entities", got nothing'),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(tmp_path: Path, doc: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImportedExtractor(write(tmp_path, [MILL, doc]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "holds no OpenIE results"),
        (b'{"docs": {}}', "holds no OpenIE results"),
        (b'{"docs": [', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        ImportedExtractor(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot read the OpenIE results"):
        ImportedExtractor(tmp_path / "nowhere.json")


ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too: JSON can spell them
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=2),
    max_leaves=6,
)


@given(st.lists(JSON_VALUES | st.lists(ANY_TEXT, min_size=3, max_size=3)))
def test_every_triple_is_kept_or_rejected_and_what_is_kept_passes_again(values: list[object]) -> None:
    triples, rejected = parse_triples(values)
    assert len(triples) + len(rejected) == len(values)
    assert all(part and part == part.strip() for triple in triples for part in triple)
    assert all(item.reason and item.raw.encode() for item in rejected)
    assert parse_triples(triples) == (triples, [])


@given(st.lists(JSON_VALUES))
def test_every_entity_is_kept_repeated_or_rejected(values: list[object]) -> None:
    entities, rejected = parse_entities(values)
    good = {value.strip() for value in values if isinstance(value, str) and value.strip()}
    assert len(entities) == len(set(entities))
    assert set(entities) | {json.loads(item.raw) for item in rejected if item.raw.startswith('"')} >= good
    assert sum(not isinstance(value, str) for value in values) <= len(rejected)


def test_the_results_published_with_hipporag_join_their_corpus(data_dir: Path) -> None:
    folder = data_dir / "musique_train_100"
    extractor = ImportedExtractor(folder / "openie_results_ner_gpt-3.5-turbo-1106.json")
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    found = extractor.extract([Passage(row["id"], row["title"], row["text"]) for row in rows])

    assert extractor.joined == extractor.passages == len(rows) == 1_890
    assert not any(extraction.missing for extraction in found)
    assert sum(len(extraction.triples) for extraction in found) == 17_419 - 185
    assert Counter(item.reason for extraction in found for item in extraction.rejected) == {
        "triple has 4 fields instead of 3": 112,
        "triple has 2 fields instead of 3": 70,
        "triple has 5 fields instead of 3": 2,
        "triple has 6 fields instead of 3": 1,
    }
    without_triples = [extraction for extraction in found if not extraction.triples]
    assert len(without_triples) == 2
    assert all(extraction.entities and not extraction.rejected for extraction in without_triples)
