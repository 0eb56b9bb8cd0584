"""How fast are ten thousand questions answered in one call, and how long does each part take?

Questions are made of the titles of the index's passages, so that their names are found. Exits with 1 if the
goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import data_folder, write_record

from hippoindex.pipeline.answer import answer_queries, write_answers
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import ClusterConfig, load_config

GOAL_PER_S = 300.0
PATTERNS = (
    "Which came first, {a} or {b}?",
    "Where was the person born who is known for {a}?",
    "Who is the father of the director of {a}?",
    "Do {a} and {b} come from the same country?",
    "When did the founder of {a} die?",
    "What is the capital of the state in which {a} lies?",
    "Which award did the performer of {a} win?",
    "Who was married to the author of {a}?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=Path, help="by default one of 2wiki_dev_375 is built")
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--workers", type=int, help="by default one process, on all cores")
    parser.add_argument("--precision", choices=("fp32", "int8"), default="int8", help="of the index built")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="retrieve.KEY=VALUE")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/bulk_queries_PRECISION.json"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(arguments.index or build(Path(folder), arguments.precision))
        result = measure(index, Path(folder), arguments)
    print(json.dumps(result, indent=2))
    if arguments.record:
        print("record:", write_record(f"bulk_queries_{result['precision']}", result))
    if result["queries_per_s"] < GOAL_PER_S:
        sys.exit(f"MISSED {result['queries_per_s']} queries/s < {GOAL_PER_S}")


def build(folder: Path, precision: str) -> Path:
    corpus, output = data_folder() / "2wiki_dev_375" / "corpus.jsonl", folder / "index"
    build_index(load_config(corpus__path=[str(corpus)], output=str(output), embed__precision=precision))
    return folder / "index"


def make_questions(index: Index, count: int, file: Path) -> None:
    titles = index.passages["title"].to_pylist()
    rng = np.random.default_rng(0)
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            a, b = (titles[i] for i in rng.integers(0, len(titles), 2))
            question = PATTERNS[rng.integers(len(PATTERNS))].format(a=a, b=b)
            stream.write(json.dumps({"id": str(number), "question": question}) + "\n")


def measure(index: Index, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    questions, output = folder / "questions.jsonl", folder / "ranked.parquet"
    make_questions(index, arguments.queries, questions)
    cluster = (
        ClusterConfig(executor="local", workers=arguments.workers) if arguments.workers else ClusterConfig()
    )
    started = time.perf_counter()
    answers = answer_queries(
        index.path, questions, method="hippoindex", overrides=arguments.overrides, cluster=cluster
    )
    ranked = time.perf_counter()
    write_answers(answers, output)
    ended = time.perf_counter()
    return {
        "passages": index.n_passages,
        "queries": arguments.queries,
        "workers": arguments.workers,
        "queries_per_s": round(arguments.queries / (ended - started), 1),
        "rank_s": round(ranked - started, 2),
        "write_s": round(ended - ranked, 2),
        "parquet_bytes": output.stat().st_size,
        "parts_queries_per_s": answers.summary()["parts_queries_per_s"],
        "precision": index.manifest.config["embed"]["precision"],
    }


if __name__ == "__main__":
    main()
