"""OpenIE results that exist already: HippoRAG's ``openie_results_ner_*.json``.

The file is ``{"docs": [{"passage" or "text", "title"?, "extracted_entities", "extracted_triples"}, ...]}``,
plain or gzip-compressed, as HippoRAG 1 and 2 write it. Passages are joined by their text: HippoRAG's
``passage`` is the title, a line break and the text.

An answer of a language model has the same two lists, so what makes an entity or a triple acceptable is
decided here for every engine (:func:`parse_entities`, :func:`parse_triples`).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from hippoindex.errors import InputError
from hippoindex.pipeline.extract.base import Extraction, Passage, RejectedTriple, Triple

#: Longest entity, subject, predicate or object in characters.
MAX_STRING_CHARS = 1_000


class RejectedEntity(RejectedTriple):
    """An entity that is not one. A type of its own, so that the two are counted apart."""

    __slots__ = ()


def raw_json(value: object) -> str:
    """Return a value as compact, readable JSON that is valid UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _problem(value: object) -> str | None:
    """Return why a value cannot be an entity or a part of a triple, or ``None`` if it can."""
    if value is None:
        return "is null"
    if not isinstance(value, str):
        return f"is not a string ({type(value).__name__})"
    if not value.strip():
        return "is empty"
    if len(value.strip()) > MAX_STRING_CHARS:
        return f"is longer than {MAX_STRING_CHARS:,} characters"
    if any("\ud800" <= char <= "\udfff" for char in value):
        return "is not valid Unicode (lone surrogate)"
    return None


def parse_entities(values: Iterable[Any]) -> tuple[list[str], list[RejectedTriple]]:
    """Sort the good entities from the bad.

    Parameters
    ----------
    values : iterable
        JSON values; a good one is a string with 1 to :data:`MAX_STRING_CHARS` characters.

    Returns
    -------
    entities : list of str
        Stripped, each once, in the order of their first occurrence.
    rejected : list of RejectedEntity
    """
    entities: dict[str, None] = {}
    rejected: list[RejectedTriple] = []
    for value in values:
        problem = _problem(value)
        if problem is None:
            entities[value.strip()] = None
        else:
            rejected.append(RejectedEntity(f"entity {problem}", raw_json(value)))
    return list(entities), rejected


def parse_triples(values: Iterable[Any]) -> tuple[list[Triple], list[RejectedTriple]]:
    """Sort the good triples from the bad.

    Parameters
    ----------
    values : iterable
        JSON values; a good one is a list of three strings with 1 to :data:`MAX_STRING_CHARS` characters.

    Returns
    -------
    triples : list of Triple
        Stripped and in order. A repeated triple stays: the graph counts extractions.
    rejected : list of RejectedTriple
    """
    triples: list[Triple] = []
    rejected: list[RejectedTriple] = []
    for value in values:
        reason = _triple_problem(value)
        if reason is None:
            triples.append(Triple(*(part.strip() for part in value)))
        else:
            rejected.append(RejectedTriple(reason, raw_json(value)))
    return triples, rejected


def _triple_problem(value: object) -> str | None:
    if not isinstance(value, list | tuple):
        return f"triple is not a list ({type(value).__name__})"
    if len(value) != 3:
        return f"triple has {len(value)} fields instead of 3"
    for name, part in zip(Triple._fields, value, strict=True):
        problem = _problem(part)
        if problem is not None:
            return f"{name} {problem}"
    return None


class ImportedExtractor:
    """Looks passages up in a file of OpenIE results.

    A passage of the corpus joins an entry whose text equals, up to white space, its title and text, else its
    text alone. A passage that joins nothing gives ``Extraction(missing=True)``. Whether *nothing at all*
    joined is known only to the caller that has seen every shard.

    Where the file holds the same passage twice with different results, the first entry is used and the
    entities and triples of the other are rejected, with both positions in the reason.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzip-compressed.

    Attributes
    ----------
    passages : int
        Distinct passages in the file.
    joined : int
        Passages found by :meth:`extract` so far.

    Raises
    ------
    InputError
        If the file cannot be read, is not such a JSON object, or an entry has no text or no lists.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._by_text = self._index(_read_docs(self._path))
        self.passages = len(self._by_text)
        self.joined = 0

    def extract(self, passages: Sequence[Passage]) -> list[Extraction]:
        """Return one extraction per passage, in order."""
        found = [self._find(passage) for passage in passages]
        self.joined += sum(not extraction.missing for extraction in found)
        return found

    def _find(self, passage: Passage) -> Extraction:
        for text in (_full_text(passage.title, passage.text), passage.text):
            extraction = self._by_text.get(_text_key(text))
            if extraction is not None:
                return extraction
        return Extraction(missing=True)

    def _index(self, docs: Sequence[Any]) -> dict[bytes, Extraction]:
        first: dict[bytes, tuple[int, Extraction]] = {}
        repeats: dict[bytes, list[RejectedTriple]] = {}
        for position, doc in enumerate(docs):
            key, extraction = self._parse(doc, f"{self._path}: docs[{position}]")
            known_position, known = first.setdefault(key, (position, extraction))
            if known != extraction:
                reason = f"docs[{position}] repeats the passage of docs[{known_position}] with other results"
                repeats.setdefault(key, []).extend(_reject_all(extraction, reason))
        by_text = {key: extraction for key, (_, extraction) in first.items()}
        for key, rejected in repeats.items():
            by_text[key] = replace(by_text[key], rejected=[*by_text[key].rejected, *rejected])
        return by_text

    def _parse(self, doc: object, where: str) -> tuple[bytes, Extraction]:
        if not isinstance(doc, dict):
            raise InputError(f"{where} is not a JSON object but {type(doc).__name__}.")
        entities, bad_entities = parse_entities(_list(doc, "extracted_entities", where))
        triples, bad_triples = parse_triples(_list(doc, "extracted_triples", where))
        extraction = Extraction(entities, triples, [*bad_entities, *bad_triples])
        return _text_key(_doc_text(doc, where)), extraction


def _read_docs(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        tree = json.loads(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"Cannot read the OpenIE results {path} (extract.path): {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    docs = tree.get("docs") if isinstance(tree, dict) else None
    if not isinstance(docs, list):
        raise InputError(
            f'{path} holds no OpenIE results: expected a JSON object with a list "docs", as in HippoRAG\'s '
            "openie_results_ner_*.json."
        )
    return docs


def _doc_text(doc: dict[str, Any], where: str) -> str:
    for field in ("passage", "text"):
        text = doc.get(field)
        if isinstance(text, str) and text.strip():
            title = doc.get("title")
            return _full_text(title, text) if field == "text" and isinstance(title, str) else text
    raise InputError(f'{where} has neither a "passage" nor a "text", so it cannot be joined with the corpus.')


def _list(doc: dict[str, Any], field: str, where: str) -> list[object]:
    values = doc.get(field)
    if not isinstance(values, list):
        found = type(values).__name__ if field in doc else "nothing"
        raise InputError(f'{where}: expected a list in "{field}", got {found}.')
    return values


def _full_text(title: str, text: str) -> str:
    return f"{title}\n{text}"


def _text_key(text: str) -> bytes:
    """Hash a text so that only its words count, not the white space between them."""
    return xxhash.xxh3_128_digest(" ".join(text.split()).encode(errors="surrogatepass"))


def _reject_all(extraction: Extraction, reason: str) -> list[RejectedTriple]:
    """Return everything in an extraction as rejected, so that it stays counted."""
    return [
        *(RejectedEntity(reason, raw_json(entity)) for entity in extraction.entities),
        *(RejectedTriple(reason, raw_json(triple)) for triple in extraction.triples),
        *extraction.rejected,
    ]
