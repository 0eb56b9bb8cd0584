"""How well and how fast does the whole job do on real corpora? Makes the tables of the README.

Builds an index of each data set below HIPPOINDEX_DATA with the defaults of a laptop, evaluates every method,
and compares the figures with the goals. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, data_folder, write_record
from rich.console import Console

from hippoindex.pipeline.display import evaluation_table

METHODS = ("bm25", "dense", "hipporag1", "hipporag2", "hippoindex")
METRICS = ("recall@2", "recall@5", "recall@10", "all_recall@2", "all_recall@5")
GPT = "musique_train_100/openie_results_ner_gpt-3.5-turbo-1106.json"


@dataclass(frozen=True)
class Case:
    """One index: a data set, an extractor, and the least figures it must reach."""

    name: str
    data: str
    settings: tuple[str, ...] = ()
    goals: dict[tuple[str, str], float] = field(default_factory=dict)
    clear_of_zero: bool = False
    passages_per_s: float | None = None
    memory_bytes: int | None = None


CASES = (
    Case(
        "MuSiQue train 100, rules",
        "musique_train_100",
        goals={("hippoindex", "recall@5"): 76, ("hippoindex", "recall@2"): 54},
    ),
    Case(
        "MuSiQue train 100, GPT-3.5 triples",
        "musique_train_100",
        settings=("extract.engine=import", f"extract.path={{data}}/{GPT}"),
        goals={
            ("hippoindex", "recall@5"): 77,
            ("hippoindex", "recall@2"): 54,
            ("hipporag1", "recall@2"): 52,
            ("hipporag2", "recall@5"): 65,
        },
    ),
    Case("HotpotQA train 100, rules", "hotpot_train_100", goals={("hippoindex", "recall@5"): 90}),
    Case(
        "2WikiMultiHopQA 375, rules",
        "2wiki_dev_375",
        clear_of_zero=True,
        passages_per_s=20,
        memory_bytes=3 * 2**30,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "readme", help="where the indexes go")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    console = Console()
    results, missed = [], []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        result = run(case, arguments.work, arguments.overrides)
        console.print(f"\n[bold]{case.name}[/]: {result['passages_per_s']} passages/s", highlight=False)
        console.print(evaluation_table(result))
        results.append(result)
        missed += [f"{case.name}: {text}" for text in misses(case, result)]
    print(markdown(results))
    if not arguments.only and not arguments.overrides:
        print("record:", write_record("readme_table", results))
        print("figure:", draw(results, ROOT / "docs" / "recall.svg"))
    for text in missed:
        print("MISSED", text, file=sys.stderr)
    sys.exit(1 if missed else 0)


def run(case: Case, work: Path, overrides: list[str]) -> dict[str, Any]:
    folder = data_folder() / case.data
    output = work / case.name.replace(" ", "-").replace(",", "").lower()
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    settings = [setting.format(data=data_folder()) for setting in case.settings] + overrides
    chosen = [part for setting in settings for part in ("--set", setting)]
    stats = hippoindex("index", "--corpus", folder / "corpus.jsonl", "--output", output, *chosen)["stats"]
    asked = ("--queries", folder / "queries.jsonl", "--methods", ",".join(METHODS))
    report = hippoindex("evaluate", "--index", output, *asked)
    report["index"].pop("path")
    del report["questions"], report["config"]  # long, and nothing that the tables show
    return {
        "name": case.name,
        "passages_per_s": stats["passages_per_s"],
        "peak_memory_bytes": stats["peak_memory_bytes"],
        "stages": {stage["name"]: round(stage["seconds_s"], 2) for stage in stats["stages"]},
        **report,
    }


def hippoindex(*arguments: object) -> dict[str, Any]:
    """Run the command line as a user does, and return what it prints as JSON."""
    command = [
        sys.executable,
        "-m",
        "hippoindex.cli",
        "--log-level",
        "warning",
        *map(str, arguments),
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def misses(case: Case, result: dict[str, Any]) -> list[str]:
    rows = result["methods"]
    found = [
        f"{method} {metric} {rows[method][metric]} < {least}"
        for (method, metric), least in case.goals.items()
        if rows[method][metric] < least
    ]
    if rows["hippoindex"]["recall@2"] < rows["dense"]["recall@2"]:
        found.append("hippoindex is below dense at recall@2")
    if case.clear_of_zero and rows["hippoindex"]["delta_recall@5"][1] <= 0:
        found.append("the interval of hippoindex - dense holds zero")
    if case.clear_of_zero and rows["hippoindex"]["recall@5"] <= rows["bm25"]["recall@5"]:
        found.append("hippoindex is not above bm25")
    if case.passages_per_s and result["passages_per_s"] < case.passages_per_s:
        found.append(f"{result['passages_per_s']} passages/s < {case.passages_per_s}")
    if case.memory_bytes and result["peak_memory_bytes"] > case.memory_bytes:
        found.append(f"peak memory {result['peak_memory_bytes']} bytes > {case.memory_bytes}")
    return found


def markdown(results: list[dict[str, Any]]) -> str:
    lines = ["| data set, extractor | method | R@2 | R@5 | R@10 | all@2 | all@5 | R@5 - dense [95 %] |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        for method, row in result["methods"].items():
            mean, low, high = row["delta_recall@5"]
            delta = "" if method == "dense" else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
            cells = [f"{row[metric]:.1f}" for metric in METRICS]
            lines.append(" | ".join([f"| {result['name']}", method, *cells, delta]) + " |")
    lines += [
        "",
        "| data set, extractor | passages | phrases | facts | synonym edges | passages/s | peak GiB |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for result in results:
        index = result["index"]
        counts = [f"{index[name]:,}" for name in ("passages", "phrases", "facts", "synonym_edges")]
        speed = [f"{result['passages_per_s']:.1f}", f"{result['peak_memory_bytes'] / 2**30:.2f}"]
        lines.append(" | ".join([f"| {result['name']}", *counts, *speed]) + " |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> Path:
    """Draw recall@5 of every method on every data set."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hippoindex", "svg.fonttype": "none", "font.family": "sans-serif"})
    colours = ("#c9ced6", "#9aa5b1", "#8fb8cc", "#5a97b5", "#1f5f7f")
    figure, axes = plt.subplots(figsize=(9, 3.4))
    width = 0.8 / len(METHODS)
    for position, (method, colour) in enumerate(zip(METHODS, colours, strict=True)):
        values = [result["methods"][method]["recall@5"] for result in results]
        places = [number + (position - (len(METHODS) - 1) / 2) * width for number in range(len(results))]
        bars = axes.bar(places, values, width * 0.92, label=method, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(
        range(len(results)), [result["name"].replace(", ", ",\n") for result in results], fontsize=8
    )
    axes.set_ylabel("recall@5, percent")
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(METHODS), frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()
