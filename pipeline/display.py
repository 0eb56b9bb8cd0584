"""What people are shown: tables of runs, evaluations, rankings, and of what an index holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import Index, Manifest
from hippoindex.pipeline.evaluation_report import (
    ANSWER_METRICS,
    METRICS,
    best_figures,
    gold_remark,
    reader_remark,
    remarks,
    shown_metrics,
)
from hippoindex.pipeline.normalise import normaliser
from hippoindex.pipeline.openie_quality import LOSSES
from hippoindex.pipeline.retrieve.base import Ranking
from hippoindex.pipeline.retrieve.seeds import fact_text
from hippoindex.pipeline.synonyms import recall_text

if TYPE_CHECKING:
    from hippoindex.pipeline.answer import Answers
    from hippoindex.pipeline.build import BuildResult
    from hippoindex.pipeline.collect import Garbage

MAX_LISTED = 20


def garbage_table(found: Sequence[Garbage], *, removed: bool) -> RenderableType:
    """Return the table of ``hippoindex gc``: the largest pieces of every kind, and their sum."""
    total = sum(garbage.size_bytes for garbage in found)
    what = "removed" if removed else "found; --delete removes them"
    table = Table(title=f"{len(found)} pieces, {total / 2**20:,.1f} MiB, {what}", title_justify="left")
    for heading in ("kind", "name", "MiB", "hours old"):
        table.add_column(heading, justify="left" if heading in {"kind", "name"} else "right", overflow="fold")
    for garbage in sorted(found, key=lambda garbage: (-garbage.size_bytes, garbage.name))[:MAX_LISTED]:
        size, age = f"{garbage.size_bytes / 2**20:,.1f}", f"{garbage.age_s / 3600:,.1f}"
        table.add_row(garbage.kind, garbage.name, size, age)
    if len(found) > MAX_LISTED:
        table.add_row("", f"and {len(found) - MAX_LISTED} more (--json lists all)", "", "")
    return table


def build_summary(result: BuildResult) -> RenderableType:
    """Return the tables that end a run of ``hippoindex index``."""
    counts, stats = result.manifest.counts, result.stats
    totals = Table(title=f"Index {result.path}", title_justify="left", show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for name in ("passages", "phrases", "facts", "synonym_edges", "graph_edges"):
        totals.add_row(name.replace("_", " "), f"{getattr(counts, name):,}")
    quarantined = counts.quarantined_records + counts.quarantined_passages
    totals.add_row("synonym join", synonym_join(result.manifest))
    totals.add_row("duplicates dropped", f"{counts.duplicates:,}")
    totals.add_row("passages quarantined", f"{quarantined:,}")
    totals.add_row("triples rejected", f"{counts.triples_rejected:,}")
    totals.add_row("passages without triples", f"{counts.passages_without_triples:,}")
    totals.add_row("passages without extraction", f"{counts.passages_without_extraction:,}")
    totals.add_row("peak memory", f"{stats['peak_memory_bytes'] / 2**30:.2f} GiB")
    totals.add_row("passages/s, whole run", f"{stats['passages_per_s']:,.1f}")
    stages = Table(title="Stages", title_justify="left")
    for heading in ("stage", "items", "seconds", "items/s"):
        stages.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in stats["stages"]:
        stages.add_row(
            stage["name"],
            f"{stage['items']:,} {stage['unit']}",
            f"{stage['seconds_s']:.2f}",
            f"{stage['items_per_s']:,.1f}",
        )
    stages.add_row("total", "", f"{stats['seconds_s']:.2f}", "", style="bold")
    return Group(totals, stages)


def evaluation_table(report: Mapping[str, Any]) -> RenderableType:
    """Return the tables of an evaluation: a row per method, figures in percent, the best ones in bold.

    Recalls and answers have a table each, as both together are too wide for 80 columns.
    """
    rows = report["methods"]
    best = best_figures(rows)
    title = f"{report['n']} questions, recall in percent"
    parts: list[RenderableType] = [_figures_table(title, rows, METRICS, best, with_interval=True)]
    if shown_metrics(rows).keys() > METRICS.keys():
        parts.append(_figures_table("Answers, in percent", rows, ANSWER_METRICS, best, with_interval=False))
    said = [text for name, row in rows.items() for text in remarks(name, row)]
    said += [text for text in (gold_remark(report), reader_remark(report)) if text]
    return Group(*parts, *map(escape, said))


def _figures_table(
    title: str,
    rows: Mapping[str, Mapping[str, Any]],
    metrics: Mapping[str, str],
    best: Mapping[str, float],
    *,
    with_interval: bool,
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", overflow="fold")
    for heading in (*metrics, *([r"R@5 - dense \[95 %]"] if with_interval else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        shown = {metric: f"{row[metric]:.1f}" for metric in metrics.values()}
        cells = [f"[bold]{text}[/]" if float(text) == best[m] else text for m, text in shown.items()]
        table.add_row(name, *cells, *([_interval(row["delta_recall@5"])] if with_interval else []))
    return table


def _interval(difference: Sequence[float]) -> str:
    mean, low, high = difference
    return escape(f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]")


def comparison_tables(result: Mapping[str, Any]) -> RenderableType:
    """Return the tables of two evaluations compared question by question, one for each pair of methods."""
    title = f"{result['n']} questions: {escape(result['second'])} against {escape(result['first'])}"
    headings = {metric: heading for heading, metric in (METRICS | ANSWER_METRICS).items()}
    tables: dict[str, Table] = {}
    for row in result["rows"]:
        name = row["method"] if row["method"] == row["other"] else f"{row['other']} against {row['method']}"
        if name not in tables:
            table = tables[name] = Table(title=escape(name), title_justify="left")
            table.add_column("metric")
            for heading in ("first", "second", r"second - first \[95 %]", "p", "better", "worse"):
                table.add_column(heading, justify="right", no_wrap=True)
        tables[name].add_row(
            headings.get(row["metric"], row["metric"]),
            f"{row['first']:.1f}",
            f"{row['second']:.1f}",
            _interval(row["difference"]),
            f"{row['p']:.4f}",
            str(row["better"]),
            str(row["worse"]),
        )
    return Group(title, *tables.values())


def openie_tables(report: Mapping[str, Any]) -> RenderableType:
    """Return the tables of ``hippoindex evaluate-openie``, shares in percent."""
    engine = escape(", ".join(f"{name}={value}" for name, value in report["extract"].items()))
    parts: list[RenderableType] = []
    if "carb" in report:
        carb = report["carb"]
        title = f"CaRB, {carb['sentences']:,} sentences, {carb['gold_tuples']:,} gold tuples ({engine})"
        scores = Table(title=title, title_justify="left")
        for heading in ("extractions", "precision", "recall", "F1", "AUC"):
            scores.add_column(heading, justify="right")
        figures = (carb[name] for name in ("precision", "recall", "f1", "auc"))
        scores.add_row(f"{carb['extractions']:,}", *(f"{100 * value:.1f}" for value in figures))
        losses = Table(title="What is missing from 100", title_justify="left", show_header=False)
        losses.add_column()
        losses.add_column(justify="right")
        for name, value in carb["losses"].items():
            losses.add_row(LOSSES[name], f"{100 * value:.1f}")
        parts += [scores, losses]
        if carb["curve_points"] == 1:
            parts.append(
                "[dim]All extractions have the same confidence: AUC is recall * (1 + precision) / 2.[/]"
            )
        if carb["passages_quarantined"]:
            parts.append(f"{carb['passages_quarantined']:,} sentences failed and count as not found.")
    if "agreement" in report:
        shares = report["agreement"]
        title = f"Of the reference on {shares['passages_compared']:,} passages, found ({engine})"
        table = Table(title=title, title_justify="left")
        for heading in ("", "reference", "found", "percent"):
            table.add_column(heading, justify="right" if heading else "left")
        for name in ("arguments", "entities", "pairs"):
            share = shares[name]
            percent = "" if share["share"] is None else f"{100 * share['share']:.1f}"
            table.add_row(name, f"{share['total']:,}", f"{share['found']:,}", percent)
        parts.append(table)
    return Group(*parts)


def answers_view(answers: Answers) -> RenderableType:
    """Return one panel per question: its best passages, gold ones marked, and the paths if asked for."""
    titles, ids = answers.index.passages["title"], answers.index.passages["passage_id"]
    panels = []
    for number, query in enumerate(answers.queries):
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column()
        table.add_column()
        table.add_column()
        table.add_column(ratio=1)
        rows, scores = answers.ranking.rows[number].tolist(), answers.ranking.scores[number].tolist()
        for rank, (row, score) in enumerate(zip(rows, scores, strict=True)):
            is_gold = ids[row].as_py() in query.gold
            mark = "[green]gold[/]" if is_gold else ""
            name = f"{escape(titles[row].as_py())} [dim]{escape(ids[row].as_py())}[/]"
            table.add_row(f"{rank + 1}", f"{score:.4f}", mark, name)
            if answers.explanations and (is_gold or not query.gold):
                table.add_row("", "", "", f"[dim]{escape(str(answers.explanations[number][rank]))}[/]")
        panels.append(Panel(Group(f"[bold]{escape(query.question)}[/]", table)))
    said = answers.remarks()
    return Group(*panels, f"{answers.method}{escape(how_solved(answers.ranking))}", *map(escape, said))


def how_solved(ranking: Ranking) -> str:
    """Return how PPR was solved and what is proven of the result; nothing where there was no PPR."""
    if not ranking.solver:
        return ""
    share = ranking.certified_share
    if share is None:
        return f", PPR by {ranking.solver}"
    k = ranking.rows.shape[1]
    return f", PPR by {ranking.solver}: the top {k} proven for {share:.0%} of the questions"


def index_overview(index: Index) -> RenderableType:
    """Return what is in an index: counts, configuration of the stages, size."""
    table = Table(title=f"Index {index.url}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in index.manifest.counts.model_dump().items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    total_bytes = sum(entry.bytes for entry in index.manifest.files.values())
    table.add_row("files", f"{len(index.manifest.files)} ({total_bytes / 2**20:,.1f} MiB)")
    table.add_row("synonym join", synonym_join(index.manifest))
    table.add_row("made by", index.manifest.generator)
    degrees = np.diff(index.graph.indptr)
    table.add_row("edges per node: mean, largest", f"{degrees.mean():.1f}, {degrees.max():,}")
    reasons = pc.value_counts(index.quarantine["reason"])
    for reason in reasons[:MAX_LISTED]:
        table.add_row(f"quarantined: {escape(str(reason['values']))}", f"{reason['counts'].as_py():,}")
    return table


def synonym_join(manifest: Manifest) -> str:
    """Return how the synonym edges were found, and the measured recall."""
    report = manifest.stages["synonyms"]
    return f"{report['method']}, found {escape(recall_text(report))}"


def phrase_record(index: Index, text: str) -> dict[str, Any]:
    """Return what an index holds about a phrase: its passages, facts and synonyms.

    Raises
    ------
    UsageError
        If the phrase is not in the index; the message names phrases that contain it.
    """
    phrase = normaliser(index.manifest.config["graph"]["normalisation"])(text)
    phrases = index.phrases["phrase"]
    row = pc.index(phrases, phrase).as_py()
    if row < 0:
        near = phrases.filter(pc.match_substring(phrases, phrase))[:5].to_pylist() if phrase else []
        raise UsageError(f"There is no phrase {phrase!r} in {index.url}; containing it: {near or 'none'}")
    number = index.phrases["phrase_id"][row].as_py()
    passages = index.occurrence[row].indices
    facts = np.flatnonzero((index.fact_ends == row).any(axis=1))
    return {
        "phrase": phrase,
        "phrase_id": number,
        "passages": index.passages["passage_id"].take(passages).to_pylist(),
        "facts": [fact_text(index, int(fact)) for fact in facts],
        "synonyms": _synonyms_of(index, number),
    }


def passage_record(index: Index, passage_id: str) -> dict[str, Any]:
    """Return what an index holds about a passage: its text, phrases and facts.

    Raises
    ------
    UsageError
        If the passage is not in the index; the message says whether it was quarantined.
    """
    row = pc.index(index.passages["passage_id"], passage_id).as_py()
    if row < 0:
        rows = index.quarantine.filter(pc.equal(index.quarantine["row_id"], passage_id)).to_pylist()
        reason = f"it was quarantined: {rows[0]['reason']}" if rows else "it was not in the corpus"
        raise UsageError(f"There is no passage {passage_id!r} in {index.url}: {reason}")
    phrases = index.occurrence[:, row].nonzero()[0]
    holds = [passage_id in holders for holders in index.facts["passage_ids"].to_pylist()]
    passage: dict[str, Any] = index.passages.slice(row, 1).to_pylist()[0]
    return passage | {
        "phrases": index.phrases["phrase"].take(phrases).to_pylist(),
        "facts": [fact_text(index, int(fact)) for fact in np.flatnonzero(holds)],
    }


def record_table(record: Mapping[str, Any]) -> RenderableType:
    """Return a record as a table; long lists are cut at ``MAX_LISTED`` lines."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in record.items():
        items = value if isinstance(value, list) else [value]
        lines = [escape(str(item)) for item in items[:MAX_LISTED]]
        if len(items) > MAX_LISTED:
            lines.append(f"... and {len(items) - MAX_LISTED:,} more")
        table.add_row(name.replace("_", " "), "\n".join(lines))
    return table


def _synonyms_of(index: Index, phrase_id: int) -> list[str]:
    table = index.synonyms
    names = dict(
        zip(index.phrases["phrase_id"].to_pylist(), index.phrases["phrase"].to_pylist(), strict=True)
    )
    wanted = pa.scalar(phrase_id, pa.uint64())
    mine = table.filter(pc.or_(pc.equal(table["phrase_id"], wanted), pc.equal(table["other_id"], wanted)))
    rows = sorted(mine.to_pylist(), key=lambda row: -row["cosine"])
    others = [row["other_id"] if row["phrase_id"] == phrase_id else row["phrase_id"] for row in rows]
    return [f"{names[other]} ({row['cosine']:.2f})" for other, row in zip(others, rows, strict=True)]
