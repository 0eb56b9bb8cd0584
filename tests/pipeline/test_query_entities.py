from __future__ import annotations

import pytest
from spacy.language import Language

from hippoindex.errors import InputError
from hippoindex.pipeline.extract.query_entities import query_entities
from hippoindex.pipeline.extract.rules import open_nlp
from hippoindex.pipeline.normalise import unicode_phrase


@pytest.fixture(scope="module")
def nlp() -> Language:
    return open_nlp(None)


def ask(nlp: Language, question: str) -> list[str]:
    [entities] = query_entities(nlp, [question])
    return entities


def test_names_in_order_of_appearance(nlp: Language) -> None:
    found = ask(nlp, "Did Maria Lopez meet Omar Farouk in Cairo before 1990?")

    assert found == ["Maria Lopez", "Omar Farouk", "Cairo", "1990"]


def test_question_word_is_no_name(nlp: Language) -> None:
    for question in ("Which river crosses Vienna?", "Is Vienna on a river?", "The river in Vienna is which?"):
        assert ask(nlp, question) == ["Vienna"]


def test_question_word_of_a_second_sentence_is_no_name(nlp: Language) -> None:
    assert ask(nlp, "A bridge was built in Vienna. Who built it?") == ["Vienna"]


def test_capitalised_run_with_joining_words(nlp: Language) -> None:
    assert "Keeper of the Lost Lanterns" in ask(nlp, "who wrote Keeper of the Lost Lanterns?")


def test_year_belongs_to_a_run_only_behind_of(nlp: Language) -> None:
    assert "Harbour Act of 1869" in ask(nlp, "Who proposed the Harbour Act of 1869?")
    assert ask(nlp, "Who ruled Belgium in 1930?") == ["Belgium", "1930"]


def test_quoted_text(nlp: Language) -> None:
    for opening, closing in ('""', "“”", "«»"):
        assert "the quiet hours" in ask(nlp, f"who recorded {opening}the quiet hours{closing} first?")


def test_names_with_letters_of_other_alphabets(nlp: Language) -> None:
    assert ask(nlp, "Who taught Élodie Brännström?") == ["Élodie Brännström"]


def test_noun_phrases_where_there_is_no_name(nlp: Language) -> None:
    question = "what is the capital of the state whose largest lake is a crater?"

    assert ask(nlp, question) == ["capital", "state", "largest lake", "crater"]


def test_entities_are_unique_after_normalisation(nlp: Language) -> None:
    found = ask(nlp, 'Is "Harbour Lights" by Harbour Lights named after the song HARBOUR LIGHTS?')

    keys = [unicode_phrase(entity) for entity in found]
    assert len(keys) == len(set(keys))
    assert "harbour lights" in keys


@pytest.mark.parametrize("question", ["", "   ", "???", "😀", '""', "“”"])
def test_question_without_words(nlp: Language, question: str) -> None:
    assert ask(nlp, question) == []


def test_result_is_the_same_alone_and_in_a_batch(nlp: Language) -> None:
    questions = [f"Who founded {name} in {1900 + i}?" for i, name in enumerate(["Lima", "Oslo", "Bonn"] * 30)]
    questions.insert(7, "")

    together = query_entities(nlp, questions)

    assert len(together) == len(questions)
    assert [ask(nlp, question) for question in questions] == together


def test_too_long_a_question_is_named(nlp: Language) -> None:
    with pytest.raises(InputError, match=r"Question 1 .* 1,200,000 characters"):
        query_entities(nlp, ["Who?", "word " * 240_000])
