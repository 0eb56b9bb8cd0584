"""Does it help to walk along the facts that read like the question, more than along others?

For each question the edge of fact f gets the weight w(f) (1 + g s(f)), where s(f) falls from 1 for the
fact nearest to the question to 0 for the n-th nearest. Either the whole walk takes these weights or only its
first step does. Everything is solved in float64, a graph for each question: this asks what the idea is worth,
not how fast it could be. A setting is chosen by cross-validation over questions, from all settings and the
unchanged walk, by the mean of R@2 and R@5. Indexes are those of reproduce.py.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from common import ROOT, data_folder, write_record
from fusion64 import Fusion64, transition
from numpy.typing import NDArray
from readme_table import CASES, Case
from reproduce import index_of

from hippoindex.cluster.usage import available_cores
from hippoindex.pipeline.answer import read_gold
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.evaluate import Gold, bootstrap_interval, judged_queries
from hippoindex.pipeline.retrieve.base import top_k

METRICS = ("recall@2", "recall@5", "recall@10")
FOLDS = 5
QUESTIONS = 100
"""Of each case at most so many, its first: every one is solved on graphs of its own."""


class Setting(NamedTuple):
    """One way to reweight."""

    steps: str
    nearest: int | None
    gain: float

    def __str__(self) -> str:
        return f"{self.steps}, n = {self.nearest or 'all'}, g = {self.gain:g}"


UNCHANGED = Setting("no step", None, 0.0)
SETTINGS = [
    UNCHANGED,
    *itertools.starmap(Setting, itertools.product(("first step", "all steps"), (20, 200, None), (1, 4, 16))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproduce", help="where indexes are")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this, and stop")
    arguments = parser.parse_args()
    values = {case.name: measure(case, arguments.work) for case in CASES if arguments.only in case.name}
    result = {
        "recall": {name: means(found) for name, found in values.items()},
        "out_of_fold": cross_validated(values),
    }
    print(markdown(result))
    if not arguments.only:
        print("record:", write_record("relation_guided", result))


def measure(case: Case, work: Path) -> NDArray[np.float64]:
    """Return recalls, shape (settings, questions, metrics); those of an earlier run are taken."""
    folder = index_of(case, work)
    kept = folder.with_name(f"{folder.name}.relation_guided.npy")
    if kept.is_file():
        return np.load(kept)
    opened = open_index(folder)
    queries = judged_queries(read_gold(opened, data_folder() / case.data / "queries.jsonl").queries)[
        :QUESTIONS
    ]
    asked, gold = Fusion64(folder, queries), Gold(opened, queries)
    edges = FactEdges(asked)
    scores = np.empty((len(SETTINGS), len(queries), opened.n_passages))

    def ask(number: int) -> None:
        for row, setting in enumerate(SETTINGS):
            scores[row, number] = asked.score(number, asked.walk(edges.steps(number, setting)))

    with ThreadPoolExecutor(available_cores()) as pool:
        for _ in pool.map(ask, range(len(queries))):
            pass
    found = []
    for of_setting in scores:
        recalls = gold.recalls(top_k(of_setting, gold.depth))
        found.append(np.stack([recalls[metric] for metric in METRICS], axis=1))
    np.save(kept, np.stack(found))
    return np.stack(found)


class FactEdges:
    """Where the facts are in a graph's matrix, and what their questions' cosines are."""

    def __init__(self, asked: Fusion64) -> None:
        index = asked.index
        self._weights = asked.weights
        self._unchanged = transition(asked.weights)
        self._cosines = asked.batch.linking_vectors @ index.float_vectors("facts").T  # (Q, facts)
        ends = index.fact_ends
        self._apart = ends[:, 0] != ends[:, 1]
        n_nodes = asked.weights.shape[0]
        rows = np.repeat(np.arange(n_nodes), np.diff(asked.weights.indptr))
        cells = rows * n_nodes + asked.weights.indices  # ascending
        there, back = (first * n_nodes + second for first, second in (ends.T, ends.T[::-1]))
        self._cells = np.searchsorted(cells, np.stack([there, back])[:, self._apart])  # (2, facts)
        doubled = 2.0 if index.manifest.config["graph"]["weights"] == "hipporag" else 1.0
        self._counts = doubled * index.facts["count"].to_numpy()[self._apart]

    def steps(self, number: int, setting: Setting) -> list[sp.csr_matrix]:
        """Return the transition matrices of one question's walk."""
        if setting == UNCHANGED:
            return [self._unchanged]
        cosines = self._cosines[number].astype(np.float64)
        nearest = min(setting.nearest or len(cosines), len(cosines))
        low, high = np.partition(cosines, len(cosines) - nearest)[len(cosines) - nearest], cosines.max()
        closeness = (
            np.clip((cosines - low) / (high - low), 0.0, None) if high > low else np.ones_like(cosines)
        )
        added = setting.gain * closeness[self._apart] * self._counts
        data = self._weights.data.copy()
        for cells in self._cells:
            data += np.bincount(cells, added, minlength=len(data))
        changed = transition(
            sp.csr_matrix((data, self._weights.indices, self._weights.indptr), shape=self._weights.shape)
        )
        return [changed] if setting.steps == "all steps" else [changed, self._unchanged]


def means(found: NDArray[np.float64]) -> dict[str, list[float]]:
    """Return the mean of every metric in percent, by setting."""
    return {
        str(setting): np.round(100 * found[row].mean(axis=0), 2).tolist()
        for row, setting in enumerate(SETTINGS)
    }


def cross_validated(values: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Return what a choice is worth on questions it has not seen, against the unchanged walk.

    Every case counts alike. Folds are the same for the same questions.
    """
    target = {name: 100 * found[:, :, :2].mean(axis=2) for name, found in values.items()}  # (settings, Q)
    folds = {
        name: np.random.default_rng(0).permutation(found.shape[1]) % FOLDS for name, found in target.items()
    }
    chosen = []
    gains = {name: np.empty(found.shape[1]) for name, found in target.items()}
    for fold in range(FOLDS):
        others = [found[:, folds[name] != fold].mean(axis=1) for name, found in target.items()]
        best = int(np.mean(others, axis=0).argmax())
        chosen.append(str(SETTINGS[best]))
        for name, found in target.items():
            part = folds[name] == fold
            gains[name][part] = found[best, part] - found[0, part]
    return {
        "chosen_by_fold": chosen,
        "gain": {
            name: [round(float(gain.mean()), 2), *bootstrap_interval(gain)] for name, gain in gains.items()
        },
    }


def markdown(result: dict[str, Any]) -> str:
    recall = result["recall"]
    lines = [f"| | {' | '.join(recall)} |", "|---|" + "--:|" * len(recall)]
    for setting in map(str, SETTINGS):
        cells = [" / ".join(f"{mean:.1f}" for mean in figures[setting]) for figures in recall.values()]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    gains = [f"{gain:+.1f} [{low}, {high}]" for gain, low, high in result["out_of_fold"]["gain"].values()]
    lines.append(f"| out of fold, (R@2 + R@5) / 2 | {' | '.join(gains)} |")
    return "\n".join([*lines, "", f"chosen by fold: {'; '.join(result['out_of_fold']['chosen_by_fold'])}"])


if __name__ == "__main__":
    main()
