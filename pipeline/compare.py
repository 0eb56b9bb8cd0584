"""Two evaluations question by question: whether one run is better than the other, or it is chance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline.evaluate import paired_bootstrap, permutation_test

MAX_LISTED = 5


def compare(first: str | Path, second: str | Path, method: str | None = None) -> dict[str, Any]:
    """Compare two reports of ``hippoindex evaluate`` on the same questions.

    Parameters
    ----------
    first, second : str or Path
        Files that ``evaluate --output`` has written. They may be the same, to compare two methods.
    method : str, optional
        ``name``, or ``name:other`` for the first report's ``name`` with the second's ``other``; by default
        every method that both have. Metrics are those that both have.

    Returns
    -------
    dict
        ``{"n", "first", "second", "rows": [{"method", "other", "metric", "first", "second", "difference":
        [mean, low, high], "p", "better", "worse"}]}``; figures in percent, the difference is second - first
        with a 95 % paired bootstrap interval, ``p`` is of a paired permutation test, ``better`` and ``worse``
        count questions.

    Raises
    ------
    InputError
        If a file is no such report, or they are not on the same questions.
    UsageError
        If a report lacks the method.
    """
    a, b = _read(Path(first)), _read(Path(second))
    order = _common_order(a, b, Path(first), Path(second))
    rows = []
    for name, other in _pairs(a, b, method):
        others = b["methods"][other]
        for metric, values in a["methods"][name].items():
            if metric not in others:
                continue
            left, right = _known(values, [others[metric][number] for number in order])
            if not len(left):
                continue
            difference = right - left
            rows.append(
                {
                    "method": name,
                    "other": other,
                    "metric": metric,
                    "first": round(float(left.mean()), 2),
                    "second": round(float(right.mean()), 2),
                    "difference": paired_bootstrap(right, left),
                    "p": round(permutation_test(right, left), 4),
                    "better": int((difference > 0).sum()),
                    "worse": int((difference < 0).sum()),
                }
            )
    return {"n": len(a["ids"]), "first": str(first), "second": str(second), "rows": rows}


def _known(values: Sequence[float | None], others: Sequence[float | None]) -> tuple[NDArray, NDArray]:
    """Return the figures of questions that have one in both; without a right answer there is none."""
    pairs = zip(values, others, strict=True)
    known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    return known[:, 0], known[:, 1]


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    questions = report.get("questions") if isinstance(report, dict) else None
    if not isinstance(questions, dict) or not _are_results(questions.get("ids"), questions.get("methods")):
        raise InputError(
            f"{path} holds no results per question, or some that are damaged; write it with "
            "`hippoindex evaluate --output`"
        )
    return questions


def _are_results(ids: object, methods: object) -> bool:
    """Whether there is a figure, or none known, of every metric of every method for each of distinct ids."""
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        return False
    if len(set(ids)) < len(ids) or not isinstance(methods, dict):
        return False
    metrics = list(methods.values())
    if not all(isinstance(of_method, dict) for of_method in metrics):
        return False
    columns = [values for of_method in metrics for values in of_method.values()]
    return all(
        isinstance(values, list) and len(values) == len(ids) and all(map(_is_figure, values))
        for values in columns
    )


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _common_order(a: Mapping[str, Any], b: Mapping[str, Any], first: Path, second: Path) -> list[int]:
    """Return where each question of the first report stands in the second."""
    place = {name: number for number, name in enumerate(b["ids"])}
    for one, other, path in ((a["ids"], place, second), (b["ids"], set(a["ids"]), first)):
        absent = [name for name in one if name not in other]
        if absent:
            listed = ", ".join(map(repr, absent[:MAX_LISTED]))
            raise InputError(
                f"{path} lacks {len(absent)} questions of the other report: {listed}; runs are compared on "
                "the same questions"
            )
    return [place[name] for name in a["ids"]]


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any], method: str | None) -> list[tuple[str, str]]:
    if method is None:
        found = [(name, name) for name in a["methods"] if name in b["methods"]]
        if not found:
            raise UsageError(
                f"The reports share no method: {', '.join(a['methods'])} and {', '.join(b['methods'])}; "
                "name two with --method first:second"
            )
        return found
    name, _, other = method.partition(":")
    other = other or name
    for report, wanted in ((a, name), (b, other)):
        if wanted not in report["methods"]:
            raise UsageError(f"A report has no method {wanted!r}; it has {', '.join(report['methods'])}")
    return [(name, other)]
