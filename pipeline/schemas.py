"""Arrow schemas of everything that travels between stages or lies in an index.

``docs/artifact.md`` describes the published tables column by column.
"""

from __future__ import annotations

import pyarrow as pa

#: One row per passage. ``span_*`` are character offsets of the passage in its document's text.
PASSAGE = pa.schema(
    [
        pa.field("passage_id", pa.string(), nullable=False),
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("span_start", pa.int32(), nullable=False),
        pa.field("span_end", pa.int32(), nullable=False),
    ]
)

#: One row per document that was read, in order: ``digest`` is the 128-bit xxh3 of title, NUL and text in hex,
#: ``records`` how many records held it, duplicates included.
DOCUMENT = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
        pa.field("records", pa.int32(), nullable=False),
    ]
)

TRIPLE = pa.struct(
    [
        pa.field("subject", pa.string(), nullable=False),
        pa.field("predicate", pa.string(), nullable=False),
        pa.field("object", pa.string(), nullable=False),
    ]
)

#: What OpenIE found in one passage, in surface form (not normalised).
#: ``missing`` is true where an extraction file holds nothing for the passage.
EXTRACTION = pa.schema(
    [
        pa.field("passage_id", pa.string(), nullable=False),
        pa.field("entities", pa.list_(pa.string()), nullable=False),
        pa.field("triples", pa.list_(TRIPLE), nullable=False),
        pa.field("missing", pa.bool_(), nullable=False),
    ]
)

#: One row per thing that could not be processed. ``kind`` is ``passage`` (it is not in the index), ``triple``
#: or ``entity`` (the passage is in the index, this part of its extraction is not). ``source`` and ``line``
#: (1-based) say where it was read from, where that is known; ``raw`` is what was read or answered, cut at
#: 2,000 characters.
QUARANTINE = pa.schema(
    [
        pa.field("stage", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=True),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),
    ]
)

MAX_RAW_CHARS = 2_000

#: ``phrase_id`` is the 64-bit xxh3 of the normalised phrase; rows are sorted by it.
PHRASE = pa.schema(
    [
        pa.field("phrase_id", pa.uint64(), nullable=False),
        pa.field("phrase", pa.string(), nullable=False),
        pa.field("passage_count", pa.int32(), nullable=False),
    ]
)

#: Distinct words of all passages, sorted; ``passage_count`` is the number of passages that have it.
WORD = pa.schema(
    [
        pa.field("word", pa.string(), nullable=False),
        pa.field("passage_count", pa.int32(), nullable=False),
    ]
)

#: Distinct facts, sorted by ``fact_id``; ``count`` is the number of extractions.
FACT = pa.schema(
    [
        pa.field("fact_id", pa.uint64(), nullable=False),
        pa.field("subject_id", pa.uint64(), nullable=False),
        pa.field("predicate", pa.string(), nullable=False),
        pa.field("object_id", pa.uint64(), nullable=False),
        pa.field("count", pa.int32(), nullable=False),
        pa.field("passage_ids", pa.list_(pa.string()), nullable=False),
    ]
)

#: Synonym edges, each once with ``phrase_id < other_id``, sorted.
SYNONYM = pa.schema(
    [
        pa.field("phrase_id", pa.uint64(), nullable=False),
        pa.field("other_id", pa.uint64(), nullable=False),
        pa.field("cosine", pa.float32(), nullable=False),
    ]
)


def quarantine_row(
    stage: str,
    row_id: str,
    reason: str,
    raw: str = "",
    *,
    kind: str = "passage",
    source: str = "",
    line: int | None = None,
) -> dict[str, object]:
    """One row of :data:`QUARANTINE`; ``raw`` is cut at :data:`MAX_RAW_CHARS` characters."""
    return {
        "stage": stage,
        "kind": kind,
        "row_id": row_id,
        "source": source,
        "line": line,
        "reason": reason,
        "raw": raw[:MAX_RAW_CHARS],
    }
