"""Questions with their gold passages and answers, out of the files that multi-hop data sets come in.

Read are JSON Lines or a JSON list, plain or gzip, of records in one of three shapes:

- ``{"id", "question", "gold": [passage ids], "answer", "answer_aliases", "named_entities"}``;
- MuSiQue's and HippoRAG's, with ``paragraphs`` (or ``contexts``) of which some have ``is_supporting``;
- HotpotQA's and 2WikiMultiHopQA's, with ``context`` and ``supporting_facts``.

The last two name gold passages by title and text: a :class:`PassageLookup` finds their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hippoindex.errors import InputError
from hippoindex.pipeline.corpus import (
    Record,
    RecordError,
    open_bytes,
    read_json_lines,
    read_json_list,
    scalar_string,
)


@dataclass(frozen=True, slots=True)
class Query:
    """One question.

    Attributes
    ----------
    query_id : str
        The file's id, or ``q`` and the 0-based position in the file.
    question : str
    gold : tuple of str
        Ids of the passages that hold the answer's evidence, each once.
    answers : tuple of str
        The answer, then its aliases, each once; empty if the file gives none.
    entities : tuple of str or None
        Named entities of the question, or ``None`` if the file does not give them.
    unresolved_gold : int
        Gold passages named by title and text that the lookup does not know: they are in no ``gold``, and
        count as never found.
    """

    query_id: str
    question: str
    gold: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    entities: tuple[str, ...] | None = None
    unresolved_gold: int = 0


@dataclass(frozen=True, slots=True)
class QuerySet:
    """The questions of one file.

    Attributes
    ----------
    queries : list of Query
    source : str
        Name of the file.
    """

    queries: list[Query]
    source: str

    @property
    def unresolved_gold(self) -> int:
        """Gold passages of all questions that the lookup does not know."""
        return sum(query.unresolved_gold for query in self.queries)


class PassageLookup:
    """Ids of passages by title and text, or by title where only one passage has it.

    White space does not count in texts, so that sentences joined with and without spaces compare equal. Of
    passages that are equal in title and text the first is found. Texts are held as hashes.

    Parameters
    ----------
    passages : iterable of (passage_id, title, text)
    """

    def __init__(self, passages: Iterable[tuple[str, str, str]]) -> None:
        self._by_content: dict[int, str] = {}
        self._by_title: dict[str, str | None] = {}
        for passage_id, title, text in passages:
            self._by_content.setdefault(_content_key(title, text), passage_id)
            title = _collapse(title)
            self._by_title[title] = passage_id if title not in self._by_title else None

    def find(self, title: str, text: str | None = None) -> str | None:
        """Return the id of a passage, or ``None`` if it is not there or cannot be told from others."""
        if text is not None:
            passage_id = self._by_content.get(_content_key(title, text))
            if passage_id is not None:
                return passage_id
        return self._by_title.get(_collapse(title))


def _collapse(text: str) -> str:
    return " ".join(text.split())


def _content_key(title: str, text: str) -> int:
    content = f"{_collapse(title)}\0{''.join(text.split())}"
    return int(xxhash.xxh3_128_intdigest(content.encode(errors="surrogatepass")))


def read_queries(path: str | Path, passages: PassageLookup | None = None) -> QuerySet:
    """Read the questions of a file.

    Parameters
    ----------
    path : str or Path
        JSON Lines or a JSON list, told apart by the first character; ``.gz`` is decompressed.
    passages : PassageLookup, optional
        Finds the ids of gold passages named by title and text; without it all of those are unresolved.

    Returns
    -------
    QuerySet

    Raises
    ------
    InputError
        If the file cannot be read or is empty, a record has no question or is malformed, or an id repeats.
    """
    path = Path(path)
    places: dict[str, int] = {}
    queries: list[Query] = []
    for position, record in enumerate(_read_records(path)):
        try:
            query = _to_query(record, position, passages)
        except RecordError as error:
            raise InputError(f"{path}:{record.line}: {error}") from error
        earlier = places.setdefault(query.query_id, record.line)
        if earlier != record.line:
            raise InputError(
                f"{path}:{record.line}: the query id {query.query_id!r} is already used at {path}:{earlier}; "
                "every query needs an id of its own"
            )
        queries.append(query)
    if not queries:
        raise InputError(f"{path}: the file holds no questions")
    return QuerySet(queries, path.name)


def _read_records(path: Path) -> Iterator[Record]:
    with open_bytes(path) as file:
        is_list = file.peek(4096).lstrip().startswith(b"[")
    return read_json_list(path) if is_list else read_json_lines(path)


def _to_query(record: Record, position: int, passages: PassageLookup | None) -> Query:
    """Return the query of a record, or raise ``RecordError``."""
    fields = record.fields
    if fields is None:
        raise RecordError(record.problem)
    question = _string(fields, "question")
    if not question.strip():
        raise RecordError(f"no question; fields seen: {', '.join(fields)}")
    gold, unresolved = _gold(fields, passages)
    entities = fields.get("named_entities")
    return Query(
        query_id=_query_id(fields, position),
        question=question,
        gold=gold,
        answers=_answers(fields),
        entities=None if entities is None else _strings(entities, "named_entities"),
        unresolved_gold=unresolved,
    )


def _query_id(fields: Mapping[str, Any], position: int) -> str:
    for name in ("id", "_id"):
        query_id = scalar_string(fields.get(name), name)
        if query_id.strip():
            return query_id
    return f"q{position}"


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    answer = fields.get("answer")
    first = _strings(answer, "answer") if isinstance(answer, list) else (scalar_string(answer, "answer"),)
    aliases = _strings(fields.get("answer_aliases") or [], "answer_aliases")
    return tuple(dict.fromkeys(text for text in (*first, *aliases) if text.strip()))


# --- gold passages


@dataclass(frozen=True, slots=True)
class _GoldPassage:
    title: str
    text: str | None


def _gold(fields: Mapping[str, Any], passages: PassageLookup | None) -> tuple[tuple[str, ...], int]:
    """Return the ids of the gold passages, and how many more there are without a known id."""
    if fields.get("gold") is not None:
        ids = _strings(fields["gold"], "gold")
        if not all(passage_id.strip() for passage_id in ids):
            raise RecordError("the field 'gold' holds an empty passage id")
        return tuple(dict.fromkeys(ids)), 0
    for name, read in _GOLD_READERS.items():
        if name in fields:
            named = dict.fromkeys(read(fields, name))
            found = [passages.find(gold.title, gold.text) if passages else None for gold in named]
            return tuple(dict.fromkeys(i for i in found if i is not None)), found.count(None)
    return (), 0


def _hotpotqa_gold(fields: Mapping[str, Any], name: str) -> list[_GoldPassage]:
    """``supporting_facts``: [[title, sentence number], ...]; ``context``: [[title, [sentence, ...]], ...]."""
    texts: dict[str, str] = {}
    for title, sentences in _pairs(fields.get("context"), "context"):
        texts.setdefault(scalar_string(title, "context"), " ".join(_strings(sentences, "context")))
    titles = [scalar_string(title, name) for title, _ in _pairs(fields[name], name)]
    return [_GoldPassage(title, texts.get(title)) for title in titles]


def _musique_gold(fields: Mapping[str, Any], name: str) -> list[_GoldPassage]:
    """``paragraphs``: [{"title", "paragraph_text" or "text", "is_supporting"}, ...]."""
    gold = []
    for paragraph in _list(fields[name], name):
        if not isinstance(paragraph, dict):
            raise RecordError(f"the field {name!r} must be a list of objects")
        if paragraph.get("is_supporting"):
            text = "paragraph_text" if "paragraph_text" in paragraph else "text"
            gold.append(_GoldPassage(_string(paragraph, "title"), _string(paragraph, text)))
    return gold


_GOLD_READERS: dict[str, Callable[[Mapping[str, Any], str], list[_GoldPassage]]] = {
    "supporting_facts": _hotpotqa_gold,
    "paragraphs": _musique_gold,
    "contexts": _musique_gold,
}


# --- checked values


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"the field {name!r} must be a list")
    return value


def _strings(value: object, name: str) -> tuple[str, ...]:
    return tuple(scalar_string(item, name) for item in _list(value, name))


def _string(fields: Mapping[str, Any], name: str) -> str:
    return scalar_string(fields.get(name), name)


def _pairs(value: object, name: str) -> list[tuple[Any, Any]]:
    pairs = _list(value, name)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RecordError(f"the field {name!r} must be a list of pairs")
    return [(first, second) for first, second in pairs]
