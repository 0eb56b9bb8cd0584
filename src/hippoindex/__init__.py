"""hippoindex: a corpus in, a HippoRAG index out, evaluation sets answered in bulk."""

from hippoindex._version import __version__
from hippoindex.errors import HippoIndexError

__all__ = ["HippoIndexError", "__version__"]
