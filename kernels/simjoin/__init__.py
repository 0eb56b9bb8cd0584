"""All pairs of vectors with cosine >= threshold, at most ``max_neighbors`` per node."""

from hippoindex.kernels.simjoin.exact import exact
from hippoindex.kernels.simjoin.ivf import ivf
from hippoindex.kernels.simjoin.join import JoinResult, join, stacked
from hippoindex.kernels.simjoin.lists import KeptLists
from hippoindex.kernels.simjoin.recall import Recall, measure_recall
from hippoindex.kernels.simjoin.reference import Pairs, reference
from hippoindex.kernels.simjoin.rows import normalised, unusable_rows
from hippoindex.kernels.simjoin.spec import spec

__all__ = [
    "JoinResult",
    "KeptLists",
    "Pairs",
    "Recall",
    "exact",
    "ivf",
    "join",
    "measure_recall",
    "normalised",
    "reference",
    "spec",
    "stacked",
    "unusable_rows",
]
