"""The ``ppr/`` folder of an index: what is solved once so that retrieval need not.

``transition.npy`` holds the cells of W D^-1, in the order of the graph's; ``z.npy`` and ``z1.npy`` hold the
passages' part of HippoRAG 2's dense restart, see :mod:`hippoindex.kernels.ppr.affine`. Columns are solved in
blocks, each written when it is done, so work that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from hippoindex.cluster.atomic import atomic_write
from hippoindex.errors import UsageError
from hippoindex.kernels.ppr import Graph, affine
from hippoindex.pipeline import artifact
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.config import Config, PrecomputeConfig, load_config
from hippoindex.pipeline.progress import Advance, Monitor
from hippoindex.pipeline.remote import is_remote
from hippoindex.pipeline.work import exclusive

log = structlog.get_logger("hippoindex")

VERSION = 1
MAX_COLUMNS = 64
"""Columns solved together; more gain nothing on a CPU."""
CHUNK_ROWS = 1 << 16


def precompute(
    folder: Path, config: PrecomputeConfig, damping: float, *, work: Path, advance: Advance
) -> dict[str, Any]:
    """Write ``ppr/`` into an index folder that holds ``graph/`` and ``vectors/passages.npy``.

    Parameters
    ----------
    folder : Path
    config : PrecomputeConfig
    damping : float
    work : Path
        Where blocks of columns are kept until they are complete.
    advance : callable
        Called with the number of columns that are done.

    Returns
    -------
    dict
        What the manifest says of the stage: version, settings, largest residual and number of iterations.

    Raises
    ------
    KernelError
        If the memory budget does not hold one column; the message says how much one needs.
    """
    graph = Graph(*(_load(folder / "graph" / f"{name}.npy") for name in ("indptr", "indices", "weights")))
    vectors = _load(folder / "vectors" / "passages.npy")
    blocks = work / _key(graph, vectors, damping, config.tolerance)
    blocks.mkdir(parents=True, exist_ok=True)
    _solve(graph, vectors, damping, config, blocks, advance)
    artifact.write_arrays(folder / "ppr", transition=graph.transition)
    _assemble(sorted(blocks.glob("*.npy")), folder / "ppr", vectors.shape, config.dtype)
    reports = [json.loads(file.read_text()) for file in sorted(blocks.glob("*.json"))]
    return {
        "version": VERSION,
        "damping": damping,
        "dtype": config.dtype,
        "tolerance": config.tolerance,
        "residual": max(report["residual"] for report in reports),
        "iterations": max(report["iterations"] for report in reports),
    }


def refresh(
    index: str | Path, overrides: Iterable[str] = (), *, monitor: Monitor | None = None
) -> dict[str, Any]:
    """Compute ``ppr/`` of an existing index anew, for another damping or type; the index is replaced at once.

    All other files stay as they are. Readers that have the index open keep the old one.

    Parameters
    ----------
    index : str or Path
        Folder, or ``s3://bucket/prefix``.
    overrides : iterable of str
        ``precompute.key=value`` and ``retrieve.damping=value`` settings in place of those stored.
    monitor : Monitor, optional

    Returns
    -------
    dict
        As :func:`precompute`.

    Raises
    ------
    ArtifactError
        If there is no index.
    UsageError
        If another setting is given.
    """
    opened = open_index(index)
    config = _changed(opened.manifest.config, overrides)
    target = opened.url if is_remote(opened.url) else opened.path.resolve()
    with exclusive(target, opened) as work:
        work.clear_parts()
        folder = work.assembled
        made = _fill(folder, opened, config, work.folder / "precompute", monitor or Monitor())
        work.publish(folder, replace=True)
        work.remove("precompute")
    return made


def _fill(
    folder: Path, opened: artifact.Index, config: Config, work: Path, monitor: Monitor
) -> dict[str, Any]:
    """Make the changed index of links to its files and of pieces computed anew."""
    manifest = opened.manifest
    for name in [*manifest.files, *artifact.TIMED]:
        if not name.startswith("ppr/") and (opened.path / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).hardlink_to((opened.path / name).resolve())
    columns = opened.vectors("passages").shape[1] + 1
    with monitor.stage("precompute", columns, "columns") as advance:
        made = precompute(folder, config.precompute, config.retrieve.damping, work=work, advance=advance)
    artifact.write_manifest(
        folder,
        **manifest.model_dump(exclude={"schema_version", "files", "config", "stages"}),
        config=manifest.config | config.model_dump(mode="json", include={"retrieve"}) | _part(config),
        stages=manifest.stages | {"precompute": made},
    )
    artifact.write_checksums(folder)
    return made


def _changed(stored: dict[str, Any], overrides: Iterable[str]) -> Config:
    settings = list(overrides)
    for setting in settings:
        if not setting.startswith(("precompute.", "retrieve.damping=")):
            raise UsageError(f"--set {setting}: only precompute.* and retrieve.damping are computed from")
    sections = {name: stored.get(name, {}) for name in ("precompute", "retrieve")}
    kept = [f"{s}.{key}={json.dumps(value)}" for s, part in sections.items() for key, value in part.items()]
    return load_config(overrides=[*kept, "precompute.enabled=true", *settings])


def _part(config: Config) -> dict[str, Any]:
    return {"precompute": config.result_part()["precompute"]}


def _solve(
    graph: Graph,
    vectors: NDArray[np.floating],
    damping: float,
    config: PrecomputeConfig,
    blocks: Path,
    advance: Advance,
) -> None:
    """Solve the columns that are not there yet; each block is a file named by its first column."""
    n_passages, dimension = vectors.shape
    done = sum(_load(file).shape[1] for file in blocks.glob("*.npy"))
    if done:
        log.info("columns found done", stage="precompute", done=done)
        advance(done)
    column_bytes = affine.precompute_bytes(graph.n_nodes, n_passages, 1)
    width = max(1, min(MAX_COLUMNS, config.memory_bytes // column_bytes))
    for block in affine.precompute(
        graph,
        vectors,
        graph.n_nodes - n_passages,
        damping,
        config.tolerance,
        block_columns=width,
        memory_bytes=config.memory_bytes,
        start=done,
    ):
        report = {"residual": float(block.residual.max()), "iterations": int(block.iterations.max())}
        (blocks / f"{block.first:06d}.json").write_text(json.dumps(report))
        with atomic_write(blocks / f"{block.first:06d}.npy") as file:  # last: with it the block is complete
            np.save(file, block.values, allow_pickle=False)
        advance(block.values.shape[1])
    if done <= dimension:
        log.info("passages precomputed", columns=dimension + 1, together=width)


def _assemble(blocks: list[Path], folder: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Join blocks of columns into ``z.npy`` and ``z1.npy``, some rows at a time."""
    columns = [_load(block) for block in blocks]
    n_passages, dimension = shape
    if not n_passages:
        artifact.write_arrays(folder, z=np.empty(shape, dtype=dtype), z1=np.empty(0, dtype=np.float32))
        return
    z = artifact.new_array(folder / "z.npy", shape, dtype)
    for start in range(0, n_passages, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        z[rows] = np.concatenate([block[rows] for block in columns], axis=1)[:, :dimension]
    z.flush()
    artifact.write_arrays(folder, z1=np.ascontiguousarray(columns[-1][:, -1]))


def _key(graph: Graph, vectors: NDArray[np.floating], damping: float, tolerance: float) -> str:
    """128-bit hex key of everything that decides a column."""
    digest = xxhash.xxh3_128(json.dumps([VERSION, damping, tolerance, *vectors.shape]).encode())
    for array in (graph.indptr, graph.indices, graph.weights, vectors):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _load(file: Path) -> NDArray:
    array: NDArray = np.load(file, mmap_mode="r", allow_pickle=False)
    return array
