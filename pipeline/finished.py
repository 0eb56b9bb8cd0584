"""Is an index what a run would make? Then a rerun has nothing to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.chunk import ChunkStage
from hippoindex.pipeline.config import Config
from hippoindex.pipeline.corpus import CorpusReader, corpus_fingerprint
from hippoindex.pipeline.embed_stage import EmbedStage
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.resolve import ResolveStage
from hippoindex.pipeline.stage import Stage


def difference(index: Index, config: Config) -> str | None:
    """Say what tells an index from that of a full build, without making it; the corpus is read for it.

    Parameters
    ----------
    index : Index
    config : Config
        Of the build.

    Returns
    -------
    str or None
        ``None`` if they are the same.

    Raises
    ------
    InputError
        If the corpus cannot be read.
    """
    held, wanted = index.manifest.config, config.result_part()
    changed = sorted(key for key in held.keys() | wanted.keys() if held.get(key) != wanted.get(key))
    if changed:
        return f"made with other settings ({', '.join(changed)})"
    for stage in _stages(config):
        description = json.loads(json.dumps({"version": stage.version, **stage.key_part()}))
        if index.manifest.stages.get(stage.name) != description:
            return f"made by another version or model of the stage {stage.name!r}"
    return _difference_of_corpora(index, CorpusReader(config.corpus))


def _stages(config: Config) -> Iterator[Stage]:
    chunk = config.chunk
    if chunk.max_tokens is not None:
        yield ChunkStage(chunk.max_tokens, chunk.overlap_tokens, config.embed)
    yield ExtractStage(config.extract)
    yield ResolveStage(config.graph)
    yield EmbedStage(config.embed)


def _difference_of_corpora(index: Index, reader: CorpusReader) -> str | None:
    documents = reader.read_through()
    counts: Any = index.manifest.counts
    held = (counts.records, counts.duplicates, counts.quarantined_records)
    read = (reader.counts.records, reader.counts.duplicates, reader.counts.quarantined)
    if held == read and corpus_fingerprint(documents) == index.manifest.corpus_fingerprint:
        return None
    return f"made of another corpus ({counts.documents} documents, now {reader.counts.documents})"
