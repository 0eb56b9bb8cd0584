"""Where do the methods rank the gold passages of HippoRAG's path-finding questions?

The four questions of HippoRAG's section 5.3 ask for a thing that no passage names together with both of its
properties: there are many candidates for each property, and one that has both. Builds an index of the 397
passages below HIPPOINDEX_DATA with the defaults, ranks all passages by every method, and prints the ranks of
the gold passages. Exits with 1 if ``hippoindex`` has not a gold passage first and all of them among the first
five for three of the four questions.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, data_folder, write_record
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.engine import METHODS

DATA = "path_finding"
TOP_K = 5
GOAL_METHOD, GOAL_QUESTIONS = "hippoindex", 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=Path, help="an index of the passages; without it one is built")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / DATA, help="where an index is built")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    index = arguments.index or build(arguments.work)
    results = rank(index, arguments.overrides)
    if arguments.markdown:
        print(markdown(results))
    else:
        Console().print(table(results))
    if arguments.index is None and not arguments.overrides:
        print("record:", write_record(DATA, results))
    solved = sum(is_solved(row["ranks"][GOAL_METHOD]) for row in results)
    print(f"{GOAL_METHOD} has a gold passage first and all in the top {TOP_K} for {solved} of {len(results)}")
    sys.exit(0 if solved >= GOAL_QUESTIONS else 1)


def build(work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    corpus = [str(data_folder() / DATA / "corpus.jsonl")]
    build_index(load_config(corpus__path=corpus, output=str(work)))
    return work


def rank(index: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Return for every question the ranks of its gold passages by method, the first being 1."""
    retriever = open_retriever(index, overrides)
    queries = read_gold(retriever.index, data_folder() / DATA / "queries.jsonl").queries
    batch = retriever.encode(queries)
    results: list[dict[str, Any]] = [
        {"id": query.query_id, "gold": len(query.gold), "ranks": {}} for query in queries
    ]
    for method in METHODS:
        rows = retriever.rank(batch, method, top_k=retriever.index.n_passages).rows
        ranks = gold_ranks(retriever.index, queries, rows)
        for result in results:
            result["ranks"][method] = ranks[result["id"]]
    return results


def gold_ranks(index: Index, queries: Sequence[Query], rows: NDArray[np.int64]) -> dict[str, list[int]]:
    """Return the ranks of each question's gold passages from all passage rows, best first, (Q, passages)."""
    number = {name: row for row, name in enumerate(index.passages["passage_id"].to_pylist())}
    places = rows.argsort(axis=1) + 1
    return {
        query.query_id: sorted(int(place[number[gold]]) for gold in query.gold)
        for query, place in zip(queries, places, strict=True)
    }


def is_solved(ranks: list[int]) -> bool:
    return ranks[0] == 1 and ranks[-1] <= TOP_K


def cells(result: dict[str, Any]) -> list[str]:
    return [", ".join(map(str, result["ranks"][method])) for method in METHODS]


def table(results: list[dict[str, Any]]) -> Table:
    made = Table(title="Ranks of the gold passages", title_justify="left")
    for heading in ("question", *METHODS):
        made.add_column(heading)
    for result in results:
        made.add_row(result["id"], *cells(result))
    return made


def markdown(results: list[dict[str, Any]]) -> str:
    lines = [" | ".join(["| question", *METHODS]) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for result in results:
        shown = [
            f"**{cell}**" if is_solved(result["ranks"][method]) else cell
            for method, cell in zip(METHODS, cells(result), strict=True)
        ]
        lines.append(" | ".join([f"| {result['id']}", *shown]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
