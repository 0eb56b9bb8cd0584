"""Named entities of questions: where a walk on the graph starts.

A question is short and its names decide everything, so more is taken than the entity recogniser finds: runs
of capitalised words, and what stands in quotation marks. A question without any gives its noun phrases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from spacy.language import Language
from spacy.tokens import Doc, Token
from thinc.backends import NumpyOps

from hippoindex.errors import InputError
from hippoindex.pipeline.extract.phrases import NounPhrases, Phrase, is_nominal
from hippoindex.pipeline.extract.rules import open_nlp
from hippoindex.pipeline.normalise import unicode_phrase

_BATCH_QUESTIONS = 256
_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|``(.+?)\'\'')
_JOINERS = frozenset({"of", "the", "and", "de", "&", "for", "in", "'s", "’s", "-", "–", ":", "!", "'"})
#: Joiners that as often stand between two names as inside one.
_SEPARATORS = frozenset({"in", "for", "and"})
#: Tags of words that are capitalised only because they open the question ("Which", "Is", "The", "After").
_OPENING_TAGS = frozenset({"WP", "WP$", "WDT", "WRB", "MD", "DT", "IN", "TO", "PRP", "PRP$", "PDT", "EX"})
_EDGES = " '\"?“”‘’`«»„,;:"


def open_question_nlp() -> Language:
    """Load the default spaCy model for questions, its products computed by numpy's BLAS.

    That is a third faster than spaCy's own, and rounds differently. Passages keep to spaCy's own, so that an
    index does not depend on numpy's.

    Raises
    ------
    ModelError
        See :func:`~hippoindex.pipeline.extract.rules.open_nlp`.
    """
    nlp = open_nlp(None)
    for _, component in nlp.pipeline:
        for node in component.model.walk():
            if type(node.ops) is NumpyOps:
                node.ops = NumpyOps(use_blis=False)
    return nlp


def query_entities(nlp: Language, questions: Sequence[str]) -> list[list[str]]:
    """Find the entities that questions ask about.

    Parameters
    ----------
    nlp : spacy.language.Language
        From :func:`open_question_nlp`.
    questions : sequence of str

    Returns
    -------
    list of list of str
        For each question its entities in order of appearance; of several with the same normalised text only
        the first. Empty if the question has neither a name nor a noun.

    Raises
    ------
    InputError
        If a question is longer than the spaCy pipeline accepts.
    """
    for number, question in enumerate(questions):
        if len(question) > nlp.max_length:
            raise InputError(
                f"Question {number} (counted from 0) has {len(question):,} characters; "
                f"at most {nlp.max_length:,} can be parsed"
            )
    texts = (" ".join(question.split()) for question in questions)
    return [_entities(doc) for doc in nlp.pipe(texts, batch_size=_BATCH_QUESTIONS)]


def _entities(doc: Doc) -> list[str]:
    phrases = NounPhrases(doc, "")
    found = [*_mentions(phrases), *_capitalised_runs(phrases), *_quotations(doc.text)]
    if not found:
        found = list(_noun_phrases(phrases))
    unique: dict[str, str] = {}
    for _, text in sorted(found, key=lambda item: item[0]):
        key = unicode_phrase(text)
        if key:
            unique.setdefault(key, text)
    return list(unique.values())


def _mentions(phrases: NounPhrases) -> Iterator[tuple[int, str]]:
    """Yield what the entity recogniser found, with its first character."""
    for mention in phrases.mentions:
        yield from _placed(phrases, phrases.mention_phrase(mention))


def _noun_phrases(phrases: NounPhrases) -> Iterator[tuple[int, str]]:
    for token in phrases.tokens:
        if is_nominal(token) and phrases.is_chunk_head(token):
            yield from _placed(phrases, phrases.phrase(token))


def _placed(phrases: NounPhrases, phrase: Phrase | None) -> Iterator[tuple[int, str]]:
    if phrase is not None:
        yield phrases.tokens[phrase.start].idx, phrase.text


def _quotations(text: str) -> Iterator[tuple[int, str]]:
    for match in _QUOTED.finditer(text):
        quoted = next(group for group in match.groups() if group is not None).strip(_EDGES)
        yield match.start(), quoted


def _capitalised_runs(phrases: NounPhrases) -> Iterator[tuple[int, str]]:
    """Yield runs of capitalised words and years with joining words inside: "Lord of the Flies"."""
    run: list[Token] = []
    for i, token in enumerate(phrases.tokens):
        if _is_capitalised(token) or (run and _joins(phrases, i)):
            run.append(token)
        elif run:
            yield _run_text(run)
            run = []
    if run:
        yield _run_text(run)


def _is_capitalised(token: Token) -> bool:
    text = token.text
    if text[0].isdigit():
        return len(text) == 4 and text.isdigit()
    if token.is_sent_start and (token.tag_ in _OPENING_TAGS or token.tag_.startswith("V")):
        return False
    return text[0].isupper()


def _joins(phrases: NounPhrases, i: int) -> bool:
    """Whether a run goes on behind a joining word: with a capital, or with a year after "of"."""
    tokens = phrases.tokens
    word, following = tokens[i].lower_, i + 1
    if word not in _JOINERS or (word in _SEPARATORS and _is_between_entities(phrases, i)):
        return False
    if word == "of" and following < len(tokens) and tokens[following].lower_ == "the":
        word, following = "the", following + 1
    if following >= len(tokens) or not _is_capitalised(tokens[following]):
        return False
    return word == "of" or tokens[following].text[0].isupper()


def _is_between_entities(phrases: NounPhrases, i: int) -> bool:
    """Whether a word stands between two entities and in neither: "Ann Lee in Rome"."""
    at = phrases.mention_at
    return i not in at and i - 1 in at and i + 1 in at


def _run_text(run: list[Token]) -> tuple[int, str]:
    text = "".join(token.text_with_ws for token in run).strip(_EDGES)
    return run[0].idx, text
