"""Why a passage was found: the most probable path from a seed to it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.retrieve.base import Seeds
from hippoindex.pipeline.retrieve.seeds import fact_text

NO_PREDECESSOR = -9999


@dataclass(frozen=True)
class Step:
    """One node of a path and the edge that leads to it.

    Attributes
    ----------
    node : str
        A phrase, or the id of a passage.
    kind : str
        "phrase" or "passage".
    by : str
        "seed: fact ..." or "seed: entity ..." for the first step; else the facts, the synonym's cosine, or
        "mention".
    """

    node: str
    kind: str
    by: str


@dataclass(frozen=True)
class Explanation:
    """The most probable path to a passage, and the share of the seeds' walks that take exactly it."""

    passage_id: str
    probability: float
    steps: tuple[Step, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        first, *rest = self.steps
        return f"{first.node} ({first.by})" + "".join(f" --({step.by})--> {step.node}" for step in rest)


class Explainer:
    """Finds paths in one index.

    The path that maximises ``seed share x product of damping x weight / degree`` is the shortest path under
    the negative logarithm of the steps' probabilities.
    """

    def __init__(self, index: Index, damping: float) -> None:
        self._index = index
        graph = index.graph
        degrees = np.repeat(graph.degrees, np.diff(graph.indptr))
        costs = -np.log(damping * graph.weights / degrees)  # positive: weight <= degree, damping < 1
        shape = (graph.n_nodes, graph.n_nodes)
        self._costs = sp.csr_matrix((costs, graph.indices, graph.indptr), shape=shape)

    def explain(self, seeds: Seeds, passages: NDArray[np.integer]) -> list[Explanation | None]:
        """Return the best path to each passage row; ``None`` where no seed reaches it."""
        if not len(seeds.rows):
            return [None] * len(passages)
        distance, before = dijkstra(self._costs, indices=seeds.rows, return_predecessors=True)  # (S, N)
        distance = distance - np.log(seeds.weights / seeds.weights.sum())[:, None]
        return [
            self._path(int(row), seeds, distance[:, self._index.n_phrases + row], before) for row in passages
        ]

    def _path(
        self, passage: int, seeds: Seeds, distance: NDArray[np.float64], before: NDArray[np.integer]
    ) -> Explanation | None:
        best = int(distance.argmin())
        if not np.isfinite(distance[best]):
            return None
        nodes = [self._index.n_phrases + passage]
        while before[best, nodes[-1]] != NO_PREDECESSOR:
            nodes.append(int(before[best, nodes[-1]]))
        nodes.reverse()
        edges = [f"seed: {seeds.origins[best]}"]
        edges += [self._edge(a, b) for a, b in itertools.pairwise(nodes)]
        steps = tuple(Step(*self._node(node), by) for node, by in zip(nodes, edges, strict=True))
        return Explanation(steps[-1].node, float(np.exp(-distance[best])), steps)

    def _node(self, node: int) -> tuple[str, str]:
        n_phrases = self._index.n_phrases
        if node < n_phrases:
            return self._index.phrases["phrase"][node].as_py(), "phrase"
        return self._index.passages["passage_id"][node - n_phrases].as_py(), "passage"

    def _edge(self, a: int, b: int) -> str:
        if max(a, b) >= self._index.n_phrases:
            return "mention"
        ends = self._index.fact_ends
        facts = np.flatnonzero((ends == (a, b)).all(axis=1) | (ends == (b, a)).all(axis=1))
        if len(facts):
            more = f" and {len(facts) - 1} more" if len(facts) > 1 else ""
            return f"fact: {fact_text(self._index, int(facts[0]))}{more}"
        ids = self._index.phrases["phrase_id"].to_numpy()
        low, high = (pa.scalar(number, pa.uint64()) for number in sorted((ids[a], ids[b])))
        synonyms = self._index.synonyms
        same = pc.and_(pc.equal(synonyms["phrase_id"], low), pc.equal(synonyms["other_id"], high))
        return f"synonym: cosine {synonyms.filter(same)['cosine'][0].as_py():.2f}"
