"""Why a passage was found: what its score is made of, and the most probable paths to it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve import fusion
from hippoindex.pipeline.retrieve.base import QueryBatch, Ranking, Seeds, min_max
from hippoindex.pipeline.retrieve.baselines import dense_scores
from hippoindex.pipeline.retrieve.hipporag import HIPPORAG2, hipporag_seeds
from hippoindex.pipeline.retrieve.seeds import fact_text, origin_text
from hippoindex.pipeline.retrieve.walk import choose_solver, walk_from_seeds, walk_from_seeds_and_passages

NO_PREDECESSOR = -9999
EPSILON = 1e-9
"""Where the pushes behind contributions stop: fine enough for their sums to meet the scores."""
NEAR_PASSAGES = "all passages, by their cosine"
WALK_OF_LINKING = {"query-to-fact": "facts", "ner-to-node": "entities", "query-to-node": "phrases"}
"""What the one walk of ``hipporag2`` is called, by what it starts from."""


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
        "seed: fact ...", "seed: entity ..." or "seed: found passage" for the first step; else the facts, the
        synonym's cosine, or "mention".
    """

    node: str
    kind: str
    by: str


@dataclass(frozen=True)
class GraphPath:
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


@dataclass(frozen=True)
class Contribution:
    """What one place where a walk restarts adds to the probability of a passage.

    Attributes
    ----------
    walk : str
        "facts", "entities", "phrases" or "feedback".
    source : str
        A phrase, the id of a passage, or that every passage restarts.
    origin : str
        The fact or entity that led to the phrase; empty for passages.
    probability : float
    """

    walk: str
    source: str
    origin: str
    probability: float


@dataclass(frozen=True)
class Pair:
    """What a passage says of the question together with another one, see :class:`PassagePairs`.

    Attributes
    ----------
    share : float
        Of the question's words, weighed, that the two have; of those that the passage has where it has as
        much by itself.
    words : tuple of str
        Those of the passage.
    passage_id : str
        The other passage; empty where there is none.
    phrase : str
        Title of one of the two that the other holds; empty where there is none.
    passage_words : tuple of str
        What the other passage adds.
    """

    share: float
    words: tuple[str, ...]
    passage_id: str
    phrase: str
    passage_words: tuple[str, ...]

    def __str__(self) -> str:
        said = f"{self.share:.0%} of the question: {', '.join(self.words) or 'nothing'}"
        return f"{said}; with {self.passage_id}: {', '.join(self.passage_words)}" if self.passage_id else said


@dataclass(frozen=True)
class Explanation:
    """What the score of a passage is made of.

    Attributes
    ----------
    passage_id : str
    score : float
    terms : dict of str to float
        They sum to the score.
    probabilities : dict of str to float
        Of the passage in each walk.
    contributions : tuple of Contribution
        Those of each walk sum to its probability, the greatest first.
    paths : tuple of GraphPath
        The most probable path from the phrases of facts and entities, and from passages found first.
    pair : Pair or None
        What the term "pairs" comes from; ``None`` where there is no such term, or it is 0.
    """

    passage_id: str
    score: float
    terms: dict[str, float]
    probabilities: dict[str, float]
    contributions: tuple[Contribution, ...]
    paths: tuple[GraphPath, ...]
    pair: Pair | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        return str(self.paths[0]) if self.paths else NEAR_PASSAGES


class _Walk(NamedTuple):
    """One walk of one question: its restarts by source, and its passages' probabilities.

    Attributes
    ----------
    restarts : scipy.sparse.csr_array, shape (sources, N)
    sources, origins : sequence of str
    passage_weight : float
        Of the restart at every passage.
    probabilities : ndarray of float32, shape (passages ranked,)
    """

    restarts: sp.csr_array
    sources: Sequence[str]
    origins: Sequence[str]
    passage_weight: float
    probabilities: NDArray[np.float32]


def explain_ranking(
    index: Index, queries: QueryBatch, ranking: Ranking, method: str, config: RetrieveConfig
) -> list[list[Explanation]]:
    """Explain every passage of a ranking.

    Parameters
    ----------
    index : Index
    queries : QueryBatch
    ranking : Ranking
        Of these queries by this method and configuration.
    method : {"hipporag2", "hippoindex"}
    config : RetrieveConfig

    Returns
    -------
    list of list of Explanation
        For each question and passage.

    Raises
    ------
    UsageError
        If the method does not walk the whole graph from phrases.
    """
    explainer = Explainer(index, config.damping, synonyms=config.synonym_edges)
    if method == "hippoindex":
        return _explain_fusion(explainer, index, queries, ranking, config)
    design = HIPPORAG2.changed(config)
    if method != "hipporag2" or not design.passage_nodes or config.walk != "ppr":
        raise UsageError(
            f"{method} as it is set does not walk the whole graph; what can be explained is hipporag2 and "
            "hippoindex"
        )
    if config.ensemble_cosine is not None:
        raise UsageError("Averages with dense scores are not explained: set retrieve.ensemble_cosine=null")
    name = WALK_OF_LINKING[design.linking]
    explained = []
    for number, seeds in enumerate(hipporag_seeds(index, queries, config, design)):
        rows = ranking.rows[number]
        scores = ranking.scores[number].astype(np.float32)
        walk = _walk_of_seeds(index, seeds, config.passage_weight, scores)
        walks = {name: walk} if len(seeds.rows) else {}
        terms = {name if walks else "dense": scores}
        vector = queries.vectors[number]
        paths = [explainer.explain(seeds, rows)]
        explained.append(_explanations(index, rows, terms, walks, paths, vector, config))
    return explained


def _explain_fusion(
    explainer: Explainer, index: Index, queries: QueryBatch, ranking: Ranking, config: RetrieveConfig
) -> list[list[Explanation]]:
    config = fusion.with_epsilon(config)
    seeds = fusion.hippoindex_seeds(index, queries, config)
    explained = []
    for scored in fusion.score(index, queries, seeds, config):
        for place in range(len(scored.total)):
            number = scored.first + place
            rows = ranking.rows[number]
            terms = {name: values[place, rows] for name, values in scored.terms.items()}
            reached = {name: values[place, rows] for name, values in scored.walks.items()}
            facts = seeds.facts[number]
            weight = config.passage_weight or float(not len(facts.rows))  # as ``fusion.score`` has it
            walks = {"facts": _walk_of_seeds(index, facts, weight, reached["facts"])}
            if "entities" in reached:
                walks["entities"] = _walk_of_seeds(index, seeds.entities[number], 0.0, reached["entities"])
            paths = [explainer.explain(facts, rows)]
            if "feedback" in reached:
                starts = scored.feedback[place]
                walks["feedback"] = _walk_of_passages(index, starts, reached["feedback"])
                paths.append(explainer.explain(_as_seeds(index, starts), rows))
            vector = queries.vectors[number]
            found = _explanations(index, rows, terms, walks, paths, vector, config)
            explained.append(_with_pairs(index, queries.questions[number], rows, found))
    return explained


def _with_pairs(
    index: Index, question: str, rows: NDArray[np.int64], explanations: Sequence[Explanation]
) -> list[Explanation]:
    """Add what the term "pairs" comes from."""
    if not any(found.terms.get("pairs") for found in explanations):
        return list(explanations)
    names, phrases = index.passages["passage_id"], index.phrases["phrase"]
    found = []
    for explanation, told in zip(explanations, index.pairs.told(question, rows), strict=True):
        pair = Pair(
            told.share,
            told.words,
            "" if told.partner < 0 else names[told.partner].as_py(),
            "" if told.phrase < 0 else phrases[told.phrase].as_py(),
            told.partner_words,
        )
        found.append(replace(explanation, pair=pair if explanation.terms.get("pairs") else None))
    return found


def _walk_of_seeds(
    index: Index, seeds: Seeds, passage_weight: float, probabilities: NDArray[np.float32]
) -> _Walk:
    ends = np.arange(len(seeds.rows) + 1)
    restarts = sp.csr_array((seeds.weights, seeds.rows, ends), (len(seeds.rows), index.graph.n_nodes))
    phrases = index.phrases["phrase"].take(seeds.rows).to_pylist()
    origins = [origin_text(index, origin) for origin in seeds.origins]
    return _Walk(restarts, phrases, origins, passage_weight, probabilities)


def _walk_of_passages(
    index: Index, found: tuple[NDArray[np.int64], NDArray[np.float64]], probabilities: NDArray[np.float32]
) -> _Walk:
    rows, weights = found
    ends = np.arange(len(rows) + 1)
    starts = sp.csr_array((weights, rows, ends), (len(rows), index.n_passages))
    names = index.passages["passage_id"].take(rows).to_pylist()
    return _Walk(fusion.first_step(index, starts), names, [""] * len(rows), 0.0, probabilities)


def _as_seeds(index: Index, found: tuple[NDArray[np.int64], NDArray[np.float64]]) -> Seeds:
    rows, weights = found
    return Seeds(rows + index.n_phrases, weights, [""] * len(rows))


def _explanations(
    index: Index,
    rows: NDArray[np.int64],
    terms: Mapping[str, NDArray[np.floating]],
    walks: Mapping[str, _Walk],
    paths: Sequence[Sequence[GraphPath | None]],
    vector: NDArray[np.float32],
    config: RetrieveConfig,
) -> list[Explanation]:
    shares = {name: _shares(index, walk, rows, vector, config) for name, walk in walks.items()}
    names = index.passages["passage_id"].take(rows).to_pylist()
    explanations = []
    for place, name in enumerate(names):
        parts = {key: float(values[place]) for key, values in terms.items()}
        contributions = []
        for key, walk in walks.items():
            sources = [*zip(walk.sources, walk.origins, strict=True), (NEAR_PASSAGES, "")]
            found = [
                Contribution(key, source, origin, float(share))
                for (source, origin), share in zip(sources, shares[key][:, place], strict=True)
                if share > 0
            ]
            contributions += sorted(found, key=lambda part: -part.probability)
        probabilities = {key: float(walk.probabilities[place]) for key, walk in walks.items()}
        routes = [found[place] for found in paths]
        explanations.append(
            Explanation(
                name,
                sum(parts.values()),
                parts,
                probabilities,
                tuple(contributions),
                tuple(route for route in routes if route is not None),
            )
        )
    return explanations


def _shares(
    index: Index, walk: _Walk, rows: NDArray[np.int64], vector: NDArray[np.float32], config: RetrieveConfig
) -> NDArray[np.float64]:
    """Return what each source adds to the probability of each passage, shape (sources + 1, passages ranked).

    PPR is linear in its restart, up to the mass that walks lose on isolated nodes and that goes back to the
    restart: a part that restarts with mass m, of which l on isolated nodes, weighs m - damping x l. The last
    row is the part of all passages.
    """
    exact = config.model_copy(update={"epsilon": min(config.epsilon or EPSILON, EPSILON)})
    isolated = np.zeros(index.graph.n_nodes)
    isolated[index.walked_graph(synonyms=config.synonym_edges).isolated] = 1.0
    masses = np.asarray(walk.restarts.sum(axis=1), dtype=np.float64).ravel()
    masses -= config.damping * (walk.restarts @ isolated)
    reached = walk_from_seeds(index, walk.restarts, exact)[:, rows].astype(np.float64)
    near: NDArray[np.floating] = np.zeros((1, len(rows)))
    mass = 0.0
    if walk.passage_weight:
        scaled = walk.passage_weight * min_max(dense_scores(index, vector[None]))[0].astype(np.float64)
        mass = float(scaled.sum() - config.damping * (scaled @ isolated[index.n_phrases :]))
        none = sp.csr_array((1, index.graph.n_nodes), dtype=np.float64)
        weight = np.array([walk.passage_weight])
        solver = choose_solver(index, exact)
        near = walk_from_seeds_and_passages(index, none, weight, vector[None], exact, solver)[:, rows]
    weights = np.append(masses, mass)
    total = weights.sum()
    if not total:
        return np.zeros((len(weights), len(rows)))
    shares: NDArray[np.float64] = np.concatenate([reached, near]) * (weights / total)[:, None]
    return shares


class Explainer:
    """Finds paths in one index.

    The path that maximises ``seed share x product of damping x weight / degree`` is the shortest path under
    the negative logarithm of the steps' probabilities.

    Parameters
    ----------
    index : Index
    damping : float
    synonyms : bool
        Whether walks follow synonym edges.
    """

    def __init__(self, index: Index, damping: float, *, synonyms: bool = True) -> None:
        self._index = index
        graph = index.walked_graph(synonyms=synonyms)
        degrees = np.repeat(graph.degrees, np.diff(graph.indptr))
        costs = -np.log(damping * graph.weights / degrees)  # positive: weight <= degree, damping < 1
        shape = (graph.n_nodes, graph.n_nodes)
        self._costs = sp.csr_matrix((costs, graph.indices, graph.indptr), shape=shape)

    def explain(self, seeds: Seeds, passages: NDArray[np.integer]) -> list[GraphPath | None]:
        """Return the best path to each passage row; ``None`` where no seed reaches it.

        Seeds are nodes: phrases, or passages, from which no path leads to themselves.
        """
        if not len(seeds.rows):
            return [None] * len(passages)
        distance, before = dijkstra(self._costs, indices=seeds.rows, return_predecessors=True)  # (S, N)
        distance = distance - np.log(seeds.weights / seeds.weights.sum())[:, None]
        ends = self._index.n_phrases + np.asarray(passages)
        distance = np.where(seeds.rows[:, None] == ends, np.inf, distance[:, ends])  # (S, passages)
        return [self._path(int(row), seeds, distance[:, place], before) for place, row in enumerate(passages)]

    def _path(
        self, passage: int, seeds: Seeds, distance: NDArray[np.float64], before: NDArray[np.integer]
    ) -> GraphPath | None:
        best = int(distance.argmin())
        if not np.isfinite(distance[best]):
            return None
        nodes = [self._index.n_phrases + passage]
        while before[best, nodes[-1]] != NO_PREDECESSOR:
            nodes.append(int(before[best, nodes[-1]]))
        nodes.reverse()
        source = int(seeds.rows[best])
        is_phrase = source < self._index.n_phrases
        origin = origin_text(self._index, seeds.origins[best]) if is_phrase else "found passage"
        edges = [f"seed: {origin}"]
        edges += [self._edge(a, b) for a, b in itertools.pairwise(nodes)]
        steps = tuple(Step(*self._node(node), by) for node, by in zip(nodes, edges, strict=True))
        return GraphPath(steps[-1].node, float(np.exp(-distance[best])), steps)

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
