"""hippoindex: a corpus in, a HippoRAG index out, evaluation sets answered in bulk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hippoindex._version import __version__
from hippoindex.errors import HippoIndexError

if TYPE_CHECKING:
    from hippoindex.reader import Reader

__all__ = ["HippoIndexError", "__version__", "open"]


def open(path: str | Path) -> Reader:  # noqa: A001 - called as hippoindex.open, like gzip.open
    """Open an index for reading; this needs only numpy and pyarrow.

    Parameters
    ----------
    path : str or Path
        Folder of the index.

    Returns
    -------
    Reader
        Its tables as Arrow tables and its arrays as memory maps, by the names of ``docs/artifact.md``.

    Raises
    ------
    ArtifactError
        If there is no complete index of this schema version, or a file is missing, has another size, or lies
        outside the index.
    """
    from hippoindex.reader import open_reader

    return open_reader(path)
