"""How long does it take from extracted triples to a graph on the disk, and in how much memory?

    python benchmarks/graph_build.py --quick --json out.json

Random extractions (``triples.py``) of 1M, 10M and 100M triples are resolved into shards; from these the graph
is built, with no synonym edges.

- ``hippoindex`` reads the shards and writes ``phrases/``, ``facts/``, ``occurrence/`` and ``graph/`` as they
  lie in an index. ``merge_s`` and ``graph_s`` are its two parts.
- ``HippoRAG`` is its way: ids are MD5 digests of phrases; every triple raises the weight of both ordered
  pairs in one dictionary of tuples, every phrase of a passage sets one; then edge by edge into lists, and
  from there into igraph by names. Triples are in memory as tuples of strings. MD5 takes ``hash_s`` of it.
  Sizes above 1,000,000 are left out: they do not fit.
- ``resolve`` is the stage before, in one process: normalising and hashing.

Both graphs must have the same edges and weights: ``digest`` is that of the edges, sorted, with weights in
float64, parallel edges summed. Every run has a process of its own, after a small run that compiles what is
compiled. ``cpu_s`` counts all threads. ``peak_bytes`` is the largest resident set of the process, mapped
files and about 0.25 GiB of interpreter and libraries included.

Exits with 1 if digests differ or, in a full run, if a goal is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import triples
from common import write_record
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from hippoindex.cluster.usage import machine
from hippoindex.kernels.ids import ranks
from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline.blocks import row_blocks, row_numbers
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.graph import build_graph
from hippoindex.pipeline.merge import merge
from hippoindex.pipeline.normalise import phrase_id
from hippoindex.pipeline.resolve import ResolveStage
from hippoindex.pipeline.shards import Shard, column
from hippoindex.pipeline.stage import read_table, table_bytes

QUICK, FULL = (100_000,), (1_000_000, 10_000_000, 100_000_000)
HIPPORAG_MOST = 1_000_000
WARM = 2_000
FASTER, SMALLER, MOST_BYTES = 20, 5, 16 * 2**30
"""Goals: times faster and smaller than HippoRAG's way, where it runs; peak memory at the largest size."""
NO_SYNONYMS = Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
HEADS = ("triples", "method", "seconds", "GiB", "edges")


def main() -> int:
    arguments = parsed()
    sizes = tuple(arguments.sizes or (QUICK if arguments.quick else FULL))
    rows = []
    with tempfile.TemporaryDirectory(prefix="hippoindex-graph-", dir=arguments.work) as temporary:
        for size in sizes:
            rows += measured(Path(temporary), size, arguments.memory_bytes)
    same = agree(rows)
    complete = not arguments.quick and sizes == FULL
    goals = checked_goals(rows) if complete else []
    Console().print(table(rows))
    if arguments.markdown:
        print("\n" + markdown(rows))
    results = {"memory_bytes": arguments.memory_bytes, "rows": rows, "goals": goals}
    if arguments.json:
        text = json.dumps({"machine": dict(machine()), **results}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if complete:
        print("record:", write_record("graph_build", results))
    if not same:
        print("MISSED the graphs differ", file=sys.stderr)
    for goal in goals:
        if not goal["met"]:
            print("MISSED", goal["name"], goal["measured"], file=sys.stderr)
    return int(not same or not all(goal["met"] for goal in goals))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]:,} triples")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="TRIPLES", help=f"instead of {FULL}")
    parser.add_argument("--memory-bytes", type=int, default=GraphConfig().memory_bytes, help="the budget")
    parser.add_argument("--work", type=Path, help="folder for temporary files, 250 bytes a triple")
    parser.add_argument("--json", type=Path, help="where machine and rows go")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README as well")
    return parser.parse_args()


def measured(folder: Path, n_triples: int, memory_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure every method on one size, and remove its files."""
    shards = folder / str(n_triples)
    yield fresh(by_resolving, shards, n_triples)
    yield fresh(by_hippoindex, shards, n_triples, memory_bytes)
    if n_triples <= HIPPORAG_MOST:
        yield fresh(by_hipporag, shards, n_triples)
    shutil.rmtree(shards)


def fresh(task: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a task in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def result(n_triples: int, method: str, seconds: float, digest: str, **more: Any) -> dict[str, Any]:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = {"triples": n_triples, "method": method, "seconds": round(seconds, 3), "peak_bytes": kib * 1024}
    return {**values, "digest": digest, **more}


def by_resolving(folder: Path, n_triples: int) -> dict[str, Any]:
    """Write the shards that the other methods read; the clock runs for the stage alone."""
    process = ResolveStage(GraphConfig()).open()
    process(triples.extraction(WARM, 0))
    folder.mkdir()
    seconds, digest = 0.0, hashlib.sha256()
    for number in range(triples.n_shards(n_triples)):
        shard = triples.extraction(n_triples, number)
        start = time.perf_counter()
        rows = process(shard).rows
        seconds += time.perf_counter() - start
        digest.update(rows["facts"].combine_chunks().flatten().field("fact_id").to_numpy().tobytes())
        (folder / f"{number:06d}.arrow").write_bytes(table_bytes(rows))
    return result(n_triples, "resolve", seconds, digest.hexdigest()[:16])


def by_hippoindex(folder: Path, n_triples: int, memory_bytes: int) -> dict[str, Any]:
    config = GraphConfig(weights="hipporag", memory_bytes=memory_bytes)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        small = Path(temporary) / "small.arrow"
        small.write_bytes(table_bytes(ResolveStage(config).open()(triples.extraction(WARM, 0)).rows))
        build([small], Path(temporary) / "warm", config)
        used = time.process_time()
        graph, times = build(sorted(folder.glob("*.arrow")), Path(temporary) / "index", config)
        more = {"cpu_s": round(time.process_time() - used, 3), **times, "edges": graph.n_edges}
        made = result(n_triples, "hippoindex", sum(times.values()), "", **more)
        return made | {"digest": digest_of(graph)}


def build(shards: list[Path], folder: Path, config: GraphConfig) -> tuple[Graph, dict[str, float]]:
    """Build the graph of resolved shards; the times of both parts."""
    start = time.perf_counter()
    passage_ids = column([Shard(path.name, "", path) for path in shards], "passage_id")
    numbered = merge(shards, passage_ids, folder, memory_bytes=config.memory_bytes)
    middle = time.perf_counter()
    parts = numbered.fact_ends, numbered.fact_counts, numbered.occurrence
    graph, _ = build_graph(folder / "graph", *parts, NO_SYNONYMS, config)
    end = time.perf_counter()
    return graph, {"merge_s": round(middle - start, 3), "graph_s": round(end - middle, 3)}


def by_hipporag(folder: Path, n_triples: int) -> dict[str, Any]:
    shards = sorted(folder.glob("*.arrow"))
    extracted = [passage for shard in shards for passage in triples_of(read_table(shard))]
    used = time.process_time()
    graph, seconds = hipporag_graph(extracted)
    used = time.process_time() - used
    made = result(n_triples, "HippoRAG", seconds, "", cpu_s=round(used, 3), hash_s=hash_seconds(extracted))
    edges = hipporag_edges(graph, extracted)
    return made | {"digest": edge_digest([edges]), "edges": len(edges[0])}


def triples_of(table: pa.Table) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the triples of each passage as HippoRAG holds them: normalised strings."""
    for row in table.to_pylist():
        texts = dict(zip(row["phrase_ids"], row["phrases"], strict=True))
        yield [
            (texts[fact["subject_id"]], fact["predicate"], texts[fact["object_id"]]) for fact in row["facts"]
        ]


def md5_id(text: str, prefix: str) -> str:
    return prefix + hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def hash_seconds(extracted: list[list[tuple[str, str, str]]]) -> float:
    """Return how long it takes to hash what HippoRAG hashes: ends of triples, then phrases of passages."""
    start = time.perf_counter()
    for passage in extracted:
        for subject, _, obj in passage:
            md5_id(subject, "entity-")
            md5_id(obj, "entity-")
        for phrase in phrases_of(passage):
            md5_id(phrase, "entity-")
    return round(time.perf_counter() - start, 3)


def hipporag_graph(extracted: list[list[tuple[str, str, str]]]) -> tuple[Any, float]:
    """Build an igraph graph with HippoRAG's data structures and loops; return it and the seconds it took."""
    import igraph

    rows = node_rows(extracted)
    start = time.perf_counter()
    weights = hipporag_weights(extracted)
    graph = igraph.Graph(directed=False)
    attributes: dict[str, list[str]] = {}
    for name, row in rows.items():
        for key, value in {**row, "name": name}.items():
            attributes.setdefault(key, []).append(value)
    graph.add_vertices(len(rows), attributes=attributes)
    add_hipporag_edges(graph, weights)
    end = time.perf_counter()
    return graph, end - start


def hipporag_weights(extracted: list[list[tuple[str, str, str]]]) -> dict[tuple[str, str], float]:
    weights: dict[tuple[str, str], float] = {}
    passages_of: dict[str, set[str]] = {}
    for number, triples_here in enumerate(extracted):
        passage, found = md5_id(str(number), "chunk-"), set()
        for subject, _, obj in triples_here:
            a, b = md5_id(subject, "entity-"), md5_id(obj, "entity-")
            weights[a, b] = weights.get((a, b), 0.0) + 1
            weights[b, a] = weights.get((b, a), 0.0) + 1
            found.update((a, b))
        for entity in found:
            passages_of[entity] = passages_of.get(entity, set()).union({passage})
    for number, triples_here in enumerate(extracted):
        passage = md5_id(str(number), "chunk-")
        for phrase in phrases_of(triples_here):
            weights[passage, md5_id(phrase, "entity-")] = 1.0
    return weights


def add_hipporag_edges(graph: Any, weights: dict[tuple[str, str], float]) -> None:
    forwards: dict[str, dict[str, float]] = defaultdict(dict)
    backwards: dict[str, dict[str, float]] = defaultdict(dict)
    sources, targets, metadata = [], [], []
    for (a, b), weight in weights.items():
        if a == b:
            continue
        forwards[a][b] = weight
        backwards[b][a] = weight
        sources.append(a)
        targets.append(b)
        metadata.append({"weight": weight})
    known = set(graph.vs["name"])
    edges, values = [], []
    for a, b, data in zip(sources, targets, metadata, strict=True):
        if a in known and b in known:
            edges.append((a, b))
            values.append(data.get("weight", 1.0))
    graph.add_edges(edges, attributes={"weight": values})


def node_rows(extracted: list[list[tuple[str, str, str]]]) -> dict[str, dict[str, str]]:
    """Return what its tables hold of each node by then."""
    phrases = dict.fromkeys(phrase for passage in extracted for phrase in phrases_of(passage))
    texts = {md5_id(phrase, "entity-"): phrase for phrase in phrases}
    texts |= {md5_id(str(number), "chunk-"): str(number) for number in range(len(extracted))}
    return {name: {"hash_id": name, "content": text} for name, text in texts.items()}


def phrases_of(passage: list[tuple[str, str, str]]) -> set[str]:
    return {end for subject, _, obj in passage for end in (subject, obj)}


EdgeList = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def hipporag_edges(graph: Any, extracted: list[list[tuple[str, str, str]]]) -> EdgeList:
    """Return an igraph graph's edges with our numbers of nodes: sorted, parallel ones summed."""
    phrases = {
        md5_id(text, "entity-"): phrase_id(text) for passage in extracted for text in phrases_of(passage)
    }
    ids = np.unique(np.fromiter(phrases.values(), np.uint64, len(phrases)))
    place = ranks(ids, np.fromiter(phrases.values(), np.uint64, len(phrases))).tolist()
    number = dict(zip(phrases, place, strict=True))
    number |= {md5_id(str(row), "chunk-"): len(ids) + row for row in range(len(extracted))}
    of_vertex = np.array([number[name] for name in graph.vs["name"]])
    pairs = np.sort(of_vertex[np.array(graph.get_edgelist(), np.int64).reshape(-1, 2)], axis=1)
    keys, inverse = np.unique(pairs[:, 0] * len(of_vertex) + pairs[:, 1], return_inverse=True)
    weights = np.bincount(inverse, np.array(graph.es["weight"]), len(keys))
    return keys // len(of_vertex), keys % len(of_vertex), weights


def digest_of(graph: Graph) -> str:
    def upper() -> Iterator[EdgeList]:
        for start, stop in row_blocks(graph.indptr):
            cells = slice(graph.indptr[start], graph.indptr[stop])
            rows, columns = row_numbers(graph.indptr, start, stop), graph.indices[cells]
            once = columns > rows
            yield rows[once], columns[once].astype(np.int64), graph.weights[cells][once].astype(np.float64)

    return edge_digest(upper())


def edge_digest(blocks: Any) -> str:
    """Digest of edges in order, lower node first; it does not depend on how they are cut into blocks."""
    digests = [hashlib.sha256() for _ in range(3)]
    for block in blocks:
        for total, array in zip(digests, block, strict=True):
            total.update(np.ascontiguousarray(array).tobytes())
    return hashlib.sha256(b"".join(total.digest() for total in digests)).hexdigest()[:16]


def agree(rows: list[dict[str, Any]]) -> bool:
    """Whether all graphs of each size are the same."""
    digests = defaultdict(set)
    for row in rows:
        if row["method"] != "resolve":
            digests[row["triples"]].add(row["digest"])
    return all(len(found) == 1 for found in digests.values())


def checked_goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {(row["triples"], row["method"]): row for row in rows}
    ours, rival = (by_name[HIPPORAG_MOST, method] for method in ("hippoindex", "HippoRAG"))
    largest = by_name[max(FULL), "hippoindex"]["peak_bytes"]
    goals = [
        ("times faster than HippoRAG", FASTER, rival["seconds"] / ours["seconds"]),
        ("times less memory than HippoRAG", SMALLER, rival["peak_bytes"] / ours["peak_bytes"]),
        ("GiB allowed over GiB taken", 1, MOST_BYTES / largest),
    ]
    return [
        {"name": name, "wanted": wanted, "measured": round(found, 2), "met": found >= wanted}
        for name, wanted, found in goals
    ]


def cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]
    return [
        f"{row['triples']:,}",
        row["method"],
        f"{seconds:,.3g}" if seconds < 100 else f"{seconds:,.0f}",
        f"{row['peak_bytes'] / 2**30:.2f}",
        f"{row['edges']:,}" if "edges" in row else "-",
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(*HEADS, title="From triples to a graph", box=box.SIMPLE)
    for row in rows:
        made.add_row(*cells(row))
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    rule = "|" + "|".join("---" if head == "method" else "--:" for head in HEADS) + "|"
    return "\n".join([f"| {' | '.join(HEADS)} |", rule, *(f"| {' | '.join(cells(row))} |" for row in rows)])


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", str(machine()["cores"]))
    sys.exit(main())
