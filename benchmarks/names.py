"""Names of real things with their aliases, and vectors of them: what the similarity join is measured on.

    python benchmarks/names.py --count 1000000 --precision int8

The names are those of DBpedia's redirects, normalised as phrases of an index are. They come in a fixed order,
the same for every count: groups of aliases shuffled by a hash, the aliases of a group side by side. The first
names are thus a random sample of groups, and hold the pairs of their groups. Vectors are L2-normalised
float32, made with the project's own embedder. Names and vectors are kept below ``benchmarks`` in the cache
folder; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from common import data_folder
from numpy.typing import NDArray

from hippoindex.cluster.usage import available_cores
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.models import cache_folder
from hippoindex.pipeline.normalise import phrase_id, unicode_phrase

if TYPE_CHECKING:  # loads onnxruntime, which measured processes do not need
    from hippoindex.pipeline.embed import Embedder

MODEL = "all-MiniLM-L6-v2"
BLOCK_NAMES = 10_000
LAYOUT = 1
"""Raised with every change of how names are read or ordered, so that none kept from before is used."""

Precision = Literal["fp32", "int8"]


class Names(NamedTuple):
    """Distinct names, and which of them name the same thing.

    Attributes
    ----------
    names : list of str
        Normalised.
    groups : ndarray of int64, shape (N,)
        Number of the group; names of one group are linked by pairs.
    gold : ndarray of int64, shape (G, 2)
        Pairs of an alias and its canonical name: rows, the smaller first, each pair once, sorted.
    """

    names: list[str]
    groups: NDArray[np.int64]
    gold: NDArray[np.int64]

    def first(self, count: int) -> Names:
        """Return the first names, with the pairs among them."""
        if count > len(self.names):
            raise SystemExit(f"{count:,} names are wanted; there are {len(self.names):,}")
        return Names(self.names[:count], self.groups[:count], self.gold[self.gold[:, 1] < count])


@functools.cache
def all_names() -> Names:
    """Return all names of ``entity_aliases``: from the cache, or in 10 to 20 seconds from the source."""
    source = data_folder() / "entity_aliases" / "alias_canonical.tsv.gz"
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    kept = folder() / f"names_{digest}_{LAYOUT}.parquet"
    pairs = kept.with_stem(f"{kept.stem}_gold")
    if not (kept.exists() and pairs.exists()):
        made = read(source)
        columns = {"name": made.names, "group": made.groups}
        write_table(columns, kept)
        write_table(dict(zip("ab", made.gold.T, strict=True)), pairs)
    table, gold = pq.read_table(kept), pq.read_table(pairs)
    groups = table["group"].to_numpy()
    return Names(table["name"].to_pylist(), groups, np.column_stack([gold["a"], gold["b"]]))


def write_table(columns: dict[str, Any], path: Path) -> None:
    """Write a table, complete or not at all."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    pq.write_table(pa.table(columns), partial)
    partial.rename(path)


def read(source: Path) -> Names:
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        ends = [[as_phrase(end) for end in line.rstrip("\n").split("\t")] for line in lines]
    return ordered([(alias, canonical) for alias, canonical in ends if alias != canonical])


def as_phrase(entry: str) -> str:
    return unicode_phrase(entry.replace("_", " "))


def ordered(pairs: list[tuple[str, str]]) -> Names:
    """Put the names of linked pairs side by side, and shuffle the groups by a hash of their first name."""
    names = sorted({name for pair in pairs for name in pair})
    number = {name: row for row, name in enumerate(names)}
    links = np.array([[number[alias], number[canonical]] for alias, canonical in pairs]).reshape(-1, 2)
    adjacency = sp.coo_array((np.ones(len(links)), links.T), shape=(len(names), len(names)))
    _, group = sp.csgraph.connected_components(adjacency, directed=False)
    _, first = np.unique(group, return_index=True)
    shuffled = np.array([phrase_id(names[row]) for row in first], dtype=np.uint64)
    order = np.lexsort((np.arange(len(names)), group, shuffled[group]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    gold = np.unique(np.sort(place[links], axis=1), axis=0)
    return Names([names[row] for row in order], group[order].astype(np.int64), gold)


def vectors(names: list[str], precision: Precision) -> NDArray[np.float32]:
    """Return the vectors of names, mapped from the cache; make them if they are not there.

    Parameters
    ----------
    names : list of str
        The first ones of :func:`all_names`. A file of more names serves as well.
    precision : {"fp32", "int8"}
        Arithmetic of the model.

    Returns
    -------
    ndarray of float32, shape (N, 384)
        Read-only, L2-normalised.
    """
    kept = kept_file(len(names), precision)
    if kept is None:
        kept = file_of(len(names), precision)
        make(names, precision, kept)
    mapped: NDArray[np.float32] = np.load(kept, mmap_mode="r")[: len(names)]
    return mapped


def folder() -> Path:
    """Return the folder of what is kept, and make it."""
    kept = cache_folder().parent / "benchmarks"
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def file_of(count: int, precision: Precision) -> Path:
    return folder() / f"names_{count}_{MODEL}_{precision}_{names_digest()}.npy"


def kept_file(count: int, precision: Precision) -> Path | None:
    """Return the smallest complete file of at least ``count`` names."""
    pattern = file_of(0, precision).name.replace("_0_", "_*_", 1)
    found = {int(path.name.split("_")[1]): path for path in file_of(0, precision).parent.glob(pattern)}
    return min(((size, path) for size, path in found.items() if size >= count), default=(0, None))[1]


@functools.cache
def names_digest() -> str:
    """Digest of all names in their order."""
    return hashlib.sha256("\n".join(all_names().names).encode()).hexdigest()[:12]


def make(names: list[str], precision: Precision, path: Path) -> None:
    """Embed names on all cores; a file beside the vectors counts the rows that are done."""
    partial, counter = path.with_suffix(".partial"), path.with_suffix(".rows")
    done = int(counter.read_text("utf-8")) if counter.exists() and partial.exists() else 0
    shape = (len(names), 384)
    mode = "r+" if done else "w+"
    rows = np.lib.format.open_memmap(partial, mode=mode, dtype=np.float32, shape=shape)
    started = time.perf_counter()
    for start, block in embedded(names, done, precision):
        end = start + len(block)
        rows[start:end] = block
        rows.flush()
        counter.write_text(str(end), encoding="utf-8")
        speed = (end - done) / (time.perf_counter() - started)
        print(f"{end:,} of {len(names):,} names embedded, {speed:,.0f}/s", flush=True)
    partial.rename(path)
    counter.unlink()


def embedded(names: list[str], done: int, precision: Precision) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the vectors of the names from ``done`` on, with the number of their first row."""
    starts = range(done, len(names), BLOCK_NAMES)
    blocks = (names[start : start + BLOCK_NAMES] for start in starts)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(available_cores(), mp_context=context) as pool:
        yield from zip(starts, pool.map(encode, blocks, [precision] * len(starts)), strict=True)


def encode(names: list[str], precision: Precision) -> NDArray[np.float32]:
    return embedder(precision).encode(names)


@functools.cache
def embedder(precision: Precision) -> Embedder:
    from hippoindex.pipeline.embed import (
        open_embedder,
    )  # loads onnxruntime, which measured processes do not need

    return open_embedder(EmbedConfig(model=MODEL, precision=precision))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--precision", choices=["fp32", "int8"], default="int8")
    arguments = parser.parse_args()
    chosen = all_names().first(arguments.count)
    rows = vectors(chosen.names, arguments.precision)
    print(f"{len(rows):,} vectors, {len(chosen.gold):,} pairs: {kept_file(len(rows), arguments.precision)}")


if __name__ == "__main__":
    main()
