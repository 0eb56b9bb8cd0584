"""The precomputed part of PPR: what it holds, resuming, and computing it anew for an existing index."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hippoindex.errors import ArtifactError, KernelError, UsageError
from hippoindex.kernels.ppr import reference
from hippoindex.pipeline.answer import answer_queries
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import PrecomputeConfig, load_config
from hippoindex.pipeline.precompute import precompute, refresh

Digests = Callable[[Path], dict[str, str]]
SMALL = PrecomputeConfig(memory_bytes=2**20)
"""Holds some tens of columns of the sample's graph, so that there are several blocks."""


@pytest.fixture
def copy(sample_index: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_index, tmp_path / "index"))


def without_ppr(index: Path, folder: Path) -> Path:
    for part in ("graph", "vectors"):
        shutil.copytree(index / part, folder / part)
    return folder


def test_columns_are_ppr_of_the_passage_vectors(sample_index: Path) -> None:
    index = open_index(sample_index)
    dense = index.dense_restart
    first, columns = index.n_phrases, (0, 17, 383)
    total = np.zeros((index.n_passages, len(columns) + 1))
    for sign in (1, -1):  # PPR takes no negative weight: the two signs apart
        restart = np.zeros((index.graph.n_nodes, len(columns) + 1))
        vectors = index.vectors("passages")[:, columns].astype(np.float64)
        restart[first:, :-1] = np.maximum(sign * vectors, 0)
        restart[first:, -1] = 1
        assert not len(index.graph.isolated)
        total += sign * reference(index.graph, restart).scores[first:] * restart.sum(axis=0)
    np.testing.assert_allclose(dense.z[:, columns], total[:, :-1], atol=1e-6)
    ones = np.zeros((index.graph.n_nodes, 1))
    ones[first:] = 1
    walked = reference(index.graph, ones).scores[first:, 0] * index.n_passages
    np.testing.assert_allclose(dense.z1, walked, rtol=1e-5)


def test_manifest_says_what_was_computed(sample_index: Path) -> None:
    manifest = open_index(sample_index).manifest
    stage = manifest.stages["precompute"]
    assert (stage["damping"], stage["dtype"], stage["version"]) == (0.5, "float32", 1)
    assert 0 < stage["residual"] <= stage["tolerance"] == 1e-6
    assert {"ppr/transition.npy", "ppr/z.npy", "ppr/z1.npy"} <= set(manifest.files)


def test_interrupted_columns_are_not_solved_again_and_bytes_do_not_depend_on_blocks(
    sample_index: Path, tmp_path: Path, digests: Digests
) -> None:
    folder = without_ppr(sample_index, tmp_path / "index")
    solved: list[float] = []

    def stop_after_two(number: float) -> None:
        solved.append(number)
        if len(solved) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        precompute(folder, SMALL, 0.5, work=tmp_path / "work", advance=stop_after_two)
    first = sum(solved)
    assert 0 < first < 385
    solved.clear()
    precompute(folder, PrecomputeConfig(), 0.5, work=tmp_path / "work", advance=solved.append)
    assert solved[0] == first
    assert sum(solved) == 385
    whole = digests(sample_index)
    assert {name: whole[f"ppr/{name}"] for name in digests(folder / "ppr")} == digests(folder / "ppr")


def test_a_budget_below_one_column_says_what_is_needed(copy: Path, tmp_path: Path) -> None:
    tiny = PrecomputeConfig.model_construct(**{**SMALL.model_dump(), "memory_bytes": 100})
    with pytest.raises(KernelError, match=r"needs \d+ bytes; the budget is 100"):
        precompute(copy, tiny, 0.5, work=tmp_path / "work", advance=lambda _: None)


def test_refresh_makes_the_index_that_a_build_with_that_damping_makes(
    copy: Path, sample: Path, tmp_path: Path, digests: Digests
) -> None:
    refresh(copy, ["retrieve.damping=0.8", "precompute.dtype=float16"])
    settings = ["retrieve.damping=0.8", "precompute.dtype=float16"]
    built = tmp_path / "built"
    corpus = [str(sample / "passages.jsonl")]
    build_index(load_config(overrides=settings, corpus__path=corpus, output=str(built), cluster__workers=1))
    assert digests(copy) == digests(built)
    open_index(copy).verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "index"]
    found = answer_queries(copy, sample / "questions.jsonl", method="hipporag2")
    assert found.summary()["solver"] == "push to 1e-08, passages precomputed"


def test_half_precision_ranks_as_single_does(copy: Path, sample_index: Path, sample: Path) -> None:
    refresh(copy, ["precompute.dtype=float16"])
    half, single = (answer_queries(index, sample / "questions.jsonl") for index in (copy, sample_index))
    np.testing.assert_allclose(half.ranking.scores, single.ranking.scores, rtol=2e-3)
    np.testing.assert_array_equal(half.ranking.rows[:, :5], single.ranking.rows[:, :5])


def test_an_index_built_without_it_is_walked_by_power_until_it_is_refreshed(
    sample: Path, tmp_path: Path, digests: Digests, sample_index: Path
) -> None:
    output = tmp_path / "index"
    corpus = [str(sample / "passages.jsonl")]
    config = load_config(
        corpus__path=corpus, output=str(output), cluster__workers=1, precompute__enabled=False
    )
    build_index(config)
    assert not (output / "ppr").exists()
    assert answer_queries(output, sample / "questions.jsonl").ranking.solver == "power to 1e-06"
    refresh(output)
    assert digests(output) == digests(sample_index)


def test_refresh_refuses_other_settings_and_leaves_the_index_when_it_fails(
    copy: Path, digests: Digests, tmp_path: Path
) -> None:
    before = digests(copy)
    with pytest.raises(UsageError, match=r"--set synonyms.threshold=0.9: only precompute"):
        refresh(copy, ["synonyms.threshold=0.9"])
    np.save(copy / "vectors" / "passages.npy", np.load(copy / "vectors" / "passages.npy")[:, :-1])
    with pytest.raises(ArtifactError, match="passages"):
        refresh(copy)
    after = digests(copy)
    del before["vectors/passages.npy"], after["vectors/passages.npy"]
    assert before == after
    with pytest.raises(ArtifactError, match="is not an index"):
        refresh(tmp_path / "nowhere")
