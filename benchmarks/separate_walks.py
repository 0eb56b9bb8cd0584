"""Do separate walks, one from each property that a question names, find what has all of them?

The questions of path_finding.py ask for the one thing with two properties. A single walk from both prefers
what is close to one of them; the geometric mean of a walk from each prefers what all of them reach. A
property is a noun phrase of the question: its walk restarts at the phrases of the index that are nearest to
it, or at the nearest facts. Each way of using these walks is measured on the four questions (ranks of the
gold passages) and on the cases of readme_table.py (recall), in float64.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import path_finding
from common import ROOT, data_folder, write_record
from fusion64 import Fusion64, Walk, transition
from numpy.typing import NDArray
from readme_table import CASES
from reproduce import index_of

from hippoindex.kernels.ppr.top import largest_of_rows
from hippoindex.pipeline.answer import read_gold
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.evaluate import Gold, judged_queries
from hippoindex.pipeline.extract.phrases import NounPhrases, is_nominal
from hippoindex.pipeline.extract.rules import open_nlp
from hippoindex.pipeline.retrieve.base import top_k

METRICS = ("recall@2", "recall@5", "recall@10")
NEAREST = 3
"""Phrases or facts that stand for a property."""


class Way(NamedTuple):
    """One way to use the walks.

    Attributes
    ----------
    ends : str
        What a property's walk restarts at: "phrases" or "facts"; "" is the default method.
    join : str
        "mean" of the logarithms of the walks; or "meet": a walk from where they meet, with the geometric mean
        of the phrases' probabilities as its restart.
    weight : float
    """

    ends: str
    join: str
    weight: float

    def __str__(self) -> str:
        return f"{self.ends}, {self.join}, weight {self.weight:g}" if self.ends else "default"


WAYS = [
    Way("", "", 0.0),
    *(
        Way(ends, join, weight)
        for ends in ("phrases", "facts")
        for join in ("mean", "meet")
        for weight in (1, 3)
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproduce", help="where indexes are")
    parser.add_argument("--index", type=Path, help="of the path-finding passages; without it one is built")
    arguments = parser.parse_args()
    of_paths = arguments.index or path_finding.build(ROOT / "runs" / path_finding.DATA)
    result: dict[str, Any] = {"ranks": ranks(of_paths), "recall": {}}
    for case in CASES:
        result["recall"][case.name] = recall(index_of(case, arguments.work), case.data)
    print(markdown(result))
    print("record:", write_record("separate_walks", result))


def ranks(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return the ranks of the gold passages of each question, the first being 1, by way."""
    index = open_index(folder)
    queries = read_gold(index, data_folder() / path_finding.DATA / "queries.jsonl").queries
    found: dict[str, dict[str, list[int]]] = {}
    for way, scores in zip(WAYS, scores_of_ways(Fusion64(folder, queries)), strict=True):
        rows = (-scores).argsort(axis=1, kind="stable")
        found[str(way)] = path_finding.gold_ranks(index, queries, rows)
    return found


def recall(folder: Path, data: str) -> dict[str, list[float]]:
    """Return the mean of every metric in percent, by way."""
    index = open_index(folder)
    queries = judged_queries(read_gold(index, data_folder() / data / "queries.jsonl").queries)
    gold = Gold(index, queries)
    found = {}
    for way, scores in zip(WAYS, scores_of_ways(Fusion64(folder, queries)), strict=True):
        recalls = gold.recalls(top_k(scores, gold.depth))
        found[str(way)] = [round(100 * float(recalls[metric].mean()), 2) for metric in METRICS]
    return found


def scores_of_ways(asked: Fusion64) -> NDArray[np.float64]:
    """Return the scores of all passages, shape (ways, Q, passages)."""
    walk = asked.walk([transition(asked.weights)])
    scores = np.empty((len(WAYS), len(asked.queries), asked.index.n_passages))
    for number, vectors in enumerate(vectors_of_properties(asked)):
        walked = {ends: walk(restarts(asked, vectors, ends)) for ends in ("phrases", "facts")}
        for row, way in enumerate(WAYS):
            more = way.weight * joined(asked, walk, walked[way.ends], way.join) if way.ends else 0.0
            scores[row, number] = asked.score(number, walk, more)
    return scores


def joined(asked: Fusion64, walk: Walk, walked: NDArray[np.float64], join: str) -> NDArray[np.float64]:
    """Return the term of a question's walks, shape (passages,), from their probabilities, (N, walks)."""
    n_phrases = asked.index.n_phrases
    if not walked.shape[1]:
        return np.zeros(asked.index.n_passages)
    if join == "mean":
        return asked.log_term(walked[n_phrases:].T).mean(axis=0)
    meeting = np.zeros((len(walked), 1))
    meeting[:n_phrases, 0] = np.exp(asked.log_term(walked[:n_phrases].T).mean(axis=0)) - asked.config.floor
    meeting.clip(0, out=meeting)
    return asked.log_term(walk(meeting)[n_phrases:, 0])


def restarts(asked: Fusion64, vectors: NDArray[np.float32], ends: str) -> NDArray[np.float64]:
    """Return the restart of each property of a question, shape (N, properties)."""
    index = asked.index
    cosines = vectors @ index.float_vectors(ends).T  # (properties, phrases or facts)
    starts = np.zeros((index.graph.n_nodes, len(vectors)))
    for column, nearest in enumerate(largest_of_rows(cosines, NEAREST)):
        for place in nearest.tolist():
            for phrase in [place] if ends == "phrases" else index.fact_ends[place].tolist():
                starts[phrase, column] += (
                    max(float(cosines[column, place]), 0.0) / index.passage_counts[phrase]
                )
    return starts


def vectors_of_properties(asked: Fusion64) -> list[NDArray[np.float32]]:
    """Return the embeddings of the noun phrases of each question, shape (properties, d)."""
    properties = noun_phrases([query.question for query in asked.queries])
    flat = [text for texts in properties for text in texts]
    vectors = asked.retriever._embedder.encode(flat)
    return np.split(vectors, np.cumsum([len(texts) for texts in properties])[:-1])


def noun_phrases(questions: list[str]) -> list[list[str]]:
    """Return the noun phrases of each question, in order, each once."""
    found = []
    for doc in open_nlp(None).pipe(questions):
        phrases = NounPhrases(doc, "")
        heads = (token for token in phrases.tokens if is_nominal(token) and phrases.is_chunk_head(token))
        named = (phrases.phrase(head) for head in heads)
        found.append(list(dict.fromkeys(phrase.text for phrase in named if phrase is not None)))
    return found


def markdown(result: dict[str, Any]) -> str:
    questions = list(next(iter(result["ranks"].values())))
    heads = [*questions, *result["recall"]]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for way in map(str, WAYS):
        cells = [", ".join(map(str, result["ranks"][way][question])) for question in questions]
        cells += [" / ".join(f"{mean:.1f}" for mean in rows[way]) for rows in result["recall"].values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
