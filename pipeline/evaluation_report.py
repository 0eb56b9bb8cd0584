"""An evaluation on paper: a Markdown table with the best figures in bold, and recall@k curves as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hippoindex.cluster.atomic import atomic_write
from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import json_text
from hippoindex.pipeline.evaluate import BASELINE

METRICS = {
    "R@2": "recall@2",
    "R@5": "recall@5",
    "R@10": "recall@10",
    "all@2": "all_recall@2",
    "all@5": "all_recall@5",
}
ANSWER_METRICS = {"EM": "exact_match", "F1": "f1"}
COLOURS = ("#7b8794", "#3e4c59", "#b44d12", "#8719e0", "#1f5f7f", "#0c6b58", "#a61b1b", "#8d6708")
WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 40, 440, 24, 280
LABEL_GAP = 13


def write_report(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Write a report as JSON, as Markdown beside it, and its curves as SVG.

    Parameters
    ----------
    report : mapping
        From :func:`hippoindex.pipeline.evaluate.evaluate`.
    path : Path
        Of the JSON file; the others have the endings ``.md`` and ``.svg``.

    Returns
    -------
    list of Path

    Raises
    ------
    UsageError
        If one of the others would take the place of the JSON file.
    HippoIndexError
        If a file cannot be written.
    """
    files = report_files(path)
    texts = json_text(report), markdown(report, files[2].name), curves_svg(report)
    for file, text in zip(files, texts, strict=True):
        with atomic_write(file) as stream:
            stream.write(text.encode())
    return files


def report_files(path: Path) -> list[Path]:
    """Return the files that make a report: JSON, Markdown, SVG.

    Raises
    ------
    UsageError
        If the name of the JSON file ends as one of the others does.
    """
    files = [path, path.with_suffix(".md"), path.with_suffix(".svg")]
    if path in files[1:]:
        raise UsageError(f"{path}: a table and a figure go beside the JSON file; call it {path.stem}.json")
    return files


def shown_metrics(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the metrics of an evaluation's columns by heading; those of answers where there are any."""
    answered = all(metric in row for row in rows.values() for metric in ANSWER_METRICS.values())
    return METRICS | ANSWER_METRICS if answered else METRICS


def best_figures(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the highest figure of each metric, as it is shown."""
    metrics = shown_metrics(rows).values()
    return {metric: max(round(row[metric], 1) for row in rows.values()) for metric in metrics}


def remarks(name: str, row: Mapping[str, Any]) -> list[str]:
    """Return what a reader of a method's figures must know."""
    said = []
    if row.get("fallbacks"):
        said.append(
            f"{name}: {row['fallbacks']} questions had no phrase to start from and fell back to the cosines "
            "of passages"
        )
    if row.get("notes"):
        said.append(f"{name}: {row['notes']}")
    facts = row.get("recognition_memory")
    if isinstance(facts, Mapping):
        said.append(
            f"{name}: recognition memory kept {facts['kept_facts']} of {facts['facts']} facts, and none for "
            f"{facts['questions_without_facts']} of {facts['questions']} questions"
        )
    chains = row.get("ircot")
    if chains:
        said.append(
            f"{name}: at most {chains['steps']} steps, {chains['thoughts']} thoughts, "
            f"{chains['ended_by_an_answer']} questions ended by an answer, {chains['failed']} failed"
        )
    answers = row.get("qa")
    if answers:
        said.append(
            f"{name}: {answers['answered']} of {answers['questions']} questions answered, "
            f"{answers['failed']} failed, {answers['without_reference']} without a right answer to compare"
        )
    return said


def reader_remark(report: Mapping[str, Any]) -> str:
    """Return which language model was asked and what it used; empty if there was none."""
    reader = report.get("reader")
    if not reader:
        return ""
    used = reader["usage"]
    text = (
        f"reader {reader['model']}: {used['requests']} requests, {used['known']} answers known, "
        f"{used['prompt_tokens']} prompt and {used['generated_tokens']} generated tokens, ${used['usd']:.4f}"
    )
    failed = (reader.get("recognition_memory") or {}).get("failed")
    return (
        f"{text}; recognition memory failed for {failed} questions, which kept their facts"
        if failed
        else text
    )


def gold_remark(report: Mapping[str, Any]) -> str:
    """Return which questions and gold passages could not be found; empty if there were none."""
    counts = report.get("queries", {})
    said = []
    if counts.get("without_gold"):
        said.append(f"{counts['without_gold']} questions without a gold passage were left out")
    if counts.get("gold_not_in_index"):
        said.append(
            f"{counts['gold_not_in_index']} of {counts['gold_passages']} gold passages are not in the index "
            "and count as never found"
        )
    return "; ".join(said)


def markdown(report: Mapping[str, Any], figure: str | None = None) -> str:
    """Return the table of an evaluation as Markdown, the best figure of each metric in bold."""
    metrics = shown_metrics(report["methods"])
    best = best_figures(report["methods"])
    head = (
        f"{report['n']} questions, recall in percent; R@5 - dense with a 95 % paired bootstrap interval; how "
        "many questions found no phrase to start from and fell back to the cosines of passages."
    )
    lines = [
        head,
        "",
        f"| method | {' | '.join(metrics)} | R@5 - dense [95 %] | fell back |",
        "|---|" + "--:|" * (len(metrics) + 2),
    ]
    for name, row in report["methods"].items():
        cells = [_bold(f"{row[m]:.1f}", round(row[m], 1) == best[m]) for m in metrics.values()]
        mean, low, high = row["delta_recall@5"]
        delta = "" if name == BASELINE else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
        fell_back = row.get("fallbacks")
        lines.append(
            f"| {name} | {' | '.join([*cells, delta, '' if fell_back is None else str(fell_back)])} |"
        )
    said = [text for name, row in report["methods"].items() for text in remarks(name, row)]
    lines += [f"\n{text}." for text in [*said, gold_remark(report), reader_remark(report)] if text]
    if figure:
        lines += ["", f"![recall@k]({figure})"]
    return "\n".join(lines) + "\n"


def curves_svg(report: Mapping[str, Any]) -> str:
    """Return the recall@k curves of an evaluation as SVG."""
    rows = report["methods"]
    n = max(len(row["curve"]) for row in rows.values())

    def x(k: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * (k - 1) / max(n - 1, 1), 1)

    def y(percent: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * percent / 100, 1)

    curves = [
        {
            "name": name,
            "points": " ".join(f"{x(k)},{y(value)}" for k, value in enumerate(row["curve"], 1)),
            "colour": COLOURS[number % len(COLOURS)],
            "end": y(row["curve"][-1]),
        }
        for number, (name, row) in enumerate(rows.items())
    ]
    for curve, place in zip(curves, _spread([curve["end"] for curve in curves]), strict=True):
        curve["label_y"] = place
    ticks = [{"k": k, "x": x(k)} for k in (1, 2, 5, 10, 15, 20) if k <= n]
    grid = [{"percent": percent, "y": y(percent)} for percent in range(0, 101, 20)]
    template = Path(__file__).with_name("curves.svg.j2").read_text(encoding="utf-8")
    drawn: str = (
        jinja2.Environment(autoescape=True)
        .from_string(template)
        .render(
            curves=curves,
            ticks=ticks,
            grid=grid,
            left=LEFT,
            right=RIGHT,
            bottom=BOTTOM,
            width=WIDTH,
            height=HEIGHT,
        )
    )
    return drawn


def _bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def _spread(places: Sequence[float]) -> list[float]:
    """Move labels down until none overlaps another."""
    moved = list(places)
    last = float("-inf")
    for number in sorted(range(len(places)), key=lambda i: places[i]):
        last = moved[number] = max(places[number], last + LABEL_GAP)
    return moved
