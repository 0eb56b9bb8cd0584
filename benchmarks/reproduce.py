"""Do the main table and the ablations come out as recorded? What `make reproduce` runs.

Builds an index of each case of readme_table.py, or takes those of an earlier run from --work, and measures
every method and every design choice. Exits with 1 if a figure is below the recorded 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import RECORDS, ROOT, data_folder, write_record
from readme_table import CASES, Case

from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.evaluate import Gold, bootstrap_interval, judged_queries
from hippoindex.pipeline.retrieve.engine import Retriever

METRICS = ("recall@2", "recall@5", "recall@10")
RECORD = "reproduce"


class Row(NamedTuple):
    """One line of a table: a method with some settings."""

    group: str
    name: str
    method: str
    settings: tuple[str, ...] = ()


def v1(name: str, *settings: str) -> Row:
    return Row("HippoRAG 1", name, "hipporag1", settings)


def v2(name: str, *settings: str) -> Row:
    return Row("HippoRAG 2", name, "hipporag2", settings)


def ours(name: str, *settings: str) -> Row:
    return Row("hippoindex", name, "hippoindex", settings)


MAIN = [Row("main", name, name) for name in ("bm25", "dense", "hipporag1", "hipporag2", "hippoindex")]
ABLATIONS = [
    v1("default"),
    v1("query nodes only", "walk=seeds"),
    v1("query nodes and neighbours", "walk=neighbours"),
    v1("without node specificity", "node_specificity=false"),
    v1("without synonym edges", "synonym_edges=false"),
    v1("with passage nodes", "passage_nodes=true"),
    v1("linking query-to-node", "linking=query-to-node"),
    v1("linking query-to-fact", "linking=query-to-fact"),
    v1("phrases counted per fact", "mentions=per-fact"),
    v1("uncertainty ensemble", "ensemble_cosine=0.9"),
    v1("damping 0.3", "damping=0.3"),
    v1("damping 0.7", "damping=0.7"),
    v2("default, no filter"),
    v2("linking ner-to-node", "linking=ner-to-node"),
    v2("linking query-to-node", "linking=query-to-node"),
    v2("without passage nodes", "passage_nodes=false"),
    v2("without node specificity", "node_specificity=false"),
    v2("without synonym edges", "synonym_edges=false"),
    v2("passage weight 0.01", "passage_weight=0.01"),
    v2("passage weight 0.1", "passage_weight=0.1"),
    v2("passage weight 0.5", "passage_weight=0.5"),
    v2("damping 0.3", "damping=0.3"),
    v2("damping 0.7", "damping=0.7"),
    v2("10 facts", "fact_top_k=10"),
    ours("default"),
    ours("without pairs of passages", "pair_weight=0"),
    ours("without pairs, dense 12", "pair_weight=0", "dense_weight=12"),
    ours("without feedback", "feedback_weight=0"),
    ours("without entities", "entity_weight=0"),
    ours("without dense", "dense_weight=0"),
    ours("facts alone", "feedback_weight=0", "entity_weight=0", "dense_weight=0", "pair_weight=0"),
    ours("without node specificity", "node_specificity=false"),
    ours("without synonym edges", "synonym_edges=false"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "reproduce", help="where the indexes are"
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--record", action="store_true", help="record the figures in place of comparing them")
    arguments = parser.parse_args()
    if arguments.only and arguments.record:
        parser.error("--only and --record: a record holds all cases")
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if arguments.only in case.name:
            found[case.name] = measure(case, arguments.work)
    print(markdown(found, MAIN), markdown(found, ABLATIONS), sep="\n\n")
    if arguments.record:
        print("record:", write_record(RECORD, found))
        return
    recorded = json.loads((RECORDS / f"{RECORD}.json").read_text(encoding="utf-8"))["results"]
    fallen = drops(found, recorded)
    for text in fallen:
        print("FALLEN", text, file=sys.stderr)
    print("every figure is within or above its recorded interval" if not fallen else "")
    sys.exit(1 if fallen else 0)


def index_of(case: Case, work: Path) -> Path:
    """Return the folder of a case's index, which is built if it is not there."""
    index = work / case.name.replace(" ", "-").replace(",", "").lower()
    if not (index / "manifest.json").is_file():
        settings = [setting.format(data=data_folder()) for setting in case.settings]
        corpus = [str(data_folder() / case.data / "corpus.jsonl")]
        build_index(load_config(overrides=settings, corpus__path=corpus, output=str(index)))
    return index


def measure(case: Case, work: Path) -> dict[str, Any]:
    """Return the figures of every row on one case, by "group: name"."""
    index = index_of(case, work)
    plain = open_retriever(index, ["retrieve.epsilon=null"])
    asked = judged_queries(read_gold(plain.index, data_folder() / case.data / "queries.jsonl").queries)
    gold, batch = Gold(plain.index, asked), plain.encode(asked)
    figures = {}
    for row in (*MAIN, *ABLATIONS):
        settings = ["retrieve.epsilon=null", *(f"retrieve.{setting}" for setting in row.settings)]
        config = open_retriever(index, settings).config
        ranking = Retriever(plain.index, config).rank(batch, row.method, top_k=gold.depth)
        recalls = gold.recalls(ranking)
        figures[f"{row.group}: {row.name}"] = {
            metric: [
                round(float(100 * recalls[metric].mean()), 2),
                *bootstrap_interval(100 * recalls[metric]),
            ]
            for metric in METRICS
        }
    return figures


def drops(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Return what is below its recorded interval, and what has no record."""
    texts = []
    for case, rows in found.items():
        for row, figures in rows.items():
            for metric, (mean, *_) in figures.items():
                then = recorded.get(case, {}).get(row, {}).get(metric)
                if then is None:
                    texts.append(f"{case}, {row}: {metric} was never recorded")
                elif mean < then[1]:
                    texts.append(
                        f"{case}, {row}: {metric} is {mean}, recorded {then[0]} [{then[1]}, {then[2]}]"
                    )
    return texts


def markdown(found: dict[str, Any], rows: list[Row]) -> str:
    """Return a table of R@2 / R@5 / R@10 of each row on each case; of the main table the best R@5 in bold."""
    heads = [f"| | {' | '.join(found)} |", "|---|" + "--:|" * len(found)]
    lines, group = list(heads), ""
    best = {
        case: max(figures[f"{row.group}: {row.name}"]["recall@5"][0] for row in rows)
        for case, figures in found.items()
    }
    for row in rows:
        if row.group not in (group, "main"):
            group = row.group
            lines.append(f"| **{group}** |" + " |" * len(found))
        cells = []
        for case, figures in found.items():
            means = [figures[f"{row.group}: {row.name}"][metric][0] for metric in METRICS]
            text = " / ".join(f"{mean:.1f}" for mean in means)
            cells.append(f"**{text}**" if np.isclose(means[1], best[case]) else text)
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
