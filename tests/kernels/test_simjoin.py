from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import KernelError
from hippoindex.kernels.simjoin import exact, reference
from hippoindex.kernels.simjoin.spec import generate

seeds = st.integers(0, 2**32 - 1)
HALF_SPHERE = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]], dtype=np.float32)


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


@settings(max_examples=25, deadline=None)
@given(seed=seeds, size=st.integers(1, 3000))
def test_result_does_not_depend_on_the_memory_budget(seed: int, size: int) -> None:
    inputs = generate(np.random.default_rng(seed), size)
    small, large = exact(**inputs, memory_bytes=1), exact(**inputs)
    for left, right in zip(small, large, strict=True):
        assert np.array_equal(left, right)


def test_a_pair_exactly_at_the_threshold_counts() -> None:
    vectors = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
    assert len(exact(vectors, threshold=0.5).first) == 1
    assert len(exact(vectors, threshold=0.5000001).first) == 0


def test_progress_ends_at_one() -> None:
    seen: list[float] = []
    vectors = generate(np.random.default_rng(0), 2500)["vectors"]
    exact(vectors, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("join", [reference, exact])
def test_bad_arguments_are_refused(join: type[object]) -> None:
    for arguments, message in [
        ((np.ones(3),), r"shape \(3,\)"),
        ((np.ones((2, 2)),), "Row 0 has norm 1.4142"),
        ((np.full((2, 2), np.nan),), "Row 0 has norm nan"),
        ((HALF_SPHERE, 0.0), "above 0 and at most 1"),
        ((HALF_SPHERE, 0.5, 0), "at least 1"),
        ((HALF_SPHERE, 0.5, 3, np.ones(2, bool)), r"searches has shape \(2,\)"),
    ]:
        with pytest.raises(KernelError, match=message):
            join(*arguments)  # type: ignore[call-arg]


def test_no_vectors_make_no_pairs() -> None:
    for join in (reference, exact):
        assert len(join(np.empty((0, 4), np.float32)).first) == 0
