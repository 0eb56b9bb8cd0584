from __future__ import annotations

import dataclasses
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin import (
    JoinResult,
    KeptLists,
    Pairs,
    exact,
    ivf,
    join,
    measure_recall,
    normalised,
    reference,
    stacked,
    unusable_rows,
)
from hippoindex.kernels.simjoin.best import BestPairs
from hippoindex.kernels.simjoin.spec import check, generate

seeds = st.integers(0, 2**32 - 1)
HALF_SPHERE = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]], dtype=np.float32)


def clustered(n: int, d: int = 48, seed: int = 0, spread: float = 0.08) -> NDArray[np.float32]:
    """Unit vectors around n / 12 random centres with most energy on the first axes, as embeddings have."""
    rng = np.random.default_rng(seed)
    scale = 1.0 / np.sqrt(1.0 + np.arange(d))
    centres = rng.standard_normal((max(n // 12, 1), d)) * scale
    x = centres[rng.integers(0, len(centres), n)] + spread * rng.standard_normal((n, d))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    x.flags.writeable = False  # no join may change its input
    return x


def as_set(pairs: Pairs) -> set[tuple[int, int]]:
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


def assert_same(left: Pairs, right: Pairs) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def test_pairs_of_known_vectors() -> None:
    pairs = exact(HALF_SPHERE, threshold=0.79)
    assert list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3)]
    np.testing.assert_allclose(pairs.cosine, [0.8, 0.96, 0.8], atol=1e-6)


def test_a_pair_survives_if_either_end_keeps_it() -> None:
    pairs = exact(HALF_SPHERE, threshold=0.5, max_neighbors=1)
    # 1 and 2 are each other's nearest; 0 keeps 1 and 3 keeps 2
    assert list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3)]


def test_a_node_that_does_not_search_can_still_be_found() -> None:
    only_first = np.array([True, False, False, False])
    pairs = exact(HALF_SPHERE, threshold=0.79, searches=only_first)
    assert list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == [(0, 1)]
    assert len(exact(HALF_SPHERE, threshold=0.79, searches=np.zeros(4, bool)).first) == 0


@settings(max_examples=15, deadline=None)
@given(seed=seeds, size=st.integers(1, 3000))
def test_result_does_not_depend_on_the_memory_budget(seed: int, size: int) -> None:
    inputs = generate(np.random.default_rng(seed), size)
    assert_same(exact(**inputs, memory_bytes=1), exact(**inputs))


@settings(max_examples=8, deadline=None)
@given(seed=seeds, half=st.booleans())
def test_short_sketches_lose_nothing(seed: int, half: bool) -> None:
    vectors = clustered(4500, d=96, seed=seed)
    vectors = vectors.astype(np.float16) if half else vectors
    full = vectors.astype(np.float64)
    products = full @ full.T
    wanted = np.argwhere(np.triu(products >= 0.8, 1))
    result = join(vectors, 0.8, 4500, method="exact", sample=50)
    assert result.details["rank"] < 96
    np.testing.assert_array_equal(np.stack(result.pairs[:2], axis=1), wanted)
    np.testing.assert_allclose(result.pairs.cosine, products[*wanted.T], atol=1e-6)


@pytest.mark.parametrize("method", ["exact", "ivf"])
def test_result_depends_neither_on_threads_nor_on_memory(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(6000)
    arguments = {"method": method, "max_neighbors": 3, "sample": 100}
    expected = join(vectors, **arguments)  # type: ignore[arg-type]
    assert_same(join(vectors, **arguments, memory_bytes=1).pairs, expected.pairs)  # type: ignore[arg-type]
    for count in (1, 3):
        monkeypatch.setattr("hippoindex.kernels.simjoin.threads.n_threads", lambda count=count: count)
        assert_same(join(vectors, **arguments).pairs, expected.pairs)  # type: ignore[arg-type]


def test_a_memory_map_is_joined_like_an_array(tmp_path: Path) -> None:
    vectors = clustered(5000).astype(np.float16)
    np.save(tmp_path / "vectors.npy", vectors)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    for method in (exact, ivf):
        assert_same(method(mapped), method(vectors))


def test_a_pair_exactly_at_the_threshold_counts() -> None:
    vectors = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
    assert len(exact(vectors, threshold=0.5).first) == 1
    assert len(exact(vectors, threshold=0.5000001).first) == 0
    assert len(exact(np.eye(3)[[0, 1, 0]], threshold=1.0).first) == 1


@pytest.mark.parametrize("method", ["exact", "ivf"])
def test_progress_ends_at_one(method: str) -> None:
    seen: list[float] = []
    join(clustered(5000), method=method, sample=50, on_progress=seen.append)  # type: ignore[arg-type]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("method", [reference, exact, ivf, join])
def test_bad_arguments_are_refused(method: type[object]) -> None:
    for arguments, message in [
        ((np.ones(3),), r"shape \(3,\)"),
        ((np.ones((2, 2)),), "Row 0 has norm 1.4142"),
        ((np.array([[1.0, 0.0], [np.nan, 0.0]]),), "Row 1 has norm nan"),
        ((np.array([[1.0, 0.0], [0.0, 0.0]]),), "Row 1 has norm 0.0000"),
        ((HALF_SPHERE, 0.0), "above 0 and at most 1"),
        ((HALF_SPHERE, 1.1), "above 0 and at most 1"),
        ((HALF_SPHERE, np.nan), "above 0 and at most 1"),
        ((HALF_SPHERE, 0.5, 0), "at least 1"),
        ((HALF_SPHERE, 0.5, 3, np.ones(2, bool)), r"searches has shape \(2,\)"),
    ]:
        with pytest.raises(KernelError, match=message):
            method(*arguments)  # type: ignore[call-arg]


def test_bad_options_are_refused() -> None:
    some = exact(HALF_SPHERE)
    for options, message in [
        ({"method": "annoy"}, "no backend 'annoy'"),
        ({"target_recall": 0.0}, "target_recall is above 0"),
        ({"target_recall": 1.5}, "target_recall is above 0"),
        ({"sample": 0}, "sample is at least 1"),
        ({"known": some}, "come together"),
        ({"new": np.ones(4, bool)}, "come together"),
        ({"known": some, "new": np.ones(5, bool)}, r"new has shape \(5,\)"),
        ({"known": Pairs(*np.array([[0], [4], [1]])), "new": np.ones(4, bool)}, r"pair 0 is \(0, 4\)"),
        ({"known": Pairs(*np.array([[2], [1], [1]])), "new": np.ones(4, bool)}, r"pair 0 is \(2, 1\)"),
    ]:
        with pytest.raises(KernelError, match=message):
            join(HALF_SPHERE, **options)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="dimension 2, the added ones 3"):
        stacked(HALF_SPHERE, np.eye(3))


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_vectors_make_no_pairs(n: int) -> None:
    vectors = np.eye(4, dtype=np.float32)[:n]
    for method in (reference, exact, ivf):
        assert len(method(vectors).first) == 0
    result = join(vectors)
    assert len(result.pairs.first) == 0
    assert (result.recall.pairs, result.recall.phrases) == (0, n)
    assert (result.recall.low, result.recall.high) == (0.0, 1.0)


def test_rows_without_a_direction_are_named_with_the_reason() -> None:
    vectors = np.eye(5, dtype=np.float32)
    vectors[1], vectors[3, 0], vectors[4, 2] = 0.0, np.nan, np.inf
    assert unusable_rows(vectors) == {1: "zero", 3: "not finite", 4: "not finite"}
    assert unusable_rows(np.eye(3)) == {}
    with pytest.raises(KernelError, match="Row 1 is zero"):
        normalised(vectors)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_unnormalised_rows_are_normalised_and_counted(dtype: type) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 8)).astype(dtype)
    vectors[7] /= np.linalg.norm(vectors[7].astype(np.float64))
    vectors[8] = np.finfo(dtype).max / 4  # its square overflows
    kept = vectors.copy()
    rows, changed = normalised(vectors)
    assert (changed, rows.dtype) == (49, dtype)
    np.testing.assert_array_equal(vectors, kept)
    np.testing.assert_array_equal(rows[7], vectors[7])
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1.0, atol=2e-3)
    exact(rows)
    same, changed = normalised(rows)
    assert changed == 0
    assert np.shares_memory(same, rows)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, size=st.integers(2, 120), cap=st.integers(1, 8))
def test_equal_vectors_are_joined_like_others(seed: int, size: int, cap: int) -> None:
    rng = np.random.default_rng(seed)
    few = clustered(12, d=5, seed=seed, spread=0.5)
    inputs = {
        "vectors": few[rng.integers(0, len(few), size)],
        "threshold": 0.6,
        "max_neighbors": cap,
        "searches": rng.random(size) < 0.8,
    }
    expected = reference(**inputs)
    check(exact(**inputs), expected, inputs)
    check(ivf(**inputs, target_recall=1.0), expected, inputs)


def test_a_hub_of_equal_vectors_keeps_the_lowest_rows() -> None:
    hub = np.zeros((20_000, 8), np.float16)
    hub[:, 0] = 1.0
    pairs = join(hub, max_neighbors=10, sample=20).pairs
    low = np.arange(20_000)
    wanted = {(i, j) for i in range(11) for j in low[i + 1 :] if i < 10 or j < 10}  # a row skips itself
    assert as_set(pairs) == {(int(i), int(j)) for i, j in wanted}


def test_memory_of_a_hub_of_near_duplicates_is_bounded() -> None:
    rng = np.random.default_rng(0)
    hub = np.eye(16)[0] + 0.02 * rng.standard_normal((6000, 16))
    hub = (hub / np.linalg.norm(hub, axis=1, keepdims=True)).astype(np.float32)
    largest = 0
    best = BestPairs(np.ones(6000, bool), 5, fresh_pairs=50_000)
    products = hub.astype(np.float64) @ hub.astype(np.float64).T
    for row in range(5999):
        others = np.arange(row + 1, 6000)
        cosine = products[row, row + 1 :]
        keep = (cosine >= best.floors[row]) | (cosine >= best.floors[others])
        best.add(np.full(keep.sum(), row), others[keep], cosine[keep])
        largest = max(largest, best.held)
    assert largest <= 6000 * 5 + 50_000 + 6000
    assert_same(best.pairs(), exact(hub, max_neighbors=5))


@settings(max_examples=15, deadline=None)
@given(seed=seeds, size=st.integers(1, 150), share=st.floats(0.0, 1.0))
def test_joining_new_rows_with_all_gives_the_full_join(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    new = rng.random(size) < share
    old = np.flatnonzero(~new)
    part = {**inputs, "vectors": inputs["vectors"][old], "searches": inputs["searches"][old]}
    before = reference(**part)
    known = Pairs(old[before.first], old[before.second], before.cosine)
    expected = reference(**inputs)
    check(exact(**inputs, known=known, new=new), expected, inputs)
    check(ivf(**inputs, target_recall=1.0, known=known, new=new), expected, inputs)


def renumbered(pairs: Pairs, rows: NDArray[np.int64]) -> Pairs:
    """The same pairs where row k has number ``rows[k]``; ``rows`` ascends."""
    return Pairs(rows[pairs.first], rows[pairs.second], pairs.cosine)


def append(
    before: JoinResult, vectors: NDArray[np.floating], new: NDArray[np.bool_], **options: object
) -> JoinResult:
    """Join new rows with those of which ``before`` is the join."""
    known = renumbered(before.pairs, np.flatnonzero(~new))
    lists = None if before.lists is None else before.lists.placed(new)
    return join(vectors, known=known, new=new, lists=lists, **options)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds, size=st.integers(1, 250), parts=st.integers(1, 4), method=st.sampled_from(["ivf", "exact"])
)
def test_appending_again_and_again_gives_the_full_join(seed: int, size: int, parts: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    part_of = rng.integers(0, parts + 1, size)
    options = {"threshold": inputs["threshold"], "max_neighbors": inputs["max_neighbors"], "method": method}
    options |= {"target_recall": 1.0, "sample": 5}
    present = part_of == 0
    result = join(inputs["vectors"][present], searches=inputs["searches"][present], **options)
    for part in range(1, parts + 1):
        present = part_of <= part
        new = part_of[present] == part
        result = append(
            result, inputs["vectors"][present], new, searches=inputs["searches"][present], **options
        )
    check(result.pairs, reference(**inputs), inputs)
    assert (result.lists is not None) == (method == "ivf")


@settings(max_examples=20, deadline=None)
@given(seed=seeds, size=st.integers(2, 100))
def test_known_pairs_may_come_in_any_order_and_be_repeated(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = generate(rng, size)
    new = np.arange(size) >= size // 2
    known = reference(inputs["vectors"][: size // 2], inputs["threshold"], inputs["max_neighbors"])
    order = rng.integers(0, len(known.first), len(known.first)) if len(known.first) else []
    order = rng.permutation(np.r_[np.arange(len(known.first)), order].astype(np.int64))
    mixed = Pairs(*(column[order] for column in known))
    assert_same(exact(**inputs, known=mixed, new=new), exact(**inputs, known=known, new=new))


def test_known_pairs_exactly_at_the_threshold_stay() -> None:
    vectors = np.array([[1.0, 0.0], [0.95, np.sqrt(1 - 0.95**2)], [0.0, 1.0]])
    known = reference(vectors[:2], 0.95)
    assert float(known.cosine[0]) < 0.95  # rounded to float32
    pairs = exact(vectors, 0.95, known=known, new=np.array([False, False, True]))
    assert as_set(pairs) == {(0, 1)}
    assert len(exact(vectors, 0.9500001, known=known, new=np.array([False, False, True])).first) == 0


@pytest.mark.parametrize("method", ["auto", "ivf"])
def test_appending_by_lists_keeps_the_recall(method: str) -> None:
    vectors = clustered(12_000)
    new = np.random.default_rng(1).random(12_000) < 0.1
    before = join(vectors[~new], max_neighbors=5, method="ivf", target_recall=0.95, sample=100)
    assert before.lists is not None
    options = {"max_neighbors": 5, "method": method, "target_recall": 0.95}
    result = append(before, vectors, new, **options)
    full = exact(vectors, max_neighbors=5)
    touched = new[full.first] | new[full.second]
    wanted = as_set(Pairs(*(column[touched] for column in full)))
    share = len(wanted & as_set(result.pairs)) / len(wanted)
    assert share >= 0.94
    assert result.method == "ivf"
    assert result.details["probes"] < result.details["lists"]
    assert result.details["compared"] < new.sum() * 6000
    assert result.recall.low <= share <= result.recall.high
    assert result.recall.phrases == 100
    assert append(before, vectors, new, **options, sample=150).recall.phrases == 150
    assert result.lists is not None
    assert result.lists.owner.min() >= 0
    np.testing.assert_array_equal(result.lists.owner[~new], before.lists.owner)
    assert_same(append(before, vectors, new, **options, memory_bytes=1).pairs, result.pairs)


def test_appending_without_lists_keeps_the_recall() -> None:
    vectors, new = stacked(clustered(9000)[:8000], clustered(9000)[8000:])
    known = exact(vectors[:8000], max_neighbors=5)
    result = join(vectors, max_neighbors=5, known=known, new=new, method="ivf", target_recall=0.95)
    full = exact(vectors, max_neighbors=5)
    touched = new[full.first] | new[full.second]
    wanted = as_set(Pairs(*(column[touched] for column in full)))
    assert len(wanted & as_set(result.pairs)) >= 0.93 * len(wanted)
    assert result.details["probes"] < result.details["lists"]
    assert result.lists is not None
    assert result.lists.owner.shape == (9000,)


def test_an_append_checks_new_rows_only() -> None:
    vectors = np.array(clustered(3000))
    new = np.arange(3000) >= 2900
    before = join(vectors[~new], method="ivf", sample=20)
    vectors[5] *= 2
    append(before, vectors, new)
    append(dataclasses.replace(before, lists=None), vectors, new)
    vectors[2950] *= 2
    with pytest.raises(KernelError, match=r"Row 2950 has norm 2\.0000 \(1 such rows\)"):
        append(before, vectors, new)


def test_appending_to_memory_maps_is_like_appending_to_arrays(tmp_path: Path) -> None:
    vectors = clustered(6000).astype(np.float16)
    new = np.arange(6000) % 50 == 0
    before = join(vectors[~new], method="ivf", sample=50)
    expected = append(before, vectors, new)
    np.save(tmp_path / "vectors.npy", vectors)
    kept: dict[str, object] = {}
    assert before.lists is not None
    for name, value in dataclasses.asdict(before.lists).items():
        np.save(tmp_path / name, value)
        array = np.load(tmp_path / f"{name}.npy", mmap_mode="r" if np.ndim(value) else None)
        kept[name] = array if np.ndim(value) else array.item()
    mapped = dataclasses.replace(before, lists=KeptLists(**kept))  # type: ignore[arg-type]
    result = append(mapped, np.load(tmp_path / "vectors.npy", mmap_mode="r"), new)
    assert_same(result.pairs, expected.pairs)
    assert len(result.pairs.first) > len(before.pairs.first)


def test_outgrown_lists_are_made_anew() -> None:
    vectors = clustered(9000)
    first = join(vectors[:4000], method="ivf", sample=20)
    assert first.lists is not None
    assert (first.lists.trained_rows, len(first.lists.centroids)) == (4000, 102)
    second = append(first, vectors[:8000], np.arange(8000) >= 4000, sample=20)
    assert second.lists is not None
    np.testing.assert_array_equal(second.lists.centroids, first.lists.centroids)
    third = append(second, vectors, np.arange(9000) >= 8000, sample=20)
    assert third.method == "ivf"
    assert third.lists is not None
    assert (third.lists.trained_rows, len(third.lists.centroids)) == (9000, 230)
    assert third.recall.estimate > 0.97


def test_wrong_lists_are_refused() -> None:
    vectors = clustered(3000)
    new = np.arange(3000) >= 2900
    before = join(vectors[~new], method="ivf", sample=20)
    assert before.lists is not None
    lists = before.lists.placed(new)
    off, early = lists.owner.copy(), lists.owner.copy()
    off[7], early[2901] = len(lists.centroids), 3
    holes = lists.centroids.copy()
    holes[0, 0] = np.nan
    for changed, message in [
        ({"axes": lists.axes[:40]}, r"axes of shape \(40, \d+\); expected \(48, m\)"),
        ({"axes": 2 * lists.axes}, "axes that are not orthonormal"),
        ({"axes": np.nan * lists.axes}, "axes that are not orthonormal"),
        ({"centroids": lists.centroids[:, :0]}, "centroids of shape"),
        ({"centroids": holes}, "centroids that are not finite"),
        ({"owner": before.lists.owner}, r"owners of shape \(2900,\); expected \(3000,\)"),
        ({"owner": off}, r"Row 7 is on kept list 74 \(1 such rows\); expected 0 to 73"),
        ({"owner": early}, "Row 2901 is on kept list 3 .*; expected -1, for it is new"),
        ({"owner": np.where(new, -1, -lists.owner - 1)}, "Row 0 is on kept list -"),
        (
            {"sketches": lists.sketches[1:]},
            r"sketches of shape \(2899, 49\), type float16",
        ),
        ({"sketches": lists.sketches.astype(np.float32)}, ", type float32; expected .* float16"),
        ({"probes": 0}, "0 probes of 74 lists"),
        ({"probes": 75}, "75 probes of 74 lists"),
        ({"threshold": 0.7}, "threshold 0.7, not 0.8"),
        ({"target_recall": 0.9}, "target_recall 0.9, less than 0.99"),
    ]:
        wrong = dataclasses.replace(lists, **changed)  # type: ignore[arg-type]
        with pytest.raises(KernelError, match=message):
            join(vectors, known=before.pairs, new=new, lists=wrong)
    with pytest.raises(KernelError, match="come together"):
        join(vectors, lists=lists)
    with pytest.raises(KernelError, match="kept of 2900 rows; 2899 rows are not new"):
        before.lists.placed(np.arange(3000) >= 2899)


@pytest.mark.parametrize("method", ["exact", "ivf"])
def test_appending_to_a_hub_of_equal_vectors_is_bounded(method: str) -> None:
    vectors = np.array(clustered(24_200))
    in_hub = np.random.default_rng(0).permutation(24_200) < 20_200
    vectors[in_hub] = vectors[0]
    new = np.zeros(24_200, bool)
    new[np.flatnonzero(in_hub)[::101]] = True
    options = {"max_neighbors": 10, "method": method, "target_recall": 1.0, "sample": 10}
    before = join(vectors[~new], **options)  # type: ignore[arg-type]
    started = time.perf_counter()
    result = append(before, vectors, new, **options)
    assert time.perf_counter() - started < 10.0
    assert_same(result.pairs, exact(vectors, max_neighbors=10))


@pytest.mark.slow
def test_lists_bear_a_hub_of_near_duplicates() -> None:
    rng = np.random.default_rng(0)
    hub = np.eye(16)[0] + 0.012 * rng.standard_normal((40_000, 16))
    hub = (hub / np.linalg.norm(hub, axis=1, keepdims=True)).astype(np.float32)
    tracemalloc.start()
    started = time.process_time()
    result = join(hub, max_neighbors=30, method="ivf", sample=100)
    assert time.process_time() - started < 60.0
    assert tracemalloc.get_traced_memory()[1] < 2**29
    tracemalloc.stop()
    assert result.recall.estimate > 0.98
    assert 40_000 * 15 < len(result.pairs.first) < 40_000 * 30


def test_pairs_found_by_lists_are_true_and_enough() -> None:
    vectors = clustered(20_000)
    result = join(vectors, 0.85, 20_000, method="ivf", target_recall=0.98)
    full = exact(vectors, 0.85, 20_000)
    found, wanted = as_set(result.pairs), as_set(full)
    assert found <= wanted
    true_recall = len(found) / len(wanted)
    assert true_recall >= 0.97
    assert result.recall.low <= true_recall <= result.recall.high
    assert result.details["probes"] < result.details["lists"] / 4
    keys, found_keys = (pairs.first * 20_000 + pairs.second for pairs in (full, result.pairs))
    position = np.searchsorted(keys, found_keys)
    np.testing.assert_array_equal(full.cosine[position], result.pairs.cosine)


def test_recall_counts_what_is_missing() -> None:
    vectors = clustered(3000, spread=0.12)
    full = exact(vectors, 0.8)
    near = full.cosine < 0.85
    assert 100 < near.sum() < len(near) - 100
    easy = Pairs(*(column[~near] for column in full))
    everyone = measure_recall(vectors, easy, 0.8, sample=3000)
    assert everyone.pairs == len(full.first)
    assert everyone.hard_pairs == near.sum()
    assert everyone.estimate == pytest.approx(1.0 - near.mean())
    assert (everyone.hard_estimate, everyone.hard_low) == (0.0, 0.0)
    assert everyone.low < everyone.estimate < everyone.high
    perfect = measure_recall(vectors, full, 0.8, sample=200)
    assert (perfect.estimate, perfect.high, perfect.phrases) == (1.0, 1.0, 200)
    assert 0.9 < perfect.low < 1.0
    only_searching = np.arange(3000) < 40
    assert measure_recall(vectors, full, 0.8, searches=only_searching).phrases == 40


def test_the_interval_covers_the_true_recall_as_often_as_it_says() -> None:
    vectors = clustered(3000, spread=0.12)
    full = exact(vectors, 0.8)
    kept = np.random.default_rng(0).random(len(full.first)) < 0.9
    partial = Pairs(*(column[kept] for column in full))
    truth = measure_recall(vectors, partial, 0.8, sample=3000).estimate
    covered = 0
    for seed in range(60):
        recall = measure_recall(vectors, partial, 0.8, sample=100, seed=seed)
        covered += recall.low <= truth <= recall.high
    assert covered >= 51  # 57 expected; fewer than 51 has a chance below 1 %


def test_auto_is_exact_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered(40_000)
    assert join(vectors, sample=50).method == "exact"
    monkeypatch.setattr(sys.modules[join.__module__], "multiplications_per_s", lambda: 1e9)
    assert join(vectors, sample=50).method == "exact"  # whatever the machine
    monkeypatch.setattr(sys.modules[join.__module__], "CHEAP_COST", 1e9)
    slow = join(vectors, sample=50)
    assert slow.method == "ivf"
    assert slow.estimate_s > 5.0
    assert join(vectors, sample=50, target_recall=1.0).method == "exact"
