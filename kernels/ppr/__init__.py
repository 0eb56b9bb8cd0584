"""Personalized PageRank over an undirected weighted graph.

``solve`` ranks nodes for many restarts: by ``push`` where restarts are sparse, by ``power`` where they are
dense. ``affine`` adds a dense restart that is affine in the query, precomputed. ``spec.backends`` holds what
is tested against ``reference`` (scipy, float64).
"""

from hippoindex.kernels.ppr import affine
from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.power import block_width, power, propagate
from hippoindex.kernels.ppr.push import Goal, Pusher, push
from hippoindex.kernels.ppr.reference import reference
from hippoindex.kernels.ppr.result import PPRResult, Ranked, SparseResult
from hippoindex.kernels.ppr.solve import ranked, solve
from hippoindex.kernels.ppr.spec import spec

__all__ = [
    "Goal",
    "Graph",
    "PPRResult",
    "Pusher",
    "Ranked",
    "SparseResult",
    "affine",
    "block_width",
    "power",
    "propagate",
    "push",
    "ranked",
    "reference",
    "solve",
    "spec",
]
