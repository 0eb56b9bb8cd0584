"""All pairs of vectors with cosine >= threshold, at most ``max_neighbors`` per node."""

from hippoindex.kernels.simjoin.exact import exact
from hippoindex.kernels.simjoin.reference import Pairs, reference
from hippoindex.kernels.simjoin.spec import spec

__all__ = ["Pairs", "exact", "reference", "spec"]
