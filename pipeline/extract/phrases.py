"""Names of things in a parsed passage: the phrases that become nodes of the graph.

A node must come out of every passage under the same name, so a phrase has no leading determiner and no
hanging punctuation, a possessor is not part of it ("parents", not "Bruce's parents"), and whatever means
the passage's topic (its title, a pronoun, "the journal" in a passage on a journal) is called by the title.

Only fine-grained (Penn Treebank) tags, dependency labels and entities are read: the pipeline components that
add lemmas and coarse tags cost a third of the time and are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from spacy.lang.en.stop_words import STOP_WORDS
from spacy.tokens import Doc, Token

from hippoindex.pipeline.extract.mentions import NAME, NAMED_LABELS, PROPER_TAGS, Mention, merged_mentions
from hippoindex.pipeline.normalise import TITLE_QUALIFIER, clean_title, unicode_phrase

NOMINAL_TAGS = PROPER_TAGS | {"NN", "NNS", "CD"}
_NAME_TAGS = PROPER_TAGS | {"CD"}
SUBJECT_DEPS = frozenset({"nsubj", "nsubjpass"})
BE_FORMS = frozenset({"be", "is", "are", "was", "were", "been", "being", "am", "'s", "’s", "'re", "’re"})

PERSONAL_PRONOUNS = frozenset({"he", "she", "him", "her", "his", "hers", "himself", "herself"})
THING_PRONOUNS = frozenset({"it", "its", "itself"})
PLURAL_PRONOUNS = frozenset({"they", "them", "their", "theirs", "themselves"})
_THIRD_PERSON = PERSONAL_PRONOUNS | THING_PRONOUNS | PLURAL_PRONOUNS
RELATIVE_PRONOUNS = frozenset({"who", "whom", "which", "that"})

_PRONOUN_TAGS = frozenset({"PRP", "PRP$", "WP", "WP$", "WDT", "EX", "DT"})
_ARTICLES = frozenset({"the", "a", "an"})
_POSSESSIVES = frozenset({"its", "his", "her", "their", "our", "my", "your"})
_DEMONSTRATIVES = frozenset({"this", "that", "these", "those", "such", "same", "own", "certain"})
_QUANTIFIERS = frozenset(
    {"some", "any", "several", "various", "many", "most", "all", "both", "each", "every", "no", "few", "more"}
)
_OTHERS = frozenset({"other", "another", "others", "one", "ones", "first"})
_LEADING = _ARTICLES | _POSSESSIVES | _DEMONSTRATIVES | _QUANTIFIERS | {"other", "another"}
#: Nouns that pass what is said on to their of-phrase: "is part of", "is a member of".
PART_NOUNS = frozenset({"part", "parts", "one", "some", "member", "members", "type", "kind", "number"})
_LIGHT_NOUNS = frozenset({"lot", "variety", "case", "way", "name", "place", "thing", "things"})
_TIME_NOUNS = frozenset({"time", "times", "year", "years", "day", "days"})
#: Words that, alone, are no phrase.
_EMPTY = _DEMONSTRATIVES | _QUANTIFIERS | _OTHERS | PART_NOUNS | _LIGHT_NOUNS | _TIME_NOUNS
_LEADING_TAGS = frozenset({"POS", "_SP", "CC", "IN", "RB", "RBR", "WDT", "WP", "WP$", "WRB"})
_TRAILING_TAGS = frozenset({"IN", "CC", "DT", "TO", "POS", "HYPH", "PRP$", "_SP"})
_KEPT_TRAILING = frozenset({"%", "#"})
_NOUN_PHRASE_DEPS = frozenset(
    SUBJECT_DEPS | {"dobj", "attr", "oprd", "dative", "pobj", "pcomp", "appos", "poss", "npadvmod", "ROOT"}
)
_TITLE_PIECE = re.compile(r"\w+|[^\w\s]")
_MAX_CLIMB = 6
_MAX_WORDS = 6
_KEPT_WORDS = 4
_MAX_CHARS = 120


class Phrase(NamedTuple):
    """A node's surface form and the tokens it was read from (``start`` is -1 if from none).

    ``named`` is true if it holds a name, a number or a date: two phrases without one say nothing that
    could be found again in another passage.
    """

    text: str
    start: int
    end: int
    named: bool

    @property
    def is_bare(self) -> bool:
        """Whether it is a single word that is no name: the same node in too many passages."""
        return not self.named and self.end - self.start == 1


def is_nominal(token: Token) -> bool:
    """Whether a token can head a noun phrase: a noun, a name or a number."""
    return token.tag_ in NOMINAL_TAGS


def is_verb(token: Token) -> bool:
    """Whether a token is a main verb or copula (not an auxiliary of another verb)."""
    return token.tag_.startswith("V") and token.dep_ not in {"aux", "auxpass"}


def trimmed_start(tokens: list[Token], start: int, end: int) -> int:
    """Move the start of a range past determiners, prepositions, adverbs and punctuation."""
    while start < end and _is_leading(tokens[start]):
        start += 1
    return start


def trimmed_end(tokens: list[Token], start: int, end: int) -> int:
    """Move the end of a range before prepositions, conjunctions and punctuation."""
    while start < end and _is_trailing(tokens, start, end):
        end -= 1
    return end


def _is_leading(token: Token) -> bool:
    if token.lower_ in _LEADING:
        return token.tag_ not in PROPER_TAGS
    return token.is_punct or token.tag_ in _LEADING_TAGS or token.dep_ == "case"


def _is_trailing(tokens: list[Token], start: int, end: int) -> bool:
    token = tokens[end - 1]
    if token.text == ")":
        return all(tokens[i].text != "(" for i in range(start, end))
    return (token.is_punct and token.text not in _KEPT_TRAILING) or token.tag_ in _TRAILING_TAGS


def _is_spelt_out_number(token: Token) -> bool:
    return token.tag_ == "CD" and token.text.isalpha() and token.text.islower()


def _is_empty(token: Token) -> bool:
    """Whether a single word names nothing: "part", "others", "two"."""
    return token.lower_ in _EMPTY or _is_spelt_out_number(token)


def noun_chunk_starts(tokens: list[Token]) -> dict[int, int]:
    """Map the head of every base noun phrase to the first token of the phrase.

    The phrase runs from the left edge of the head's subtree to the head, for heads in the usual positions and
    their conjuncts, and never reaches into the phrase before it.
    """
    starts: dict[int, int] = {}
    previous_end = 0
    for token in tokens:
        if token.tag_ not in NOMINAL_TAGS or not _heads_noun_phrase(token, starts):
            continue
        starts[token.i] = max(token.left_edge.i, previous_end)
        previous_end = token.i + 1
    return starts


def _heads_noun_phrase(token: Token, starts: dict[int, int]) -> bool:
    return token.dep_ in _NOUN_PHRASE_DEPS or (token.dep_ == "conj" and token.head.i in starts)


def _title_pattern(title: str) -> re.Pattern[str]:
    """Return a pattern for a title in running text.

    Spaces around punctuation and the first letter's case are free, but a title that is one function word
    ("Them") must have its capital.
    """
    words = [r"\s*".join(map(re.escape, _TITLE_PIECE.findall(word))) for word in title.split()]
    pattern = r"\s+".join(words)
    first = title[0]
    if (
        first.isalpha()
        and first.lower() != first.upper()
        and not (len(words) == 1 and title.lower() in STOP_WORDS)
    ):
        pattern = f"[{first.upper()}{first.lower()}]{pattern[1:]}"
    return re.compile(rf"(?<!\w){pattern}(?!\w)")


class NounPhrases:
    """Names the noun phrases of one parsed passage.

    Parameters
    ----------
    doc : spacy.tokens.Doc
        Tagged, parsed, with entities.
    title : str
        Title of the passage or ``""``: then the first subject, else the first entity, is the topic.

    Attributes
    ----------
    tokens : list of Token
    children : list of list of Token
        Syntactic children of every token, in order.
    mentions : list of Mention
    mention_at : dict of int to Mention
        The mention that a token belongs to.
    topic : Phrase or None
    other_names : list of Phrase
        The topic's longer name in the first sentence, or its title without the place after the comma.
    """

    def __init__(self, doc: Doc, title: str) -> None:
        self.doc = doc
        self.text = doc.text
        self.tokens = list(doc)
        self.children: list[list[Token]] = [[] for _ in self.tokens]
        for token in self.tokens:
            if token.head.i != token.i:
                self.children[token.head.i].append(token)
        self.mentions = merged_mentions(self.tokens, doc.ents)
        self.mention_at = {i: mention for mention in self.mentions for i in range(mention.start, mention.end)}
        self._chunk_starts = noun_chunk_starts(self.tokens)
        self._cache: dict[int, Phrase | None] = {}
        self.title = clean_title(title)
        qualifier = TITLE_QUALIFIER.search(title)
        self._qualifier_key = unicode_phrase(qualifier[1]) if qualifier is not None else ""
        self._title_key = unicode_phrase(self.title)
        self._title_at = {i: span for span in self._title_spans() for i in range(*span)}
        self._topic_keys: set[str] = set()
        self._kinds: frozenset[str] = frozenset()
        self.other_names: list[Phrase] = []
        self.topic = Phrase(self.title, -1, -1, named=True) if self._title_key else None
        if self.topic is None:
            self.topic = self._first_name()
        else:
            names = (self._lead_name(), self._placeless_title())
            self.other_names = [name for name in names if name is not None]
            self._topic_keys = self._find_topic_keys()
        self._kinds = self._topic_kinds()

    @property
    def has_title(self) -> bool:
        """Whether the topic is a title, and not only the first name of the text."""
        return bool(self._title_key)

    # Phrases

    def phrase(self, head: Token) -> Phrase | None:
        """Return the phrase that a token heads, or ``None`` if it names nothing ("this", "many")."""
        if head.i not in self._cache:
            self._cache[head.i] = self._phrase(head)
        return self._cache[head.i]

    def conjuncts(self, head: Token) -> list[Token]:
        """Return a head and everything coordinated with it: "Ann, Bob and Cy" -> 3 heads."""
        if not any(child.dep_ == "conj" for child in self.children[head.i]):
            return [head]
        found: list[Token] = []
        queue = [head]
        while queue:
            token = queue.pop()
            found.append(token)
            queue += [child for child in self.children[token.i] if self._is_conjunct(child, token)]
        return sorted(found, key=lambda token: token.i)

    def _is_conjunct(self, child: Token, head: Token) -> bool:
        if child.dep_ != "conj" or not (child.tag_ in NOMINAL_TAGS or child.i in self.mention_at):
            return False
        return child.i not in self._title_at or self._title_at[child.i] != self._title_at.get(head.i)

    def mention_phrase(self, mention: Mention) -> Phrase | None:
        """Return an entity's own name, which may lie inside a longer phrase."""
        if mention.start in self._title_at and mention.end - 1 in self._title_at:
            return self.topic
        return self._named_range(mention.start, mention.end)

    def antecedent(self, pronoun: Token) -> Phrase | None:
        """Return what a third-person pronoun stands for.

        A possessive or reflexive stands for the subject of its clause ("the Board chose its chair"). Any
        other stands for the topic, unless the topic is known to be of the other sort: then "she" is the last
        person named before it, and "it" is left unresolved.
        """
        word = pronoun.lower_
        if word not in _THIRD_PERSON:
            return None
        if pronoun.tag_ == "PRP$" or word.endswith(("self", "selves")):
            local = self._clause_subject(pronoun)
            if local is not None:
                return local
        if word in PERSONAL_PRONOUNS and self.topic_is_person is False:
            return self._last_person(pronoun.i)
        if word not in PERSONAL_PRONOUNS and self.topic_is_person:
            return None
        return self._topic_before(pronoun)

    def _topic_before(self, pronoun: Token) -> Phrase | None:
        """Return the topic, unless it was read off the text behind the pronoun."""
        return self.topic if self.topic is not None and self.topic.start < pronoun.i else None

    def _clause_subject(self, pronoun: Token) -> Phrase | None:
        """Return the subject before a pronoun in its clause if it is a name that the pronoun fits."""
        verb = pronoun.head
        for _ in range(_MAX_CLIMB):
            if verb.tag_.startswith("V") or verb.head.i == verb.i:
                break
            verb = verb.head
        for child in self.children[verb.i]:
            if child.dep_ in SUBJECT_DEPS and child.right_edge.i < pronoun.i and is_nominal(child):
                phrase = self.phrase(child)
                return phrase if phrase is not None and phrase.named and self._fits(pronoun, child) else None
        return None

    def _fits(self, pronoun: Token, name: Token) -> bool:
        mention = self.mention_at.get(name.i)
        if mention is None or mention.label == NAME or pronoun.lower_ in PLURAL_PRONOUNS:
            return True
        return (mention.label == "PERSON") == (pronoun.lower_ in PERSONAL_PRONOUNS)

    def _phrase(self, head: Token) -> Phrase | None:
        if head.tag_ in _PRONOUN_TAGS and head.i not in self.mention_at:
            return self.antecedent(head)
        if head.i in self._title_at:
            return self.topic
        start, end = self._range(head)
        if self._is_topic_kind(head, start, end):
            return self.topic
        name = self.close_apposition(head)
        return self.phrase(name) if name is not None else self._named_range(start, end)

    def description(self, head: Token) -> Phrase | None:
        """Return the phrase of a head that :meth:`phrase` calls by the name that follows it."""
        return self._named_range(*self._range(head))

    def is_chunk_head(self, token: Token) -> bool:
        """Whether a token heads a base noun phrase, and does not only modify another noun."""
        return token.i in self._chunk_starts

    def is_in_title(self, token: Token) -> bool:
        """Whether a token is part of an occurrence of the title."""
        return token.i in self._title_at

    def close_apposition(self, head: Token) -> Token | None:
        """Return the head of the name that follows a common noun directly: "the novelist" -> "Ann Lee"."""
        if head.tag_ not in {"NN", "NNS"} or head.i in self.mention_at:
            return None
        for child in self.children[head.i]:
            if child.dep_ == "appos" and child.i in self.mention_at:
                first = child.left_edge.i
                if first == head.i + 1 or (first == head.i + 2 and self.tokens[head.i + 1].is_quote):
                    return child
        return None

    def _named_range(self, start: int, end: int) -> Phrase | None:
        start, end = self._shortened(*self._trimmed(start, end))
        if start >= end or (end - start == 1 and _is_empty(self.tokens[start])):
            return None
        first, last = self.tokens[start], self.tokens[end - 1]
        text = self.text[first.idx : last.idx + len(last)].strip(" ,;:\"“”'‘’`")
        if text.count('"') == 1:
            text = text.replace('"', "")
        key = unicode_phrase(text)
        if len(text) > _MAX_CHARS or (len(key) == 1 and start not in self.mention_at):
            return None
        if key in self._topic_keys:
            return self.topic
        return Phrase(text, start, end, self._has_name(start, end)) if any(map(str.isalnum, key)) else None

    def _trimmed(self, start: int, end: int) -> tuple[int, int]:
        """Trim, but let a name keep a capitalised first word that is no article: "All India Radio"."""
        start = self._after_bracket(start, end)
        mention = self.mention_at.get(start)
        opens_name = mention is not None and mention.start == start and mention.label in NAMED_LABELS
        first = self.tokens[start] if start < end else None
        if first is None or not opens_name or not first.text[0].isupper() or first.lower_ in _ARTICLES:
            start = trimmed_start(self.tokens, start, end)
        return start, trimmed_end(self.tokens, start, end)

    def _after_bracket(self, start: int, end: int) -> int:
        """Skip a bracket that was opened before the range: "EPA) official range" -> "official range"."""
        for i in range(start, end):
            if self.tokens[i].text == "(":
                break
            if self.tokens[i].text == ")":
                return i + 1
        return start

    def _has_name(self, start: int, end: int) -> bool:
        return any(i in self.mention_at or self.tokens[i].tag_ in _NAME_TAGS for i in range(start, end))

    def _shortened(self, start: int, end: int) -> tuple[int, int]:
        """Keep the last words of a pile of more than six nouns that is not a name."""
        if end - start <= _MAX_WORDS or self._is_one_mention(start, end):
            return start, end
        mention = self.mention_at.get(end - 1)
        kept = end - _KEPT_WORDS if mention is None else min(mention.start, end - _KEPT_WORDS)
        return self._trimmed(max(start, kept), end)

    def _is_one_mention(self, start: int, end: int) -> bool:
        mention = self.mention_at.get(start)
        return mention is not None and mention.end >= end

    def _range(self, head: Token) -> tuple[int, int]:
        start, end = self._chunk_starts.get(head.i, head.i), head.i + 1
        mention = self.mention_at.get(head.i)
        for child in self.children[head.i]:
            if child.dep_ == "poss" and (mention is None or child.i < mention.start):
                start = max(start, min(child.right_edge.i + 1, head.i))
        if mention is not None:
            end = max(end, mention.end)
            named = mention.label in NAMED_LABELS
            start = self._name_start(mention, start) if named else min(start, mention.start)
        start = self._without_count(start, head.i)
        return start, self._with_of_name(head, end)

    def _name_start(self, mention: Mention, chunk_start: int) -> int:
        """Cut what stands before a name ("actor" Ann Lee), save proper nouns that continue it to the left."""
        start = mention.start
        if mention.label == "PERSON":
            return start
        while start > chunk_start and self.tokens[start - 1].tag_ in PROPER_TAGS | {"HYPH"}:
            start -= 1
        return start

    def _without_count(self, start: int, head: int) -> int:
        """Drop a spelt-out number that counts: "ten olympiads" -> "olympiads"."""
        while start < head and start not in self.mention_at:
            token = self.tokens[start]
            if not _is_spelt_out_number(token) and token.lower_ not in _LEADING:
                break
            start += 1
        return start

    def _with_of_name(self, head: Token, end: int) -> int:
        """Extend a name by an of-phrase that is a name: "University" + "of Leeds"."""
        if head.tag_ not in PROPER_TAGS or end >= len(self.tokens) or self.tokens[end].lower_ != "of":
            return end
        preposition = self.tokens[end]
        if preposition.head.i != head.i or preposition.dep_ != "prep":
            return end
        for child in self.children[preposition.i]:
            if child.dep_ == "pobj" and child.tag_ in PROPER_TAGS:
                mention = self.mention_at.get(child.i)
                return max(child.i + 1, mention.end if mention is not None else 0)
        return end

    # The topic

    @cached_property
    def topic_is_person(self) -> bool | None:
        """Whether the topic is a person, by its first mention's label; ``None`` if unknown or doubtful."""
        label = self._topic_label()
        if label is None or label == NAME:
            return None
        pronouns = {token.lower_ for token in self.tokens if token.tag_ in {"PRP", "PRP$"}}
        if label == "PERSON":
            return None if pronouns & THING_PRONOUNS and not pronouns & PERSONAL_PRONOUNS else True
        names_person = any(mention.label == "PERSON" for mention in self.mentions)
        return None if pronouns & PERSONAL_PRONOUNS and not names_person else False

    def _topic_label(self) -> str | None:
        """Label of the topic's first mention: of its title, its longer name, or a part of a person's name."""
        if self._title_at:
            first = next(iter(self._title_at))
            span = self._title_at[first]
        else:
            name = next((name for name in [*self.other_names, self.topic] if name and name.start >= 0), None)
            span = (name.start, name.end) if name is not None else (0, 0)
        for i in range(*span):
            if i in self.mention_at:
                return self.mention_at[i].label
        words = self._title_key.split()
        for mention in self.mentions:
            if mention.label == "PERSON" and unicode_phrase(self.tokens[mention.end - 1].text) in words:
                return mention.label
        return None

    def _last_person(self, before: int) -> Phrase | None:
        for mention in reversed(self.mentions):
            if mention.end <= before and mention.label == "PERSON":
                return self.mention_phrase(mention)
        return None

    def _title_spans(self) -> Iterator[tuple[int, int]]:
        """Return the token ranges of the title's occurrences in the text."""
        if len(self.title) < 3 or not self._title_key:
            return
        for match in _title_pattern(self.title).finditer(self.text):
            span = self.doc.char_span(match.start(), match.end())
            if span is not None:
                yield span.start, span.end

    def _first_name(self) -> Phrase | None:
        """Return the topic of a passage without a title: its first named subject, else its first entity."""
        for token in self.tokens:
            if token.dep_ in SUBJECT_DEPS and token.tag_ in NOMINAL_TAGS:
                phrase = self._named_range(*self._range(token))
                if phrase is not None and phrase.named:
                    return phrase
        return next(filter(None, (self._named_range(m.start, m.end) for m in self.mentions)), None)

    def _lead_name(self) -> Phrase | None:
        """Return the first sentence's subject if it is the title with more words in it.

        "Ada Mary Stone OBE (born 1950) is ..." in a passage entitled "Ada Stone".
        """
        subject = next((token for token in self.tokens if token.dep_ in SUBJECT_DEPS), None)
        if subject is None or subject.sent.start != 0 or subject.tag_ not in PROPER_TAGS:
            return None
        name = self._named_range(*self._range(subject))
        if name is None:
            return None
        title_words, words = self._title_key.split(), unicode_phrase(name.text).split()
        extends = len(words) > len(title_words) > 1 and set(title_words) <= set(words)
        return name if extends and (words[0] == title_words[0] or words[-1] == title_words[-1]) else None

    def _placeless_title(self) -> Phrase | None:
        """Return "Springfield" for the title "Springfield, Ohio" if the text says it."""
        name, comma, place = self.title.partition(", ")
        if not comma or "," in place or not place[:1].isupper() or name not in self.text:
            return None
        return Phrase(name, -1, -1, named=True)

    def _find_topic_keys(self) -> set[str]:
        """Keys of what also means the topic: its other names, and a person's first or last name alone."""
        names = {self._title_key, *(unicode_phrase(name.text) for name in self.other_names)}
        words = self._title_key.split()
        if self.topic_is_person and len(words) > 1:
            names.update(word for word in (words[0], words[-1]) if len(word) > 2)
        return names

    def _topic_kinds(self) -> frozenset[str]:
        """Return the nouns that say what the topic is: of "X is a journal", "X (film)" and "Battle of X"."""
        if not self.title:
            return frozenset()
        words = self._title_key.split()
        kinds = {words[-1]} if len(words) > 1 else set()
        kinds.update(self._qualifier_key.split()[-1:])
        kinds.update(word for word, following in pairwise(words) if following == "of")
        for token in next(iter(self.doc.sents), ()):
            if token.dep_ == "attr" and token.tag_ in {"NN", "NNS"} and token.head.lower_ in BE_FORMS:
                kinds.update(conjunct.lower_ for conjunct in self.conjuncts(token))
        return frozenset(kinds)

    def _is_topic_kind(self, head: Token, start: int, end: int) -> bool:
        """Whether a phrase is "the journal", "this film" and nothing more, in a passage on one."""
        if head.lower_ not in self._kinds or end != head.i + 1 or head.i == 0:
            return False
        chunk_start = self._chunk_starts.get(head.i, start)
        if head.i - chunk_start != 1 or self.tokens[chunk_start].lower_ not in {"the", "this"}:
            return False
        return not any(child.dep_ in {"prep", "relcl", "acl"} for child in self.children[head.i])


def entity_phrases(phrases: NounPhrases) -> Iterator[tuple[Mention, Phrase]]:
    """Yield the entities worth a node, in order of appearance.

    A date or amount is one if it has a digit or a name in it: "May", not "annually".
    """
    for mention in phrases.mentions:
        phrase = phrases.mention_phrase(mention) if names_something(phrases, mention) else None
        if phrase is not None:
            yield mention, phrase


def names_something(phrases: NounPhrases, mention: Mention) -> bool:
    """Whether an entity is a name, or a date or amount that says which one."""
    if mention.label in NAMED_LABELS:
        return True
    tokens = (phrases.tokens[i] for i in range(mention.start, mention.end))
    return any(token.tag_ in PROPER_TAGS or any(map(str.isdigit, token.text)) for token in tokens)


def entities(phrases: NounPhrases) -> list[str]:
    """Return the passage's entities: the title first, then names, dates and amounts in order of appearance.

    Of several with the same normalised text the first is kept.
    """
    found: dict[str, str] = {}
    if unicode_phrase(phrases.title):
        found[unicode_phrase(phrases.title)] = phrases.title
    for _, phrase in entity_phrases(phrases):
        found.setdefault(unicode_phrase(phrase.text), phrase.text)
    return list(found.values())
