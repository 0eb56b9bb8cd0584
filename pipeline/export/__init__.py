"""Writing an index for other programs.

Each format is one module. All go through the index in blocks, write nothing that differs between two runs on
the same index, and appear whole or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hippoindex.cluster.atomic import atomic_directory, atomic_write
from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.export import edge_table, faiss_files, graphml, hipporag, neo4j
from hippoindex.pipeline.progress import Advance, Monitor

FILES: dict[str, Callable[[Index, BinaryIO, Advance], None]] = {
    "graphml": graphml.write,
    "parquet-edges": edge_table.write,
}
FOLDERS: dict[str, Callable[[Index, Path, Advance], None]] = {
    "faiss": faiss_files.write,
    "hipporag": hipporag.write,
    "neo4j-csv": neo4j.write,
}


def export_index(
    path: str | Path,
    form: str,
    output: str | Path,
    *,
    llm_model: str | None = None,
    embedding_model: str | None = None,
    monitor: Monitor | None = None,
) -> dict[str, Any]:
    """Write an index in another format.

    Parameters
    ----------
    path : str or Path
        Folder of the index.
    form : str
        A key of :data:`FILES`, then ``output`` becomes a file, or of :data:`FOLDERS`.
    output : str or Path
        Must not exist, or be an empty folder where a folder is written.
    llm_model, embedding_model : str, optional
        ``hipporag`` only: the names under which HippoRAG will look for the export.
    monitor : Monitor, optional

    Returns
    -------
    dict
        ``format``, ``output``, and ``files``: path to bytes.

    Raises
    ------
    UsageError
        If the format is unknown or the output is taken.
    MissingPackageError
        If the format needs a package that is not installed.
    ArtifactError
        If there is no index.
    """
    folders = dict(FOLDERS)
    if form == "hipporag":
        folders[form] = functools.partial(
            hipporag.write, llm_model=llm_model, embedding_model=embedding_model
        )
    elif llm_model is not None or embedding_model is not None:
        raise UsageError(f"--llm-model and --embedding-model are for the format hipporag, not {form}")
    if form not in FILES and form not in folders:
        raise UsageError(f"There is no format {form!r}; there are {', '.join(sorted({*FILES, *folders}))}")
    index = open_index(path)
    target = _free(index, Path(output), folder=form in folders)
    with (monitor or Monitor()).stage("export", 0, "rows") as advance:
        if form in folders:
            with atomic_directory(target) as folder:
                folders[form](index, folder, advance)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(target) as file:
                FILES[form](index, file, advance)
    written = sorted(file for file in target.rglob("*") if file.is_file()) or [target]
    files = {
        file.relative_to(target).as_posix() if file != target else file.name: file.stat().st_size
        for file in written
    }
    return {"format": form, "output": str(target), "files": files}


def _free(index: Index, target: Path, *, folder: bool) -> Path:
    empty_folder = target.is_dir() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not (folder and empty_folder):
        raise UsageError(f"{target} exists already: choose another name")
    if target.resolve().is_relative_to(index.path.resolve()):
        raise UsageError(f"{target} lies inside the index, where nothing else may lie: choose another folder")
    return target
