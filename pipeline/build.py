"""The main job: read, chunk, extract, resolve, embed, synonyms, graph, publish.

Sharded stages run through an executor; what must see everything at once (numbering, the similarity join, the
graph) runs here on arrays. The index is assembled in the work folder and appears whole.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from numpy.typing import NDArray

from hippoindex import __version__
from hippoindex.cluster.executor import Executor, choose_executor
from hippoindex.cluster.storage import open_storage
from hippoindex.cluster.usage import PeakMemory, machine
from hippoindex.errors import InputError, ThresholdError, UsageError
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.chunk import ChunkStage
from hippoindex.pipeline.config import Config
from hippoindex.pipeline.corpus import CorpusCounts, CorpusReader, Document, corpus_fingerprint
from hippoindex.pipeline.embed_stage import TEXT, EmbedStage
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.finished import difference
from hippoindex.pipeline.graph import EdgeCounts, build_graph
from hippoindex.pipeline.llm.accounting import LiveUsage, language_model_stats, stage_usage
from hippoindex.pipeline.merge import Resolution, merge
from hippoindex.pipeline.overlap import meanwhile, on_other_devices
from hippoindex.pipeline.precompute import precompute
from hippoindex.pipeline.preflight import preflight
from hippoindex.pipeline.progress import Advance, Monitor
from hippoindex.pipeline.remote import is_remote
from hippoindex.pipeline.report import write_report
from hippoindex.pipeline.resolve import ResolveStage
from hippoindex.pipeline.shards import Shard, ShardStore, column
from hippoindex.pipeline.stage import joined, quarantine_table
from hippoindex.pipeline.synonyms import find_synonyms, known_pairs, recall_shortfall
from hippoindex.pipeline.titles import title_rows
from hippoindex.pipeline.words import VERSION as WORDS_VERSION
from hippoindex.pipeline.words import write_words
from hippoindex.pipeline.work import exclusive, work_url

log = structlog.get_logger("hippoindex")

MIN_SLASHES = 3
"""Of an S3 URL that names more than a bucket."""

RESOLUTION = "resolution"
"""Folder of the work folder for what was merged."""
STAGES = ("read", "chunk", "extract", "resolve", "synonyms")
"""Stages that quarantine, in their order."""


class NothingToDo(Exception):  # noqa: N818 - no error, but a reason to stop
    """A run has found that the index is as it should be."""


@dataclass(frozen=True)
class BuildResult:
    """What a finished run made: where it is, its manifest, and the content of ``stats.json``.

    ``changed`` is false if it was there already.
    """

    path: str | Path
    manifest: artifact.Manifest
    stats: dict[str, Any]
    changed: bool = True


def build_index(
    config: Config, *, overwrite: bool = False, strict: bool = False, monitor: Monitor | None = None
) -> BuildResult:
    """Build an index of a corpus; one that is at ``output`` and is what this would make stays as it is.

    Parameters
    ----------
    config : Config
        ``corpus.path`` and ``output`` must be set.
    overwrite : bool
        Whether an index that is at ``output`` may be replaced; it stays readable until the new one is whole.
    strict : bool
        Whether a recall of synonyms below ``synonyms.target_recall`` is an error. The index is there then.
    monitor : Monitor, optional
        Shows progress and keeps the times.

    Returns
    -------
    BuildResult

    Raises
    ------
    UsageError
        If a setting is missing, or ``output`` is taken by something else.
    InputError
        If the corpus cannot be read or holds no passage.
    ThresholdError
        If more than ``max_quarantine_rate`` was quarantined; what was done is kept for the next run. If
        ``strict``, and too few synonyms were found.
    """
    output = _check_output(config)
    if _holds_index(output) and not overwrite:
        return _finished(config, output)
    preflight(config)
    return carry_out(config, output, Run.build, replace=overwrite, strict=strict, monitor=monitor)


def carry_out(
    config: Config,
    output: str | Path,
    make: Callable[[Run, Path], artifact.Manifest],
    *,
    source: artifact.Index | None = None,
    replace: bool,
    strict: bool = False,
    monitor: Monitor | None = None,
) -> BuildResult:
    """Have an index made in the work beside ``output`` and publish it there in one step.

    Meanwhile no other run can work on this output.

    Parameters
    ----------
    config : Config
    output : str or Path
        Folder or S3 prefix.
    make : callable
        ``make(run, folder)`` fills an empty folder and returns its manifest, or raises
        :class:`NothingToDo`.
    source : Index, optional
        See :class:`Run`.
    replace, strict, monitor
        As for :func:`build_index`; ``replace`` is its ``overwrite``.

    Returns
    -------
    BuildResult

    Raises
    ------
    NothingToDo
        If ``make`` did; nothing is left of the run.
    LeaseHeldError
        If another run works on this output.
    LeaseLostError
        If another run took over because this one gave no sign of life; nothing is published then.
    UsageError
        If ``source`` is not what is at its path any more.
    ThresholdError
        If ``strict``, and too few synonyms were found; the index is there then.
    """
    with exclusive(output, source) as work:
        work.clear_parts()
        assembled = work.assembled
        run = Run(config, ShardStore(work.storage, work.folder, monitor or Monitor()), source)
        started = datetime.now(UTC)
        try:
            with PeakMemory() as memory:
                manifest = make(run, assembled)
        except NothingToDo:
            work.remove()
            raise
        stats = run.stats(manifest, started, memory.peak_bytes)
        artifact.write_json(assembled / "stats.json", stats)
        write_report(assembled / "report.html", manifest, stats)
        artifact.write_checksums(assembled)
        work.publish(assembled, replace=replace)
        work.remove()
    shortfall = recall_shortfall(manifest.stages["synonyms"], config.synonyms)
    if strict and shortfall is not None:
        raise ThresholdError(f"{output} is built, but {shortfall}")
    return BuildResult(output, manifest, stats)


def _check_output(config: Config) -> str | Path:
    """Return where the index is to be, after making sure that it can be there."""
    if not config.corpus.path:
        raise UsageError("No corpus: give --corpus PATH or set corpus.path")
    if not config.output:
        raise UsageError("No output: give --output DIR or set output")
    if is_remote(config.output):
        url = config.output.rstrip("/")
        if url.count("/") < MIN_SLASHES:
            raise UsageError(f"--output {url} names a whole bucket; give s3://bucket/prefix")
        return url
    output = Path(config.output)
    if output.name in {"", ".."}:
        raise UsageError(f"--output {config.output!r} does not name a folder of its own")
    if output.is_file():
        raise UsageError(f"{output} is a file; --output names a folder")
    if output.is_dir() and any(output.iterdir()) and not _holds_index(output):
        raise UsageError(f"{output} is neither empty nor an index: choose another folder")
    return output


def _holds_index(output: str | Path) -> bool:
    return open_storage(output).exists(artifact.MANIFEST)


def _finished(config: Config, output: str | Path) -> BuildResult:
    """Return the index at ``output`` if it is what this run would make.

    Raises
    ------
    UsageError
        If it is not.
    """
    index = artifact.open_index(output)
    other = difference(index, config)
    if other is not None:
        raise UsageError(f"{output} is an index already, {other}: choose another output, or give --overwrite")
    log.info("the index is there, of this corpus and these settings: nothing is done", index=str(output))
    if next(open_storage(work_url(output)).entries(), None) is not None:
        with exclusive(output) as work:  # of a run that was killed between its last two steps
            work.remove()
    stats = index.path / "stats.json"
    held = json.loads(stats.read_text(encoding="utf-8")) if stats.is_file() else {}
    return BuildResult(output, index.manifest, held, changed=False)


@dataclass(frozen=True)
class Parts:
    """What an index is assembled from, in passage order.

    Attributes
    ----------
    documents : pyarrow.Table
        ``schemas.DOCUMENT``.
    read : CorpusCounts
    passages_made : int
        Those quarantined included.
    passages : pyarrow.Table
        ``schemas.PASSAGE``.
    extractions : pyarrow.Table
        ``schemas.EXTRACTION``, row by row those of the passages.
    resolution : Resolution
    """

    documents: pa.Table
    read: CorpusCounts
    passages_made: int
    passages: pa.Table
    extractions: pa.Table
    resolution: Resolution


class Run:
    """One run: its configuration, its shards, and the executor it has chosen.

    Parameters
    ----------
    config : Config
    store : ShardStore
    source : Index, optional
        Vectors and synonym edges that it holds are taken from it.
    """

    def __init__(self, config: Config, store: ShardStore, source: artifact.Index | None = None) -> None:
        self.config = config
        self.store = store
        self.source = source
        self.executor: Executor
        self.effort: dict[str, Any]

    @contextmanager
    def executing(self, passages: int) -> Iterator[None]:
        """Choose an executor for so many passages and keep it open."""
        cluster = self.config.cluster
        with choose_executor(
            cluster.executor,
            address=cluster.address,
            workers=cluster.workers,
            passages=passages,
            limits=cluster.limits(),
        ) as self.executor:
            yield

    def build(self, folder: Path) -> artifact.Manifest:
        """Do the whole job into an empty folder."""
        reader, documents = self.read()
        with self.executing(reader.counts.documents):
            parts = self.extract(reader, documents)
            self.embed(parts, folder)
        return self.assemble(parts, folder)

    def assemble(self, parts: Parts, folder: Path, parent: str | None = None) -> artifact.Manifest:
        """Connect and write what was extracted and embedded; no executor is needed for it."""
        edges = self._connect(parts, folder)
        self._precompute(folder)
        with self.store.monitor.stage("words", parts.passages.num_rows, "passages") as advance:
            places = self._places("passages", parts.passages["passage_id"])
            write_words(parts.passages, folder, advance, self.source, places)
        self.store.stages["words"] = {"version": WORDS_VERSION}
        with self._stage("publish", "files") as advance:
            quarantine = in_stage_order(self.store.all_quarantine())
            _write_tables(parts, quarantine, folder)
            manifest = artifact.write_manifest(
                folder,
                generator=f"hippoindex {__version__}",
                corpus_fingerprint=corpus_fingerprint(parts.documents),
                parent=parent,
                config=self.config.result_part(),
                stages=self.store.stages,
                counts=_counts(parts, quarantine, edges),
            )
            advance(len(manifest.files))
        return manifest

    def stats(self, manifest: artifact.Manifest, started: datetime, peak_memory_bytes: int) -> dict[str, Any]:
        """Return what ``stats.json`` holds: all that differs between two runs on the same input."""
        seconds_s = (datetime.now(UTC) - started).total_seconds()
        return {
            "started_at": started.isoformat(timespec="seconds"),
            "seconds_s": round(seconds_s, 3),
            "passages_per_s": round(manifest.counts.passages / seconds_s, 2),
            "peak_memory_bytes": peak_memory_bytes,
            "stages": [
                {
                    **asdict(time),
                    "items_per_s": round(time.items / max(time.seconds_s, 1e-9), 2),
                    **stage_usage(self.store.storage, time.name),
                }
                for time in self.store.monitor.times
            ],
            **self.effort,
            **language_model_stats(self.config.extract, self.store.storage),
            "executor": self.executor.name,
            "workers": self.executor.workers,
            "machine": dict(machine()),
            "corpus": list(self.config.corpus.path),
        }

    def _stage(self, name: str, unit: str) -> AbstractContextManager[Advance]:
        return self.store.monitor.stage(name, 0, unit)

    def read(self, known: pa.Table | None = None) -> tuple[CorpusReader, list[Shard]]:
        """Read the corpus into shards of documents.

        Parameters
        ----------
        known : pyarrow.Table, optional
            Documents that count as read before, ``schemas.DOCUMENT``.

        Raises
        ------
        InputError
            If the corpus cannot be read or nothing is in it.
        """
        reader = CorpusReader(self.config.corpus, known)
        with self._stage("read", "records") as advance:
            rows = (_whole_document(document) for document in reader)
            size = self.config.cluster.shard_passages
            documents = self.store.write_rows(rows, schemas.PASSAGE, size)
            advance(reader.counts.records)
        self.store.quarantine.append(quarantine_table(reader.quarantine))
        self._check_quarantine("records", reader.counts.quarantined, reader.counts.records)
        if not documents and not reader.counts.duplicates:
            raise InputError(f"{', '.join(self.config.corpus.path)}: there is no passage in it")
        return reader, documents

    def extract(self, reader: CorpusReader, documents: list[Shard]) -> Parts:
        """Chunk, extract and resolve the documents that were read."""
        made = self._chunk(documents)
        passages, extractions = self._extract(made)
        stage = ResolveStage(self.config.graph)
        resolved = self.store.run(self.executor, stage, "passages", extractions)
        return Parts(
            documents=reader.documents(_read_documents(documents)),
            read=reader.counts,
            passages_made=_n_rows(made),
            passages=self._gather("passages", passages),
            extractions=self._gather("extractions", extractions),
            resolution=self.merge(resolved, column(passages, "passage_id")),
        )

    def merge(self, resolved: list[Shard], passage_ids: pa.Array) -> Resolution:
        """Give numbers to what was resolved; it is written into the work folder."""
        shards, budget = [shard.path for shard in resolved], self.config.graph.memory_bytes
        return merge(shards, passage_ids, self.store.folder / RESOLUTION, memory_bytes=budget)

    def _gather(self, kind: str, shards: list[Shard]) -> pa.Table:
        """Return all rows of shards, mapped from one file: there may be more shards than can be mapped."""
        return joined((shard.read() for shard in shards), self.store.folder / "gathered" / f"{kind}.arrow")

    def _chunk(self, documents: list[Shard]) -> list[Shard]:
        chunk = self.config.chunk
        if chunk.max_tokens is None:
            return documents
        stage = ChunkStage(chunk.max_tokens, chunk.overlap_tokens, self.config.embed)
        made = self.store.run(self.executor, stage, "documents", documents)
        ids = column(made, "passage_id")
        counted = pc.value_counts(ids)
        twice = counted.filter(pc.greater(counted.field("counts"), 1))
        if len(twice):
            raise InputError(
                f"The id {twice[0]['values']} of a chunk is also a document's: rename that document"
            )
        return made

    def _extract(self, made: list[Shard]) -> tuple[list[Shard], list[Shard]]:
        """Extract; return the shards of the passages that are kept, and of what was found in them."""
        workers = max(1, min(self.executor.workers, len(made)))
        storage, config = self.store.storage, self.config.extract
        stage = ExtractStage(config, workers, usage=storage)
        note = LiveUsage(storage, stage.name) if config.engine in ("openai", "vllm") else None
        with self._embedding_meanwhile(made):
            extractions = self.store.run(self.executor, stage, "passages", made, note)
        kept = [self._keep(*pair) for pair in zip(made, extractions, strict=True)]
        self._check_quarantine("passages", _n_rows(made) - _n_rows(kept), _n_rows(made))
        missing = column(extractions, "missing")
        if pc.all(missing, min_count=1).as_py():
            raise InputError(
                f"{self.config.extract.path}: none of its passages is in the corpus. Passages are matched by "
                "their text; is this the extraction of another corpus?"
            )
        return kept, extractions

    @contextmanager
    def _embedding_meanwhile(self, made: list[Shard]) -> Iterator[None]:
        """Embed passages while they are extracted, as far as that gets, if it takes nothing from it.

        They are cut into the same shards as by :meth:`embed`, but for those that lose a passage.
        """
        if not (self.config.cluster.overlap and on_other_devices(self.config.extract, self.config.embed)):
            yield
            return
        stage = EmbedStage(self.config.embed)
        shards = self._passage_shards(texts for shard in made for texts in _passage_texts(shard.read()))
        with meanwhile(stage, self.store.pending(stage, shards)) as done:
            yield
        log.info("embedded during extraction", shards=len(done))

    def _passage_shards(self, texts: Iterable[pa.Array]) -> Iterator[Shard]:
        """Write texts of passages as shards that end where the shards of passages end."""
        for piece in texts:
            table = pa.table([piece], schema=TEXT)
            yield from self.store.write_slices(table, self.config.cluster.shard_passages)

    def _keep(self, passages: Shard, extraction: Shard) -> Shard:
        """Leave out the passages of a shard that could not be extracted."""
        if passages.n_rows == extraction.n_rows:
            return passages
        table, ids = passages.read(), column([extraction], "passage_id")
        return self.store.write(table.filter(pc.is_in(table["passage_id"], value_set=ids)))

    def embed(self, parts: Parts, folder: Path) -> None:
        """Write the vectors of passages, phrases and facts; what the source does not hold is embedded."""
        phrases = parts.resolution.phrases
        texts: dict[str, tuple[pa.ChunkedArray, Iterable[pa.Array]]] = {
            "passages": (parts.passages["passage_id"], _passage_texts(parts.passages)),
            "phrases": (phrases["phrase_id"], phrases["phrase"].chunks),
            "facts": (parts.resolution.fact_ids, parts.resolution.fact_texts()),
        }
        stage = EmbedStage(self.config.embed, usage=self.store.storage)
        places = {kind: self._places(kind, ids) for kind, (ids, _) in texts.items()}
        new = {kind: _chosen(values, places[kind] < 0) for kind, (_, values) in texts.items()}
        inputs = {"passages": list(self._passage_shards(new["passages"]))}
        for kind in ("phrases", "facts"):
            inputs[kind] = self.store.write_column(new[kind], TEXT, self.config.cluster.shard_texts)
        shards = iter(
            self.store.run(self.executor, stage, "texts", [s for kind in inputs for s in inputs[kind]])
        )
        for kind, part in inputs.items():
            artifact.write_vectors(
                folder / "vectors" / f"{kind}.npy",
                (shard.read() for shard in itertools.islice(shards, len(part))),
                stage.dimension,
                self.config.embed.dtype,
                places[kind],
                None if self.source is None else self.source.vectors(kind),
            )

    def _places(self, kind: str, ids: pa.ChunkedArray) -> NDArray[np.int64]:
        """Return the row in the source of every row, -1 where it has none, shape (rows,)."""
        if self.source is None:
            return np.full(len(ids), -1)
        name = f"{kind.removesuffix('s')}_id"
        held = self.source.reader.table(kind, [name])[name]
        return pc.fill_null(pc.index_in(ids, value_set=held), -1).to_numpy().astype(np.int64)

    def _connect(self, parts: Parts, folder: Path) -> EdgeCounts:
        """Find the synonym edges, build the graph, and write both."""
        resolution, phrases = parts.resolution, parts.resolution.phrases
        with self.store.monitor.stage("synonyms", len(phrases), "phrases") as advance:
            file, config = folder / "vectors" / "phrases.npy", self.config.synonyms
            known = None if self.source is None else known_pairs(self.source, phrases, config)
            found = find_synonyms(file, phrases, config, advance, known)
        self.store.stages["synonyms"], self.effort = found.report, {"synonyms": found.effort}
        self.store.quarantine.append(found.quarantine)
        with self._stage("graph", "edges") as advance:
            titles = title_rows(parts.passages, phrases, self.config.graph.normalisation)
            _, edges = build_graph(
                folder / "graph",
                resolution.fact_ends,
                resolution.fact_counts,
                resolution.occurrence,
                found.pairs,
                self.config.graph,
                titles,
            )
            advance(edges.graph_edges)
        artifact.write_parquet(_synonym_table(found.pairs, phrases), folder / "synonyms")
        if found.lists is not None:
            arrays = {name: getattr(found.lists, name) for name in artifact.LIST_ARRAYS}
            artifact.write_arrays(folder / "lists", **arrays)
        return edges

    def _precompute(self, folder: Path) -> None:
        """Solve what retrieval needs of PPR for all passages at once, if it is wanted."""
        if not self.config.precompute.enabled:
            return
        vectors = np.load(folder / "vectors" / "passages.npy", mmap_mode="r", allow_pickle=False)
        with self.store.monitor.stage("precompute", vectors.shape[1] + 1, "columns") as advance:
            self.store.stages["precompute"] = precompute(
                folder,
                self.config.precompute,
                self.config.retrieve.damping,
                work=self.store.folder / "precompute",
                advance=advance,
            )

    def _check_quarantine(self, what: str, quarantined: int, total: int) -> None:
        limit = self.config.max_quarantine_rate
        if total and quarantined / total > limit:
            file = self.store.folder / "quarantine.parquet"
            pq.write_table(self.store.all_quarantine(), file)
            raise ThresholdError(
                f"{quarantined} of {total} {what} were quarantined ({quarantined / total:.1%}); "
                f"max_quarantine_rate allows {limit:.1%}. The reasons are in {file}. Mend the input or raise "
                "the rate and run again: what was done is kept"
            )


def _n_rows(shards: Iterable[Shard]) -> int:
    return sum(shard.n_rows for shard in shards)


def _whole_document(document: Document) -> dict[str, object]:
    return {
        "passage_id": document.doc_id,
        "doc_id": document.doc_id,
        "title": document.title,
        "text": document.text,
        "span_start": 0,
        "span_end": len(document.text),
    }


def _read_documents(shards: Iterable[Shard]) -> Iterator[tuple[str, str, str]]:
    for shard in shards:
        table = shard.read()
        yield from zip(*(table[name].to_pylist() for name in ("doc_id", "title", "text")), strict=True)


def _passage_texts(passages: pa.Table) -> Iterator[pa.Array]:
    """Yield what is embedded of passages, some at a time: the title, a line break, the text."""
    for batch in passages.to_batches():
        titled = pc.binary_join_element_wise(batch["title"], batch["text"], "\n")
        yield pc.if_else(pc.equal(batch["title"], ""), batch["text"], titled)


def _chosen(values: Iterable[pa.Array], chosen: NDArray[np.bool_]) -> Iterator[pa.Array]:
    start = 0
    for part in values:
        yield part.filter(pa.array(chosen[start : start + len(part)]))
        start += len(part)


def in_stage_order(quarantine: pa.Table) -> pa.Table:
    """Return quarantine rows in the order of stages; those of one stage keep theirs."""
    rank = np.array([STAGES.index(stage) for stage in quarantine["stage"].to_pylist()], dtype=np.int64)
    return quarantine.take(pa.array(np.argsort(rank, kind="stable")))


def _write_tables(parts: Parts, quarantine: pa.Table, folder: Path) -> None:
    artifact.write_parquet(parts.documents, folder / "documents")
    artifact.write_parquet(parts.passages, folder / "passages")
    artifact.write_parquet(parts.extractions.cast(schemas.EXTRACTION), folder / "extractions")
    artifact.write_parquet(quarantine, folder / "quarantine")
    parts.resolution.move(folder)


def _counts(parts: Parts, quarantine: pa.Table, edges: EdgeCounts) -> artifact.Counts:
    triples, entities = (
        pc.list_value_length(parts.extractions[name].combine_chunks()).to_numpy()
        for name in ("triples", "entities")
    )
    read = asdict(parts.read)
    return artifact.Counts(
        **{name: value for name, value in read.items() if name != "quarantined"},
        quarantined_records=read["quarantined"],
        passages_made=parts.passages_made,
        quarantined_passages=_count(quarantine, "passage", "extract"),
        passages=parts.passages.num_rows,
        passages_without_triples=int(np.sum(triples == 0)),
        passages_without_extraction=int(np.sum((triples == 0) & (entities == 0))),
        triples_extracted=int(triples.sum()) + _count(quarantine, "triple", "extract"),
        triples_rejected=_count(quarantine, "triple"),
        triples=parts.resolution.n_triples,
        facts=parts.resolution.n_facts,
        phrases=parts.resolution.n_phrases,
        **asdict(edges),
    )


def _synonym_table(synonyms: Pairs, phrases: pa.Table) -> pa.Table:
    ids = phrases["phrase_id"].to_numpy()
    columns = [ids[synonyms.first], ids[synonyms.second], synonyms.cosine]
    return pa.table([pa.array(values) for values in columns], schema=schemas.SYNONYM)


def _count(quarantine: pa.Table, kind: str, stage: str | None = None) -> int:
    mask = pc.equal(quarantine["kind"], kind)
    if stage is not None:
        mask = pc.and_(mask, pc.equal(quarantine["stage"], stage))
    return int(pc.sum(mask, min_count=0).as_py())
