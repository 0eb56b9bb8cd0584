"""Rule-based OpenIE: triples read off a dependency parse, one rule per construction.

A passage is parsed once. Rules for noun phrases (apposition, possessor, preposition, modifier) are chosen by
the dependency of a noun's child, rules for clauses (object, preposition, adjective, date) by that of a verb's
child. Every named entity that no rule has reached is then tied to the phrase it stands in, or to the subject
of its sentence, so that none is missing from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import spacy
from spacy.language import Language
from spacy.tokens import Doc, Token

from hippoindex.errors import ModelError
from hippoindex.pipeline.extract.base import Extraction, Passage, Triple
from hippoindex.pipeline.extract.clauses import clause_triples
from hippoindex.pipeline.extract.mentions import NAME, NAMED_LABELS, PLACE_LABELS, PROPER_TAGS, Mention
from hippoindex.pipeline.extract.phrases import (
    BE_FORMS,
    PART_NOUNS,
    RELATIVE_PRONOUNS,
    SUBJECT_DEPS,
    NounPhrases,
    Phrase,
    entities,
    entity_phrases,
    is_nominal,
    is_verb,
    names_something,
)
from hippoindex.pipeline.models import model_path
from hippoindex.pipeline.normalise import unicode_phrase

DEFAULT_MODEL = "en_core_web_sm"
UNUSED_COMPONENTS = ("lemmatizer", "attribute_ruler", "senter")
_BATCH_PASSAGES = 64
_MAX_LIFTS = 8
_OBJECT_DEPS = frozenset({"dobj", "attr", "oprd", "dative"})
_MODIFIER_DEPS = frozenset({"amod", "compound", "nmod"})
_PREPOSITION_DEPS = frozenset({"prep", "agent"})
_INHERITING_DEPS = frozenset({"conj", "xcomp", "advcl", "ccomp"})
_NESTED_PREPOSITIONS = frozenset({"of", "in", "to", "for", "with", "by", "from", "at", "on"})
_DASHES = frozenset({"-", "–", "—", "to", "until"})
_DEATH_WORDS = frozenset({"died", "d.", "†", "death"})
_BIRTH_WORDS = frozenset({"born", "b.", "*", "birth"})
_PERSON_LABELS = frozenset({"PERSON", NAME})
_NON_FINITE_BE = frozenset({"be", "been", "being"})
_MAX_ACRONYM_CHARS = 10


class Subject(NamedTuple):
    """What a clause is told of. ``role`` is set if the grammatical subject is one bare noun of it.

    "The population of Bonn grew" is told of Bonn, with the role "population".
    """

    phrase: Phrase
    role: str = ""

    def predicate(self, text: str) -> str:
        """Return a predicate that holds for the phrase: "population grew"."""
        return f"{self.role} {text}" if self.role else text


class Clause(NamedTuple):
    """A verb with its subjects; ``objects`` are the heads of its objects, conjuncts included."""

    verb: Token
    text: str
    is_copula: bool
    subjects: list[Subject]
    objects: list[Token]


class TripleFinder:
    """Finds the triples of one parsed passage.

    Parameters
    ----------
    phrases : NounPhrases
        The passage's noun phrases.
    """

    def __init__(self, phrases: NounPhrases) -> None:
        self._phrases = phrases
        self._tokens = phrases.tokens
        self._children = phrases.children
        self._triples: dict[Triple, None] = {}
        self._keys: set[str] = set()
        self._phrase_over: dict[int, Phrase] = {}
        #: Tokens inside brackets that have been read as dates or acronyms.
        self._bracketed: set[int] = set()

    def find(self) -> list[Triple]:
        """Return the passage's triples, without duplicates, in order of discovery."""
        self._name_topic()
        self._read_brackets()
        for token in self._tokens:
            if is_nominal(token):
                self._read_noun_phrase(token)
            elif is_verb(token):
                self._read_clause(token)
        self._tie_leftovers()
        return list(self._triples)

    def _add(self, subject: Phrase | None, predicate: str, obj: Phrase | None) -> None:
        """Keep a triple if both ends are phrases, they differ, and at least one is or has a name."""
        if subject is None or obj is None or not (subject.named or obj.named):
            return
        keys = unicode_phrase(subject.text), unicode_phrase(obj.text)
        if keys[0] == keys[1]:
            return
        self._triples[Triple(subject.text, predicate, obj.text)] = None
        self._keys.update(keys)
        for phrase in (subject, obj):
            for i in range(phrase.start, phrase.end):
                self._phrase_over.setdefault(i, phrase)

    # Noun phrases

    def _read_noun_phrase(self, head: Token) -> None:
        children = self._children[head.i]
        phrase = self._phrases.phrase(head) if children else None
        if phrase is None:
            return
        for child in children:
            rule = _NOUN_RULES.get(child.dep_)
            if rule is not None:
                rule(self, head, phrase, child)

    def _read_apposition(self, head: Token, phrase: Phrase, child: Token) -> None:
        """Read "Ann Lee, a Danish painter" as (Ann Lee, is, Danish painter); of a place, "located in"."""
        if child.i in self._bracketed or child.tag_ == "PRP":
            return
        if child == self._phrases.close_apposition(head):
            self._read_close_apposition(head, child)
            return
        predicate = "located in" if self._is_place_after_comma(phrase, child) else "is"
        for conjunct in self._phrases.conjuncts(child):
            self._add(phrase, predicate, self._phrases.phrase(conjunct))
            self._read_nationality(phrase, conjunct)

    def _read_close_apposition(self, head: Token, child: Token) -> None:
        """Read "the Danish painter Ann Lee" as (Ann Lee, is, Danish painter), (Ann Lee, is, Danish)."""
        for conjunct in self._phrases.conjuncts(child):
            name = self._phrases.phrase(conjunct)
            if name is not None:
                self._add(name, "is", self._phrases.description(head))
                self._read_nationality(name, head)

    def _is_place_after_comma(self, phrase: Phrase, child: Token) -> bool:
        """Whether an apposition says where something is: "Bath, England", not "Bath, the city"."""
        mention = self._mention(child)
        if not phrase.named or mention is None or mention.label not in PLACE_LABELS:
            return False
        return mention.start == child.left_edge.i and self._tokens[mention.start - 1].text == ","

    def _read_possessor(self, head: Token, phrase: Phrase, child: Token) -> None:
        """Read "Bell's new lab" as (Bell, has, new lab), "Bell's wife Ann" as (Bell, wife, Ann)."""
        predicate = "has"
        if self._phrases.close_apposition(head) is not None:
            description = self._phrases.description(head)
            predicate = description.text if description is not None else predicate
        self._add(self._phrases.phrase(child), predicate, phrase)

    def _read_noun_preposition(self, head: Token, phrase: Phrase, child: Token) -> None:
        """Read "the old bridge over the Elbe" as (old bridge, over, Elbe)."""
        if child.lower_ in {"such", "like"} or self._is_said_elsewhere(head, phrase):
            return
        for predicate, obj in self._objects_of(child):
            other = self._phrases.phrase(obj)
            if other is not None and _follows(other, phrase):
                self._add(phrase, predicate, other)

    def _is_said_elsewhere(self, head: Token, phrase: Phrase) -> bool:
        """Whether a noun's prepositions are better told of something else.

        A bare noun ("city of Bonn") would join all cities of the corpus in one node, and what a clause's
        object is like is told of the clause's subject.
        """
        if phrase.is_bare:
            return True
        told = head.dep_ == "attr" or (head.dep_ == "dobj" and not phrase.named)
        return told and bool(self._subjects(head.head))

    def _read_modifier(self, head: Token, phrase: Phrase, child: Token) -> None:
        """Read "Paris fashion show" as (Paris fashion show, associated with, Paris)."""
        mention, own = self._mention(child), self._mention(head)
        if own is not None and own.label == "PERSON" and child.i < own.start:
            self._read_epithet(phrase, child, mention)
        elif phrase.is_bare or self._is_nationality_told(head, mention):
            return
        elif self._modifies_as_name(mention, head):
            self._add(phrase, "associated with", self._mention_phrase(mention))

    def _read_epithet(self, person: Phrase, child: Token, mention: Mention | None) -> None:
        """Read "Polish composer Jan Nowak" as (Jan Nowak, is, Polish), (Jan Nowak, is, composer)."""
        if mention is not None:
            self._add(person, _modifier_predicate(mention), self._mention_phrase(mention))
        elif child.tag_ in {"NN", "NNS"}:
            self._add(person, "is", self._phrases.phrase(child))
            self._read_nationality(person, child)

    def _read_nationality(self, subject: Phrase, noun: Token) -> None:
        """Read the adjective in "is a Chilean poet" as (subject, is, Chilean)."""
        for child in self._children[noun.i]:
            mention = self._mention(child)
            if child.dep_ in _MODIFIER_DEPS and mention is not None and self._modifies_as_name(mention, noun):
                self._add(subject, _modifier_predicate(mention), self._mention_phrase(mention))

    def _modifies_as_name(self, mention: Mention | None, head: Token) -> bool:
        """Whether a mention is a name that stands before a head and does not include it."""
        return mention is not None and mention.label in NAMED_LABELS and head.i >= mention.end

    def _is_nationality_told(self, head: Token, mention: Mention | None) -> bool:
        """Whether "a Chilean poet" stands in a copula or apposition, where somebody is called Chilean."""
        if mention is None or mention.label != "NORP":
            return False
        return head.dep_ == "appos" or (head.dep_ == "attr" and bool(self._subjects(head.head)))

    # Names and dates in brackets

    def _name_topic(self) -> None:
        """Read "Ada Mary Stone was ..." under the title "Ada Stone" as (Ada Stone, also known as, ...)."""
        for name in self._phrases.other_names:
            self._add(self._phrases.topic, "also known as", name)

    def _read_brackets(self) -> None:
        """Read what stands in brackets after a name: dates of a life, the year of a work, an acronym."""
        opening: int | None = None
        for token in self._tokens:
            if token.text == "(":
                opening = token.i
            elif token.text == ")" and opening is not None:
                self._read_bracket(opening, token.i)
                opening = None

    def _read_bracket(self, opening: int, closing: int) -> None:
        owner = self._owner_of_bracket(opening)
        if owner is None:
            return
        dates = [
            mention
            for i in range(opening + 1, closing)
            if (mention := self._phrases.mention_at.get(i)) is not None
            and mention.label == "DATE"
            and mention.start == i
            and names_something(self._phrases, mention)
        ]
        if dates:
            self._read_dates(owner, opening, dates)
        elif closing - opening == 2 and self._is_acronym(self._tokens[opening + 1].text):
            self._bracketed.add(opening + 1)
            self._add(owner, "also known as", self._phrases.phrase(self._tokens[opening + 1]))

    def _owner_of_bracket(self, opening: int) -> Phrase | None:
        before = self._tokens[opening - 1] if opening else None
        if before is None:
            return None
        if before.is_quote and opening > 1:
            before = self._tokens[opening - 2]
        named = before.i in self._phrases.mention_at or self._phrases.is_in_title(before)
        owner = self._phrases.phrase(before) if named else None
        return owner if owner is not None and owner.named else None

    def _read_dates(self, owner: Phrase, opening: int, dates: list[Mention]) -> None:
        """Read "Ann Lee (4 May 1891 – 1960)" as born and died, "Old Songs (1971)" as date."""
        for mention, predicate in zip(dates, self._date_predicates(owner, opening, dates), strict=False):
            self._bracketed.update(range(mention.start, mention.end))
            self._add(owner, predicate, self._phrases.mention_phrase(mention))

    def _date_predicates(self, owner: Phrase, opening: int, dates: list[Mention]) -> list[str]:
        first = self._tokens[dates[0].start]
        words = {self._tokens[i].lower_ for i in range(opening, first.i)}
        if words & _BIRTH_WORDS:
            start, end = "born", "died"
        elif words & _DEATH_WORDS:
            start, end = "died", "date"
        elif len(dates) == 2 and self._tokens[dates[1].start - 1].text in _DASHES:
            start, end = ("born", "died") if self._is_person(owner) else ("from", "until")
        else:
            start, end = "date", "date"
        return [start, end] + ["date"] * (len(dates) - 2)

    def _is_person(self, phrase: Phrase) -> bool:
        if phrase.start < 0:
            return self._phrases.topic_is_person is not False
        mention = self._phrases.mention_at.get(phrase.start)
        return mention is not None and mention.label in _PERSON_LABELS

    @staticmethod
    def _is_acronym(text: str) -> bool:
        return 2 <= len(text) <= _MAX_ACRONYM_CHARS and sum(map(str.isupper, text)) >= 2 and text[0].isupper()

    # Clauses

    def _read_clause(self, verb: Token) -> None:
        if self._phrases.is_in_title(verb):
            return
        subjects = [subject for token in self._subjects(verb) for subject in self._told_of(token)]
        if not subjects:
            return
        objects = [
            conjunct
            for child in self._children[verb.i]
            if child.dep_ in _OBJECT_DEPS and (is_nominal(child) or self._mention(child) is not None)
            for conjunct in self._phrases.conjuncts(child)
        ]
        clause = Clause(verb, self._verb_text(verb), verb.lower_ in BE_FORMS, subjects, objects)
        self._read_objects(clause)
        for child in self._children[verb.i]:
            rule = _CLAUSE_RULES.get(child.dep_)
            if rule is not None:
                rule(self, clause, child)

    def _told_of(self, token: Token) -> list[Subject]:
        """Return what is meant by a grammatical subject: itself, or the owner of one bare noun.

        Under the title "Bonn", "The population grew" is told of Bonn.
        """
        phrase = self._phrases.phrase(token)
        if phrase is None:
            return []
        owners = self._owners(token) if phrase.is_bare else []
        topic = self._phrases.topic
        if phrase.is_bare and not owners and topic is not None and self._phrases.has_title:
            owners = [topic]
        return [Subject(owner, phrase.text) for owner in owners] or [Subject(phrase)]

    def _owners(self, noun: Token) -> list[Phrase]:
        """Return what a noun belongs to: its possessor, or the names in its of-phrase."""
        found: list[Phrase | None] = []
        for child in self._children[noun.i]:
            if child.dep_ == "poss":
                found.append(self._phrases.phrase(child))
            elif child.dep_ == "prep" and child.lower_ == "of":
                found += [self._phrases.phrase(other) for _, other in self._objects_of(child)]
        return [phrase for phrase in found if phrase is not None and phrase.named]

    def _read_objects(self, clause: Clause) -> None:
        """Read "Ann Lee founded a school" as (Ann Lee, founded, school)."""
        if not clause.objects:
            self._read_gap(clause)
        for obj in clause.objects:
            phrase = self._phrases.phrase(obj)
            if clause.is_copula and phrase is not None and phrase.named and self._read_role(clause, phrase):
                continue
            for subject in clause.subjects:
                self._add(subject.phrase, subject.predicate(clause.text), phrase)
                self._read_object_prepositions(clause, subject, obj, phrase)
                if clause.is_copula and not subject.role:
                    self._read_nationality(subject.phrase, obj)

    def _read_object_prepositions(
        self, clause: Clause, subject: Subject, obj: Token, phrase: Phrase | None
    ) -> None:
        """Read "Bonn was the capital of Prussia" as (Bonn, was capital of, Prussia)."""
        if phrase is None and obj.lower_ not in PART_NOUNS:
            return
        text = subject.predicate(f"{clause.text} {obj.text if phrase is None else phrase.text}")
        for child in self._children[obj.i]:
            if child.dep_ != "prep":
                continue
            for predicate, other in self._objects_of(child):
                target = self._phrases.phrase(other)
                if target is not None and (phrase is None or _follows(target, phrase)):
                    self._add(subject.phrase, f"{text} {predicate}", target)

    def _read_role(self, clause: Clause, value: Phrase) -> bool:
        """Read "The first editor of the Globe is Ann Lee" as (Globe, first editor, Ann Lee).

        Without an owner the role is the topic's. Returns whether that leaves nothing to say.
        """
        told = False
        for token in self._subjects(clause.verb):
            role = self._phrases.phrase(token) if is_nominal(token) else None
            if role is None or role.named or role.is_bare:
                continue
            owners = self._owners(token)
            for owner in owners:
                self._add(owner, role.text, value)
            if not owners and self._phrases.has_title:
                self._add(self._phrases.topic, role.text, value)
            told = told or bool(owners)
        return told and len(clause.subjects) == 1

    def _read_gap(self, clause: Clause) -> None:
        """Read "the songs that Ann Lee wrote" as (Ann Lee, wrote, songs)."""
        verb = clause.verb
        children = self._children[verb.i]
        if verb.dep_ != "relcl" or clause.is_copula or any(c.tag_ == "WRB" for c in children):
            return
        subject_relative = any(c.dep_ in SUBJECT_DEPS and c.lower_ in RELATIVE_PRONOUNS for c in children)
        if subject_relative or any(c.dep_ in _PREPOSITION_DEPS and self._has_relative(c) for c in children):
            return
        if any(c.dep_ == "nsubj" for c in children):
            for subject in clause.subjects:
                self._add(subject.phrase, subject.predicate(clause.text), self._phrases.phrase(verb.head))

    def _has_relative(self, preposition: Token) -> bool:
        return any(c.tag_ in {"WDT", "WP"} for c in self._children[preposition.i])

    def _read_verb_preposition(self, clause: Clause, child: Token) -> None:
        """Read "Ann Lee moved to Rome" as (Ann Lee, moved to, Rome); an object joins the predicate."""
        text = clause.text
        if clause.objects and not clause.is_copula:
            obj = self._phrases.phrase(clause.objects[0])
            text = f"{text} {obj.text}" if obj is not None else text
        self._add_prepositions(clause, text, child)

    def _read_adjective(self, clause: Clause, child: Token) -> None:
        """Read "Ann Lee is famous for Old Songs" as (Ann Lee, is famous for, Old Songs)."""
        for preposition in self._children[child.i]:
            if preposition.dep_ == "prep":
                self._add_prepositions(clause, f"{clause.text} {child.lower_}", preposition)

    def _add_prepositions(self, clause: Clause, text: str, preposition: Token) -> None:
        for predicate, token in self._objects_of(preposition):
            phrase = self._phrases.phrase(token)
            for subject in clause.subjects:
                self._add(subject.phrase, subject.predicate(f"{text} {predicate}"), phrase)

    def _read_adverbial_noun(self, clause: Clause, child: Token) -> None:
        """Read "Ann Lee died 4 May 1960" as (Ann Lee, died, 4 May 1960)."""
        mention = self._mention(child)
        if mention is not None and names_something(self._phrases, mention):
            for subject in clause.subjects:
                self._add(subject.phrase, subject.predicate(clause.text), self._mention_phrase(mention))

    def _verb_text(self, verb: Token) -> str:
        """Return the verb with negation, particle and a passive's finite auxiliary: "was not set up"."""
        words = [child for child in self._children[verb.i] if child.dep_ in {"neg", "prt", "auxpass"}]
        kept = [word for word in words if word.lower_ not in _NON_FINITE_BE]
        if not kept:
            return verb.lower_
        return " ".join(word.lower_ for word in sorted([*kept, verb], key=lambda token: token.i))

    def _objects_of(self, preposition: Token) -> Iterator[tuple[str, Token]]:
        """Yield a preposition's objects with the words that lead to each.

        "in the old city of Bonn" -> ("in", city), ("in city of", Bonn). One bare noun before another
        preposition is passed over: it would be the same node in every passage.
        """
        if preposition.i in self._phrases.mention_at:  # "May to July" is one name
            return
        # "from 1991 to 2002" has an object of its own, "out of Rome" has not.
        has_object = any(child.dep_ == "pobj" for child in self._children[preposition.i])
        for child in self._children[preposition.i]:
            if child.dep_ == "pobj":
                nested = list(self._nested_objects(preposition, child))
                for conjunct in self._phrases.conjuncts(child):
                    if not (nested and self._is_bare(conjunct)):
                        yield preposition.lower_, conjunct
                yield from nested
            elif child.dep_ == "prep" and child.i not in self._phrases.mention_at:
                for inner in self._children[child.i]:
                    if inner.dep_ == "pobj":
                        yield (child.lower_ if has_object else f"{preposition.lower_} {child.lower_}"), inner

    def _is_bare(self, token: Token) -> bool:
        phrase = self._phrases.phrase(token)
        return phrase is None or phrase.is_bare

    def _nested_objects(self, preposition: Token, noun: Token) -> Iterator[tuple[str, Token]]:
        if noun.tag_ not in {"NN", "NNS"} or noun.i in self._phrases.mention_at:
            return
        for inner in self._children[noun.i]:
            if inner.dep_ == "prep" and inner.lower_ in _NESTED_PREPOSITIONS:
                for child in self._children[inner.i]:
                    if child.dep_ == "pobj":
                        for conjunct in self._phrases.conjuncts(child):
                            yield f"{preposition.lower_} {noun.text} {inner.lower_}", conjunct

    # Subjects

    def _subjects(self, verb: Token, lifts: int = _MAX_LIFTS) -> list[Token]:
        """Return the heads of a verb's subjects: its own, or those it shares with the clause above it."""
        found: list[Token] = []
        for child in self._children[verb.i]:
            if child.dep_ in SUBJECT_DEPS:
                if verb.dep_ == "relcl" and child.lower_ in RELATIVE_PRONOUNS:
                    found += self._described(verb.head, lifts)
                else:
                    found += self._phrases.conjuncts(child)
        return found or self._title_before(verb) or self._inherited_subjects(verb, lifts)

    def _inherited_subjects(self, verb: Token, lifts: int) -> list[Token]:
        """Find Ann in "Ann came and sang", "Ann wanted to sing", "Ann is known for singing"."""
        if lifts <= 0 or verb.head.i == verb.i:
            return []
        above = verb.head
        if verb.dep_ in {"acl", "relcl"}:
            return self._described(above, lifts)
        if verb.dep_ == "pcomp":  # the preposition's verb, or the verb of its adjective
            above = above.head if above.head.tag_.startswith("V") else above.head.head
        elif verb.dep_ not in _INHERITING_DEPS:
            return []
        if not above.tag_.startswith("V") or above.i == verb.i:
            return []
        controllers = self._direct_objects(above) if verb.dep_ == "xcomp" else []
        return controllers or self._subjects(above, lifts - 1)

    def _direct_objects(self, verb: Token) -> list[Token]:
        """Return the objects that do what follows: "hired Ann to sing"."""
        return [child for child in self._children[verb.i] if child.dep_ == "dobj"]

    def _title_before(self, verb: Token) -> list[Token]:
        """Return the title's last token if it stands before a verb that the parser left without a subject.

        A title is often misread inside: '"Run Home" is a song'.
        """
        i = verb.i - 1
        if i >= 0 and self._tokens[i].text == ")":
            while i >= 0 and self._tokens[i].text != "(":
                i -= 1
            i -= 1
        while i >= 0 and (self._tokens[i].is_punct or self._tokens[i].dep_ in {"aux", "auxpass"}):
            i -= 1
        return [self._tokens[i]] if i >= 0 and self._phrases.is_in_title(self._tokens[i]) else []

    def _described(self, noun: Token, lifts: int) -> list[Token]:
        """Return what a relative clause is about: X in "X is a river that ..." and "X, a river that ..."."""
        if lifts > 0 and noun.dep_ == "attr" and noun.head.lower_ in BE_FORMS:
            subjects = self._subjects(noun.head, lifts - 1)
            if subjects:
                return subjects
        if noun.dep_ == "appos" and noun.head.tag_ in PROPER_TAGS:
            return [noun.head]
        return [noun]

    # Leftovers

    def _tie_leftovers(self) -> None:
        """Tie an entity that no rule has reached to the phrase around it, else to its sentence's subject."""
        for mention, phrase in entity_phrases(self._phrases):
            if unicode_phrase(phrase.text) not in self._keys:
                self._tie(mention, phrase)

    def _tie(self, mention: Mention, phrase: Phrase) -> None:
        sentence = self._tokens[mention.start].sent
        anchor = self._sentence_subject(sentence.start, sentence.end)
        predicate = "date" if mention.label == "DATE" else "related to"
        for subject, relation in (
            (self._phrase_over.get(mention.start), "associated with"),
            (anchor, predicate),
            (self._phrases.topic, predicate),
        ):
            self._add(subject, relation, phrase)
            if unicode_phrase(phrase.text) in self._keys:
                return

    def _sentence_subject(self, start: int, end: int) -> Phrase | None:
        for i in range(start, end):
            if self._tokens[i].dep_ in SUBJECT_DEPS:
                phrase = self._phrases.phrase(self._tokens[i])
                if phrase is not None and phrase.named:
                    return phrase
        return None

    def _mention_phrase(self, mention: Mention | None) -> Phrase | None:
        return self._phrases.mention_phrase(mention) if mention is not None else None

    def _mention(self, token: Token) -> Mention | None:
        return self._phrases.mention_at.get(token.i)


def _follows(phrase: Phrase, other: Phrase) -> bool:
    """Whether a phrase lies behind another, and not in it; the topic's pronoun is in no place."""
    return phrase.start >= other.end or phrase.start < 0


def _modifier_predicate(mention: Mention) -> str:
    return "is" if mention.label == "NORP" else "associated with"


NounRule = Callable[[TripleFinder, Token, Phrase, Token], None]
ClauseRule = Callable[[TripleFinder, Clause, Token], None]

_NOUN_RULES: Mapping[str, NounRule] = {
    "appos": TripleFinder._read_apposition,
    "poss": TripleFinder._read_possessor,
    "prep": TripleFinder._read_noun_preposition,
    "amod": TripleFinder._read_modifier,
    "compound": TripleFinder._read_modifier,
    "nmod": TripleFinder._read_modifier,
}
_CLAUSE_RULES: Mapping[str, ClauseRule] = {
    "prep": TripleFinder._read_verb_preposition,
    "agent": TripleFinder._read_verb_preposition,
    "npadvmod": TripleFinder._read_adverbial_noun,
    "acomp": TripleFinder._read_adjective,
}


def open_nlp(model: str | Path | None = None) -> Language:
    """Load the spaCy model with what the rules read: tags, dependencies and entities.

    Parameters
    ----------
    model : str or Path, optional
        Name of a fetched model, or the folder of a spaCy pipeline; by default :data:`DEFAULT_MODEL`.

    Returns
    -------
    spacy.language.Language

    Raises
    ------
    ModelError
        If the model is not there, cannot be loaded, or has no parser, tagger or entity recogniser.
    """
    path = model if isinstance(model, Path) else model_path(model or DEFAULT_MODEL)
    try:
        nlp = spacy.load(path, exclude=list(UNUSED_COMPONENTS))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a spaCy pipeline that can be loaded: {error}") from error
    absent = {"tagger", "parser", "ner"} - set(nlp.pipe_names)
    if absent:
        raise ModelError(f"The spaCy pipeline {path} has no {', '.join(sorted(absent))}; the rules need it")
    return nlp


class RulesExtractor:
    """Rule-based OpenIE engine.

    Parameters
    ----------
    model : str or Path, optional
        See :func:`open_nlp`.
    whole_arguments : bool
        Whether triples are those of :func:`~hippoindex.pipeline.extract.clauses.clause_triples`, instead of
        the graph's.

    Raises
    ------
    ModelError
        If the model cannot be used.
    """

    def __init__(self, model: str | Path | None = None, *, whole_arguments: bool = False) -> None:
        self._nlp = open_nlp(model)
        self._whole_arguments = whole_arguments

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Return one extraction per passage, in order.

        A passage longer than the spaCy pipeline accepts has :attr:`Extraction.error` set.
        """
        texts = [" ".join(passage.text.split()) for passage in passages]
        limit = self._nlp.max_length
        docs = self._nlp.pipe((text for text in texts if len(text) <= limit), batch_size=_BATCH_PASSAGES)
        return [
            self._extraction(next(docs), passage.title) if len(text) <= limit else _too_long(text, limit)
            for text, passage in zip(texts, passages, strict=True)
        ]

    def _extraction(self, doc: Doc, title: str) -> Extraction:
        phrases = NounPhrases(doc, title)
        triples = clause_triples(doc) if self._whole_arguments else TripleFinder(phrases).find()
        return Extraction(entities=entities(phrases), triples=triples)


def _too_long(text: str, limit: int) -> Extraction:
    reason = f"{len(text):,} characters; the parser takes {limit:,}. Split it with chunk.max_tokens"
    return Extraction(error=reason, raw=text)
