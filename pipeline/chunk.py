"""Splitting long documents into passages, on sentence boundaries where they exist."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import pyarrow as pa

from hippoindex.errors import UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table

Span = tuple[int, int]

#: Marks after which a sentence may end without a space, and the brackets that may close it. spaCy's tokenizer
#: splits at white space, and would leave them inside a word.
_UNSPACED_MARKS = "。！？｡．」』"

_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def sentence_spans(text: str) -> list[Span]:
    """Split a text into sentences, in any script that marks their ends.

    spaCy's rule-based ``sentencizer`` over its multi-language tokenizer; a blank line ends a sentence too.

    Parameters
    ----------
    text : str

    Returns
    -------
    list of (int, int)
        Character spans in order, without white space at their ends. They hold every other character.
    """
    paragraphs = list(_paragraph_spans(text))
    spans = []
    nlp = _sentencizer()
    with nlp.memory_zone():  # else the words of every text stay in spaCy's vocabulary
        for start, end in paragraphs:
            for sentence in nlp(text[start:end]).sents:
                span = _trim(text, start + sentence.start_char, start + sentence.end_char)
                if span[0] < span[1]:
                    spans.append(span)
    return spans


@functools.cache
def _sentencizer() -> Any:
    import spacy  # takes a second, so only where it is used

    nlp = spacy.blank("xx")
    nlp.add_pipe("sentencizer")
    nlp.max_length = sys.maxsize  # the limit is there for statistical models
    infixes = [*nlp.Defaults.infixes, f"[{_UNSPACED_MARKS}]"]
    nlp.tokenizer.infix_finditer = spacy.util.compile_infix_regex(infixes).finditer
    return nlp


def _paragraph_spans(text: str) -> Iterator[Span]:
    start = 0
    for blank in _BLANK_LINES.finditer(text):
        yield start, blank.start()
        start = blank.end()
    yield start, len(text)


def _trim(text: str, start: int, end: int) -> Span:
    """Return the span without white space at its ends, which is empty if there is nothing else."""
    kept = text[start:end].lstrip()
    start = end - len(kept)
    return start, start + len(kept.rstrip())


def chunk_spans(text: str, max_tokens: int, overlap_tokens: int, token_offsets: Sequence[Span]) -> list[Span]:
    """Cut a text into chunks of whole sentences.

    Sentences are taken as long as they fit into ``max_tokens``. The next chunk begins with as many whole
    sentences from the end of the last one as fit into ``overlap_tokens`` and leave room for a new one. A
    sentence longer than ``max_tokens`` is cut between words, or between tokens where a word is longer still.

    Parameters
    ----------
    text : str
    max_tokens : int
        Most tokens of a chunk.
    overlap_tokens : int
        Most tokens that a chunk shares with the one before.
    token_offsets : sequence of (int, int)
        Character spans of the text's tokens, in order, without special tokens.

    Returns
    -------
    list of (int, int)
        Character spans, start and end both rising, without white space at their ends. Every character that
        is not white space is in at least one; a text without any gives no chunk.

    Raises
    ------
    UsageError
        If ``overlap_tokens`` is not below ``max_tokens``, or a single character has more than ``max_tokens``
        tokens.
    """
    if not 0 <= overlap_tokens < max_tokens:
        raise UsageError(
            f"overlap_tokens must be at least 0 and below max_tokens, got {overlap_tokens} and {max_tokens}"
        )
    if len(token_offsets) <= max_tokens:
        whole = _trim(text, 0, len(text))
        return [whole] if whole[0] < whole[1] else []
    atoms = _atoms(token_offsets)
    # Characters from the start of an atom to that of the next belong to it: nothing falls between chunks.
    bounds = [0, *(start for start, _, _ in atoms[1:]), len(text)]
    tokens_before = [0, *itertools.accumulate(tokens for _, _, tokens in atoms)]
    sentence_starts = {bisect_left(bounds, start) for start, _ in sentence_spans(text)}
    edges = sorted(sentence_starts.difference({0, len(atoms)}))
    units = [
        piece
        for sentence in itertools.pairwise([0, *edges, len(atoms)])
        for piece in _cut(sentence, atoms, tokens_before, max_tokens)
    ]
    sizes = [tokens_before[last] - tokens_before[first] for first, last in units]
    spans = (
        _trim(text, bounds[units[first][0]], bounds[units[last - 1][1]])
        for first, last in _windows(sizes, max_tokens, overlap_tokens)
    )
    return [(start, end) for start, end in spans if start < end]  # a token may be white space


Atom = tuple[int, int, int]


def _atoms(token_offsets: Sequence[Span]) -> list[Atom]:
    """Return (start, end, number of tokens) of the smallest pieces that can be cut apart.

    Tokens can share a character: a tokenizer that decomposes Hangul makes several of one syllable.
    """
    atoms: list[Atom] = []
    for start, end in token_offsets:
        if atoms and start < atoms[-1][1]:
            first, last, tokens = atoms[-1]
            atoms[-1] = (first, max(last, end), tokens + 1)
        else:
            atoms.append((start, end, 1))
    return atoms


def _cut(
    sentence: Span, atoms: Sequence[Atom], tokens_before: Sequence[int], max_tokens: int
) -> Iterator[Span]:
    """Cut a range of atoms into ranges of at most ``max_tokens``, before a space where there is one."""
    first, end = sentence
    while tokens_before[end] - tokens_before[first] > max_tokens:
        last = bisect_left(tokens_before, tokens_before[first] + max_tokens + 1, first, end) - 1
        if last == first:
            raise UsageError(
                f"max_tokens={max_tokens} is too small: one character has {atoms[first][2]} tokens"
            )
        spaced = (cut for cut in range(last, first, -1) if atoms[cut - 1][1] < atoms[cut][0])
        cut = next(spaced, last)
        yield first, cut
        first = cut
    yield first, end


def _windows(sizes: Sequence[int], max_tokens: int, overlap_tokens: int) -> Iterator[Span]:
    """Return ranges of units: each as long as fits, beginning with the end of the one before."""
    first = end = 0
    while True:
        size = sum(sizes[first:end])
        while end < len(sizes) and size + sizes[end] <= max_tokens:
            size += sizes[end]
            end += 1
        yield first, end
        if end == len(sizes):
            return
        # The next chunk must hold the unit at end. It did not fit beside all of this one: first always rises.
        room = min(overlap_tokens, max_tokens - sizes[end])
        first = end
        while sizes[first - 1] <= room:
            first -= 1
            room -= sizes[first]


def chunk_table(
    table: pa.Table,
    max_tokens: int,
    overlap_tokens: int,
    token_offsets: Callable[[Sequence[str]], list[list[Span]]],
) -> pa.Table:
    """Chunk every row of a table of documents.

    A document that fits into one chunk stays as it is. The chunks of another are passages ``{doc_id}#0``,
    ``{doc_id}#1`` and so on, with the document's id and title and their span of characters in its text.

    Parameters
    ----------
    table : pyarrow.Table
        Of :data:`schemas.PASSAGE`.
    max_tokens, overlap_tokens : int
        As in :func:`chunk_spans`.
    token_offsets : callable
        Tokenizer, as :meth:`Embedder.token_offsets <hippoindex.pipeline.embed.base.Embedder.token_offsets>`.

    Returns
    -------
    pyarrow.Table
        Of :data:`schemas.PASSAGE`.
    """
    rows: list[Mapping[str, Any]] = []
    for row in table.to_pylist():
        text = row["text"]
        (offsets,) = token_offsets([text])
        spans = chunk_spans(text, max_tokens, overlap_tokens, offsets)
        rows.extend(_chunk_rows(row, spans) if len(spans) > 1 else [row])
    return pa.Table.from_pylist(rows, schema=schemas.PASSAGE)


def _chunk_rows(row: Mapping[str, Any], spans: Sequence[Span]) -> Iterator[Mapping[str, Any]]:
    for number, (start, end) in enumerate(spans):
        yield {
            **row,
            "passage_id": f"{row['doc_id']}#{number}",
            "text": row["text"][start:end],
            "span_start": row["span_start"] + start,
            "span_end": row["span_start"] + end,
        }


@dataclass(frozen=True)
class ChunkStage:
    """Documents in, passages of at most ``max_tokens`` tokens of the embedding model out.

    Attributes
    ----------
    max_tokens, overlap_tokens : int
        As in :func:`chunk_spans`.
    embed : EmbedConfig
        Names the model whose tokens are counted.
    """

    name: ClassVar[str] = "chunk"
    version: ClassVar[int] = 1
    reads: ClassVar[pa.Schema] = schemas.PASSAGE
    writes: ClassVar[pa.Schema] = schemas.PASSAGE

    max_tokens: int
    overlap_tokens: int
    embed: EmbedConfig

    def key_part(self) -> Mapping[str, Any]:
        """Return what decides the chunks of a shard: the sizes, the tokenizer and the sentence splitter."""
        return {
            "max_tokens": self.max_tokens,
            "overlap_tokens": self.overlap_tokens,
            "engine": self.embed.engine,
            "model": self.embed.model,
            "spacy": metadata.version("spacy"),
        }

    def open(self) -> Process:
        """Load the tokenizer and return the stage's function."""
        from hippoindex.pipeline.embed import open_embedder  # brings the model's runtime with it

        embedder = open_embedder(self.embed)

        def process(table: pa.Table) -> StageOutput:
            rows = chunk_table(table, self.max_tokens, self.overlap_tokens, embedder.token_offsets)
            return StageOutput(rows, quarantine_table())

        return process
