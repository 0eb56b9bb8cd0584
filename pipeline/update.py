"""Append and delete: the index of a full build over the changed corpus, at the cost of the change.

What is new is extracted and embedded; vectors and synonym edges of the rest are taken from the index; the
graph and the precomputed pieces are made anew, as every edge weight takes part in them. The old index stays
readable until the new one takes its place in one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.artifact import MANIFEST, Index, Manifest, open_index
from hippoindex.pipeline.build import BuildResult, NothingToDo, Parts, Run, carry_out
from hippoindex.pipeline.config import Config, load_config
from hippoindex.pipeline.corpus import CorpusCounts
from hippoindex.pipeline.merge import Resolution, combine
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.remote import is_remote
from hippoindex.pipeline.resolve import ResolveStage

LOCAL = (
    "corpus.",
    "cluster.",
    "extract.",
    "synonyms.memory_bytes",
    "graph.memory_bytes",
    "precompute.memory_bytes",
)
"""Settings that a caller may give: where things are and how they run."""
OF_THE_INDEX = {"corpus": True, "precompute": True}
"""Settings that may differ from those of the index without changing what is in it."""
OF_THE_FILE = "file_sha256"
"""Tells the OpenIE file of ``extract.engine=import``: new passages come with a file of their own."""


def append(
    index: str | Path,
    corpus: Iterable[str],
    overrides: Iterable[str] = (),
    *,
    precompute: bool = True,
    strict: bool = False,
    monitor: Monitor | None = None,
    **values: Any,
) -> BuildResult | None:
    """Add documents to an index.

    The files of the index are then those of a full build over the old corpus and the new one, byte for byte;
    only ``manifest.json`` names the index it came from, and measures the recall among the new phrases.

    Parameters
    ----------
    index : str or Path
        Folder, or ``s3://bucket/prefix``.
    corpus : iterable of str
        Files, folders or patterns, as ``corpus.path``.
    overrides : iterable of str
        ``section.key=value`` settings that change nothing in an index: where its parts are made, and of what.
    precompute : bool
        Whether ``ppr/`` is computed anew. Without it, retrieval iterates over the graph until
        ``hippoindex precompute`` was run.
    strict, monitor
        As for :func:`hippoindex.pipeline.build.build_index`.
    **values : Any
        As for :func:`hippoindex.pipeline.config.load_config`.

    Returns
    -------
    BuildResult or None
        ``None`` if every document is in the index already: then nothing is changed.

    Raises
    ------
    ArtifactError
        If there is no index.
    UsageError
        If a setting would change what is in the index, or this version makes something else than it holds.
    InputError
        If the corpus cannot be read, or an id in it belongs to another document of the index.
    """
    old = open_index(index)
    config = _config(old, overrides, precompute, corpus__path=list(corpus), **values)

    def make(run: Run, folder: Path) -> Manifest:
        reader, documents = run.read(old.documents)
        if not documents:
            raise NothingToDo
        with run.executing(reader.counts.documents):
            added = run.extract(reader, documents)
            _check_stages(old, run.store.stages)
            run.store.quarantine.insert(0, _without(old.quarantine, "synonyms"))
            parts = _together(old, added, run)
            run.embed(parts, folder)
        return run.assemble(parts, folder, parent=_digest(old))

    try:
        return carry_out(config, _target(old), make, source=old, replace=True, strict=strict, monitor=monitor)
    except NothingToDo:
        return None


def delete(
    index: str | Path,
    doc_ids: Iterable[str],
    *,
    precompute: bool = True,
    strict: bool = False,
    monitor: Monitor | None = None,
    **values: Any,
) -> BuildResult:
    """Remove documents from an index.

    Its files are then those of a full build over the corpus without them, byte for byte; only
    ``manifest.json`` names the index it came from.

    Parameters
    ----------
    index : str or Path
        Folder, or ``s3://bucket/prefix``.
    doc_ids : iterable of str
        Ids of documents; where documents were chunked, all their passages go.
    precompute, strict, monitor, **values
        As for :func:`append`.

    Returns
    -------
    BuildResult

    Raises
    ------
    ArtifactError
        If there is no index.
    UsageError
        If an id is not in the index, or nothing would be left.
    """
    old = open_index(index)
    gone = pa.array(sorted(set(doc_ids)), pa.string())
    unknown = gone.filter(pc.invert(pc.is_in(gone, value_set=old.documents["doc_id"].combine_chunks())))
    if len(unknown):
        named = ", ".join(map(repr, unknown[:5].to_pylist()))
        raise UsageError(f"{len(unknown)} ids are not those of documents of {index}: {named}")
    if not len(gone):
        raise UsageError("There is nothing to delete: no id was given")
    if len(gone) == old.documents.num_rows:
        raise UsageError("No document would be left: remove the folder of the index instead")
    config = _config(old, (), precompute, **values)

    def make(run: Run, folder: Path) -> Manifest:
        with run.executing(old.n_passages):
            parts = _remainder(old, gone, run)
            run.embed(parts, folder)
        return run.assemble(parts, folder, parent=_digest(old))

    return carry_out(config, _target(old), make, source=old, replace=True, strict=strict, monitor=monitor)


def read_ids(file: Path) -> list[str]:
    """Read ids, one a line; blank lines are passed over.

    Parameters
    ----------
    file : Path

    Returns
    -------
    list of str

    Raises
    ------
    InputError
        If the file cannot be read or is not UTF-8.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read the ids in {file}: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _config(old: Index, overrides: Iterable[str], precompute: bool, **values: Any) -> Config:
    """Return the configuration of an index with settings that change nothing in it."""
    settings = list(overrides)
    for setting in settings:
        if not setting.startswith(LOCAL):
            raise UsageError(f"--set {setting}: an index keeps the settings that it was made with")
    config = load_config(None, settings, base=old.manifest.config, **values)
    stored, given = old.manifest.config, config.result_part()
    for section in given:
        if section not in OF_THE_INDEX and given[section] != stored.get(section):
            raise UsageError(f"{section}: an index keeps the settings that it was made with")
    pieces = config.precompute.model_copy(update={"enabled": config.precompute.enabled and precompute})
    return config.model_copy(update={"precompute": pieces})


def _check_stages(old: Index, stages: dict[str, dict[str, Any]]) -> None:
    """Refuse to mix what different code, models or prompts have made."""
    for name, made in stages.items():
        held = old.manifest.stages.get(name, {})
        for key in sorted(made.keys() | held.keys() - {OF_THE_FILE}):
            if key != OF_THE_FILE and made.get(key) != held.get(key):
                raise UsageError(
                    f"Stage {name!r} has {key} {made.get(key)}; the index was made with {held.get(key)}. "
                    "Build it anew"
                )


def _together(old: Index, new: Parts, run: Run) -> Parts:
    """Return the parts of an index and those of new documents after them."""
    held = _held(old)
    ids = pc.is_in(new.passages["passage_id"], value_set=old.passages["passage_id"].combine_chunks())
    if pc.any(ids, min_count=0).as_py():
        twice = new.passages["passage_id"].filter(ids)[0]
        raise InputError(
            f"The id {twice} of a new passage is also that of one in the index: rename its document"
        )
    passages = pa.concat_tables([held.passages, new.passages])
    read = {name: value + getattr(held.read, name) for name, value in asdict(new.read).items()}
    return Parts(
        documents=new.documents,  # those known are among them
        read=CorpusCounts(**read),
        passages_made=held.passages_made + new.passages_made,
        passages=passages,
        extractions=pa.concat_tables([held.extractions, new.extractions]),
        resolution=combine(
            held.resolution,
            new.resolution,
            passages["passage_id"].combine_chunks(),
            run.store.folder / "combined",
            memory_bytes=run.config.graph.memory_bytes,
        ),
    )


def _held(old: Index) -> Parts:
    counts = old.manifest.counts
    return Parts(
        documents=old.documents,
        read=CorpusCounts(
            files=counts.files,
            records=counts.records,
            documents=counts.documents,
            duplicates=counts.duplicates,
            quarantined=counts.quarantined_records,
        ),
        passages_made=counts.passages_made,
        passages=old.passages,
        extractions=old.extractions,
        resolution=Resolution(old.reader, counts.phrases, counts.facts, counts.passages, counts.triples),
    )


def _remainder(old: Index, gone: pa.Array, run: Run) -> Parts:
    """Return the parts of an index without some documents, resolved anew."""
    leaves = pc.is_in(old.passages["doc_id"].combine_chunks(), value_set=gone)
    stays = pc.invert(leaves)
    passages, extractions = old.passages.filter(stays), old.extractions.filter(stays)
    quarantine = _without(old.quarantine, "synonyms", "resolve")
    doc_ids = set(gone.to_pylist())
    of_gone = [_belongs(row_id, doc_ids) for row_id in quarantine["row_id"].to_pylist()]
    dropped = pc.and_(pa.array(of_gone, pa.bool_()), pc.not_equal(quarantine["stage"], "read"))
    lost = quarantine.filter(dropped)
    run.store.quarantine.append(quarantine.filter(pc.invert(dropped)))
    shards = run.store.write_slices(extractions, run.config.cluster.shard_passages)
    resolved = run.store.run(run.executor, ResolveStage(run.config.graph), "passages", shards)
    _check_stages(old, run.store.stages)
    run.store.stages = {name: made for name, made in old.manifest.stages.items() if name != "precompute"}
    held, documents = _held(old), old.documents
    mask = pc.is_in(documents["doc_id"].combine_chunks(), value_set=gone)
    records = pc.sum(documents["records"].filter(mask)).as_py()
    left = held.read
    return Parts(
        documents=documents.filter(pc.invert(mask)),
        read=CorpusCounts(
            files=left.files,
            records=left.records - records,
            documents=left.documents - len(gone),
            duplicates=left.duplicates - (records - len(gone)),
            quarantined=left.quarantined,
        ),
        passages_made=held.passages_made
        - int(np.sum(leaves.to_numpy(zero_copy_only=False)))
        - int(pc.sum(pc.equal(lost["kind"], "passage"), min_count=0).as_py()),
        passages=passages,
        extractions=extractions,
        resolution=run.merge(resolved, passages["passage_id"].combine_chunks()),
    )


def _belongs(row_id: str, doc_ids: set[str]) -> bool:
    """Whether a passage is of one of the documents: its id is theirs, or theirs and the chunk's number."""
    return row_id in doc_ids or row_id.rpartition("#")[0] in doc_ids


def _without(quarantine: pa.Table, *stages: str) -> pa.Table:
    """Leave out the rows of stages that see all passages again."""
    kept = pc.invert(pc.is_in(quarantine["stage"], value_set=pa.array(stages)))
    return quarantine.filter(kept).cast(schemas.QUARANTINE)


def _target(old: Index) -> str | Path:
    """Return what is to be replaced; a link to an index stays one."""
    return old.url if is_remote(old.url) else old.path.resolve()


def _digest(old: Index) -> str:
    """SHA-256 of the manifest, by which a descendant names this index."""
    return hashlib.sha256((old.path / MANIFEST).read_bytes()).hexdigest()
