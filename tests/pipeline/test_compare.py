"""Two reports compared: the differences by hand, the test against its definition, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline.compare import compare
from hippoindex.pipeline.evaluate import permutation_test


def write(path: Path, ids: list[str], **methods: list[float]) -> Path:
    content = {"questions": {"ids": ids, "methods": {name: {"recall@5": v} for name, v in methods.items()}}}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_questions_are_matched_by_id(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", ["x", "y", "z"], ours=[0, 50, 100], dense=[0, 0, 0])
    b = write(tmp_path / "b.json", ["z", "x", "y"], ours=[100, 100, 0], other=[1, 1, 1])
    result = compare(a, b)
    (row,) = result["rows"]
    assert result["n"] == 3
    assert (row["method"], row["metric"], row["first"], row["second"]) == ("ours", "recall@5", 50.0, 66.67)
    assert row["difference"][0] == 16.67
    assert (row["better"], row["worse"]) == (1, 1)
    (row,) = compare(a, a, "dense:ours")["rows"]
    assert (row["first"], row["second"], row["other"]) == (0.0, 50.0, "ours")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no results per question"),
        ("{}", "evaluate --output"),
        ('{"questions": {"methods": {"ours": {"recall@5": [1]}}}}', "no results per question"),
        ('{"questions": {"ids": ["x"], "methods": {"ours": [1]}}}', "damaged"),
        ('{"questions": {"ids": ["x"], "methods": {"ours": {"recall@5": [1, 2]}}}}', "damaged"),
        ('{"questions": {"ids": ["x"], "methods": {"ours": {"recall@5": ["1"]}}}}', "damaged"),
        ('{"questions": {"ids": ["x"], "methods": {"ours": {"recall@5": [NaN]}}}}', "damaged"),
        ('{"questions": {"ids": ["x", "x"], "methods": {"ours": {"recall@5": [1, 2]}}}}', "damaged"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str, message: str) -> None:
    good = write(tmp_path / "good.json", ["x"], ours=[1])
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(InputError, match=message):
        compare(good, bad)


def test_other_questions_and_methods_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", ["x", "y"], ours=[1, 2])
    with pytest.raises(InputError, match="lacks 1 questions of the other report: 'y'"):
        compare(a, write(tmp_path / "b.json", ["x"], ours=[1]))
    with pytest.raises(UsageError, match="share no method"):
        compare(a, write(tmp_path / "c.json", ["x", "y"], theirs=[1, 2]))
    with pytest.raises(UsageError, match="no method 'magic'; it has ours"):
        compare(a, a, "magic")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_few_differences_are_tested_with_every_pattern_of_signs(differences: list[int]) -> None:
    values: Any = np.array(differences, dtype=float)
    patterns = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = np.mean([abs(total) >= abs(sum(differences)) for total in patterns])
    assert permutation_test(values, np.zeros(len(values))) == pytest.approx(expected)


def test_many_differences_are_tested_with_random_patterns() -> None:
    rng = np.random.default_rng(3)
    noise, zero = rng.normal(size=200), np.zeros(200)
    assert permutation_test(noise - noise.mean(), zero) > 0.9
    assert permutation_test(noise + 1, zero) < 0.001
    assert permutation_test(noise, zero) == permutation_test(zero, noise)
