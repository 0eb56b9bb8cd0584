"""Real corpora: the precomputed dense restart ranks as plain PPR does, for every question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from hippoindex.kernels.ppr import Goal, Pusher, affine, reference
from hippoindex.pipeline.answer import open_retriever, read_gold
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.retrieve.base import QueryBatch, min_max
from hippoindex.pipeline.retrieve.engine import Retriever
from hippoindex.pipeline.retrieve.hipporag import SEEDS

pytestmark = pytest.mark.slow
GPT = "openie_results_ner_gpt-3.5-turbo-1106.json"
TOP_K = 20


@pytest.fixture(scope="module")
def musique(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Retriever, QueryBatch]:
    data = data_dir / "musique_train_100"
    output = tmp_path_factory.mktemp("musique") / "index"
    config = load_config(
        overrides=["extract.engine=import", f"extract.path={data / GPT}"],
        corpus__path=[str(data / "corpus.jsonl")],
        output=str(output),
        cluster__executor="local",
    )
    build_index(config)
    retriever = open_retriever(output)
    return retriever, retriever.encode(read_gold(retriever.index, data / "queries.jsonl").queries)


def sparse_seeds(index: Index, retriever: Retriever, batch: QueryBatch, method: str) -> sp.csr_array:
    found = SEEDS[method](index, batch, retriever.config)
    rows = np.repeat(np.arange(len(batch)), [len(seeds.rows) for seeds in found])
    nodes = np.concatenate([seeds.rows for seeds in found])
    weights = np.concatenate([seeds.weights for seeds in found]).astype(np.float64)
    return sp.csr_array((weights, (rows, nodes)), shape=(len(batch), index.graph.n_nodes))


@pytest.mark.parametrize("method", sorted(SEEDS))
@pytest.mark.parametrize(
    ("dtype", "epsilon", "error", "alike"), [("float32", 1e-9, 2e-6, 0.99), ("float16", 1e-7, 1e-4, 0.95)]
)
def test_top_20_of_every_question_is_that_of_plain_ppr(
    musique: tuple[Retriever, QueryBatch],
    method: str,
    dtype: str,
    epsilon: float,
    error: float,
    alike: float,
) -> None:
    """``error`` is relative to the best score; nearer scores are ties, and so few that most have none."""
    retriever, batch = musique
    index, config = retriever.index, retriever.config
    graph, first = index.graph, index.n_phrases
    graph.validate()
    vectors = np.asarray(index.vectors("passages"), dtype=np.float32)
    seeds = sparse_seeds(index, retriever, batch, method)

    columns = np.concatenate(
        [block.values for block in affine.precompute(graph, vectors, first, config.damping)], axis=1
    )
    z, z1 = np.ascontiguousarray(columns[:, :-1], dtype=dtype), np.ascontiguousarray(columns[:, -1])
    pusher = Pusher(graph, config.damping, candidates=(first, graph.n_nodes))
    dense = affine.DenseRestart(vectors, z, z1)
    result = affine.rank(pusher, dense, batch.vectors, config.passage_weight, seeds, TOP_K, Goal(epsilon))

    restart = seeds.toarray()
    cosines = batch.vectors.astype(np.float64) @ vectors.astype(np.float64).T
    restart[:, first:] += config.passage_weight * min_max(cosines)
    exact = reference(graph, restart.T, config.damping).scores.T[:, first:]

    assert len(batch) == 100
    assert result.converged.all()
    order = np.argsort(-exact, axis=1, kind="stable")[:, :TOP_K]
    found = result.nodes - first
    best, wanted, ranked = (np.take_along_axis(exact, rows, axis=1) for rows in (order[:, :1], order, found))
    assert np.all(np.abs(result.scores - ranked) <= error * best)
    assert np.all((found == order) | (np.abs(ranked - wanted) <= error * best))
    assert np.mean(np.all(found == order, axis=1)) >= alike
    assert np.median(result.certified_k) >= 10, "of which most is proven"
