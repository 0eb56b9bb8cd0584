"""What are the edges of titles worth, and passages that say together what a question asks?

Ranks by the default method with several weights of the edge between a passage and its title, and of the term
for pairs of passages that name each other, on the four questions of path_finding.py (ranks of the gold
passages) and the cases of readme_table.py (recall). Indexes are built where --work has none; their graphs are
weighed anew in memory, and walks are by power iteration.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import path_finding
from common import ROOT, data_folder, write_record
from readme_table import CASES
from reproduce import index_of

from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.ppr.assemble import weigh_titles
from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.evaluate import Gold, judged_queries
from hippoindex.pipeline.retrieve.engine import Retriever

METRICS = ("recall@2", "recall@5", "recall@10")


class Way(NamedTuple):
    """Weights of the edges of titles, of the term for pairs and of the dense term, and an exponent."""

    method: str = "hippoindex"
    title: float = 1.0
    pair: float = 0.0
    exponent: float = 3.0
    dense: float = 12.0

    def __str__(self) -> str:
        parts = [self.method, f"titles {self.title:g}"]
        if self.method == "hippoindex":
            pairs = f"pairs {self.pair:g} h^{self.exponent:g}" if self.pair else "no pairs"
            parts += [pairs, f"dense {self.dense:g}"]
        return ", ".join(parts)

    def settings(self) -> list[str]:
        values = {"pair_weight": self.pair, "pair_exponent": self.exponent, "dense_weight": self.dense}
        return ["retrieve.solver=power", *(f"retrieve.{key}={value}" for key, value in values.items())]


WAYS = [
    Way("hipporag2", title=0),
    Way("hipporag2"),
    *(Way(title=weight) for weight in (0, 0.5, 1, 2)),
    *(Way(pair=18, exponent=exponent, dense=8) for exponent in (1, 2, 3, 4)),
    *(Way(pair=pair, dense=8) for pair in (9, 12, 24, 36)),
    *(Way(pair=18, dense=dense) for dense in (6, 12)),
    *(Way(title=title, pair=18, dense=8) for title in (0, 2)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproduce", help="where indexes are")
    parser.add_argument("--index", type=Path, help="of the path-finding passages; without it one is built")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    of_paths = arguments.index or path_finding.build(ROOT / "runs" / path_finding.DATA)
    result: dict[str, Any] = {"ranks": ranks(of_paths), "recall": {}}
    for case in CASES:
        if arguments.only in case.name:
            result["recall"][case.name] = recall(index_of(case, arguments.work), case.data)
    print(markdown(result))
    if not arguments.only:
        print("record:", write_record("titles_and_pairs", result))


def ranks(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return the ranks of the gold passages of each question, the first being 1, by way."""
    found = {}
    for way in WAYS:
        retriever = weighed(folder, way)
        queries = read_gold(retriever.index, data_folder() / path_finding.DATA / "queries.jsonl").queries
        rows = retriever.rank(retriever.encode(queries), way.method, top_k=retriever.index.n_passages).rows
        found[str(way)] = path_finding.gold_ranks(retriever.index, queries, rows)
    return found


def recall(folder: Path, data: str) -> dict[str, list[float]]:
    """Return the mean of every metric in percent, by way."""
    plain = open_index(folder)
    queries = judged_queries(read_gold(plain, data_folder() / data / "queries.jsonl").queries)
    gold = Gold(plain, queries)
    found = {}
    for way in WAYS:
        retriever = weighed(folder, way)
        recalls = gold.recalls(retriever.rank(retriever.encode(queries), way.method, top_k=gold.depth))
        found[str(way)] = [round(100 * float(recalls[metric].mean()), 2) for metric in METRICS]
    return found


def weighed(folder: Path, way: Way) -> Retriever:
    """Return a retriever whose graph has titles of this weight, whatever those of the index have."""
    retriever = open_retriever(folder, way.settings())
    index: Index = retriever.index
    graph = index.graph
    weights = np.array(graph.weights)
    start = graph.indptr[index.n_phrases]
    weights[start:] = 1.0
    weights[:start][graph.indices[:start] >= index.n_phrases] = 1.0
    weigh_titles(graph.indptr, graph.indices, weights, index.titles, index.n_phrases, way.title)
    vars(index)["graph"] = Graph(np.array(graph.indptr), np.array(graph.indices), weights)
    return retriever


def markdown(result: dict[str, Any]) -> str:
    questions = list(next(iter(result["ranks"].values())))
    lines = [f"| | {' | '.join([*questions, *result['recall']])} |"]
    lines.append("|---|" + "---|" * len(questions) + "--:|" * len(result["recall"]))
    for way in map(str, WAYS):
        cells = [", ".join(map(str, result["ranks"][way][question])) for question in questions]
        cells += [" / ".join(f"{mean:.1f}" for mean in rows[way]) for rows in result["recall"].values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
