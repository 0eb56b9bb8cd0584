"""Personalized PageRank over an undirected weighted graph.

``spec.backends`` holds what is registered: ``reference`` (scipy, float64) and ``power`` (numba, float32).
"""

from hippoindex.kernels.ppr.graph import Graph
from hippoindex.kernels.ppr.power import block_width, power
from hippoindex.kernels.ppr.reference import PPRResult, reference
from hippoindex.kernels.ppr.spec import spec

__all__ = ["Graph", "PPRResult", "block_width", "power", "reference", "spec"]
