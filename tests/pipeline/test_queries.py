from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.errors import InputError
from hippoindex.pipeline.config import CorpusConfig
from hippoindex.pipeline.corpus import CorpusReader
from hippoindex.pipeline.queries import PassageLookup, Query, read_queries

PASSAGES = [
    ("p1", "Hive", "A hive is a box.  Bees live in it."),
    ("p2", "Wax", "Wax is made by bees."),
    ("p3", "Wax", "Wax is also a record."),
    ("p4", "Honey", "Honey is sweet."),
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(tmp_path, *records, passages=None):
    return read_queries(write(tmp_path / "queries.jsonl", records), passages)


# --- our own shape

OWN = {
    "id": "q-a",
    "type": "2hop",
    "question": "Where do bees live?",
    "gold": ["p1", "p2", "p1"],
    "answer": "a hive",
    "answer_aliases": ["hive", "a hive", ""],
    "named_entities": ["Bees"],
}
OWN_READ = Query("q-a", "Where do bees live?", ("p1", "p2"), ("a hive", "hive"), ("Bees",))


def test_a_query_is_read_with_all_its_fields(tmp_path):
    result = read(tmp_path, OWN)
    assert result.queries == [OWN_READ]
    assert (result.unresolved_gold, result.source) == (0, "queries.jsonl")


def test_lists_and_gzip_files_are_read_alike(tmp_path):
    as_list = tmp_path / "list.json"
    as_list.write_text(" \n" + json.dumps([OWN], indent=1), encoding="utf-8-sig")
    as_gzip = tmp_path / "lines.jsonl.gz"
    as_gzip.write_bytes(gzip.compress(json.dumps(OWN).encode()))
    assert read_queries(as_list).queries == read_queries(as_gzip).queries == [OWN_READ]


def test_a_question_alone_is_enough(tmp_path):
    result = read(
        tmp_path, {"question": "Who?"}, {"id": "", "question": "What?"}, {"id": 7, "question": "Why?"}
    )
    assert result.queries == [Query("q0", "Who?"), Query("q1", "What?"), Query("7", "Why?")]


def test_numbers_as_gold_ids_and_answers_become_strings(tmp_path):
    (query,) = read(tmp_path, {"question": "How many?", "gold": [7, "08"], "answer": 35}).queries
    assert (query.gold, query.answers) == (("7", "08"), ("35",))


def test_no_entities_and_unknown_entities_are_told_apart(tmp_path):
    result = read(tmp_path, {"question": "Who?", "named_entities": []}, {"question": "What?"})
    assert [query.entities for query in result.queries] == [(), None]


def test_a_list_of_answers_is_read(tmp_path):
    (query,) = read(
        tmp_path, {"question": "Who?", "answer": ["Ann", "Anna"], "answer_aliases": ["A."]}
    ).queries
    assert query.answers == ("Ann", "Anna", "A.")


# --- shapes of the data sets

MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {
            "idx": 0,
            "title": "Hive",
            "paragraph_text": "A hive is a box. Bees live in it.",
            "is_supporting": True,
        },
        {"idx": 1, "title": "Honey", "paragraph_text": "Honey is sweet.", "is_supporting": False},
        {"idx": 2, "title": "Wax", "paragraph_text": "Wax is also a record.", "is_supporting": True},
    ],
    "question": "What is in the box?",
    "question_decomposition": [],
    "answer": "bees",
    "answer_aliases": ["the bees"],
    "answerable": True,
}
HOTPOTQA = {
    "_id": "5a7a06935542990198eaf050",
    "answer": "yes",
    "question": "Is honey kept in a hive?",
    "supporting_facts": [["Hive", 0], ["Hive", 1], ["Honey", 0]],
    "context": [
        ["Hive", ["A hive is a box.", " Bees live in it."]],
        ["Wax", ["Wax is made by bees."]],
        ["Honey", ["Honey is ", "sweet."]],
    ],
    "type": "comparison",
    "level": "hard",
}


def test_musique_names_gold_by_title_and_text(tmp_path):
    result = read(tmp_path, MUSIQUE, passages=PassageLookup(PASSAGES))
    assert result.queries == [Query("2hop__1_2", MUSIQUE["question"], ("p1", "p3"), ("bees", "the bees"))]
    assert result.unresolved_gold == 0


@pytest.mark.parametrize("field", ["paragraphs", "contexts"])
def test_paragraphs_may_call_their_text_text(tmp_path, field):
    paragraphs = [{"title": "Wax", "text": "Wax is made by bees.", "is_supporting": True}]
    result = read(tmp_path, {"question": "Who?", field: paragraphs}, passages=PassageLookup(PASSAGES))
    assert result.queries[0].gold == ("p2",)


def test_hotpotqa_names_gold_by_supporting_facts(tmp_path):
    result = read(tmp_path, HOTPOTQA, passages=PassageLookup(PASSAGES))
    assert result.queries == [Query(HOTPOTQA["_id"], HOTPOTQA["question"], ("p1", "p4"), ("yes",))]
    assert result.unresolved_gold == 0


def test_sentences_of_2wikimultihopqa_come_without_spaces_between(tmp_path):
    record = {
        **HOTPOTQA,
        "supporting_facts": [["Wax", 0]],
        "context": [["Wax", ["Wax is", "also a record."]]],
    }
    assert read(tmp_path, record, passages=PassageLookup(PASSAGES)).queries[0].gold == ("p3",)


def test_a_gold_passage_that_is_not_found_is_counted_and_left_out(tmp_path):
    facts = [["Hive", 0], ["Pollen", 0], ["Wax", 0]]
    context = [["Hive", ["An edited text."]], ["Wax", ["Text of neither."]]]
    record = {**HOTPOTQA, "supporting_facts": facts, "context": context}
    result = read(tmp_path, record, MUSIQUE, passages=PassageLookup(PASSAGES))
    assert result.queries[0].gold == ("p1",)  # the only passage of that title
    assert result.unresolved_gold == 2


def test_without_a_lookup_named_gold_is_unresolved(tmp_path):
    result = read(tmp_path, MUSIQUE, HOTPOTQA, OWN)
    assert [query.gold for query in result.queries] == [(), (), ("p1", "p2")]
    assert result.unresolved_gold == 4


# --- the lookup


def test_the_lookup_prefers_title_and_text_and_takes_the_title_if_only_one_has_it():
    lookup = PassageLookup(PASSAGES)
    assert lookup.find("Wax", "Wax is  made\nby bees.") == "p2"
    assert lookup.find(" Hive ", "another edition") == "p1"
    assert lookup.find("Hive") == "p1"
    assert lookup.find("Wax") is None
    assert lookup.find("Wax", "Text of neither.") is None
    assert lookup.find("Pollen", "Wax is made by bees.") is None


def test_of_equal_passages_the_first_is_found():
    assert PassageLookup([("b", "T", "x"), ("a", "T", "x")]).find("T", "x") == "b"


@given(st.lists(st.tuples(st.sampled_from("TUV"), st.text("ab \n", max_size=6)), max_size=8))
def test_every_passage_is_found_by_title_and_text_however_it_is_spaced(contents):
    lookup = PassageLookup((str(i), title, text) for i, (title, text) in enumerate(contents))
    for title, text in contents:
        found = lookup.find(title, " ".join(text))
        assert found is not None
        found_title, found_text = contents[int(found)]
        assert (found_title, "".join(found_text.split())) == (title, "".join(text.split()))


# --- errors


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "x", "query": "Who?"}, "no question; fields seen: id, query"),
        ({"question": " "}, "no question"),
        ({"question": ["Who?"]}, "the field 'question' is a list"),
        ({"question": "Who?", "id": True}, "the field 'id' is a boolean"),
        ({"question": "Who?", "gold": "p1"}, "the field 'gold' must be a list"),
        ({"question": "Who?", "gold": ["p1", None]}, "the field 'gold' holds an empty passage id"),
        ({"question": "Who?", "gold": [["p1"]]}, "the field 'gold' is a list, not a string"),
        ({"question": "Who?", "answer": {"text": "x"}}, "the field 'answer' is an object"),
        ({"question": "Who?", "answer_aliases": "x"}, "the field 'answer_aliases' must be a list"),
        ({"question": "Who?", "named_entities": "Ann"}, "the field 'named_entities' must be a list"),
        ({"question": "Who?", "paragraphs": {}}, "the field 'paragraphs' must be a list"),
        ({"question": "Who?", "paragraphs": ["x"]}, "the field 'paragraphs' must be a list of objects"),
        ({"question": "Who?", "supporting_facts": [["x", 0]]}, "the field 'context' must be a list"),
        ({"question": "Who?", "supporting_facts": ["x"], "context": []}, "must be a list of pairs"),
        ({"question": "Who?", "supporting_facts": [], "context": [["x", "y"]]}, "'context' must be a list"),
        (["Who?"], "the record is a list, not an object"),
    ],
)
def test_a_malformed_record_is_refused_with_its_place(tmp_path, record, message):
    path = write(tmp_path / "queries.jsonl", [OWN, record])
    with pytest.raises(InputError) as caught:
        read_queries(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("second", [OWN, {"id": "q0", "question": "Who?"}])
def test_an_id_used_twice_is_refused_with_both_places(tmp_path, second):
    first = OWN if second is OWN else {"question": "What?"}
    path = write(tmp_path / "queries.jsonl", [first, {"question": "Why?"}, second])
    with pytest.raises(InputError) as caught:
        read_queries(path)
    assert str(caught.value).startswith(f"{path}:3: the query id ")
    assert f"already used at {path}:1" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no questions"),
        (b"[]", "holds no questions"),
        (b'{"question": "Who?"', ":1: not valid JSON"),
        (b'{"question": "\xff"}', ":1: not valid UTF-8"),
        (b'[{"question": "Who?"}', "not valid JSON"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path, data, message):
    path = tmp_path / "queries.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read_queries(path)
    assert str(path) in str(caught.value)
    assert "corpus" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl: the file cannot be read"):
        read_queries(tmp_path / "nowhere.jsonl")


@given(st.binary(max_size=100))
def test_arbitrary_bytes_never_pass_as_questions(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "queries.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError):
        read_queries(path)


# --- real data


@pytest.mark.parametrize(
    ("folder", "count", "gold"),
    [
        ("musique_train_100", 100, 237),
        ("hotpot_train_100", 100, 200),
        ("2wiki_dev_375", 375, 918),
        ("path_finding", 4, 10),
    ],
)
def test_the_real_queries_point_to_passages_of_their_corpora(data_dir, folder, count, gold):
    result = read_queries(data_dir / folder / "queries.jsonl")
    documents = {
        d.doc_id: d for d in CorpusReader(CorpusConfig(path=(str(data_dir / folder / "corpus.jsonl"),)))
    }
    assert len(result.queries) == count
    assert sum(len(query.gold) for query in result.queries) == gold
    assert {passage for query in result.queries for passage in query.gold} <= documents.keys()


@pytest.mark.parametrize("folder", ["musique_train_100", "hotpot_train_100", "path_finding"])
def test_gold_named_by_title_and_text_resolves_to_the_ids_of_a_real_corpus(data_dir, tmp_path, folder):
    documents = {
        d.doc_id: d for d in CorpusReader(CorpusConfig(path=(str(data_dir / folder / "corpus.jsonl"),)))
    }
    expected = read_queries(data_dir / folder / "queries.jsonl").queries
    lookup = PassageLookup((d.doc_id, d.title, d.text) for d in documents.values())
    as_musique = [
        {
            "id": query.query_id,
            "question": query.question,
            "paragraphs": [
                {"title": documents[i].title, "paragraph_text": documents[i].text, "is_supporting": True}
                for i in query.gold
            ],
        }
        for query in expected
    ]
    result = read_queries(write(tmp_path / "musique.jsonl", as_musique), lookup)
    assert [query.gold for query in result.queries] == [query.gold for query in expected]
    assert result.unresolved_gold == 0
