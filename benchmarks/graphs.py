"""Random graphs for the benchmark of Personalized PageRank, seeded, in little memory.

Phrases are the first nodes and passages the last, as in an index. Edges may repeat and may be self-loops:
``Graph.from_edges`` sums the ones and drops the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hippoindex.kernels.ppr import Graph

PASSAGE_SHARE = 0.3
EXPONENT = 2.5
HEAD = 20.0
"""Ranks begin here, which limits the largest degree: to about 0.9 % of the nodes for a million of them."""
COMMUNITY_NODES = 200
INSIDE = 0.8
DRAWN = 1.003
DRAWN_IN_COMMUNITIES = 1.27
"""Edges drawn for every one wanted; the rest are repetitions, mostly between the largest nodes."""
CHUNK_EDGES = 1 << 22

PHRASES, PASSAGES = 85_288, 11_656
FACT_EDGES, SYNONYM_EDGES, PASSAGE_EDGES = 140_830, 1_125_951, 132_586
"""What HippoRAG's authors published of their graph of MuSiQue: scale 1."""
POPULARITY_EXPONENT, POPULARITY_HEAD = 2.1, 1.0
CLUSTER_DENSITY = 0.9
FACT_WEIGHT, PASSAGE_WEIGHT = 2.0, 1.0
"""HippoRAG stores fact and synonym edges in both directions and passage edges once, see docs/artifact.md."""


class Edges(NamedTuple):
    """Undirected edges and where passages begin.

    Attributes
    ----------
    n_nodes, first_passage : int
    sources, targets : ndarray of int32, shape (M,)
    weights : ndarray of float32, shape (M,)
    """

    n_nodes: int
    first_passage: int
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]

    def graph(self) -> Graph:
        return Graph.from_edges(self.n_nodes, self.sources, self.targets, self.weights)


def power_law(n_nodes: int, edges_per_node: int = 10, *, communities: bool = False, seed: int = 0) -> Edges:
    """Draw a Chung-Lu graph whose degrees follow a power law with exponent 2.5.

    Both ends of an edge are drawn with probability proportional to a node's expected degree. With
    ``communities`` the second end of 80 % of the edges is then replaced by its counterpart in the community
    of the first: nodes of about the same expected degree, one for each community of 200.

    Raises
    ------
    ValueError
        If the nodes do not fill communities.
    """
    n_communities = n_nodes // COMMUNITY_NODES
    if communities and n_communities * COMMUNITY_NODES != n_nodes:
        raise ValueError(f"{n_nodes} nodes are no multiple of the community size, {COMMUNITY_NODES}")
    rng = np.random.default_rng(seed)
    node_of_rank = rng.permutation(n_nodes).astype(np.int32)
    n_edges = round(n_nodes * edges_per_node * (DRAWN_IN_COMMUNITIES if communities else DRAWN))
    sources, targets = np.empty(n_edges, np.int32), np.empty(n_edges, np.int32)
    weights = np.empty(n_edges, np.float32)
    for start in range(0, n_edges, CHUNK_EDGES):
        part = slice(start, min(start + CHUNK_EDGES, n_edges))
        a, b = (ranks(rng, part.stop - start, n_nodes) for _ in range(2))
        if communities:
            moved = b // n_communities * n_communities + a % n_communities
            b = np.where(rng.random(len(b)) < INSIDE, moved, b)
        sources[part], targets[part] = node_of_rank[a], node_of_rank[b]
        weights[part] = _weights(rng, len(a))
    return Edges(n_nodes, n_nodes - int(PASSAGE_SHARE * n_nodes), sources, targets, weights)


def ranks(
    rng: np.random.Generator, count: int, n: int, exponent: float = EXPONENT, head: float = HEAD
) -> NDArray[np.int32]:
    r"""Draw ranks 0 .. n - 1 with :math:`P(i) \propto \int_i^{i+1} (x + h)^{-1/(\gamma - 1)} dx`.

    Expected degrees that fall with the rank like this have a power law with exponent :math:`\gamma`. The
    integral has a closed inverse, so no table is needed.
    """
    power = 1.0 - 1.0 / (exponent - 1.0)
    least, greatest = head**power, (n + head) ** power
    drawn = (least + (greatest - least) * rng.random(count)) ** (1.0 / power) - head
    return np.clip(drawn, 0, n - 1).astype(np.int32)


def _weights(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Draw weights of both kinds that an index has: cosines from 0.8 and counts from 1 to 3."""
    cosines = rng.uniform(0.8, 1.0, count)
    return np.where(rng.random(count) < 0.5, cosines, rng.integers(1, 4, count)).astype(np.float32)


def phrase_graph(scale: float = 1.0, seed: int = 0) -> Edges:
    """Draw a graph with the counts that HippoRAG published for MuSiQue, times ``scale``.

    Every phrase stands in one passage, popular ones by a power law in more; facts join phrases of one
    passage; synonyms are clusters of phrases in which about nine pairs of ten are joined. Cluster sizes are
    geometric, with the mean at which that makes the number of synonym edges. Edges come in this order.
    """
    rng = np.random.default_rng(seed)
    n_phrases, n_passages = int(PHRASES * scale), int(PASSAGES * scale)
    n_facts, n_mentions = int(FACT_EDGES * scale), int(PASSAGE_EDGES * scale)
    home = rng.integers(0, n_passages, n_phrases)
    again = ranks(rng, n_mentions - n_phrases, n_phrases, POPULARITY_EXPONENT, POPULARITY_HEAD)
    mentioned = np.concatenate([np.arange(n_phrases), rng.permutation(n_phrases)[again]])
    mentioning = np.concatenate([home, rng.integers(0, n_passages, len(again))])
    subjects, objects = _facts(rng, home, n_facts)
    left, right = _synonyms(rng, n_phrases, int(SYNONYM_EDGES * scale))
    weights = np.concatenate(
        [
            np.full(n_mentions, PASSAGE_WEIGHT),
            np.full(len(subjects), FACT_WEIGHT),
            FACT_WEIGHT * rng.uniform(0.8, 1.0, len(left)),
        ]
    )
    return Edges(
        n_phrases + n_passages,
        n_phrases,
        np.concatenate([mentioned, subjects, left]).astype(np.int32),
        np.concatenate([mentioning + n_phrases, objects, right]).astype(np.int32),
        weights.astype(np.float32),
    )


def _facts(
    rng: np.random.Generator, home: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join phrases with others of their home passage."""
    order = np.argsort(home, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sizes = np.bincount(home)
    first = np.cumsum(sizes) - sizes
    companions = np.flatnonzero(sizes[home] > 1)
    subjects = rng.choice(companions, count)
    steps = rng.integers(1, sizes[home[subjects]])
    start = first[home[subjects]]
    objects = order[start + (place[subjects] - start + steps) % sizes[home[subjects]]]
    return subjects, objects


def _synonyms(
    rng: np.random.Generator, n_phrases: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join so many pairs of phrases within clusters, or all pairs where there are fewer."""
    mean = 1.0 + SYNONYM_EDGES / (CLUSTER_DENSITY * PHRASES)  # geometric: E[s (s - 1) / 2] / E[s] = mean - 1
    ends = np.cumsum(rng.geometric(1.0 / mean, size=n_phrases))
    end = np.minimum(ends[np.searchsorted(ends, np.arange(n_phrases), side="right")], n_phrases)
    later = end - 1 - np.arange(n_phrases)  # members of the cluster after each one
    left = np.repeat(np.arange(n_phrases), later)
    right = left + 1 + np.arange(len(left)) - np.repeat(np.cumsum(later) - later, later)
    kept = rng.permutation(len(left))[:count]
    phrases = rng.permutation(n_phrases)
    return phrases[left[kept]], phrases[right[kept]]


def save(graph: Graph, folder: Path) -> None:
    """Write the arrays of a graph, which :func:`load` maps."""
    for name in ("indptr", "indices", "weights"):
        np.save(folder / f"{name}.npy", getattr(graph, name))


def load(folder: Path) -> Graph:
    """Return a graph on memory-mapped files."""
    return Graph(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices", "weights"))
    )
