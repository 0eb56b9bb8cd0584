"""The stage of synonym edges: what it sets aside, what it measures, and what it says of too low a recall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin import ivf, reference
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import SynonymsConfig
from hippoindex.pipeline.synonyms import Synonyms, find_synonyms, recall_shortfall, recall_text

NAMES = ["bridge of 1963", "bridge of 1964", "harbour", "the harbour", "mill", "tower"]


def phrases(texts: list[str]) -> pa.Table:
    ids = pa.array(range(100, 100 + len(texts)), pa.uint64())
    counts = pa.array([1] * len(texts), pa.int32())
    return pa.table([ids, pa.array(texts), counts], schema=schemas.PHRASE)


def near_pairs() -> np.ndarray:
    """Three pairs of rows with a cosine of about 0.95; different pairs are orthogonal."""
    vectors = np.zeros((6, 8), dtype=np.float32)
    for row in range(6):
        vectors[row, row // 2] = 1.0
        vectors[row, 7] = 0.3 * (row % 2)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def found(
    folder: Path, vectors: np.ndarray, texts: list[str], **settings: Any
) -> tuple[Synonyms, list[float], np.ndarray]:
    file = folder / "phrases.npy"
    np.save(file, vectors)
    progress: list[float] = []
    made = find_synonyms(file, phrases(texts), SynonymsConfig(**settings), progress.append)
    return made, progress, np.load(file)


def ends(made: Synonyms) -> list[tuple[int, int]]:
    return list(zip(made.pairs.first.tolist(), made.pairs.second.tolist(), strict=True))


def test_pairs_are_those_of_the_reference_and_the_recall_is_measured(tmp_path: Path) -> None:
    vectors = near_pairs()
    made, progress, _ = found(tmp_path, vectors, NAMES)
    expected = reference(vectors, 0.8, 100)
    assert ends(made) == [(0, 1), (2, 3), (4, 5)]
    assert np.array_equal(made.pairs.cosine, expected.cosine)
    assert made.report["method"] == "exact"
    assert made.report["recall"]["estimate"] == 1.0
    assert made.report["recall"]["pairs"] == 3
    assert 0 < made.report["recall"]["low"] < 1
    assert sum(progress) == pytest.approx(6)
    assert made.quarantine.num_rows == 0
    assert made.effort["seconds_s"] >= 0


@pytest.mark.parametrize("method", ["auto", "exact", "ivf", "reference"])
def test_every_method_finds_them(tmp_path: Path, method: str) -> None:
    made, _, _ = found(tmp_path, near_pairs(), NAMES, method=method)
    assert ends(made) == [(0, 1), (2, 3), (4, 5)]


def test_phrases_without_a_usable_vector_are_set_aside(tmp_path: Path) -> None:
    vectors = near_pairs()
    vectors[0] = np.nan
    vectors[3] = 0.0
    made, _, stored = found(tmp_path, vectors, NAMES)
    assert ends(made) == [(4, 5)]
    assert made.report["vectors_unusable"] == 2
    rows = made.quarantine.to_pylist()
    assert [(row["row_id"], row["kind"], row["raw"]) for row in rows] == [
        ("100", "phrase", "bridge of 1963"),
        ("103", "phrase", "the harbour"),
    ]
    assert all("zero or not finite" in row["reason"] for row in rows)
    assert np.isfinite(stored).all()
    assert np.array_equal(stored[[1, 2, 4, 5]], vectors[[1, 2, 4, 5]])
    assert not stored[[0, 3]].any()


def test_vectors_of_another_length_are_normalised_and_counted(tmp_path: Path) -> None:
    vectors = near_pairs()
    vectors[1] *= 3.0
    made, _, stored = found(tmp_path, vectors, NAMES)
    assert ends(made) == [(0, 1), (2, 3), (4, 5)]
    assert made.report["vectors_normalised"] == 1
    assert np.array_equal(stored, vectors)


def test_the_guard_drops_pairs_whose_numbers_differ(tmp_path: Path) -> None:
    made, _, _ = found(tmp_path, near_pairs(), NAMES, guard="names")
    assert ends(made) == [(2, 3), (4, 5)]
    assert made.report["rejected_by_guard"] == 1
    assert made.report["recall"]["estimate"] == 1.0  # of the join, before the guard


def test_short_phrases_start_no_search(tmp_path: Path) -> None:
    texts = ["ab", "c", "d1", "long enough", "東京", "京都府"]
    made, _, _ = found(tmp_path, near_pairs(), texts)
    assert ends(made) == [(2, 3), (4, 5)]  # one end of each is long enough


@pytest.mark.parametrize("count", [0, 1])
def test_there_may_be_nothing_to_join(tmp_path: Path, count: int) -> None:
    made, _, _ = found(tmp_path, near_pairs()[:count], NAMES[:count])
    assert ends(made) == []
    assert made.report["recall"]["pairs"] == 0
    assert recall_shortfall(made.report, SynonymsConfig()) is None
    assert "unknown" in recall_text(made.report)


def test_a_recall_below_the_target_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 16))
    vectors = centres[rng.integers(0, 60, 2000)] + 0.35 * rng.standard_normal((2000, 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = [f"phrase {row}" for row in range(2000)]
    made, _, _ = found(tmp_path, vectors.astype(np.float32), texts, method="ivf", target_recall=0.5)
    estimate = made.report["recall"]["estimate"]
    everything = reference(vectors.astype(np.float32), 0.8, 100)
    assert estimate == pytest.approx(len(made.pairs.first) / len(everything.first), abs=0.05)
    assert estimate < 0.999
    assert recall_shortfall(made.report, SynonymsConfig(target_recall=0.5)) is None
    told = recall_shortfall(made.report, SynonymsConfig(target_recall=0.9999))
    assert told is not None
    assert f"{estimate:.1%}" in told
    assert "synonyms.method=exact" in told
    assert made.report["probes"] < made.report["lists"]
    again = ivf(vectors.astype(np.float32), 0.8, 100, target_recall=0.5)
    assert ends(made) == list(zip(again.first.tolist(), again.second.tolist(), strict=True))


@pytest.mark.parametrize("method", ["cupy", "faiss-gpu"])
def test_a_method_that_cannot_run_here_says_why(tmp_path: Path, method: str) -> None:
    from hippoindex.kernels.simjoin import spec

    if spec.backends[method].unavailable() is None:
        pytest.skip(f"{method} can run here")
    with pytest.raises(KernelError, match=f"'{method}' of kernel 'simjoin' cannot run here"):
        found(tmp_path, near_pairs(), NAMES, method=method)
