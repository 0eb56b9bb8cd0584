"""What is asked of a language model at question time and made of its answers, without one."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hippoindex.errors import UsageError
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.answers import ReadAnswer, counts_of, extract_answer, score_answers
from hippoindex.pipeline.reader.ircot import Chain, first_sentence
from hippoindex.pipeline.reader.model import Failure
from hippoindex.pipeline.reader.prompts import PassageText, load_reader_prompts
from hippoindex.pipeline.reader.recognition import match_facts
from hippoindex.pipeline.reader.squad import exact_match, normalise_answer, token_f1
from hippoindex.pipeline.retrieve.base import Fact

WORDS = st.lists(st.sampled_from(["river", "Asker", "1871", "mill", "Zoë"]), min_size=1, max_size=6)

# --- exact match and F1


@given(st.text())
def test_a_normalised_answer_is_normal(text: str) -> None:
    normal = normalise_answer(text)
    assert normalise_answer(normal) == normal
    assert normal == " ".join(normal.split())
    assert not set(normal) & set(string.punctuation)
    assert not {"a", "an", "the"} & set(normal.split())


@given(WORDS, st.data())
def test_case_articles_punctuation_and_space_do_not_count(words: list[str], data: st.DataObject) -> None:
    noise = st.sampled_from(["  ", " the ", " A ", " an, ", ". ", "\n"])
    dressed = "".join(data.draw(noise) + word.upper() for word in words)
    assert exact_match(dressed, [" ".join(words)]) == 1.0
    assert token_f1(dressed, [" ".join(words)]) == 1.0


@given(st.text(), st.lists(st.text(), min_size=1, max_size=4))
def test_scores_are_bounded_and_best_over_aliases(answer: str, references: list[str]) -> None:
    f1, exact = token_f1(answer, references), exact_match(answer, references)
    assert 0.0 <= exact <= f1 <= 1.0
    assert f1 == max(token_f1(answer, [reference]) for reference in references)
    assert exact == max(exact_match(answer, [reference]) for reference in references)
    assert exact_match(answer, [*references, answer]) == 1.0


@given(st.text(), st.text())
def test_f1_does_not_care_which_is_the_answer(one: str, other: str) -> None:
    assert token_f1(one, [other]) == token_f1(other, [one])


def test_f1_counts_words() -> None:
    assert token_f1("the hills of Tarvia", ["Tarvia"]) == pytest.approx(2 * 1 * (1 / 3) / (1 + 1 / 3))
    assert token_f1("mill mill", ["mill"]) == pytest.approx(2 / 3)
    assert token_f1("Corran", ["Tarvia"]) == 0.0
    assert token_f1("", ["Tarvia"]) == 0.0
    assert token_f1("The.", ["a"]) == 1.0  # nothing is left of either


def test_questions_without_a_right_answer_are_counted_and_not_scored() -> None:
    queries = [
        Query("1", "?", answers=("Tarvia", "Tarvian hills")),
        Query("2", "?"),
        Query("3", "?", answers=("x",)),
    ]
    answers = [
        ReadAnswer("the Tarvian hills", "", []),
        ReadAnswer("Lissow", "", [], marked=False),
        ReadAnswer("", "", [], error="the server refused the request"),
    ]
    scores = score_answers(answers, queries)
    assert scores.exact_match == [100.0, None, 0.0]
    assert scores.summary() == {"exact_match": 50.0, "f1": 50.0}
    assert counts_of(answers, queries) == {
        "questions": 3,
        "answered": 2,
        "failed": 1,
        "unmarked": 1,
        "without_reference": 1,
    }


# --- answers and thoughts


@pytest.mark.parametrize(
    ("text", "answer", "marked"),
    [
        ("Thought: It rises in the hills.\nAnswer: Tarvia.", "Tarvia", True),
        ("Answer: no\nBut wait.\n**Answer:** **River Asker**", "River Asker", True),
        ("**Final answer**: yes\nThat is all.", "yes", True),
        ("It rises there. So the answer is: U.S. Steel.", "U.S. Steel", True),
        ("Answer:\n  1871", "1871", True),
        ("<think>Answer: none</think>Answer: Lissow", "Lissow", True),
        ("It rises in the hills.\nTarvia\n\n", "Tarvia", False),
        ("Thought: It is Tarvia", "It is Tarvia", False),
        ("The answers differ: one", "The answers differ: one", False),
        ("Answer:", "", True),
        ("", "", False),
    ],
)
def test_the_answer_is_behind_its_last_mark(text: str, answer: str, marked: bool) -> None:
    assert extract_answer(text) == (answer, marked)


@given(st.text())
@example("0\x1f_")
def test_any_text_has_an_answer_of_one_line_or_none(text: str) -> None:
    answer, _ = extract_answer(text)
    assert answer == answer.strip()
    assert len(answer.splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Orla Fenwick built Corran Mill. It stands on the Asker.", "Orla Fenwick built Corran Mill."),
        ("So the answer is: St. Ives. It is there.\nMore.", "So the answer is: St. Ives. It is there."),
        ("<think>Hm. Well.</think>\nShe lived in Lissow.", "She lived in Lissow."),
        ("It is Tarvia\nIt is Tarvia\nIt is", "It is Tarvia"),
        (" \n", None),
    ],
)
def test_a_thought_is_one_sentence(text: str, sentence: str | None) -> None:
    assert first_sentence(text) == sentence


def test_a_chain_keeps_the_best_score_of_a_passage_and_ends_by_an_answer() -> None:
    chain = Chain("?")
    chain.add([7, 3, 5], [1.0, 0.5, 0.0])
    chain.think("Orla built Corran Mill.")
    chain.add([5, 9, 7], [1.0, 0.5, 0.0])
    assert chain.best(4) == [7, 5, 3, 9]  # of equal scores the earlier found one is first
    assert chain.is_open
    chain.think("so the Answer is: Tarvia")
    assert not chain.is_open
    failed = Chain("?")
    failed.think(Failure("no answer"))
    assert (failed.is_open, failed.error, failed.thoughts) == (False, "no answer", [])


# --- facts

FACTS = [
    Fact("orla fenwick", "built", "corran mill"),
    Fact("corran mill", "stands on", "river asker"),
    Fact("corran mill", "Stands on", "river asker"),
]


def test_kept_facts_are_among_the_given_ones() -> None:
    assert match_facts([["corran mill", "stands on", "river asker"]], FACTS) == ([1], 0)
    assert match_facts([["Corran  Mill", "STANDS ON", "River Asker."]], FACTS) == ([1, 2], 0)
    bad = [
        ["orla fenwick", "wrote", "songs"],
        ["orla fenwick", "built"],
        "orla fenwick built corran mill",
        None,
        [1, 2, 3],
    ]
    assert match_facts([*bad, list(FACTS[0]), list(FACTS[0])], FACTS) == ([0], 5)
    assert match_facts([], FACTS) == ([], 0)


@given(
    st.lists(st.tuples(st.text(), st.text(), st.text()).map(lambda parts: Fact(*parts)), unique=True),
    st.data(),
)
def test_facts_that_are_copied_are_kept_and_no_others(facts: list[Fact], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(facts) - 1), unique=True)) if facts else []
    assert match_facts([list(facts[n]) for n in positions], facts) == (sorted(positions), 0)


# --- prompts


def test_prompts_hold_what_they_ask_about_as_it_is() -> None:
    prompts = load_reader_prompts()
    passages = [PassageText("Mill {question}", "A {facts} text"), PassageText("Asker", "rises")]
    thought = prompts.thought.ask(passages, "Where?", ["One.", "Two."])
    assert "[1] Mill {question}\nA {facts} text\n\n[2] Asker\nrises" in thought[-1]["content"]
    assert "Where?" in thought[-1]["content"]
    assert "One.\nTwo." in thought[-1]["content"]
    answer = prompts.answer.ask(passages, "Where?")
    assert [message["role"] for message in answer] == ["system", "user", "assistant", "user"]
    assert answer[2]["content"].endswith("Answer: Tarvia")
    facts = prompts.recognition.ask("Where?", FACTS)
    assert '["corran mill", "stands on", "river asker"]' in facts[-1]["content"]
    assert answer[:-1] == prompts.answer.ask([], "Who?")[:-1]  # the beginning is the same for all questions


def test_a_file_of_prompts_needs_its_placeholders(tmp_path: Path) -> None:
    tree = load_reader_prompts().model_dump(mode="json")
    file = tmp_path / "prompts.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert load_reader_prompts(file).digest == load_reader_prompts().digest
    tree["answer"]["instruction"] = "What is it?"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(UsageError, match=r"answer\.instruction.*must hold \{passages\} exactly once"):
        load_reader_prompts(file)
    with pytest.raises(UsageError, match=r"reader\.prompts"):
        load_reader_prompts(tmp_path / "none.yaml")
