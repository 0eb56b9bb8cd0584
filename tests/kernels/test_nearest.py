"""Nearest rows: the same whatever they are searched with, and refusals. test_registry.py has the results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.nearest import NearestRows, codes, reference, spec


def unit_rows(rng: np.random.Generator, n: int, d: int = 32) -> np.ndarray:
    rows = rng.standard_normal((n, d))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), part=st.integers(1, 40))
def test_a_result_depends_on_nothing_but_query_and_rows(seed: int, part: int) -> None:
    rng = np.random.default_rng(seed)
    vectors, queries = unit_rows(rng, 3000).astype(np.float16), unit_rows(rng, 600)
    whole = NearestRows(vectors).find(queries, 7)
    ways = [
        NearestRows(vectors, threads=3).find(queries, 7),
        NearestRows(vectors, kept_bytes=0).find(queries, 7),
    ]
    for other in ways:
        for got, expected in zip(other, whole, strict=True):
            np.testing.assert_array_equal(got, expected)
    few = NearestRows(vectors).find(queries[part : part + 5], 7)  # too few to round the rows for
    for got, expected in zip(few, whole, strict=True):
        np.testing.assert_array_equal(got, expected[part : part + 5])


def test_rounding_to_bytes_leaves_few_rows_to_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit_rows(rng, 20_000, 384), unit_rows(rng, 64, 384)
    checked = []

    def counted(n_queries: int, asked: np.ndarray, *rest: object) -> object:
        checked.append(len(asked))
        return chosen(n_queries, asked, *rest)

    chosen = codes._chosen
    monkeypatch.setattr(codes, "_chosen", counted)
    found = NearestRows(vectors).find(queries, 5)
    spec.check(found, reference(vectors, queries, 5), {"vectors": vectors, "queries": queries})
    assert sum(checked) < 0.05 * len(queries) * len(vectors)


def test_rows_may_be_a_memory_map(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors, queries = unit_rows(rng, 5000).astype(np.float16), unit_rows(rng, 70)
    np.save(tmp_path / "v.npy", vectors)
    mapped = NearestRows(np.load(tmp_path / "v.npy", mmap_mode="r")).find(queries, 3)
    np.testing.assert_array_equal(mapped.rows, NearestRows(vectors).find(queries, 3).rows)


def test_what_cannot_be_searched_is_refused() -> None:
    rows = np.eye(4, dtype=np.float32)
    for bad in (rows.astype(np.float64), rows[0], rows.astype(int), rows[:, :0]):
        with pytest.raises(KernelError, match=r"expected float16 or float32 \(N, d\)"):
            NearestRows(bad)
    search = NearestRows(rows)
    with pytest.raises(KernelError, match=r"queries \(2, 3\) do not fit vectors \(4, 4\)"):
        search.find(np.zeros((2, 3), np.float32), 1)
    with pytest.raises(KernelError, match="k must be at least 1; got 0"):
        search.find(rows, 0)
    queries = rows.copy()
    queries[2, 1] = np.nan
    with pytest.raises(KernelError, match="query 2 holds a non-finite value"):
        search.find(queries, 1)


@pytest.mark.parametrize("n_queries", [1, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(n_queries: int, value: float) -> None:
    rows = np.ones((3000, 4), np.float32)
    rows[2500, 3] = value
    with pytest.raises(KernelError, match="vector 2500 holds a non-finite value"):
        NearestRows(rows).find(np.ones((n_queries, 4), np.float32), 1)


def test_without_rows_or_queries_nothing_is_found() -> None:
    empty = NearestRows(np.empty((0, 4), np.float32)).find(np.ones((2, 4), np.float32), 3)
    assert empty.rows.shape == empty.products.shape == (2, 0)
    assert np.isinf(empty.least).all()
    assert NearestRows(np.eye(4, dtype=np.float32)).find(np.empty((0, 4), np.float32), 3).rows.shape == (0, 3)
