"""The report of an evaluation on paper, and gold passages that are not in the index."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from hippoindex.errors import UsageError
from hippoindex.pipeline.display import comparison_tables, evaluation_table
from hippoindex.pipeline.evaluation_report import METRICS, curves_svg, markdown, write_report

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def report(**recalls: float) -> dict[str, Any]:
    return {
        "n": 7,
        "methods": {
            name: dict.fromkeys(METRICS.values(), value)
            | {
                "delta_recall@5": [1.0, -0.5, 2.5],
                "curve": [value / 2, value],
                "fallbacks": None if name == "dense" else 3,
                "notes": "recognition memory off" if name == "hipporag2" else "",
            }
            for name, value in recalls.items()
        },
    }


def test_the_best_figures_are_bold_also_where_they_are_shown_equal() -> None:
    text = markdown(report(dense=40.0, hipporag2=61.23, hippoindex=61.21))
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "**" not in lines["dense"]
    assert lines["hipporag2"].count("**61.2**") == lines["hippoindex"].count("**61.2**") == len(METRICS)
    assert "+1.0 [-0.5, +2.5]" in lines["hippoindex"]
    assert "+1.0" not in lines["dense"]
    assert lines["hippoindex"].endswith("| 3 |")
    assert "hipporag2: recognition memory off." in text


def test_the_curves_are_drawn_to_scale() -> None:
    root = ET.fromstring(curves_svg(report(**{"a<b": 100.0, "dense": 0.0})))  # noqa: S314 - our own text
    lines = [line.attrib["points"].split() for line in root.findall("svg:polyline", NAMES)]
    heights = [[float(point.split(",")[1]) for point in points] for points in lines]
    assert heights == [[(24.0 + 280.0) / 2, 24.0], [280.0, 280.0]]
    assert [points[0].split(",")[0] for points in lines] == ["40.0", "40.0"]
    labels = [
        float(text.attrib["y"]) for text in root.findall("svg:text", NAMES) if text.text in ("a<b", "dense")
    ]
    assert abs(labels[0] - labels[1]) >= 13


def test_three_files_are_written(tmp_path: Path) -> None:
    files = write_report(report(dense=10.0), tmp_path / "report.json")
    assert [file.name for file in files] == ["report.json", "report.md", "report.svg"]
    assert "(report.svg)" in files[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report.md", "report.svg"])
def test_a_json_file_that_its_own_table_would_replace_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"call it report\.json"):
        write_report(report(dense=10.0), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_tables_show_every_figure_on_80_columns() -> None:
    made = report(**{"dense": 100.0, "hippoindex+ircot": 100.0})
    for row in made["methods"].values():
        row |= {"exact_match": 12.3, "f1": 45.6, "delta_recall@5": [-12.5, -25.5, -10.5]}
    shown = printed(evaluation_table(made))
    assert shown.count("12.3") == shown.count("45.6") == shown.count("-12.5 [-25.5, -10.5]") == 2
    assert "no phrase to start from" in shown
    row = {"method": "hipporag2+ircot", "other": "hippoindex+ircot", "metric": "all_recall@5", "p": 0.0123}
    row |= {
        "first": 100.0,
        "second": 87.5,
        "difference": [-12.5, -25.5, -10.5],
        "better": 123,
        "worse": 4567,
    }
    compared = printed(comparison_tables({"n": 9999, "first": "a.json", "second": "b.json", "rows": [row]}))
    for figure in ("100.0", "87.5", "-12.5 [-25.5, -10.5]", "0.0123", "123", "4567"):
        assert figure in compared
    assert "hippoindex+ircot against hipporag2+ircot" in compared


def printed(shown: RenderableType) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()
