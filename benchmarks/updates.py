"""What do a rerun of a finished job, an append and a delete cost, beside the build?

    python benchmarks/updates.py            # about 100,000 phrases: ten minutes
    python benchmarks/updates.py --quick    # 600 passages

Builds an index of 99 % of a corpus from HIPPOINDEX_DATA with the defaults of a laptop, runs the same command
again, appends the last 1 %, and deletes that again: the files must then be those of the build (all but those
that synonyms decide, where these are found by lists, which may find other pairs). Every step is a command of
its own, start and end of the process included. Exits with 1 if the files differ or a goal is missed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import data_folder, write_record
from rich import box
from rich.console import Console
from rich.table import Table

from hippoindex.pipeline.artifact import open_index

PASSAGES = 10_200
LARGEST_SHARE = 0.05
LONGEST_RERUN_S = 8.0
OF_PAIRS = {"synonyms", "lists", "graph", "ppr"}
LINEAGE = {"manifest.json", "SHA256SUMS", "stats.json", "report.html"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="600 passages; no goal is judged")
    parser.add_argument("--passages", type=int, default=PASSAGES)
    parser.add_argument(
        "--json", type=Path, help="where the rows go; without it benchmarks/records/updates.json"
    )
    arguments = parser.parse_args()
    total = 600 if arguments.quick else arguments.passages
    with tempfile.TemporaryDirectory(prefix="updates-") as temporary:
        rows, same = measure(Path(temporary), total)
    Console().print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    elif not arguments.quick:
        print("record:", write_record("updates", rows))
    missed = [] if arguments.quick else misses(rows)
    missed += [] if same else ["deleting what was appended does not lead back to the files of the build"]
    for text in missed:
        print("MISSED", text, file=sys.stderr)
    return int(bool(missed))


def measure(folder: Path, total: int) -> tuple[list[dict[str, Any]], bool]:
    """Carry out all steps; return their rows, and whether the files of the build came back."""
    records = list(corpus(total))
    new = max(1, total // 100)
    most, rest, ids = (folder / name for name in ("most.jsonl", "rest.jsonl", "ids.txt"))
    for path, part in ((most, records[:-new]), (rest, records[-new:])):
        path.write_text("".join(json.dumps(record) + "\n" for record in part), encoding="utf-8")
    ids.write_text("".join(f"{record['id']}\n" for record in records[-new:]), encoding="utf-8")
    index = folder / "index"
    build = ("index", "--corpus", most, "--output", index)
    append = ("append", "--index", index, "--corpus", rest)
    rows = [step("build", total - new, *build)]
    before = digests(index)
    rows += [step("the same again", 0, *build)]
    rows += [step("append, PPR pieces too", new, *append)]
    rows += [step("delete it again", new, "delete", "--index", index, "--ids", ids)]
    same = digests(index) == before
    rows += [step("append, PPR pieces left out", new, *append, "--no-precompute")]
    for row in rows:
        row["share"] = round(row["seconds"] / rows[0]["seconds"], 4)
    return rows, same


def corpus(total: int) -> Iterator[dict[str, str]]:
    """Yield passages of 2WikiMultiHopQA, and then of others with other titles."""
    titles = set()
    with (data_folder() / "2wiki_dev_375" / "corpus.jsonl").open(encoding="utf-8") as lines:
        for _, line in zip(range(total), lines, strict=False):
            record = json.loads(line)
            titles.add(record["title"])
            total -= 1
            yield record
    for file in sorted((data_folder() / "distractors").glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                record = json.loads(line)
                if total > 0 and record["title"] not in titles:
                    total -= 1
                    yield {"id": f"other-{number}", "title": record["title"], "text": record["text"]}


def step(action: str, passages: int, *arguments: object) -> dict[str, Any]:
    """Run a command; return what it took and came to."""
    command = [
        sys.executable,
        "-m",
        "hippoindex.cli",
        "--log-level",
        "warning",
        *map(str, arguments),
        "--json",
    ]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = round(time.perf_counter() - started, 2)
    made = json.loads(done.stdout)
    print(f"{action}: {seconds} s", file=sys.stderr, flush=True)
    counts = made["counts"]
    return {
        "action": action,
        "passages": passages,
        "seconds": seconds,
        "changed": made["changed"],
        "of_passages": counts["passages"],
        "of_phrases": counts["phrases"],
        "stages": {s["name"]: round(s["seconds_s"], 2) for s in made["stats"]["stages"]} if passages else {},
    }


def digests(index: Path) -> dict[str, str]:
    by_lists = open_index(index).manifest.stages["synonyms"]["method"] == "ivf"
    return {
        file.relative_to(index).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(index.rglob("*"))
        if file.is_file() and file.name not in LINEAGE and not (by_lists and file.parent.name in OF_PAIRS)
    }


def misses(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    if rows[1]["changed"] or rows[1]["seconds"] > LONGEST_RERUN_S:
        found.append(
            f"a rerun took {rows[1]['seconds']} s, more than {LONGEST_RERUN_S:g} s, or did something"
        )
    found += [
        f"{row['action']}: {row['share']:.1%} of the build, more than {LARGEST_SHARE:.0%}"
        for row in rows
        if row["action"].startswith("append") and row["share"] > LARGEST_SHARE
    ]
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="Beside the build", box=box.SIMPLE)
    for name in ("step", "passages", "to an index of phrases", "seconds", "share of the build"):
        made.add_column(name, justify="left" if name == "step" else "right")
    for row in rows:
        counts = f"{row['passages']:,}", f"{row['of_phrases']:,}"
        made.add_row(row["action"], *counts, f"{row['seconds']:.1f}", f"{row['share']:.1%}")
    return made


if __name__ == "__main__":
    sys.exit(main())
