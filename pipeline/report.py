"""``report.html``: a page about one run, to be opened by a person. No script, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from hippoindex.pipeline.artifact import Manifest
from hippoindex.pipeline.synonyms import recall_text


def write_report(file: Path, manifest: Manifest, stats: dict[str, Any]) -> None:
    """Write the report of a run.

    Parameters
    ----------
    file : Path
    manifest : Manifest
    stats : dict
        The content of ``stats.json``.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        manifest=manifest,
        counts=manifest.counts,
        stats=stats,
        synonyms=manifest.stages["synonyms"],
        recall=recall_text(manifest.stages["synonyms"]),
        longest_s=max(stage["seconds_s"] for stage in stats["stages"]),
        number="{:,}".format,
    )
    file.write_text(page, encoding="utf-8")
