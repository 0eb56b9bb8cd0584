"""How fast is the similarity join next to what HippoRAG does, and which synonyms does it find?

    python benchmarks/simjoin.py --quick --json out.json

Joins the first 10k, 100k and 1M names of ``names.py`` at cosine >= 0.8, at most 101 neighbours a name, as
many as HippoRAG keeps. Names with fewer than three of the characters A-Z, a-z, 0-9 start no search, as there.

- ``exact`` and ``ivf`` are ours; the number behind ``ivf`` is the recall that was asked for. ``BLAS``
  multiplies tiles of the upper triangle with numpy and thresholds each. ``faiss flat`` is a range search of
  all names among all names. ``HippoRAG`` is its way: the 2,047 nearest of every name in blocks of 1,000, kept
  as Python lists of ids and cosines; then the threshold. The search is torch's there and numpy's here, where
  it is faster than faiss's at so many neighbours.
- Every run has a process of its own, after a small run that compiles what is compiled. Seconds are of the
  call with vectors mapped from a file; ``ivf`` and ``auto`` include their own measurement of recall. In a
  full run methods that others are compared with run first and last, and their seconds are the mean; ``x
  BLAS`` says how many times faster than ``BLAS`` a method is. ``peak_bytes`` (GiB in the table) is the
  largest resident set of the process: mapped pages of the vectors count, and about 0.2 GiB of interpreter and
  libraries.
- At 1M names ``BLAS`` and ``faiss flat`` compare a random part (marked *), and their seconds are scaled up:
  ``extrapolated_from`` is the share of the pairs that were compared.
- Recall is measured here, not by the kernels: names drawn at random are compared with all others in float64.
  ``recall_hard_band`` is that of pairs with cosine below 0.85.
- ``append 1 %`` joins the last hundredth of the names with all, given the pairs of the others and the lists
  that their join by ``ivf 0.99`` has kept; ``rebuild`` joins all of them by the method that it chooses.
  ``append 1 %, exact`` is given exact pairs and no lists; ``rebuild, exact`` compares all with all. All four
  measure their recall, the appends that of the new names.

The second table compares pairs with aliases of DBpedia. Recall is that of the pairs of an alias and its
canonical name; precision counts all pairs that lead to one canonical name, and is a lower bound: not every
true alias is listed. ``guard`` is the rule of ``pipeline/names_guard.py``.

Exits with 1 if a recall is below its bound or, in a full run, if a goal is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import names
import numpy as np
import structlog
from common import ROOT, write_record
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_info

from hippoindex.cluster.usage import machine
from hippoindex.kernels.simjoin import KeptLists, Pairs, exact, join
from hippoindex.pipeline.names_guard import guard

QUICK, FULL = (20_000,), (10_000, 100_000, 1_000_000)
MANY = 300_000
"""From here on exact methods are extrapolated, and HippoRAG's way is left out."""
SMALL, LARGE, APPENDED = 100_000, 1_000_000, 500_000
"""Sizes that the goals speak of."""

THRESHOLD, HARD_BAND = 0.8, 0.85
MAX_NEIGHBORS = 101
TARGETS = (0.9, 0.95, 0.99)
SAMPLED_NAMES = 5_000
TILE_ROWS, TILE_COLUMNS = 1024, 65_536
PART = 0.04
"""Share of the tiles that stand for all where BLAS is too slow; faiss searches half as many names."""
ROUNDING = 1e-5
"""Pairs whose cosine is nearer to the threshold than this may differ between exact methods."""
TAUS = tuple(round(0.7 + 0.05 * step, 2) for step in range(6))

NEAREST, QUERY_BLOCK, KEY_BLOCK = 2047, 1000, 10_000
"""HippoRAG's ``synonymy_edge_topk``, ``synonymy_edge_query_batch_size``, ``synonymy_edge_key_batch_size``."""

LIBRARIES = ["hippoindex.kernels.simjoin", "hippoindex.pipeline.models", "pyarrow.parquet", "rich.table"]
"""What this script and the modules beside it import, loaded once for all processes."""


def main() -> int:
    arguments = parsed()
    for module in ("faiss", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"{module} is not installed: pip install 'hippoindex[bench]'")
    share_blas_kernel()
    sizes = tuple(arguments.sizes or (QUICK if arguments.quick else FULL))
    known_names = names.all_names().first(max(sizes))
    names.vectors(known_names.names, arguments.precision)
    with tempfile.TemporaryDirectory(prefix="hippoindex-simjoin-") as temporary:
        data = Data(Path(temporary), arguments.precision)
        np.save(data.searches, np.array([starts_search(name) for name in known_names.names]))
        appended = min(max(sizes), APPENDED)
        orders = [*((size, turns(size)) for size in sizes), (appended, APPEND)]
        if SMALL in sizes:
            orders.append((SMALL, EXACT_APPEND))
        if arguments.quick:
            orders = [(size, list(dict.fromkeys(order))) for size, order in orders]
        rows = [row for size, order in orders for row in measured(data, size, order)]
        synonyms = against_aliases(data, min(max(sizes), SMALL), known_names)
    goals = [*recalls(rows), *([] if arguments.quick else speeds(rows))]
    Console().print(table(rows), synonym_table(synonyms), goal_table(goals))
    if arguments.markdown:
        print("\n" + markdown(rows), synonym_markdown(synonyms), goals_markdown(goals), sep="\n\n")
    results = {
        "data": {"names": names.names_digest(), "model": names.MODEL, "precision": arguments.precision},
        "rows": rows,
        "aliases": synonyms,
        "goals": [goal._asdict() for goal in goals],
    }
    if arguments.json:
        text = json.dumps({"machine": dict(machine()), **results}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    complete = not arguments.quick and sizes == FULL
    if complete:
        print("record:", write_record("simjoin", results))
    if complete or arguments.svg:
        print("figure:", draw(rows, synonyms, arguments.svg or ROOT / "docs" / "simjoin.svg"))
    missed = [goal for goal in goals if not goal.met]
    for goal in missed:
        print("MISSED", goal.name, goal.measured, file=sys.stderr)
    return int(bool(missed))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20,000 names; only recalls are judged")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="NAMES", help=f"instead of {FULL}")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="int8", help="of the vectors' model")
    parser.add_argument("--json", type=Path, help="where machine and rows go")
    parser.add_argument("--svg", type=Path, help="where the figure goes; docs/simjoin.svg after a full run")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the README as well")
    return parser.parse_args()


def share_blas_kernel() -> None:
    """Have faiss's own OpenBLAS, which knows few processors, use the kernels that numpy's has chosen."""
    for library in threadpool_info():
        if library["internal_api"] == "openblas":
            os.environ.setdefault("OPENBLAS_CORETYPE", library["architecture"])


def starts_search(name: str) -> bool:
    """Whether HippoRAG looks for synonyms of a name."""
    return len(re.sub("[^A-Za-z0-9]", "", name)) > 2


class Problem(NamedTuple):
    """What is joined.

    Attributes
    ----------
    vectors : ndarray of float32, shape (N, 384)
    searches : ndarray of bool, shape (N,)
    known : Pairs or None
        Pairs of all but the last hundredth.
    lists : KeptLists or None
        What the join of these has kept.
    """

    vectors: NDArray[np.float32]
    searches: NDArray[np.bool_]
    known: Pairs | None = None
    lists: KeptLists | None = None

    def first(self, count: int) -> Problem:
        return Problem(self.vectors[:count], self.searches[:count])

    @property
    def appended(self) -> NDArray[np.bool_]:
        """The last hundredth, shape (N,)."""
        count = len(self.vectors)
        return np.arange(count) >= old_of(count)


def old_of(count: int) -> int:
    return count - count // 100


class Found(NamedTuple):
    """Result of a method.

    Attributes
    ----------
    pairs : Pairs
    share : float
        Share of all pairs of names that were compared; below 1 where a part stands for the whole.
    details : dict
        What the method tells about itself.
    lists : KeptLists or None
        For appending.
    """

    pairs: Pairs
    share: float = 1.0
    details: dict[str, Any] = {}  # noqa: RUF012
    lists: KeptLists | None = None


Method = Callable[[Problem], Found]


def by_exact(problem: Problem) -> Found:
    return Found(exact(problem.vectors, THRESHOLD, MAX_NEIGHBORS, problem.searches))


def by_blas(problem: Problem, part: float = 1.0) -> Found:
    """Multiply tiles of the upper triangle, all of them or random ones, and threshold each."""
    x, count = problem.vectors, len(problem.vectors)
    tops = np.arange(0, count, TILE_ROWS)
    drawn = np.sort(np.random.default_rng(1).choice(tops, max(1, round(part * len(tops))), replace=False))
    edges, compared = [], 0
    for top in drawn.tolist():
        rows = x[top : top + TILE_ROWS]
        for left in range(top, count, TILE_COLUMNS):
            tile = rows @ x[left : left + TILE_COLUMNS].T  # (TILE_ROWS, TILE_COLUMNS)
            near = np.flatnonzero(tile >= THRESHOLD)
            first, second = near // tile.shape[1] + top, near % tile.shape[1] + left
            upper = first < second
            edges.append((first[upper], second[upper], tile.ravel()[near[upper]]))
        compared += len(rows) * (count - top) - len(rows) * (len(rows) + 1) // 2
    first, second, cosines = map(np.concatenate, zip(*edges, strict=True))
    ends = np.r_[first, second], np.r_[second, first], np.r_[cosines, cosines]
    return Found(as_pairs(*kept(*ends, problem.searches)), compared / (count * (count - 1) // 2))


def by_join(problem: Problem, **options: Any) -> Found:
    joined = join(problem.vectors, THRESHOLD, MAX_NEIGHBORS, problem.searches, **options)
    details = {"chosen": joined.method, "own_recall": joined.recall.estimate, **joined.details}
    return Found(joined.pairs, details=details, lists=joined.lists)


def by_append(problem: Problem, method: str) -> Found:
    """Join the last hundredth with all; what is not known of the others is found first."""
    if problem.known is None:
        before = by_join(problem.first(old_of(len(problem.vectors))), method=method)
        problem = problem._replace(known=before.pairs, lists=before.lists)
    new = problem.appended
    lists = None if problem.lists is None else problem.lists.placed(new)
    return by_join(problem, method=method, known=problem.known, new=new, lists=lists)


def by_faiss(problem: Problem, part: float = 1.0) -> Found:
    """Let faiss search all names, or random ones, among all."""
    import faiss

    x, count = problem.vectors, len(problem.vectors)
    drawn = np.sort(np.random.default_rng(1).choice(count, max(1, round(part * count)), replace=False))
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(x)
    edges = []
    for start in range(0, len(drawn), QUERY_BLOCK):
        rows = drawn[start : start + QUERY_BLOCK]
        limits, cosines, others = index.range_search(x[rows], THRESHOLD)
        edges.append(
            kept(np.repeat(rows, np.diff(limits.astype(np.int64))), others, cosines, problem.searches)
        )
    return Found(as_pairs(*map(np.concatenate, zip(*edges, strict=True))), len(drawn) / count)


def by_hipporag(problem: Problem) -> Found:
    """Do as ``retrieve_knn`` and ``add_synonymy_edges`` of HippoRAG do."""
    ids = [f"entity-{row:032x}" for row in range(len(problem.vectors))]  # as long as with an MD5 digest
    queries, among = normalised(problem.vectors), normalised(problem.vectors)
    nearest: dict[str, tuple[list[str], list[float]]] = {}
    for start in range(0, len(ids), QUERY_BLOCK):
        rows, cosines = nearest_rows(queries[start : start + QUERY_BLOCK], among)
        for place, query in enumerate(ids[start : start + QUERY_BLOCK]):
            nearest[query] = ([ids[row] for row in rows[place].tolist()], cosines[place].tolist())
    edges = {}
    for query, searches in zip(ids, problem.searches, strict=True):
        if searches:
            edges |= {(query, other): cosine for other, cosine in synonyms(query, *nearest[query])}
    first, second = (np.array([int(edge[end][7:], 16) for edge in edges], dtype=np.int64) for end in (0, 1))
    return Found(as_pairs(first, second, np.array(list(edges.values()), dtype=np.float32)))


def nearest_rows(
    queries: NDArray[np.float32], keys: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return rows and cosines of the 2,047 nearest keys, nearest first: of each block, then of all blocks."""
    best = []
    for start in range(0, len(keys), KEY_BLOCK):
        columns, cosines = largest(queries @ keys[start : start + KEY_BLOCK].T)
        best.append((columns + start, cosines))
    rows, cosines = (np.concatenate(arrays, axis=1) for arrays in zip(*best, strict=True))
    columns, cosines = largest(cosines)
    order = np.argsort(-cosines, axis=1)
    rows = np.take_along_axis(rows, np.take_along_axis(columns, order, axis=1), axis=1)
    return rows, np.take_along_axis(cosines, order, axis=1)


def largest(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return columns and values of the 2,047 largest of each row, in any order."""
    count = min(NEAREST, values.shape[1])
    columns = np.argpartition(values, -count, axis=1)[:, -count:]
    return columns, np.take_along_axis(values, columns, axis=1)


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def synonyms(query: str, nearest: list[str], cosines: list[float]) -> Iterator[tuple[str, float]]:
    count = 0
    for other, cosine in zip(nearest, cosines, strict=True):
        if cosine < THRESHOLD or count > MAX_NEIGHBORS - 1:
            break
        if other != query:
            yield other, cosine
            count += 1


METHODS: dict[str, Method] = {
    "BLAS": by_blas,
    "BLAS, a part": functools.partial(by_blas, part=PART),
    "faiss flat": by_faiss,
    "faiss flat, a part": functools.partial(by_faiss, part=PART / 2),
    "HippoRAG": by_hipporag,
    "exact": by_exact,
    **{f"ivf {target}": functools.partial(by_join, method="ivf", target_recall=target) for target in TARGETS},
    "auto": by_join,
    "append 1 %": functools.partial(by_append, method="ivf"),
    "rebuild": by_join,
    "append 1 %, exact": functools.partial(by_append, method="exact"),
    "rebuild, exact": functools.partial(by_join, method="exact"),
}
BEFORE = {"append 1 %": "ivf 0.99", "append 1 %, exact": "rebuild, exact"}
"""How the names were joined that an append adds to."""
SAME = ("BLAS", "faiss flat", "HippoRAG")
"""Must find the pairs of ``exact``."""
RECALL_BOUNDS = {
    **dict.fromkeys((*SAME, "exact", "append 1 %, exact", "rebuild, exact"), 0.9999),
    **{f"ivf {target}": target for target in TARGETS},
    **dict.fromkeys(("auto", "append 1 %", "rebuild"), 0.99),
}
APPEND = ["append 1 %", "rebuild", "append 1 %"]
EXACT_APPEND = ["append 1 %, exact", "rebuild, exact", "append 1 %, exact"]


def turns(count: int) -> list[str]:
    """Return the methods of a size in their order: those that others are compared with first and last."""
    ours = ["exact", *(f"ivf {target}" for target in TARGETS), "auto"]
    if count >= MANY:
        return ["BLAS, a part", "faiss flat, a part", *ours, "BLAS, a part"]
    return ["BLAS", "faiss flat", *ours, "HippoRAG", "exact", "BLAS"]


class Data(NamedTuple):
    """Where the data of a run are.

    Attributes
    ----------
    work : Path
    precision : {"fp32", "int8"}
    """

    work: Path
    precision: names.Precision

    @property
    def searches(self) -> Path:
        return self.work / "searches.npy"

    def truth(self, count: int) -> Path:
        return self.work / f"truth-{count}.npz"

    def pairs(self, count: int, method: str) -> Path:
        return self.work / f"pairs-{count}-{method}.npz"

    def lists(self, count: int, method: str) -> Path:
        return self.work / f"lists-{count}-{method}.npz"

    def problem(self, count: int) -> Problem:
        kept = names.kept_file(count, self.precision)
        if kept is None:
            raise SystemExit(f"There are no vectors of {count:,} names: python benchmarks/names.py")
        return Problem(np.load(kept, mmap_mode="r"), np.load(self.searches)).first(count)


def load(path: Path) -> Pairs:
    with np.load(path) as arrays:
        return Pairs(arrays["first"], arrays["second"], arrays["cosine"])


def load_lists(path: Path) -> KeptLists:
    with np.load(path) as arrays:
        return KeptLists(**{name: array if array.ndim else array.item() for name, array in arrays.items()})


def measured(data: Data, count: int, order: list[str]) -> Iterator[dict[str, Any]]:
    """Run methods in their order, each in a process of its own, and yield a row for each."""
    say = functools.partial(print, f"{count:,} names:", file=sys.stderr, flush=True)
    if not data.truth(count).exists():
        fresh(find_truth, data, count)
    for name in BEFORE.keys() & set(order):
        fresh(run, data, old_of(count), BEFORE[name])
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in order:
        say(name)
        runs.setdefault(name, []).append(fresh(run, data, count, name))
    for name, results in runs.items():
        yield row(data, count, name, results)


def fresh(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task in a process of its own, forked from one that has loaded libraries and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(task, *arguments).result()


def peak_bytes() -> int:
    """Return the largest resident set that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(data: Data, count: int, name: str) -> dict[str, Any]:
    """Run a method once, write its pairs, and tell what it took."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    problem = data.problem(count)
    if name in BEFORE:
        before, method = old_of(count), BEFORE[name]
        kept = data.lists(before, method)
        lists = load_lists(kept) if kept.exists() else None
        problem = problem._replace(known=load(data.pairs(before, method)), lists=lists)
    METHODS[name](problem.first(500))  # compiles
    started = time.perf_counter()
    found = METHODS[name](problem)
    seconds = time.perf_counter() - started
    used = peak_bytes()
    np.savez(data.pairs(count, name), **found.pairs._asdict())
    if found.lists is not None:
        np.savez(data.lists(count, name), **dataclasses.asdict(found.lists))
    result: dict[str, Any] = {"seconds": seconds / found.share, "peak_bytes": used}
    if found.share < 1:
        result["extrapolated_from"] = round(found.share, 4)
    return result | {"details": found.details}


def find_truth(data: Data, count: int) -> None:
    """Write what sampled names keep, by brute force."""
    x, searches = data.problem(count)[:2]
    rng = np.random.default_rng(count)
    sample = np.sort(rng.choice(count, min(SAMPLED_NAMES, count), replace=False))
    parts = []
    for start in range(0, len(sample), 100):
        rows = sample[start : start + 100]
        place, others = np.nonzero(x[rows] @ x.T >= THRESHOLD - 1e-3)
        nodes = rows[place]
        cosines = np.concatenate([products(x, *ends) for ends in blocks(nodes, others)])
        near = cosines >= THRESHOLD
        parts.append(kept(nodes[near], others[near], cosines[near], searches))
    np.savez(data.truth(count), **as_pairs(*map(np.concatenate, zip(*parts, strict=True)))._asdict())


def blocks(*arrays: NDArray) -> Iterator[list[NDArray]]:
    for start in range(0, max(len(arrays[0]), 1), 100_000):
        yield [array[start : start + 100_000] for array in arrays]


def products(x: NDArray[np.float32], first: NDArray, second: NDArray) -> NDArray[np.float64]:
    return np.einsum("ij,ij->i", x[first].astype(np.float64), x[second].astype(np.float64))


def kept(
    nodes: NDArray, others: NDArray, cosines: NDArray, searches: NDArray[np.bool_]
) -> tuple[NDArray, NDArray, NDArray]:
    """Keep the neighbours of every searching node that have its highest cosines; ties by number."""
    wanted = (nodes != others) & searches[nodes]
    nodes, others, cosines = nodes[wanted], others[wanted], cosines[wanted]
    order = np.lexsort((others, -cosines, nodes))
    nodes, others, cosines = nodes[order], others[order], cosines[order]
    wanted = np.arange(len(nodes)) - np.searchsorted(nodes, nodes) < MAX_NEIGHBORS
    return nodes[wanted], others[wanted], cosines[wanted]


def as_pairs(nodes: NDArray, others: NDArray, cosines: NDArray) -> Pairs:
    """Turn directed edges into sorted pairs, each once."""
    first, second = np.minimum(nodes, others).astype(np.int64), np.maximum(nodes, others).astype(np.int64)
    _, places = np.unique(keys(first, second), return_index=True)
    return Pairs(first[places], second[places], cosines[places].astype(np.float32))


def keys(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number a pair, so that sets of pairs are compared as numbers."""
    return (first << 32) | second


def row(data: Data, count: int, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = load(data.pairs(count, name))
    whole = "extrapolated_from" not in results[0]
    values: dict[str, Any] = {
        "n": count,
        "dim": data.problem(count).vectors.shape[1],
        "method": name.removesuffix(", a part"),
        "seconds": float(f"{statistics.fmean(result['seconds'] for result in results):.4g}"),
        "pairs": len(pairs.first) if whole else None,
        "recall": None,
        "recall_hard_band": None,
        "peak_bytes": max(result["peak_bytes"] for result in results),
    }
    if not whole:
        return values | {"extrapolated_from": results[0]["extrapolated_from"]}
    values |= recall(pairs, load(data.truth(count)))
    if data.pairs(count, "exact").exists():
        values["differing"] = differing(pairs, load(data.pairs(count, "exact")))
    return values | ({"details": results[0]["details"]} if results[0]["details"] else {})


def recall(pairs: Pairs, truth: Pairs) -> dict[str, Any]:
    """Return the share of the sample's true pairs that were found: all, and those of the hard band."""
    found = np.isin(keys(truth.first, truth.second), keys(pairs.first, pairs.second))
    hard = found[truth.cosine < HARD_BAND]
    low, high = wilson(int(found.sum()), len(found))
    return {
        "recall": rounded_share(found),
        "recall_hard_band": rounded_share(hard),
        "recall_interval": [round(low, 5), round(high, 5)],
        "sampled_pairs": len(found),
        "sampled_pairs_hard_band": len(hard),
    }


def rounded_share(found: NDArray[np.bool_]) -> float | None:
    return round(float(found.mean()), 5) if len(found) else None


def wilson(found: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    z, share = 1.96, found / total
    centre = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    scale = 1 + z * z / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def differing(pairs: Pairs, others: Pairs) -> int:
    """Count pairs that only one of two results has, apart from those within rounding of the threshold."""
    a, b = keys(pairs.first, pairs.second), keys(others.first, others.second)
    only = np.r_[pairs.cosine[~np.isin(a, b)], others.cosine[~np.isin(b, a)]]
    return int(np.sum(only - THRESHOLD > ROUNDING))


def against_aliases(data: Data, count: int, known_names: names.Names) -> dict[str, Any]:
    """Compare pairs at each threshold with the aliases among the first names."""
    chosen = known_names.first(count)
    pairs = fresh(widest, data, count)
    return {"n": count, "gold": len(chosen.gold), "rows": [judged(pairs, chosen, tau) for tau in TAUS]}


def widest(data: Data, count: int) -> Pairs:
    """Join at the lowest threshold."""
    problem = data.problem(count)
    return exact(problem.vectors, TAUS[0], MAX_NEIGHBORS, problem.searches)


def judged(pairs: Pairs, chosen: names.Names, tau: float) -> dict[str, Any]:
    near = pairs.cosine >= tau
    first, second = pairs.first[near], pairs.second[near]
    same = chosen.groups[first] == chosen.groups[second]
    gold = np.isin(keys(first, second), keys(*chosen.gold.T))
    passed = guard([chosen.names[row] for row in first], [chosen.names[row] for row in second])
    values: dict[str, Any] = {"tau": tau, "pairs": len(first)}
    for suffix, mask in (("", np.ones(len(first), dtype=bool)), ("_guard", passed)):
        precision, found = ratio(same[mask].sum(), mask.sum()), ratio(gold[mask].sum(), len(chosen.gold))
        values |= {f"precision{suffix}": precision, f"recall{suffix}": found}
    values["gold_rejected_by_guard"] = ratio((gold & ~passed).sum(), gold.sum())
    values["others_rejected_by_guard"] = ratio((~same & ~passed).sum(), (~same).sum())
    return values


def ratio(part: int, whole: int) -> float | None:
    return round(float(part / whole), 4) if whole else None


class Checked(NamedTuple):
    """A goal, and whether it was met."""

    name: str
    wanted: str
    measured: str
    met: bool


def recalls(rows: list[dict[str, Any]]) -> Iterator[Checked]:
    """Check the recall of every method; missed if even the upper end of its interval is below the bound."""
    for values in rows:
        if values["recall"] is not None:
            least, (low, high) = RECALL_BOUNDS[values["method"]], values["recall_interval"]
            text = f"{values['recall']:.4f} [{low:.4f}, {high:.4f}]"
            yield Checked(f"{values['n']:,}: {values['method']}, recall", f">= {least}", text, high >= least)
        if values["method"] in SAME and "differing" in values:
            name = f"{values['n']:,}: {values['method']}, pairs other than those of exact"
            yield Checked(name, "0", str(values["differing"]), values["differing"] == 0)


def speeds(rows: list[dict[str, Any]]) -> Iterator[Checked]:
    """Check the goals that were set for a size, where it was measured."""
    by_name = {(values["n"], values["method"]): values for values in rows}
    if (LARGE, "BLAS") in by_name:
        ours, rival = by_name[LARGE, "ivf 0.99"], by_name[LARGE, "BLAS"]
        yield at_least(f"{LARGE:,}: ivf 0.99 against BLAS", 15, rival["seconds"] / ours["seconds"])
        limit = 4 * LARGE * ours["dim"] + 2 * 2**30
        used = f"{ours['peak_bytes'] / 2**30:.2f} GiB"
        wanted = f"<= {limit / 2**30:.2f} GiB"
        yield Checked(f"{LARGE:,}: ivf 0.99, memory", wanted, used, ours["peak_bytes"] <= limit)
    if (SMALL, "HippoRAG") in by_name:
        ours, rival = by_name[SMALL, "exact"], by_name[SMALL, "HippoRAG"]
        yield at_least(f"{SMALL:,}: exact against HippoRAG", 3, rival["seconds"] / ours["seconds"])
        less = rival["peak_bytes"] / ours["peak_bytes"]
        yield at_least(f"{SMALL:,}: exact against HippoRAG, memory", 4, less)
    if (APPENDED, "rebuild") in by_name:
        faster = by_name[APPENDED, "rebuild"]["seconds"] / by_name[APPENDED, "append 1 %"]["seconds"]
        yield at_least(f"{APPENDED:,}: append 1 % against rebuild", 20, faster)
    if (SMALL, "rebuild, exact") in by_name:
        ours, rival = by_name[SMALL, "append 1 %, exact"], by_name[SMALL, "rebuild, exact"]
        yield at_least(
            f"{SMALL:,}: append 1 % against rebuild, exact", 15, rival["seconds"] / ours["seconds"]
        )


def at_least(name: str, least: float, measured: float) -> Checked:
    return Checked(name, f">= {least}x", f"{measured:.3g}x", measured >= least)


HEADS = ("names", "method", "seconds", "x BLAS", "pairs", "recall", "< 0.85", "GiB")
ALIAS_HEADS = ("tau", "pairs", "precision", "recall", "precision, guard", "recall, guard")


def table(rows: list[dict[str, Any]]) -> Table:
    return filled(
        "Similarity join, cosine >= 0.8", HEADS, map(cells, zip(rows, blas_ratios(rows), strict=True))
    )


def filled(title: str, heads: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    made = Table(*heads, title=title, box=box.SIMPLE)
    for column in made.columns:
        column.justify = "left" if column.header in ("method", "goal") else "right"
    for line in lines:
        made.add_row(*line)
    return made


def blas_ratios(rows: list[dict[str, Any]]) -> list[float | None]:
    """Return how many times faster than BLAS each row is, where BLAS was measured."""
    slow = {values["n"]: values["seconds"] for values in rows if values["method"] == "BLAS"}
    return [slow[values["n"]] / values["seconds"] if values["n"] in slow else None for values in rows]


def cells(judged_row: tuple[dict[str, Any], float | None]) -> list[str]:
    values, faster = judged_row
    return [
        f"{values['n']:,}",
        values["method"] + (" *" if "extrapolated_from" in values else ""),
        f"{values['seconds']:,.3g}" if values["seconds"] < 100 else f"{values['seconds']:,.0f}",
        "-" if faster is None else f"{faster:.3g}",
        "-" if values["pairs"] is None else f"{values['pairs']:,}",
        *("-" if values[name] is None else f"{values[name]:.4f}" for name in ("recall", "recall_hard_band")),
        f"{values['peak_bytes'] / 2**30:.2f}",
    ]


def synonym_table(synonyms: dict[str, Any]) -> Table:
    title = f"Pairs against {synonyms['gold']:,} aliases among {synonyms['n']:,} names"
    return filled(title, ALIAS_HEADS, map(alias_cells, synonyms["rows"]))


def alias_cells(values: dict[str, Any]) -> list[str]:
    shares = (values[name] for name in ("precision", "recall", "precision_guard", "recall_guard"))
    return [
        f"{values['tau']:.2f}",
        f"{values['pairs']:,}",
        *("-" if share is None else f"{share:.3f}" for share in shares),
    ]


def goal_table(goals: list[Checked]) -> Table:
    lines = ([*goal[:3], "met" if goal.met else "[bold red]missed"] for goal in goals)
    return filled("Goals", ("goal", "wanted", "measured", ""), lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    made = markdown_table(HEADS, map(cells, zip(rows, blas_ratios(rows), strict=True)))
    extrapolated = any("extrapolated_from" in values for values in rows)
    return made + ("\n\n\\* scaled up from a part" if extrapolated else "")


def synonym_markdown(synonyms: dict[str, Any]) -> str:
    return markdown_table(ALIAS_HEADS, map(alias_cells, synonyms["rows"]))


def goals_markdown(goals: list[Checked]) -> str:
    lines = ([*goal[:3], "met" if goal.met else "missed"] for goal in goals)
    return markdown_table(("goal", "wanted", "measured", ""), lines)


def markdown_table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rule = "|" + "|".join("---" if head in ("method", "goal") else "--:" for head in heads) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


LINES = {
    "HippoRAG": ("#6b7480", "s", "HippoRAG: kNN, then threshold"),
    "faiss flat": ("#c27a2c", "^", "faiss, flat range search"),
    "BLAS": ("#b9a13a", "P", "BLAS, tile by tile"),
    "exact": ("#8fb8cc", "v", "exact"),
    "ivf 0.99": ("#1f5f7f", "o", "ivf, recall 0.99"),
    "ivf 0.9": ("#4a90b2", "D", "ivf, recall 0.9"),
}
"""Colour, marker and label of the lines of the figure: ours are blue, the others grey and orange."""


def draw(rows: list[dict[str, Any]], synonyms: dict[str, Any], path: Path) -> Path:
    """Draw time and memory against the number of names, and precision and recall against the threshold."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hippoindex", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, (seconds, memory, aliases) = plt.subplots(1, 3, figsize=(12.5, 3.8))
    for axes, key, scale, label in (
        (seconds, "seconds", 1, "seconds"),
        (memory, "peak_bytes", 2**30, "peak memory, GiB"),
    ):
        for name, (colour, marker, text) in LINES.items():
            found = [values for values in rows if values["method"] == name]
            ends = [values["n"] for values in found], [values[key] / scale for values in found]
            axes.plot(*ends, color=colour, marker=marker, label=text, linewidth=1.8, markersize=6)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("names")
        axes.set_ylabel(label)
    seconds.legend(frameon=False, fontsize=8, loc="upper left")
    draw_aliases(aliases, synonyms)
    for axes in (seconds, memory, aliases):
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    return path


def draw_aliases(axes: Any, synonyms: dict[str, Any]) -> None:
    taus = [values["tau"] for values in synonyms["rows"]]
    for name, colour, marker in (("precision", "#1f5f7f", "o"), ("recall", "#c27a2c", "^")):
        for suffix, style in (("", "-"), ("_guard", ":")):
            shares = [values[name + suffix] for values in synonyms["rows"]]
            text = f"{name} with the guard" if suffix else name
            axes.plot(
                taus, shares, style, color=colour, marker=marker, label=text, linewidth=1.8, markersize=5
            )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"threshold, {synonyms['n']:,} names")
    axes.set_ylabel("share, against aliases of DBpedia")
    axes.legend(frameon=False, fontsize=8, loc="lower left")


if __name__ == "__main__":
    sys.exit(main())
