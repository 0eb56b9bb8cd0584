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
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, find_method
from hippoindex.pipeline.retrieve.engine import METHODS, Retriever

log = structlog.get_logger("hippoindex")

RECALL_AT = (2, 5, 10)
ALL_RECALL_AT = (2, 5)
CURVE_TO = 20
BASELINE = "dense"
RESAMPLES = 10_000
SEED = 20_260_101
MAX_LISTED = 20


def evaluate(
    retriever: Retriever, queries: Sequence[Query], methods: Sequence[str], *, allow_missing: bool = False
) -> dict[str, Any]:
    """Measure methods on queries with gold passages.

    Parameters
    ----------
    retriever : Retriever
    queries : sequence of Query
        Queries without gold passages are left out and counted.
    methods : sequence of str
        ``dense`` is always measured too: it is the baseline of the intervals.
    allow_missing : bool
        Whether gold passages that are not in the index are counted, as never found, instead of refused.

    Returns
    -------
    dict
        ``{"n", "methods": {name: {"recall@2", ..., "all_recall@2", ..., "delta_recall@5": [mean, low, high],
        "curve", "fallbacks", "notes", "queries_per_s", "solver"}}, "index": {...}, "queries": {...},
        "questions": {"ids", "methods"}}``; recalls in percent, ``curve`` is recall@1, @2, ...; ``questions``
        holds the same for every question.

    Raises
    ------
    InputError
        If no query has a gold passage, or one is not in the index.
    UsageError
        If a method is unknown.
    """
    judged = judged_queries(queries)
    for method in methods:
        find_method(METHODS, method)
    gold = Gold(retriever.index, judged)
    if not allow_missing:
        gold.require_found()
    started = time.perf_counter()
    batch = retriever.encode(judged)
    encode_s = time.perf_counter() - started
    measured = {name: _measure(retriever, batch, name, gold) for name in dict.fromkeys([BASELINE, *methods])}
    baseline = measured[BASELINE][0]["recall@5"]
    counts = retriever.index.manifest.counts
    return {
        "n": len(judged),
        "methods": {name: summarise(measured[name][0], baseline) | measured[name][1] for name in methods},
        "index": {"path": str(retriever.index.path), **counts.model_dump()},
        "queries": {
            "without_gold": len(queries) - len(judged),
            "gold_passages": gold.n_gold,
            "gold_not_in_index": gold.n_missing,
            "encode_s": round(encode_s, 3),
        },
        "config": retriever.config.model_dump(mode="json"),
        "questions": {
            "ids": [query.query_id for query in judged],
            "methods": {name: _percent(measured[name][0]) for name in methods},
        },
    }


def judged_queries(queries: Sequence[Query]) -> list[Query]:
    """Return the queries that name a gold passage.

    Raises
    ------
    InputError
        If none does.
    """
    judged = [query for query in queries if query.gold or query.unresolved_gold]
    if not judged:
        raise InputError("No query names a gold passage: there is nothing to measure")
    return judged


def _measure(
    retriever: Retriever, batch: QueryBatch, method: str, gold: Gold
) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
    """Return the recalls of each query, and what else there is to say of a method."""
    started = time.perf_counter()
    ranking = retriever.rank(batch, method, top_k=gold.depth)
    speed = round(len(batch) / (time.perf_counter() - started), 1)
    log.info("evaluated", method=method, queries_per_s=speed, fallbacks=ranking.fallbacks)
    said = {
        "curve": [round(100 * float(value), 2) for value in gold.curve(ranking)],
        "fallbacks": ranking.fallbacks,
        "notes": ranking.notes,
        "queries_per_s": speed,
        "solver": ranking.solver,
    }
    return gold.recalls(ranking), said


def _percent(recalls: Mapping[str, NDArray[np.float64]]) -> dict[str, list[float]]:
    return {name: [round(100 * value, 4) for value in values.tolist()] for name, values in recalls.items()}


class Gold:
    """Which passages answer which query.

    A gold id names a passage or, where documents were split, a document: then the best-ranked of its passages
    counts. A gold id that is not in the index counts as never found.

    Attributes
    ----------
    n_gold, n_missing : int
        Gold ids, and those of them that are not in the index.
    missing : list of str
        Those that are not, each once; gold passages named by title and text that nothing is known of have no
        id, and are only counted.
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
        absent = (gold for query in queries for gold in query.gold if gold not in number)
        self.missing = list(dict.fromkeys(absent))
        if self.n_missing:
            log.warning("gold passages are not in the index", missing=self.n_missing, of=self.n_gold)
        per_document = np.bincount(self._codes[1])
        self.depth = int(min(index.n_passages, CURVE_TO * per_document.max()))

    def require_found(self) -> None:
        """Make sure that every gold passage is in the index.

        Raises
        ------
        InputError
            Listing those that are not.
        """
        if not self.n_missing:
            return
        listed = ", ".join(map(repr, self.missing[:MAX_LISTED]))
        more = len(self.missing) - MAX_LISTED
        raise InputError(
            f"{self.n_missing} of {self.n_gold} gold passages are not in the index: "
            f"{listed or 'named by title and text'}{f' and {more} more' if more > 0 else ''}. "
            "With --allow-missing they count as never found"
        )

    def curve(self, ranking: Ranking) -> NDArray[np.float64]:
        """Return recall@1 to recall@20, 0 to 1, the mean over all queries."""
        ranks = [self._ranks(rows, gold) for rows, gold in zip(ranking.rows, self._gold, strict=True)]
        found = [[np.mean(rank < k) for k in range(1, CURVE_TO + 1)] for rank in ranks]
        return np.mean(found, axis=0)

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
    return [round(float(difference.mean()), 2), *bootstrap_interval(difference)]


def bootstrap_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantile of the mean over resampled queries, seeded."""
    rng = np.random.default_rng(SEED)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return round(float(low), 2), round(float(high), 2)


def permutation_test(values: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of a paired permutation test of the mean difference (Fisher, 1935).

    If neither run is better, the sign of each query's difference is a coin toss: p is the share of sign
    patterns whose mean is at least as far from 0. All patterns are counted where they are few, else random
    ones.

    Parameters
    ----------
    values, others : ndarray, shape (Q,)
    """
    difference = values - others
    difference = difference[difference != 0]
    n = len(difference)
    if 2**n <= RESAMPLES:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        sums = (1 - 2 * patterns) @ difference
        extra = 0
    else:
        rng = np.random.default_rng(SEED)
        sums = np.array([rng.choice((-1.0, 1.0), n) @ difference for _ in range(RESAMPLES)])
        extra = 1  # the observed pattern is one of the possible ones
    observed = abs(difference.sum())
    as_far = np.count_nonzero(np.abs(sums) >= observed * (1 - 1e-12))
    return float((as_far + extra) / (len(sums) + extra))
