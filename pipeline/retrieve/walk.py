"""Walks over an index's graph, as scores of every passage."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import structlog
from numpy.typing import NDArray

from hippoindex.errors import UsageError
from hippoindex.kernels import ppr
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.config import RetrieveConfig
from hippoindex.pipeline.retrieve.base import min_max
from hippoindex.pipeline.retrieve.baselines import dense_scores

log = structlog.get_logger("hippoindex")

Scores = NDArray[np.float32]
EPSILON = 1e-8
"""Where pushes stop by default."""


def choose_solver(index: Index, config: RetrieveConfig) -> str:
    """Return how a restart with weight on every passage is walked: ``"push"`` or ``"power"``.

    Raises
    ------
    UsageError
        If ``push`` is asked for and the index does not hold the passages' part for this walk.
    """
    stored = index.precomputed_damping
    if not config.synonym_edges:
        lacking = "the passages' part of PPR is precomputed with synonym edges"
        remedy = "leave retrieve.solver at auto"
    elif stored == config.damping:
        return "power" if config.solver == "power" else "push"
    else:
        lacking = (
            f"{index.path} holds no precomputed part of PPR"
            if stored is None
            else f"{index.path} holds the precomputed part of PPR for damping {stored}, not {config.damping}"
        )
        remedy = f"hippoindex precompute {index.path} --set retrieve.damping={config.damping}"
    if config.solver == "push":
        raise UsageError(f"retrieve.solver=push: {lacking}. Run: {remedy}")
    if config.solver == "auto":
        log.info("PPR by power iteration", why=lacking, faster=remedy)
    return "power"


def sparse_solver(config: RetrieveConfig) -> str:
    """Return how a restart at few nodes is walked: it needs nothing precomputed."""
    return "power" if config.solver == "power" else "push"


def push_goal(config: RetrieveConfig) -> ppr.Goal:
    """Return where pushes stop."""
    return ppr.Goal(config.epsilon or EPSILON)


def solver_text(solver: str, config: RetrieveConfig) -> str:
    """Return how PPR was solved, with its accuracy."""
    reached = push_goal(config).epsilon if solver == "push" else config.tolerance
    return f"{solver} to {reached:g}"


def blocks(index: Index, n_queries: int, config: RetrieveConfig) -> list[slice]:
    """Return the blocks of questions whose walks fit into ``config.memory_bytes``."""
    width = max(ppr.block_width(index.graph.n_nodes, n_queries, config.memory_bytes), 1)
    return [slice(start, min(start + width, n_queries)) for start in range(0, n_queries, width)]


def walk_from_seeds_and_passages(
    index: Index,
    seeds: sp.csr_array,
    weights: NDArray[np.float64],
    vectors: NDArray[np.float32],
    config: RetrieveConfig,
    solver: str,
    cosines: Scores | None = None,
) -> Scores:
    """Return PPR of passages where every passage restarts with weight x min-max scaled cosine as well.

    Parameters
    ----------
    index : Index
    seeds : scipy.sparse.csr_array, shape (Q, N)
    weights : ndarray of float64, shape (Q,)
    vectors : ndarray of float32, shape (Q, d)
    config : RetrieveConfig
    solver : str
        See :func:`choose_solver`.
    cosines : ndarray of float32, shape (Q, passages), optional
        Those of the vectors and all passages, where the caller has them.

    Returns
    -------
    ndarray of float32, shape (Q, passages)
    """
    if solver == "push":
        pusher, epsilon = index.pusher(config.damping), push_goal(config).epsilon
        return ppr.affine.scores(pusher, index.dense_restart, vectors, weights, seeds, epsilon, cosines)
    restart = seeds.toarray().T.astype(np.float32)  # (N, Q)
    near = dense_scores(index, vectors) if cosines is None else cosines
    restart[index.n_phrases :] += (weights[:, None] * min_max(near)).T
    graph = index.walked_graph(synonyms=config.synonym_edges)
    return ppr.power(graph, restart, config.damping, config.tolerance).scores[index.n_phrases :].T


def walk_from_seeds(index: Index, seeds: sp.csr_array, config: RetrieveConfig) -> Scores:
    """Return PPR of passages over the whole graph for sparse restarts; a row without any gives zeros.

    Parameters
    ----------
    index : Index
    seeds : scipy.sparse.csr_array, shape (Q, N)
    config : RetrieveConfig

    Returns
    -------
    ndarray of float32, shape (Q, passages)
    """
    scores = np.zeros((seeds.shape[0], index.n_passages), dtype=np.float32)
    seeded = np.flatnonzero(np.diff(seeds.indptr))
    if not len(seeded):
        return scores
    if sparse_solver(config) == "power":
        graph = index.walked_graph(synonyms=config.synonym_edges)
        restart = seeds[seeded].toarray().T.astype(np.float32)
        walked = ppr.power(graph, restart, config.damping, config.tolerance).scores
        scores[seeded] = walked[index.n_phrases :].T
        return scores
    pusher = index.pusher(config.damping, synonyms=config.synonym_edges)
    pusher.add_scores(scores, seeded, seeds[seeded], push_goal(config).epsilon)
    return scores


def walk_phrases(index: Index, seeds: sp.csr_array, config: RetrieveConfig) -> Scores:
    """Return the sum of the scores of each passage's phrases, by a walk over phrases alone.

    Parameters
    ----------
    index : Index
    seeds : scipy.sparse.csr_array, shape (Q, phrases)
        No row is empty.
    config : RetrieveConfig
        ``config.walk`` says what takes the place of PPR; ``config.mentions`` how often a phrase counts.

    Returns
    -------
    ndarray of float32, shape (Q, passages)
    """
    holds = index.held if config.mentions == "once" else index.held_per_fact
    if config.walk == "ppr" and sparse_solver(config) == "power":
        graph = index.walked_graph(phrases_only=True, synonyms=config.synonym_edges)
        restart = seeds.toarray().T.astype(np.float32)
        dense: Scores = ppr.power(graph, restart, config.damping, config.tolerance).scores.T @ holds
        return dense
    walked = (
        _pushed_phrases(index, seeds, config) if config.walk == "ppr" else _unwalked(index, seeds, config)
    )
    return (walked @ holds).toarray()


def _pushed_phrases(index: Index, seeds: sp.csr_array, config: RetrieveConfig) -> sp.csr_array:
    pusher = index.pusher(config.damping, phrases_only=True, synonyms=config.synonym_edges)
    found = pusher.solve(seeds, push_goal(config))
    return sp.csr_array((found.scores.astype(np.float32), found.nodes, found.indptr), shape=seeds.shape)


def _unwalked(index: Index, seeds: sp.csr_array, config: RetrieveConfig) -> sp.csr_array:
    """Return the alternatives to PPR of HippoRAG's table 5: query nodes only, or with their neighbours.

    A neighbour of a seed gets half the least weight of the question's seeds, from each seed anew.
    """
    if config.walk == "seeds":
        return seeds.astype(np.float32)
    graph = index.walked_graph(phrases_only=True, synonyms=config.synonym_edges).matrix()
    joined: sp.csr_array = (seeds > 0).astype(np.float32) @ (graph > 0).astype(np.float32)
    least = np.array([seeds.data[a:b].min() for a, b in zip(seeds.indptr, seeds.indptr[1:], strict=False)])
    return sp.csr_array(seeds.astype(np.float32) + sp.diags_array(0.5 * least.astype(np.float32)) @ joined)
