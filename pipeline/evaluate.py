"""Recall of methods on an evaluation set, with intervals against a baseline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
from numpy.typing import NDArray

from hippoindex.errors import InputError
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.retrieve.base import Ranking
from hippoindex.pipeline.retrieve.engine import Retriever

log = structlog.get_logger("hippoindex")

RECALL_AT = (2, 5, 10)
ALL_RECALL_AT = (2, 5)
BASELINE = "dense"
RESAMPLES = 10_000
SEED = 20_260_101


def evaluate(retriever: Retriever, queries: Sequence[Query], methods: Sequence[str]) -> dict[str, Any]:
    """Measure methods on queries with gold passages.

    Parameters
    ----------
    retriever : Retriever
    queries : sequence of Query
        Queries without gold passages are left out and counted.
    methods : sequence of str
        ``dense`` is always measured too: it is the baseline of the intervals.

    Returns
    -------
    dict
        ``{"n", "methods": {name: {"recall@2", ..., "all_recall@2", ..., "delta_recall@5": [mean, low, high],
        "queries_per_s"}}, "index": {...}, "queries": {...}}``; recalls in percent.

    Raises
    ------
    InputError
        If no query has a gold passage.
    UsageError
        If a method is unknown.
    """
    judged = [query for query in queries if query.gold or query.unresolved_gold]
    if not judged:
        raise InputError("No query names a gold passage: there is nothing to measure")
    gold = Gold(retriever.index, judged)
    started = time.perf_counter()
    batch = retriever.encode(judged)
    encode_s = time.perf_counter() - started
    per_query, speed, solver = {}, {}, {}
    for method in dict.fromkeys([BASELINE, *methods]):
        started = time.perf_counter()
        ranking = retriever.rank(batch, method, top_k=gold.depth)
        speed[method] = len(judged) / (time.perf_counter() - started)
        per_query[method], solver[method] = gold.recalls(ranking), ranking.solver
        log.info("evaluated", method=method, queries_per_s=round(speed[method], 1))
    baseline = per_query[BASELINE]["recall@5"]
    results = {
        method: summarise(per_query[method], baseline)
        | {"queries_per_s": round(speed[method], 1), "solver": solver[method]}
        for method in methods
    }
    counts = retriever.index.manifest.counts
    return {
        "n": len(judged),
        "methods": results,
        "index": {"path": str(retriever.index.path), **counts.model_dump()},
        "queries": {
            "without_gold": len(queries) - len(judged),
            "gold_passages": gold.n_gold,
            "gold_not_in_index": gold.n_missing,
            "encode_s": round(encode_s, 3),
        },
    }


class Gold:
    """Which passages answer which query.

    A gold id names a passage or, where documents were split, a document: then the best-ranked of its passages
    counts. A gold id that is not in the index counts as never found.

    Attributes
    ----------
    n_gold, n_missing : int
        Gold ids, and those of them that are not in the index.
    depth : int
        Passages that a ranking must hold for every metric.
    """

    def __init__(self, index: Index, queries: Sequence[Query]) -> None:
        passages, documents = (index.passages[name] for name in ("passage_id", "doc_id"))
        names = pa.chunked_array([*passages.chunks, *documents.chunks]).combine_chunks().dictionary_encode()
        codes = names.indices.to_numpy()
        self._codes = codes.reshape(2, -1)  # passage's own id, its document's id
        number = {name: code for code, name in enumerate(names.dictionary.to_pylist())}
        self._gold = [
            [number.get(gold, -1) for gold in query.gold] + [-1] * query.unresolved_gold for query in queries
        ]
        self.n_gold = sum(map(len, self._gold))
        self.n_missing = sum(codes.count(-1) for codes in self._gold)
        if self.n_missing:
            log.warning("gold passages are not in the index", missing=self.n_missing, of=self.n_gold)
        per_document = np.bincount(self._codes[1])
        self.depth = int(min(index.n_passages, max(RECALL_AT) * per_document.max()))

    def recalls(self, ranking: Ranking) -> dict[str, NDArray[np.float64]]:
        """Return recall@k and all_recall@k of each query, 0 to 1, shape (Q,)."""
        ranks = [self._ranks(rows, gold) for rows, gold in zip(ranking.rows, self._gold, strict=True)]
        recall = {f"recall@{k}": np.array([np.mean(rank < k) for rank in ranks]) for k in RECALL_AT}
        full = {
            f"all_recall@{k}": np.array([np.mean(np.all(rank < k)) for rank in ranks]) for k in ALL_RECALL_AT
        }
        return recall | full

    def _ranks(self, rows: NDArray[np.int64], gold: Sequence[int]) -> NDArray[np.float64]:
        """0-based rank of each gold id; passages of one document share the rank of the best of them."""
        own, document = self._codes[0][rows], self._codes[1][rows]
        _, first, group = np.unique(document, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))  # rank of a document among documents
        by_document = order[group]
        ranks = []
        for code in gold:
            hits = np.flatnonzero(document == code)
            if len(hits):
                ranks.append(float(by_document[hits[0]]))
                continue
            hits = np.flatnonzero(own == code)
            ranks.append(float(hits[0]) if len(hits) else np.inf)
        return np.array(ranks)


def summarise(recalls: Mapping[str, NDArray[np.float64]], baseline: NDArray[np.float64]) -> dict[str, Any]:
    """Return percentages, and the difference in recall@5 to a baseline with a 95 % paired bootstrap interval.

    Parameters
    ----------
    recalls : mapping of str to ndarray, shape (Q,)
    baseline : ndarray, shape (Q,)
        Recall@5 of the baseline on the same queries.
    """
    summary: dict[str, Any] = {name: round(100 * float(values.mean()), 2) for name, values in recalls.items()}
    summary["delta_recall@5"] = paired_bootstrap(100 * recalls["recall@5"], 100 * baseline)
    return summary


def paired_bootstrap(values: NDArray[np.float64], baseline: NDArray[np.float64]) -> list[float]:
    """Return mean, 2.5 % and 97.5 % quantile of the mean difference over resampled queries (Efron, 1979).

    Parameters
    ----------
    values, baseline : ndarray, shape (Q,)

    Returns
    -------
    list of float
        ``[mean, low, high]``, the same for the same values: the resampling is seeded.
    """
    difference = values - baseline
    rng = np.random.default_rng(SEED)
    means = [difference[rng.integers(0, len(difference), len(difference))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return [round(float(difference.mean()), 2), round(float(low), 2), round(float(high), 2)]
