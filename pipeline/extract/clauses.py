"""Triples with whole arguments: one per clause, in the words of the sentence.

The triples of the graph (``rules.py``) name things in a few words, resolve pronouns, and leave out what holds
no name. Here nothing is shortened or resolved, as OpenIE benchmarks expect it: the subject of a clause, its
verbs, and all that the verbs govern.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

from spacy.tokens import Doc, Token

from hippoindex.pipeline.extract.base import Triple
from hippoindex.pipeline.extract.phrases import RELATIVE_PRONOUNS, SUBJECT_DEPS, is_nominal, is_verb

_VERB_GROUP_DEPS = frozenset({"aux", "auxpass", "neg", "prt"})
_OBJECT_DEPS = frozenset({"dobj", "attr", "acomp", "oprd", "dative", "ccomp", "pcomp", "xcomp"})
_ADJUNCT_DEPS = frozenset({"prep", "agent", "npadvmod", "advmod"})
_COMPLEMENT_DEPS = _OBJECT_DEPS | _ADJUNCT_DEPS
_INHERITING_DEPS = frozenset({"conj", "advcl", "xcomp", "pcomp", "ccomp"})
#: What is not part of a noun phrase that stands for a subject.
_APART_DEPS = frozenset({"relcl", "acl", "appos", "cc", "conj", "preconj"})
_MAX_LIFTS = 8
_EDGES = " ,;:."


def clause_triples(doc: Doc) -> list[Triple]:
    """Return the triples of a parsed passage, without duplicates, in the order of their verbs and nouns.

    The object of a triple is what stands behind the verbs, then what stands before them. Adverbial and
    relative clauses are triples of their own.

    "In May the old mill was sold to Bob, a baker" has (the old mill, was sold to, Bob, a baker In May) and
    (Bob, is, a baker).

    Parameters
    ----------
    doc : spacy.tokens.Doc
        Tagged and parsed.
    """
    found: dict[Triple, None] = {}
    for token in doc:
        if is_verb(token) and not _continues(token):
            found.update(dict.fromkeys(_clause(token)))
        elif is_nominal(token):
            found.update(dict.fromkeys(_appositions(token)))
    return [triple for triple in found if all(triple)]


def _appositions(noun: Token) -> Iterator[Triple]:
    for child in noun.children:
        if child.dep_ == "appos" and is_nominal(child):
            yield Triple(_noun_phrase(noun), "is", _noun_phrase(child))


def _clause(verb: Token) -> Iterator[Triple]:
    verbs = _verbs(verb)
    relation = {token for link in verbs for token in _verb_group(link)}
    complements = {child for link in verbs for child in link.children if _is_complement(child)}
    complements.difference_update(verbs)
    inside = {child for child in complements if child.dep_ == "advmod" and _stands_in(child, relation)}
    relation.update(token for child in inside for token in child.subtree)
    complements -= inside
    words = {token for child in complements for token in _without_relative_clauses(child)}
    leading = _leading_word(min((c for c in complements if c.i > verb.i), default=None, key=_position))
    relation |= leading
    words -= leading
    after = _text(token for token in words if token.i > verb.i)
    before = _text(token for token in words if token.i < verb.i)
    gap = _gap(verb)
    told = [_noun_phrase(gap) if gap is not None else "", after, before]
    for subject in _subjects(verb, _MAX_LIFTS):
        yield Triple(_noun_phrase(subject), _text(relation), " ".join(filter(None, told)))


def _is_complement(child: Token) -> bool:
    return child.dep_ in _COMPLEMENT_DEPS and child.lower_ not in RELATIVE_PRONOUNS


def _gap(verb: Token) -> Token | None:
    """Return the object that stands before a relative clause: the songs in "the songs that Ann wrote"."""
    children = list(verb.children)
    if verb.dep_ != "relcl" or not is_nominal(verb.head) or any(child.tag_ == "WRB" for child in children):
        return None
    relative = {child.dep_ for child in children if child.lower_ in RELATIVE_PRONOUNS}
    objects = any(child.dep_ == "dobj" for child in children)
    prepositions = (child for child in children if child.dep_ == "prep")
    if any(inner.tag_ in {"WDT", "WP"} for child in prepositions for inner in child.children):
        return None
    if relative & SUBJECT_DEPS or (objects and "dobj" not in relative):
        return None
    return verb.head if any(child.dep_ == "nsubj" for child in children) else None


def _leading_word(complement: Token | None) -> set[Token]:
    """Return the word of the first complement that belongs to the relation: "led to", "said that"."""
    if complement is None:
        return set()
    if complement.dep_ in {"prep", "agent"} and complement.n_rights:
        return {complement}
    if complement.dep_ == "ccomp":
        return {child for child in complement.children if child.dep_ == "mark" and child.lower_ == "that"}
    return set()


def _stands_in(adverb: Token, relation: Collection[Token]) -> bool:
    """Whether an adverb stands between the verbs or directly before them: "is first mentioned"."""
    places = {token.i for token in relation}
    return min(places) < adverb.i < max(places) or adverb.i + 1 in places


def _subjects(verb: Token, lifts: int) -> list[Token]:
    """Return the head of a clause's subject; a clause without one has that of the clause above it."""
    above = verb.head
    for child in verb.children:
        if child.dep_ in SUBJECT_DEPS:
            if child.lower_ in RELATIVE_PRONOUNS and verb.dep_ == "relcl":
                return _described(above, lifts)
            return [child]
    if verb.dep_ in {"acl", "relcl"}:
        return _described(above, lifts)
    if lifts and verb.dep_ in _INHERITING_DEPS and above.i != verb.i and above.tag_.startswith("V"):
        return _subjects(above, lifts - 1)
    return []


def _described(noun: Token, lifts: int) -> list[Token]:
    """Return what a relative clause is about: Ann in "Ann is a poet who sings"."""
    if lifts and noun.dep_ == "attr":
        subjects = _subjects(noun.head, lifts - 1)
        if subjects:
            return subjects
    return [noun] if is_nominal(noun) else []


def _verb_group(verb: Token) -> list[Token]:
    return [verb, *(child for child in verb.children if child.dep_ in _VERB_GROUP_DEPS)]


def _verbs(verb: Token) -> list[Token]:
    """Return a verb and those that continue it: "wanted to sing"; not "asked Ann to sing"."""
    found = [verb]
    if not any(child.dep_ == "dobj" for child in verb.children):
        for child in verb.children:
            if is_verb(child) and _continues(child):
                found += _verbs(child)
    return found


def _continues(verb: Token) -> bool:
    own_subject = any(child.dep_ in SUBJECT_DEPS for child in verb.children)
    return verb.dep_ == "xcomp" and verb.head.tag_.startswith("V") and not own_subject


def _noun_phrase(head: Token) -> str:
    return _text(_noun_words(head))


def _noun_words(head: Token) -> Iterator[Token]:
    yield head
    for child in head.children:
        if child.dep_ not in _APART_DEPS and (child.dep_ != "punct" or child.i < head.i):
            yield from child.subtree


def _without_relative_clauses(head: Token) -> Iterator[Token]:
    yield head
    for child in head.children:
        if child.dep_ != "relcl":
            yield from _without_relative_clauses(child)


def _text(tokens: Iterable[Token]) -> str:
    """Return tokens as they stand in the text; a space fills each gap."""
    ordered = sorted(tokens, key=_position)
    if not ordered:
        return ""
    parts = [
        token.text_with_ws if following.i == token.i + 1 else f"{token.text} "
        for token, following in pairwise(ordered)
    ]
    return "".join([*parts, ordered[-1].text]).strip(_EDGES)


def _position(token: Token) -> int:
    return token.i
