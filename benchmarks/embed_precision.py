"""What does MiniLM in whole numbers cost in recall, and what does it save?

Indexes every case of readme_table.py with both precisions, unless the index is there, and prints recall,
synonym edges and speed of both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, data_folder, write_record
from readme_table import CASES, Case
from reproduce import index_of

from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.evaluate import Gold, judged_queries

METHODS = ("dense", "hipporag1", "hipporag2", "hippoindex")
METRICS = ("recall@2", "recall@5", "recall@10")
PRECISIONS = ("fp32", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "precision", help="where indexes are, by precision"
    )
    arguments = parser.parse_args()
    result = {
        case.name: {precision: measure(case, precision, arguments.work) for precision in PRECISIONS}
        for case in CASES
    }
    print(markdown(result))
    print("record:", write_record("embed_precision", result))


def measure(case: Case, precision: str, work: Path) -> dict[str, Any]:
    """Return recalls in percent by method, and how the index was built."""
    settings = (*case.settings, f"embed.precision={precision}")
    retriever = open_retriever(index_of(replace(case, settings=settings), work / precision))
    index = retriever.index
    made = index.manifest.config["embed"]["precision"]
    if made != precision:
        raise SystemExit(f"{index.path} was embedded in {made}, not {precision}")
    queries = judged_queries(read_gold(index, data_folder() / case.data / "queries.jsonl").queries)
    gold, batch = Gold(index, queries), retriever.encode(queries)
    stats = json.loads((index.path / "stats.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = {
        "passages_per_s": stats["passages_per_s"],
        "synonym_edges": index.manifest.counts.synonym_edges,
    }
    for method in METHODS:
        recalls = gold.recalls(retriever.rank(batch, method, top_k=gold.depth))
        figures[method] = [round(float(100 * np.mean(recalls[metric])), 2) for metric in METRICS]
    return figures


def markdown(result: dict[str, Any]) -> str:
    lines = [f"| | | {' | '.join(METHODS)} | synonym edges | passages/s |"]
    lines.append("|---|---|" + "--:|" * (len(METHODS) + 2))
    for case, by_precision in result.items():
        for precision, figures in by_precision.items():
            cells = [" / ".join(f"{mean:.1f}" for mean in figures[method]) for method in METHODS]
            cells += [f"{figures['synonym_edges']:,}", f"{figures['passages_per_s']:.1f}"]
            lines.append(f"| {case} | {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
