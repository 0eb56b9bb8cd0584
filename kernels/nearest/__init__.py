"""The rows of a matrix with the greatest products with a vector, for many vectors, and the least products."""

from hippoindex.kernels.nearest.codes import NearestRows
from hippoindex.kernels.nearest.reference import Nearest, reference
from hippoindex.kernels.nearest.spec import spec

__all__ = ["Nearest", "NearestRows", "reference", "spec"]
