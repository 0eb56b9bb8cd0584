"""Random extractions for the benchmark of the graph, seeded, made passage block by passage block.

A passage has about twelve triples over thirteen phrases: eight that no passage had before and five drawn by
Zipf's law (Mandelbrot's form, so that no phrase is in every passage) from those of the whole corpus. One
passage in a hundred mentions a given hub. That is about the shape of HippoRAG's extraction of MuSiQue: 0.9
mentions and 0.6 new phrases a triple. Phrases are two or three made-up words.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hippoindex.pipeline import schemas

TRIPLES_PER_PASSAGE = 12
FRESH, DRAWN = 8, 5
HUBS, HUB_SHARE = 20, 0.01
ZIPF_SHIFT = 30
REPEATED = 0.04
"""Share of triples that repeat the one before."""
PREDICATES = 4_000
SHARD_PASSAGES = 1024

SYLLABLES = [
    "ba",
    "dor",
    "el",
    "fi",
    "gra",
    "hu",
    "ilm",
    "jo",
    "kes",
    "lu",
    "mar",
    "ne",
    "ost",
    "pri",
    "ra",
    "tun",
]
WORDS = pa.array(["".join(parts) for parts in itertools.product(SYLLABLES, repeat=3)])


def n_passages(n_triples: int) -> int:
    return -(-n_triples // TRIPLES_PER_PASSAGE)


def n_shards(n_triples: int) -> int:
    return -(-n_passages(n_triples) // SHARD_PASSAGES)


def extraction(n_triples: int, shard: int, seed: int = 0) -> pa.Table:
    """Return one shard of a corpus of so many triples, ``schemas.EXTRACTION``."""
    rng = np.random.default_rng([seed, n_triples, shard])
    first = shard * SHARD_PASSAGES
    count = min(SHARD_PASSAGES, n_passages(n_triples) - first)
    wanted = min(n_triples - first * TRIPLES_PER_PASSAGE, count * TRIPLES_PER_PASSAGE)
    passages = np.sort(rng.integers(0, count, wanted))  # so many triples in all, twelve a passage on average
    slots = _phrases(rng, first, count, n_passages(n_triples) * FRESH)
    subject = rng.integers(0, FRESH + DRAWN, wanted)
    obj = (subject + rng.integers(1, FRESH + DRAWN, wanted)) % (FRESH + DRAWN)
    columns = [slots[passages, subject], _zipf(rng, wanted, PREDICATES), slots[passages, obj]]
    again = np.flatnonzero((rng.random(wanted) < REPEATED) & (np.diff(passages, prepend=-1) == 0))
    for column in columns:
        column[again] = column[again - 1]
    texts = [phrase_texts(columns[0]), WORDS.take(pa.array(columns[1])), phrase_texts(columns[2])]
    triples = pa.StructArray.from_arrays(texts, fields=list(schemas.TRIPLE))
    offsets = np.searchsorted(passages, np.arange(count + 1)).astype(np.int32)
    return pa.table(
        [
            pa.array([f"passage-{number}" for number in range(first, first + count)]),
            pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string())),
            pa.ListArray.from_arrays(pa.array(offsets), triples),
            pa.array(np.zeros(count, bool)),
        ],
        schema=schemas.EXTRACTION,
    )


def _phrases(rng: np.random.Generator, first: int, count: int, total: int) -> NDArray[np.int64]:
    """Return the phrases of passages, shape (count, FRESH + DRAWN)."""
    fresh = np.arange(first * FRESH, (first + count) * FRESH).reshape(count, FRESH)
    slots = np.concatenate([HUBS + fresh, HUBS + _zipf(rng, (count, DRAWN), total)], axis=1)
    with_hub = np.flatnonzero(rng.random(count) < HUBS * HUB_SHARE)
    slots[with_hub, -1] = rng.integers(0, HUBS, len(with_hub))
    return slots


def _zipf(rng: np.random.Generator, size: int | tuple[int, ...], n: int) -> NDArray[np.int64]:
    r"""Draw ranks 0 .. n - 1 with :math:`P(i) \propto \int_i^{i+1} (x + s)^{-1} dx`."""
    drawn = ZIPF_SHIFT * ((n + ZIPF_SHIFT) / ZIPF_SHIFT) ** rng.random(size) - ZIPF_SHIFT
    return np.clip(drawn, 0, n - 1).astype(np.int64)


def phrase_texts(numbers: NDArray[np.int64]) -> pa.Array:
    """Return the text of phrases: their number, written with words for digits."""
    base = len(WORDS)
    digits = [numbers % base, numbers // base % base, numbers // base**2]
    words = [WORDS.take(pa.array(digit)) for digit in digits[:2]]
    third = WORDS.take(pa.array(digits[2], mask=digits[2] == 0))
    return pc.binary_join_element_wise(*words, third, " ", null_handling="skip")
