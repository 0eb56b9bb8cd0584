"""Recall of methods on an evaluation set, with intervals against a baseline, and what is answered by them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
from numpy.typing import NDArray

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.answers import AnswerScores, answer_questions, counts_of, score_answers
from hippoindex.pipeline.reader.ircot import interleave
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
    retriever: Retriever,
    queries: Sequence[Query],
    methods: Sequence[str],
    *,
    allow_missing: bool = False,
    qa: bool = False,
    ircot_steps: int | None = None,
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
    qa : bool
        Whether the retriever's reader answers each question out of each method's best passages.
    ircot_steps : int, optional
        Measure each method also as the retriever of IRCoT with so many steps, as ``METHOD+ircot``.

    Returns
    -------
    dict
        ``{"n", "methods": {name: {"recall@2", ..., "all_recall@2", ..., "delta_recall@5": [mean, low, high],
        "curve", "fallbacks", "notes", "recognition_memory", "queries_per_s", "solver"}}, "index": {...},
        "queries": {...}, "reader": {...}, "questions": {"ids", "methods"}}``; recalls in percent, ``curve``
        is recall@1, @2, ...; ``questions`` holds the same for every question. With ``qa`` a method has
        "exact_match", "f1" and "qa" (counts), and ``questions`` has "answers"; with ``ircot_steps`` there are
        "ircot" and "thoughts".

    Raises
    ------
    InputError
        If no query has a gold passage, one is not in the index, or with ``qa`` no query has an answer.
    UsageError
        If there is no method, one is unknown, or ``qa`` or ``ircot_steps`` is asked for without a reader.
    """
    judged = judged_queries(queries)
    if not methods:
        raise UsageError(f"No method to measure was named; there are {', '.join(METHODS)}")
    for method in methods:
        find_method(METHODS, method)
    _require_reader(retriever, judged, qa=qa, ircot_steps=ircot_steps)
    gold = Gold(retriever.index, judged)
    if not allow_missing:
        gold.require_found()
    started = time.perf_counter()
    batch = retriever.encode(judged)
    encode_s = time.perf_counter() - started
    measured = {name: _measure(retriever, batch, name, gold) for name in dict.fromkeys([BASELINE, *methods])}
    baseline = measured[BASELINE].recalls["recall@5"]
    shown = list(dict.fromkeys(methods))
    if ircot_steps is not None:
        for name in shown.copy():
            measured[f"{name}+ircot"] = _measure(retriever, batch, name, gold, ircot_steps)
        shown += [f"{name}+ircot" for name in shown]
    if qa:
        for name in shown:
            measured[name].read(retriever, judged)
    counts = retriever.index.manifest.counts
    questions: dict[str, Any] = {"ids": [query.query_id for query in judged]}
    questions["methods"] = {name: measured[name].by_question() for name in shown}
    for kind in ("answers", "thoughts"):
        found = {name: getattr(measured[name], kind) for name in shown if getattr(measured[name], kind)}
        if found:
            questions[kind] = found
    return {
        "n": len(judged),
        "methods": {name: measured[name].summary(baseline) for name in shown},
        "index": {"path": str(retriever.index.path), **counts.model_dump()},
        "queries": {
            "without_gold": len(queries) - len(judged),
            "gold_passages": gold.n_gold,
            "gold_not_in_index": gold.n_missing,
            "encode_s": round(encode_s, 3),
        },
        "config": retriever.config.model_dump(mode="json"),
        "reader": retriever.reader_report(),
        "questions": questions,
    }


def _require_reader(
    retriever: Retriever, queries: Sequence[Query], *, qa: bool, ircot_steps: int | None
) -> None:
    if (qa or ircot_steps is not None) and retriever.reader is None:
        raise UsageError(
            "Answers (--qa) and chains of thought (--ircot-steps) need a language model: --set "
            "reader.engine=openai --set reader.model=NAME --set reader.base_url=URL, or reader.engine=vllm"
        )
    if qa and not any(query.answers for query in queries):
        raise InputError("No query has an answer: --qa has nothing to compare with")


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


@dataclass
class _Measured:
    """What one method does with the queries.

    Attributes
    ----------
    ranking : Ranking
    recalls : dict of str to ndarray, shape (Q,)
    said : dict
        What else there is to say.
    thoughts, answers : list of dict
        Of each query; empty where none were asked for.
    scores : AnswerScores or None
    """

    ranking: Ranking
    recalls: dict[str, NDArray[np.float64]]
    said: dict[str, Any]
    thoughts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    scores: AnswerScores | None = None

    def read(self, retriever: Retriever, queries: Sequence[Query]) -> None:
        """Have the queries answered out of their best passages."""
        if retriever.reader is None:
            return
        questions = [query.question for query in queries]
        answers = answer_questions(retriever.reader, retriever.index, questions, self.ranking.rows)
        self.answers = [answer.record() for answer in answers]
        self.scores = score_answers(answers, queries)
        self.said |= self.scores.summary() | {"qa": counts_of(answers, queries)}

    def summary(self, baseline: NDArray[np.float64]) -> dict[str, Any]:
        """Return the figures over all queries."""
        return summarise(self.recalls, baseline) | self.said

    def by_question(self) -> dict[str, Any]:
        """Return the figures of each query, in percent."""
        figures = _percent(self.recalls)
        return figures if self.scores is None else figures | asdict(self.scores)


def _measure(
    retriever: Retriever, batch: QueryBatch, method: str, gold: Gold, ircot_steps: int | None = None
) -> _Measured:
    started = time.perf_counter()
    thoughts: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    if ircot_steps is None or retriever.reader is None:
        ranking = retriever.rank(batch, method, top_k=gold.depth)
    else:
        found = interleave(retriever, retriever.reader, batch, method, steps=ircot_steps, top_k=gold.depth)
        ranking, thoughts, said = found.ranking, found.records(), {"ircot": found.summary()}
    speed = round(len(batch) / (time.perf_counter() - started), 1)
    log.info(
        "evaluated", method=method, ircot_steps=ircot_steps, queries_per_s=speed, fallbacks=ranking.fallbacks
    )
    said |= {
        "curve": [round(100 * float(value), 2) for value in gold.curve(ranking)],
        "fallbacks": ranking.fallbacks,
        "notes": ranking.notes,
        "recognition_memory": ranking.recognition,
        "queries_per_s": speed,
        "solver": ranking.solver,
    }
    return _Measured(ranking, gold.recalls(ranking), said, thoughts)


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
