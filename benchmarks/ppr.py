"""How fast is Personalized PageRank next to what HippoRAG calls, and does it rank the same passages?

    python benchmarks/ppr.py --quick --json out.json

Draws power-law, community and phrase-like graphs of growing size and answers the same queries by igraph as
HippoRAG calls it, by scikit-network, ``power``, ``push`` and, for HippoRAG 2's dense restart, the affine
method. Methods take turns, query by query, in one process; every second round runs backwards. Ratios are
medians over rounds of ratios within a round. Passages are compared with those of the float64 reference.

- Seconds are of the call alone for igraph and scikit-network, and of the whole way from restarts to ranked
  passages for ours. ``push`` is timed one query a call on one core; ``power``, ``push bulk`` and ``affine``
  are given a block of queries and all cores, and their time is divided by the block. ``push`` stops at
  epsilon 1e-7 where nothing else is said, ``affine`` at 5e-8. Let nothing else run:
  igraph has its threads (OpenMP) wait for each other, and on a busy machine that can take ten times as long
  as its work on a graph of 10,000 nodes.
- ``peak_bytes`` is the largest resident set of a fresh process that loads the graph, prepares one method and
  makes one call: mapped pages of the graph count, and about 0.15 GiB of interpreter and libraries.
- The dense restart is measured on power-law graphs. ``affine`` rests on precomputed columns, whose cost is
  listed apart.

Exits with 1 if an overlap is below its bound or, in a full run, if a goal is missed. The reference of the
largest graph takes 14 GiB; everything else stays below 8.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import graphs
import numpy as np
import scipy.sparse as sp
from common import ROOT, write_record
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hippoindex.cluster.usage import available_cores, machine
from hippoindex.kernels.ppr import Goal, Graph, Pusher, Ranked, SparseResult, affine, ranked, reference, solve
from hippoindex.kernels.ppr.top import largest

KINDS = ("power-law", "community", "phrase-like")
QUICK, FULL = (10_000, 50_000), (10_000, 100_000, 1_000_000, 10_000_000)
MANY_NODES = 3_000_000
"""From here on: power-law graphs and our own methods alone, in narrow blocks."""
SMALL, LARGE, HUGE = 100_000, 1_000_000, 10_000_000
"""Sizes that the goals speak of."""

DAMPING = 0.5
TOP = 20
QUERIES, SEEDS = 64, 5
PASSAGE_WEIGHT = 0.05
AFFINE_EPSILON = 5e-8
"""Half of ``push``'s: on the smallest graph 1e-7 exchanges neighbours in the order of one query in ten."""
DIMENSIONS, FEW_DIMENSIONS, BLOCK_COLUMNS = 384, 32, 32
BUDGET_BYTES = 20 * 2**30
REFERENCE_TOLERANCE = 1e-10
TIE, SAME = 1e-9, 1e-6
"""Relative differences of reference scores that count as equal: in an overlap, and in an order."""
BOUNDS = {
    ("push", "overlap_at_20"): 0.99,
    ("push 1e-6", "overlap_at_20"): 0.97,
    ("push", "certified_right"): 1.0,
    ("push certified 10", "certified_right"): 1.0,
    ("push bulk", "overlap_at_20"): 0.99,
    ("power", "overlap_at_20"): 0.99,
    ("affine", "overlap_at_20"): 0.99,
    ("affine", "same_order_at_20"): 1.0,
    ("affine single", "same_order_at_20"): 1.0,
}
"""The least that a method must reach on every graph of up to a million nodes; beyond, with few queries
checked, it is only told."""

REFERENCE = "reference.npy"
ABOUT = "about.json"
"""Written last into the folder of a graph: without it the arrays may be incomplete."""

Ask = Callable[[int], Any]
"""Answers the query of this number, or a whole block; returns scores of all nodes, or ranked nodes."""


@dataclass(frozen=True)
class Case:
    """One graph and what is asked of it.

    Attributes
    ----------
    kind : str
    size : int
        Nodes, or nearly so.
    rounds : int
        Queries that every method answers.
    checked : int
        Queries that the reference answers, for methods that answer more.
    dimensions : int
        Of the passages' vectors; 0 without dense restarts.
    """

    kind: str
    size: int
    rounds: int
    checked: int
    dimensions: int

    @property
    def many(self) -> bool:
        return self.size >= MANY_NODES

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.size}"


def main() -> int:
    arguments = parsed()
    for module in ("igraph", "matplotlib", "sknetwork"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"{module} is not installed: pip install 'hippoindex[bench]'")
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The load of this machine is {load:.1f}: times will mislead", file=sys.stderr)
    largest(np.zeros(1), np.zeros(1, dtype=np.int64), 1)  # the compiler loads here once, not in every process
    sizes = arguments.sizes or (QUICK if arguments.quick else FULL)
    console = Console()
    results = shown(
        measured(cases(sizes, arguments.graphs, arguments.quick), arguments.cache), arguments.json
    )
    goals = [*overlaps(results), *([] if arguments.quick else speeds(results))]
    rows = [row for result in results for row in result["rows"]]
    console.print(goal_table(goals))
    if arguments.markdown:
        print("\n" + markdown(rows) + "\n\n" + goals_markdown(goals))
    if arguments.json:
        write_json(arguments.json, results, goals)
    complete = not arguments.quick and tuple(sizes) == FULL and tuple(arguments.graphs) == KINDS
    if complete:
        summary = {"rows": rows, "results": without_rows(results)}
        print("record:", write_record("ppr", summary | {"goals": [goal._asdict() for goal in goals]}))
    if complete or arguments.svg:
        print("figure:", draw(rows, arguments.svg or ROOT / "docs" / "ppr.svg"))
    missed = [goal for goal in goals if not goal.met]
    for goal in missed:
        print("MISSED", goal.name, goal.measured, file=sys.stderr)
    return int(bool(missed))


def shown(found: Iterable[dict[str, Any]], path: Path | None) -> list[dict[str, Any]]:
    """Print and write results as they come: what a long run has measured is not lost with it."""
    results = []
    for result in found:
        results.append(result)
        Console().print(table(result), preparation(result), highlight=False)
        if path:
            write_json(path, results, [])
    return results


def write_json(path: Path, results: list[dict[str, Any]], goals: list[Checked]) -> None:
    record = {
        "machine": dict(machine()),
        "rows": [row for result in results for row in result["rows"]],
        "results": without_rows(results),
        "goals": [goal._asdict() for goal in goals],
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small graphs; only overlaps are judged")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="NODES", help=f"instead of {FULL}")
    parser.add_argument("--graphs", choices=KINDS, nargs="+", default=KINDS, help="kinds of graphs")
    parser.add_argument("--json", type=Path, help="where machine and rows go")
    parser.add_argument("--svg", type=Path, help="where the figure goes; docs/ppr.svg after a full run")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the README as well")
    parser.add_argument("--cache", type=Path, help="folder in which graphs are kept from run to run")
    return parser.parse_args()


def cases(sizes: Iterable[int], kinds: Iterable[str], quick: bool) -> Iterator[Case]:
    """Yield graphs, with the fewer queries for slow methods the longer these take."""
    wanted = set(kinds)
    return (case for case in all_cases(sizes, quick) if case.kind in wanted)


def all_cases(sizes: Iterable[int], quick: bool) -> Iterator[Case]:
    plain, *others = KINDS
    for size in sizes:
        if size >= MANY_NODES:
            yield Case(plain, size, rounds=3, checked=4, dimensions=0)
            continue
        large = size >= LARGE
        dimensions = FEW_DIMENSIONS if quick else DIMENSIONS
        yield Case(plain, size, rounds=3 if quick else 5 if large else 10, checked=32, dimensions=dimensions)
        if size <= QUICK[0] or not quick:
            for kind in others:
                yield Case(kind, size, rounds=3 if quick or large else 10, checked=32, dimensions=0)


def measured(wanted: Iterable[Case], cache: Path | None) -> Iterator[dict[str, Any]]:
    """Measure each case in processes of its own, so that nothing of one is held while another runs."""
    source = hashlib.sha256(Path(graphs.__file__).read_bytes()).hexdigest()[:8]
    with tempfile.TemporaryDirectory(prefix="hippoindex-ppr-") as temporary:
        for case in wanted:
            work = Path(temporary, case.name)
            kept = cache / f"{case.name}-{source}" if cache else work
            for folder in (work, kept):
                folder.mkdir(parents=True, exist_ok=True)
            yield measure(case, kept, work)
            for path in work.iterdir():
                path.unlink()


def measure(case: Case, graph_folder: Path, work: Path) -> dict[str, Any]:
    say = functools.partial(print, f"{case.name}:", file=sys.stderr, flush=True)
    started = time.perf_counter()
    if not (graph_folder / ABOUT).exists():
        fresh(make, case, graph_folder)
    about = json.loads((graph_folder / ABOUT).read_text("utf-8"))
    result: dict[str, Any] = {"graph": case.kind, "size": case.size} | about
    say(f"{result['nodes']:,} nodes, {result['edges']:,} edges")
    if case.dimensions:
        result["precomputed"] = fresh(precompute, case, graph_folder, work)
    refer(case, graph_folder, work, result["nodes"] - result["first_passage"])
    say(f"methods take turns after {time.perf_counter() - started:.0f} s")
    result |= fresh(trial, case, graph_folder, work)
    for row in result["rows"]:
        row["peak_bytes"] = fresh(peak, case, graph_folder, work, row["method"])
    say(f"done after {time.perf_counter() - started:.0f} s")
    return result


def fresh(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task in a process of its own."""
    with processes(1) as pool:
        return pool.submit(task, *arguments).result()


def processes(count: int) -> ProcessPoolExecutor:
    """Return processes forked from this one, which holds libraries and no data."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork"))


def peak_bytes() -> int:
    """Return the largest resident set that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def make(case: Case, folder: Path) -> None:
    """Draw a graph and write its arrays."""
    started = time.perf_counter()
    if case.kind == "phrase-like":
        edges = graphs.phrase_graph(case.size / (graphs.PHRASES + graphs.PASSAGES))
    else:
        edges = graphs.power_law(case.size, communities=case.kind == "community")
    graph = edges.graph()
    graphs.save(graph, folder)
    about = {
        "nodes": graph.n_nodes,
        "edges": graph.n_edges,
        "first_passage": edges.first_passage,
        "made_s": round(time.perf_counter() - started, 2),
        "made_peak_bytes": peak_bytes(),
    }
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def precompute(case: Case, graph_folder: Path, work: Path) -> dict[str, Any]:
    """Write vectors of passages, and what the affine method needs of them."""
    problem = Problem(case, graph_folder, work)
    vectors = topical(problem.n_passages, case.dimensions, seed=2)
    np.save(work / "vectors.npy", vectors)
    columns = np.empty((problem.n_passages, case.dimensions + 1), dtype=np.float32)
    started = time.perf_counter()
    for block in affine.precompute(problem.graph, vectors, problem.first, DAMPING):
        columns[:, block.first : block.first + block.values.shape[1]] = block.values
    seconds = time.perf_counter() - started
    np.save(work / "z.npy", columns[:, :-1])
    np.save(work / "z1.npy", columns[:, -1])
    return about_columns(case.dimensions + 1, seconds)


def about_columns(count: int, seconds: float) -> dict[str, Any]:
    return {
        "columns": count,
        "seconds_per_column": round(seconds / count, 4),
        "peak_bytes": peak_bytes(),
    }


def topical(count: int, dimensions: int, seed: int) -> NDArray[np.float32]:
    """Draw unit vectors around common centres, as texts on common topics have them."""
    centres = np.random.default_rng(0).standard_normal((1000, dimensions), dtype=np.float32)
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, dimensions), dtype=np.float32)
    vectors += centres[rng.integers(0, len(centres), count)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def refer(case: Case, graph_folder: Path, work: Path, n_passages: int) -> None:
    """Write the reference's scores of passages, on all cores: for sparse restarts, then for dense ones."""
    count = case.checked + (case.rounds if case.dimensions else 0)
    shape = (count, n_passages)
    np.lib.format.open_memmap(work / REFERENCE, mode="w+", dtype=np.float64, shape=shape).flush()
    parts = 1 if case.many else min(available_cores(), count)  # each holds the graph in float64
    with processes(parts) as pool:
        rows = np.array_split(np.arange(count), parts)
        for done in [pool.submit(refer_part, case, graph_folder, work, part) for part in rows]:
            done.result()


def refer_part(case: Case, graph_folder: Path, work: Path, rows: NDArray[np.int64]) -> None:
    problem = Problem(case, graph_folder, work)
    restarts = [problem.restart(int(row) % case.checked, dense=bool(row >= case.checked)) for row in rows]
    scores = reference(problem.graph, np.stack(restarts, axis=1), DAMPING, REFERENCE_TOLERANCE).scores
    np.lib.format.open_memmap(work / REFERENCE, mode="r+")[rows] = scores[problem.first :].T


class Problem:
    """A graph on mapped files, and the queries.

    Attributes
    ----------
    graph : Graph
    first : int
        The first passage; all nodes from here on are passages.
    restarts : scipy.sparse.csr_array, shape (64, N)
        Five phrases each, with random weights.
    """

    def __init__(self, case: Case, graph_folder: Path, work: Path) -> None:
        self.case, self._work = case, work
        self.graph: Graph = graphs.load(graph_folder)
        self.first: int = json.loads((graph_folder / ABOUT).read_text("utf-8"))["first_passage"]
        self.n_passages = self.graph.n_nodes - self.first
        self.candidates = (self.first, self.graph.n_nodes)
        rng = np.random.default_rng(1)
        phrases = np.flatnonzero(self.graph.degrees[: self.first] > 0)
        seeds = np.concatenate([rng.choice(phrases, SEEDS, replace=False) for _ in range(QUERIES)])
        weights = rng.uniform(0.2, 1.0, QUERIES * SEEDS)
        starts = np.arange(0, QUERIES * SEEDS + 1, SEEDS)
        self.restarts = sp.csr_array((weights, seeds, starts), shape=(QUERIES, self.graph.n_nodes))

    @functools.cached_property
    def dense(self) -> affine.DenseRestart:
        arrays = (np.load(self._work / f"{name}.npy", mmap_mode="r") for name in ("vectors", "z", "z1"))
        return affine.DenseRestart(*arrays)

    @functools.cached_property
    def queries(self) -> NDArray[np.float32]:
        """Vectors of the queries, shape (64, d)."""
        return topical(QUERIES, self.case.dimensions, seed=3)

    def restart(self, number: int, dense: bool = False) -> NDArray[np.float64]:
        """Return the restart of one query over all nodes; with ``dense`` HippoRAG 2's, not scaled."""
        restart = self.restarts[[number]].toarray()[0]
        if dense:
            cosines = (self.dense.vectors @ self.queries[number]).astype(np.float64)
            spread = (cosines - cosines.min()) / (cosines.max() - cosines.min())
            restart[self.first :] += PASSAGE_WEIGHT * spread
        return restart

    @functools.cached_property
    def igraph(self) -> Any:
        import igraph

        rows = np.repeat(np.arange(self.graph.n_nodes, dtype=np.int32), np.diff(self.graph.indptr))
        upper = rows < self.graph.indices
        edges = np.column_stack([rows[upper], self.graph.indices[upper]])
        built = igraph.Graph(n=self.graph.n_nodes, edges=edges)
        built.es["weight"] = self.graph.weights[upper].tolist()
        return built


class Method(NamedTuple):
    """One way to answer queries.

    Attributes
    ----------
    name : str
    prepare : callable
        Does what is done once for all queries.
    batch : int
        Queries answered by a call.
    cores : str
    dense : bool
        Whether the restart is HippoRAG 2's.
    every_query : bool
        Whether all 64 queries are asked, one by one, and not only those of the rounds.
    ours : bool
    """

    name: str
    prepare: Callable[[Problem], Ask]
    batch: int = 1
    cores: str = "1"
    dense: bool = False
    every_query: bool = False
    ours: bool = True


def methods(case: Case) -> list[Method]:
    found = [
        Method("push", pushing(Goal(1e-7)), every_query=True),
        Method("push 1e-6", pushing(Goal(1e-6)), every_query=True),
        Method("push certified 10", pushing(Goal(1e-6, certify_k=10)), every_query=True),
        Method("push bulk", pushing_all, QUERIES, "all"),
    ]
    if not case.many:  # there, power and igraph take minutes; the block of columns shows what power needs
        found += [
            Method("power", powering(QUERIES), QUERIES, "all"),
            Method("igraph", as_hipporag(dense=False), cores="all", ours=False),
            Method("scikit-network", as_scikit_network, ours=False),
        ]
    if case.dimensions:
        found += [
            Method("affine", affine_all, QUERIES, "all", dense=True),
            Method("affine single", affine_single, 1, "all", dense=True),
            Method("igraph dense", as_hipporag(dense=True), cores="all", dense=True, ours=False),
        ]
    return found


def pushing(goal: Goal) -> Callable[[Problem], Ask]:
    def prepare(problem: Problem) -> Ask:
        pusher = Pusher(problem.graph, DAMPING, candidates=problem.candidates, threads=1)
        rows = [problem.restarts[[number]] for number in range(QUERIES)]
        return lambda number: pusher.solve(rows[number], goal, top_k=TOP)

    return prepare


def pushing_all(problem: Problem) -> Ask:
    pusher = Pusher(problem.graph, DAMPING, candidates=problem.candidates)
    return lambda _: pusher.solve(problem.restarts, top_k=TOP)


def powering(width: int) -> Callable[[Problem], Ask]:
    def prepare(problem: Problem) -> Ask:
        options: dict[str, Any] = {"top_k": TOP, "candidates": problem.candidates, "damping": DAMPING}
        block, budget = problem.restarts[:width], 16 * problem.graph.n_nodes * width
        return lambda _: solve(problem.graph, block, "power", memory_bytes=budget, **options)

    return prepare


def as_hipporag(*, dense: bool) -> Callable[[Problem], Ask]:
    """Call igraph with the arguments of HippoRAG's ``run_ppr``; the ranking after it is not timed."""

    def prepare(problem: Problem) -> Ask:
        graph = problem.igraph  # is built here, and not in the time of a call
        resets = [problem.restart(number, dense) for number in range(problem.case.rounds)]
        return lambda number: graph.personalized_pagerank(
            vertices=range(problem.graph.n_nodes),
            damping=DAMPING,
            directed=False,
            weights="weight",
            reset=resets[number],
            implementation="prpack",
        )

    return prepare


def as_scikit_network(problem: Problem) -> Ask:
    """Call scikit-network's power iteration, to the tolerance of ours."""
    from sknetwork.ranking import PageRank

    solver = PageRank(DAMPING, solver="piteration", n_iter=200, tol=1e-6)
    adjacency = problem.graph.matrix(np.float64)
    resets = [problem.restart(number) for number in range(problem.case.rounds)]
    return lambda number: solver.fit_predict(adjacency, resets[number])


def affine_all(problem: Problem) -> Ask:
    pusher = Pusher(problem.graph, DAMPING, candidates=problem.candidates)
    return lambda _: affine.rank(
        pusher,
        problem.dense,
        problem.queries,
        PASSAGE_WEIGHT,
        problem.restarts,
        TOP,
        Goal(AFFINE_EPSILON),
    )


def affine_single(problem: Problem) -> Ask:
    pusher = Pusher(problem.graph, DAMPING, candidates=problem.candidates)
    rows = [problem.restarts[[number]] for number in range(problem.case.rounds)]
    vectors = [problem.queries[[number]] for number in range(problem.case.rounds)]
    return lambda number: affine.rank(
        pusher, problem.dense, vectors[number], PASSAGE_WEIGHT, rows[number], TOP, Goal(AFFINE_EPSILON)
    )


def peak(case: Case, graph_folder: Path, work: Path, name: str) -> int:
    """Return the peak memory of one method alone."""
    problem = Problem(case, graph_folder, work)
    method = next(method for method in methods(case) if method.name == name)
    method.prepare(problem)(0)
    return peak_bytes()


class Answer(NamedTuple):
    """What was found for one query or for a block of Q.

    Attributes
    ----------
    nodes : ndarray of int64, shape (Q, 20)
        Ranked passages, -1 where none was found.
    certified_k : ndarray of int64, shape (Q,)
        How many of them are proven; 0 where the method proves nothing.
    edges : float or None
        Stored edges walked a query.
    """

    nodes: NDArray[np.int64]
    certified_k: NDArray[np.int64]
    edges: float | None


def read(raw: Any, first: int) -> Answer:
    if isinstance(raw, SparseResult):
        raw = ranked(raw, TOP)
    if isinstance(raw, Ranked):
        return Answer(raw.nodes, raw.certified_k, float(np.mean(raw.edges_touched)))
    scores = np.asarray(raw, dtype=np.float64)[first:]
    nodes = largest(scores, np.arange(len(scores)), TOP)[None] + first
    return Answer(nodes, np.zeros(1, dtype=np.int64), None)


@dataclass
class Run:
    """What one method took and found.

    Attributes
    ----------
    seconds : dict of int to float
        For a query, by the number of the query or, where a call answers a block, of the round.
    found : dict of int to (ndarray, int)
        Ranked passages of a query, and how many of them are proven.
    edges : list of float
        Stored edges walked a query, where the method tells.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    found: dict[int, tuple[NDArray[np.int64], int]] = field(default_factory=dict)
    edges: list[float] = field(default_factory=list)


def trial(case: Case, graph_folder: Path, work: Path) -> dict[str, Any]:
    """Let methods take turns and compare what they find with the reference."""
    problem = Problem(case, graph_folder, work)
    result: dict[str, Any] = {}
    if case.many:  # one process holds the block and answers the queries, within the budget
        vectors = topical(problem.n_passages, BLOCK_COLUMNS - 1, seed=2)
        started = time.perf_counter()
        next(affine.precompute(problem.graph, vectors, problem.first, DAMPING, block_columns=BLOCK_COLUMNS))
        result["precomputed"] = about_columns(BLOCK_COLUMNS, time.perf_counter() - started)
    chosen = methods(case)
    asks = {method.name: method.prepare(problem) for method in chosen}
    for method in chosen:
        if method.ours:
            asks[method.name](0)
    runs = {method.name: Run() for method in chosen}
    for number in range(case.rounds):
        for method in chosen if number % 2 == 0 else reversed(chosen):
            take_turn(method, asks[method.name], number, problem, runs[method.name])
    scores = np.load(work / REFERENCE, mmap_mode="r")
    result["rows"] = [row(method, runs, problem, scores) for method in chosen]
    return result | {"trial_peak_bytes": peak_bytes()}


def take_turn(method: Method, ask: Ask, number: int, problem: Problem, run: Run) -> None:
    for query in range(number, QUERIES if method.every_query else number + 1, problem.case.rounds):
        started = time.perf_counter()
        raw = ask(query)
        run.seconds[query] = (time.perf_counter() - started) / method.batch
        answer = read(raw, problem.first)
        run.edges += [] if answer.edges is None else [answer.edges]
        start = 0 if method.batch > 1 else query
        run.found |= dict(enumerate(zip(answer.nodes, answer.certified_k, strict=True), start))


def row(
    method: Method, runs: dict[str, Run], problem: Problem, scores: NDArray[np.float64]
) -> dict[str, Any]:
    run, checked = runs[method.name], problem.case.checked
    rival = runs.get("igraph dense" if method.dense else "igraph")
    truth = scores[checked:] if method.dense else scores[:checked]
    found = [
        (nodes - problem.first, certified, truth[number])
        for number, (nodes, certified) in run.found.items()
        if number < len(truth)
    ]
    seconds = statistics.median(run.seconds.values())
    values: dict[str, Any] = {
        "graph": problem.case.kind,
        "nodes": problem.graph.n_nodes,
        "edges": problem.graph.n_edges,
        "method": method.name,
        "seconds_per_query": float(f"{seconds:.4g}"),
        "overlap_at_20": mean(overlap(nodes, true, TOP) for nodes, _, true in found),
        "edges_touched": round(statistics.fmean(run.edges)) if run.edges else None,
        "peak_bytes": None,  # of a process that runs this method alone; added by the caller
        "queries_a_call": method.batch,
        "cores": method.cores,
        "same_order_at_20": mean(same_order(nodes, true) for nodes, _, true in found),
        "exact_order_at_20": mean(exact_order(nodes, true) for nodes, _, true in found),
        "certified_k": mean(int(k) for _, k, _ in found),
        "certified_right": mean(overlap(nodes, true, k) if k else 1.0 for nodes, k, true in found),
    }
    if rival:
        common = rival.seconds.keys() & run.seconds.keys()
        ratio = statistics.median(rival.seconds[i] / run.seconds[i] for i in common)
        values["igraph_ratio"] = float(f"{ratio:.4g}")
    return values


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 4)


def overlap(passages: NDArray[np.int64], scores: NDArray[np.float64], k: int) -> float:
    """Share of k ranked passages that are among the best k by the reference; ties count.

    Parameters
    ----------
    passages : ndarray of int64, shape (20,)
        Numbers of passages, negative where none was found.
    scores : ndarray of float64, shape (M,)
        The reference's scores of passages.
    k : int
    """
    least = np.partition(scores, -k)[-k]
    return float(np.mean(true_scores(passages, scores)[:k] >= least * (1 - TIE)))


def same_order(passages: NDArray[np.int64], scores: NDArray[np.float64]) -> bool:
    """Whether every rank holds a passage with the reference's score at that rank, up to 1e-6 of it."""
    best = np.sort(scores)[::-1][: len(passages)]
    return bool(np.all(np.abs(true_scores(passages, scores) - best) <= SAME * best))


def exact_order(passages: NDArray[np.int64], scores: NDArray[np.float64]) -> bool:
    """Whether the passages are the reference's in its order, equal scores by number."""
    return bool(np.array_equal(passages, largest(scores, np.arange(len(scores)), len(passages))))


def true_scores(passages: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(passages >= 0, scores[passages], 0.0)


class Checked(NamedTuple):
    """A goal, and whether it was met."""

    name: str
    wanted: str
    measured: str
    met: bool


def overlaps(results: list[dict[str, Any]]) -> Iterator[Checked]:
    """Check what every graph of up to a million nodes must keep, by the worst of them."""
    rows = [row for result in results if result["size"] <= LARGE for row in result["rows"]]
    for (name, measure), least in BOUNDS.items():
        found = [values for values in rows if values["method"] == name]
        if found:
            worst = min(found, key=lambda values: values[measure])
            where = f"{worst[measure]:.3f} ({worst['graph']}, {worst['nodes']:,} nodes)"
            yield Checked(
                f"{name}: {measure.replace('_', ' ')}", f">= {least}", where, worst[measure] >= least
            )


def speeds(results: list[dict[str, Any]]) -> Iterator[Checked]:
    """Check the goals that were set for power-law graphs, where their sizes were measured."""
    by_size = {result["size"]: result for result in results if result["graph"] == "power-law"}
    rows = {(size, values["method"]): values for size, result in by_size.items() for values in result["rows"]}
    if LARGE in by_size:
        for name, least in (("push", 200), ("push 1e-6", 1000), ("power", 25), ("affine", 100)):
            ratio = rows[LARGE, name]["igraph_ratio"]
            rival = "igraph with the dense restart" if name == "affine" else "igraph"
            yield Checked(
                f"{LARGE:,} nodes: {name} against {rival}", f">= {least}x", f"{ratio}x", ratio >= least
            )
    if SMALL in by_size and HUGE in by_size:
        growth = rows[HUGE, "push"]["seconds_per_query"] / rows[SMALL, "push"]["seconds_per_query"]
        yield Checked(f"push, {SMALL:,} to {HUGE:,} nodes", "<= 2x", f"{growth:.2f}x", growth <= 2)
    if HUGE in by_size:
        used = by_size[HUGE]["trial_peak_bytes"]
        text = f"{used / 2**30:.2f} GiB"
        yield Checked(
            f"{HUGE:,} nodes: map, precompute {BLOCK_COLUMNS} columns, answer",
            "<= 20 GiB",
            text,
            used <= BUDGET_BYTES,
        )


def table(result: dict[str, Any]) -> Table:
    made = Table(title=f"{result['graph']}: {result['nodes']:,} nodes, {result['edges']:,} edges")
    made.add_column("method")
    for head in ("queries a call", "cores", "ms a query", "igraph / this", *HEADS):
        made.add_column(head, justify="right")
    for values in result["rows"]:
        start = (values["method"], str(values["queries_a_call"]), values["cores"])
        made.add_row(*start, milliseconds(values), ratio_text(values), *cells(values))
    return made


HEADS = ("top-20 overlap", "edges touched", "peak GiB")


def cells(values: dict[str, Any]) -> list[str]:
    edges = values["edges_touched"]
    return [
        f"{values['overlap_at_20']:.3f}",
        "-" if edges is None else f"{edges:,}",
        f"{values['peak_bytes'] / 2**30:.2f}",
    ]


def milliseconds(values: dict[str, Any]) -> str:
    value = 1e3 * values["seconds_per_query"]
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(values: dict[str, Any]) -> str:
    ratio = values.get("igraph_ratio")
    return "-" if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def preparation(result: dict[str, Any]) -> str:
    if "precomputed" not in result:
        return ""
    done = result["precomputed"]
    return (
        f"{done['columns']} columns precomputed, {done['seconds_per_column']:.3g} s a column, peak "
        f"{done['peak_bytes'] / 2**30:.2f} GiB\n"
    )


def goal_table(goals: list[Checked]) -> Table:
    made = Table("goal", "wanted", "measured", "")
    for goal in goals:
        made.add_row(goal.name, goal.wanted, goal.measured, "met" if goal.met else "[bold red]missed")
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table for each kind of graph: times by size, the rest at the largest size with all methods."""
    tables = []
    for kind in KINDS:
        found = {(values["nodes"], values["method"]): values for values in rows if values["graph"] == kind}
        sizes = sorted({size for size, _ in found})
        names = list(dict.fromkeys(name for _, name in found))
        complete = [size for size in sizes if all((size, name) in found for name in names)]
        if not complete:
            continue
        largest_size = complete[-1]
        heads = [f"{size:,} nodes" for size in sizes]
        heads += [f"{head} at {largest_size:,}" for head in ("igraph / this", *HEADS)]
        lines = [f"| {kind}, ms a query | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
        for name in names:
            times = [milliseconds(found[size, name]) if (size, name) in found else "-" for size in sizes]
            values = found[largest_size, name]
            lines.append("| " + " | ".join([name, *times, ratio_text(values), *cells(values)]) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def goals_markdown(goals: list[Checked]) -> str:
    lines = ["| goal | wanted | measured | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(goal[:3])} | {'met' if goal.met else 'missed'} |" for goal in goals]
    return "\n".join(lines)


def without_rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in result.items() if name != "rows"} for result in results]


LINES = {
    "igraph": ("#6b7480", "s", "igraph, as HippoRAG calls it"),
    "scikit-network": ("#9aa5b1", "^", "scikit-network"),
    "igraph dense": ("#c27a2c", "P", "igraph, dense restart"),
    "power": ("#8fb8cc", "v", "power, in blocks"),
    "affine": ("#e0a45c", "X", "affine, dense restart, block of 64"),
    "push": ("#1f5f7f", "o", "push, epsilon 1e-7"),
    "push 1e-6": ("#4a90b2", "D", "push, epsilon 1e-6"),
}
"""Colour, marker and label of the lines of the figure: ours are blue or light, dense restarts orange."""


def draw(rows: list[dict[str, Any]], path: Path) -> Path:
    """Draw the time of a query against the size of power-law graphs."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hippoindex", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    for name, (colour, marker, label) in LINES.items():
        found = [values for values in rows if (values["graph"], values["method"]) == (KINDS[0], name)]
        nodes = [values["nodes"] for values in found]
        seconds = [values["seconds_per_query"] for values in found]
        axes.plot(nodes, seconds, color=colour, marker=marker, label=label, linewidth=1.8, markersize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("nodes of a power-law graph, 10 edges a node")
    axes.set_ylabel("seconds a query")
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    return path


if __name__ == "__main__":
    sys.exit(main())
