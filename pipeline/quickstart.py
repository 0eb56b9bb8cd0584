"""The sample corpus, from nothing to explained answers: what ``make quickstart`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from hippoindex.pipeline.answer import Answers, answer_queries, open_retriever
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.display import answers_view, build_summary, evaluation_table
from hippoindex.pipeline.evaluate import evaluate
from hippoindex.pipeline.models import fetch_models
from hippoindex.pipeline.retrieve.engine import METHODS

TOP_K = 5


def run_quickstart(sample: Path, output: Path, executor: str, console: Console) -> None:
    """Index the sample corpus, answer its questions, and show what the graph finds that dense misses.

    Parameters
    ----------
    sample : Path
        Folder with ``passages.jsonl`` and ``questions.jsonl``.
    output : Path
        Folder of the index; an index that is there is replaced.
    executor : str
        "auto", "local" or "ray".
    console : rich.console.Console
    """
    fetch_models()
    corpus, questions = sample / "passages.jsonl", sample / "questions.jsonl"
    config = load_config(corpus__path=[str(corpus)], output=str(output), cluster__executor=executor)
    console.print(build_summary(build_index(config, overwrite=True)))
    found = answer_queries(output, questions, method="hippoindex", top_k=TOP_K, explain=True)
    console.print(answers_view(found))
    console.print(evaluation_table(evaluate(open_retriever(output), found.queries, list(METHODS))))
    dense = answer_queries(output, questions, method="dense", top_k=TOP_K)
    console.print(_comparison(found, dense))
    console.print(
        f"The index is the folder {output}. Open {output}/report.html, or look inside:\n"
        f"  hippoindex inspect {output} --passage {found.queries[0].gold[0]}",
        highlight=False,
    )


def _comparison(found: Answers, dense: Answers) -> Panel:
    """Show each question whose gold passages are all found by the graph but not by dense, and the path."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for number, query in enumerate(found.queries):
        missed = [gold for gold in query.gold if gold not in _passage_ids(dense, number)]
        ranked = _passage_ids(found, number)
        if not missed or not all(gold in ranked for gold in query.gold):
            continue
        table.add_row(f"[bold]{escape(query.question)}[/]")
        for gold in missed:
            path = found.explanations[number][ranked.index(gold)] if found.explanations else None
            table.add_row(f"dense misses [red]{gold}[/], hippoindex has it at rank {ranked.index(gold) + 1}:")
            table.add_row(f"[dim]{escape(str(path))}[/]")
    title = f"In the top {TOP_K} by the graph, but not by dense"
    return Panel(table, title=title, title_align="left")


def _passage_ids(answers: Answers, number: int) -> Sequence[str]:
    rows = answers.ranking.rows[number].tolist()
    ids: list[str] = answers.index.passages["passage_id"].take(rows).to_pylist()
    return ids
