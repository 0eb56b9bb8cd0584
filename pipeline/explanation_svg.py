"""The paths to the passages of one question, drawn: seeds on the left, passages on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from hippoindex.pipeline.retrieve.explain import Explanation, GraphPath

BOX, GAP, ROW, TOP = 190, 60, 30, 40
CHARACTER = 7
"""Width of a character, about."""
MAX_TEXT = 30
MAX_PASSAGES = 5
FILLS = {"phrase": "#f0f4f8", "passage": "#d8ecf3"}
COLOURS = {"fact": "#1f5f7f", "synonym": "#b44d12", "mention": "#7b8794"}


def explanation_svg(question: str, explanations: Sequence[Explanation]) -> str:
    """Return the graph of the paths to the first five passages, with what their scores are made of.

    Parameters
    ----------
    question : str
    explanations : sequence of Explanation
        Of the passages, best first.

    Returns
    -------
    str
        Titles of nodes and edges say what seeded a phrase and what an edge stands for.
    """
    shown = explanations[:MAX_PASSAGES]
    paths = [path for found in shown for path in found.paths]
    last = max((len(path.steps) for path in paths), default=2) - 1
    columns: list[dict[str, str]] = [{} for _ in range(last + 1)]
    for found in shown:
        columns[last][found.passage_id] = "passage"
    for path in paths:
        for column, step in enumerate(path.steps[:-1]):
            columns[column].setdefault(step.node, step.kind)
    places = {
        (column, name): (10 + column * (BOX + GAP), TOP + row * ROW)
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    seeds = {path.steps[0].node: path.steps[0].by for path in paths}
    nodes = [
        {
            "x": x,
            "y": y,
            "text": name if len(name) <= MAX_TEXT else name[: MAX_TEXT - 1] + "…",
            "title": f"{name} ({seeds[name]})" if column == 0 and name in seeds else name,
            "fill": FILLS[columns[column][name]],
        }
        for (column, name), (x, y) in places.items()
    ]
    edges = [edge for path in paths for edge in _edges(path, places, last)]
    right = 10 + last * (BOX + GAP) + BOX + 8
    scores = [
        {
            "x": right,
            "y": places[last, found.passage_id][1] + 10,
            "text": _sum(found),
            "pair": "" if found.pair is None else str(found.pair),
        }
        for found in shown
    ]
    texts = [str(line[key]) for line in scores for key in ("text", "pair")]
    width = max([right + CHARACTER * max(map(len, texts), default=0), CHARACTER * len(question)]) + 20
    template = Path(__file__).with_name("paths.svg.j2").read_text(encoding="utf-8")
    drawn: str = (
        jinja2.Environment(autoescape=True)
        .from_string(template)
        .render(
            question=question,
            nodes=nodes,
            edges=edges,
            scores=scores,
            box=BOX,
            width=width,
            height=TOP + ROW * max(len(names) for names in columns) + 10,
        )
    )
    return drawn


def _edges(
    path: GraphPath, places: dict[tuple[int, str], tuple[int, int]], last: int
) -> list[dict[str, Any]]:
    """Return the lines of a path; its last step goes to the column of passages."""
    ends = [*range(len(path.steps) - 1), last]
    lines = []
    for number in range(1, len(path.steps)):
        step = path.steps[number]
        x1, y1 = places[ends[number - 1], path.steps[number - 1].node]
        x2, y2 = places[ends[number], step.node]
        lines.append(
            {
                "x1": x1 + BOX,
                "y1": y1 + 10,
                "x2": x2,
                "y2": y2 + 10,
                "by": step.by,
                "colour": COLOURS[step.by.split(":")[0]],
                "stroke": round(1 + 4 * path.probability**0.25, 1),
            }
        )
    return lines


def _sum(found: Explanation) -> str:
    terms = " ".join(f"{value:+.2f} {name}" for name, value in found.terms.items())
    return f"{found.score:.3f} = {terms}"
