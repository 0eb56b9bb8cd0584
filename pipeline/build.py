"""The main job: read, chunk, extract, resolve, embed, synonyms, graph, publish.

Sharded stages run through an executor; what must see everything at once (numbering, the similarity join, the
graph) runs here on arrays. The index is assembled in the work folder and appears whole.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hippoindex import __version__
from hippoindex.cluster.atomic import atomic_directory
from hippoindex.cluster.executor import Executor, choose_executor
from hippoindex.cluster.usage import PeakMemory, machine
from hippoindex.errors import InputError, ThresholdError, UsageError
from hippoindex.kernels import simjoin
from hippoindex.kernels.simjoin import Pairs
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.chunk import ChunkStage
from hippoindex.pipeline.config import Config, SynonymsConfig
from hippoindex.pipeline.corpus import CorpusReader, Document
from hippoindex.pipeline.embed_stage import TEXT, EmbedStage
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.graph import EdgeCounts, build_graph
from hippoindex.pipeline.normalise import count_alphanumerics
from hippoindex.pipeline.precompute import precompute
from hippoindex.pipeline.progress import Advance, Monitor
from hippoindex.pipeline.report import write_report
from hippoindex.pipeline.resolve import Resolution, ResolveStage, fact_texts, merge
from hippoindex.pipeline.shards import ShardStore, column, count_rows
from hippoindex.pipeline.stage import quarantine_table, read_table, write_table


@dataclass(frozen=True)
class BuildResult:
    """What a finished run made: where it is, its manifest, and the content of ``stats.json``."""

    path: Path
    manifest: artifact.Manifest
    stats: dict[str, Any]


def build_index(config: Config, *, overwrite: bool = False, monitor: Monitor | None = None) -> BuildResult:
    """Build an index of a corpus.

    Parameters
    ----------
    config : Config
        ``corpus.path`` and ``output`` must be set.
    overwrite : bool
        Whether an index that is at ``output`` may be replaced; it stays readable until the new one is whole.
    monitor : Monitor, optional
        Shows progress and keeps the times.

    Returns
    -------
    BuildResult

    Raises
    ------
    UsageError
        If a setting is missing, or ``output`` is taken.
    InputError
        If the corpus cannot be read or holds no passage.
    ThresholdError
        If more than ``max_quarantine_rate`` was quarantined. What was done is kept for the next run.
    """
    output = _check_output(config, overwrite)
    work = output.with_name(output.name + ".work")
    assembled = work / "assembled"
    shutil.rmtree(assembled, ignore_errors=True)  # of a run that was killed
    assembled.mkdir(parents=True)
    run = _Run(config, ShardStore(work, monitor or Monitor()))
    started = datetime.now(UTC)
    with PeakMemory() as memory:
        manifest = run.build(assembled)
    stats = run.stats(manifest, started, memory.peak_bytes)
    artifact.write_json(assembled / "stats.json", stats)
    write_report(assembled / "report.html", manifest, stats)
    with atomic_directory(output, replace=overwrite) as folder:
        assembled.replace(folder)  # a folder may take the place of an empty one
    shutil.rmtree(work)
    return BuildResult(output, manifest, stats)


def _check_output(config: Config, overwrite: bool) -> Path:
    if not config.corpus.path:
        raise UsageError("No corpus: give --corpus PATH or set corpus.path")
    if not config.output:
        raise UsageError("No output: give --output DIR or set output")
    output = Path(config.output)
    if output.name in {"", ".."}:
        raise UsageError(f"--output {config.output!r} does not name a folder of its own")
    if output.is_file():
        raise UsageError(f"{output} is a file; --output names a folder")
    if output.is_dir() and any(output.iterdir()):
        if not (output / artifact.MANIFEST).is_file():
            raise UsageError(f"{output} is neither empty nor an index: choose another folder")
        if not overwrite:
            raise UsageError(f"{output} is an index already: choose another folder, or give --overwrite")
    return output


class _Run:
    """One run: its configuration, its shards, and the executor it has chosen."""

    def __init__(self, config: Config, store: ShardStore) -> None:
        self.config = config
        self.store = store
        self.executor: Executor

    def build(self, folder: Path) -> artifact.Manifest:
        """Do the whole job into an empty folder."""
        reader, documents = self._read()
        cluster = self.config.cluster
        with choose_executor(
            cluster.executor,
            address=cluster.address,
            workers=cluster.workers,
            passages=reader.counts.documents,
        ) as self.executor:
            made = self._chunk(documents)
            passages, extractions = self._extract(made)
            resolution = self._resolve(passages, extractions)
            self._embed(passages, resolution, folder)
        edges = self._connect(resolution, folder)
        self._precompute(folder)
        with self._stage("publish", "files") as advance:
            self._write_tables(passages, resolution, folder)
            manifest = artifact.write_manifest(
                folder,
                generator=f"hippoindex {__version__}",
                corpus_fingerprint=reader.fingerprint,
                parent=None,
                config=self.config.result_part(),
                stages=self.store.stages,
                counts=self._counts(reader, made, extractions, resolution, edges),
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
                {**asdict(time), "items_per_s": round(time.items / max(time.seconds_s, 1e-9), 2)}
                for time in self.store.monitor.times
            ],
            "executor": self.executor.name,
            "workers": self.executor.workers,
            "machine": dict(machine()),
            "corpus": list(self.config.corpus.path),
        }

    def _stage(self, name: str, unit: str) -> AbstractContextManager[Advance]:
        return self.store.monitor.stage(name, 0, unit)

    def _read(self) -> tuple[CorpusReader, list[Path]]:
        reader = CorpusReader(self.config.corpus)
        with self._stage("read", "records") as advance:
            rows = (_whole_document(document) for document in reader)
            size = self.config.cluster.shard_passages
            documents = self.store.write_rows("documents", rows, schemas.PASSAGE, size)
            advance(reader.counts.records)
        self.store.quarantine.append(quarantine_table(reader.quarantine))
        self._check_quarantine("records", reader.counts.quarantined, reader.counts.records)
        if not documents:
            raise InputError(f"{', '.join(self.config.corpus.path)}: there is no passage in it")
        return reader, documents

    def _chunk(self, documents: list[Path]) -> list[Path]:
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

    def _extract(self, made: list[Path]) -> tuple[list[Path], list[Path]]:
        """Extract; return the shards of the passages that are kept, and of what was found in them."""
        stage = ExtractStage(self.config.extract)
        extractions = self.store.run(self.executor, stage, "passages", made)
        kept = [self._keep(number, *pair) for number, pair in enumerate(zip(made, extractions, strict=True))]
        n_made = sum(map(count_rows, made))
        self._check_quarantine("passages", n_made - sum(map(count_rows, kept)), n_made)
        missing = column(extractions, "missing")
        if pc.all(missing, min_count=1).as_py():
            raise InputError(
                f"{self.config.extract.path}: none of its passages is in the corpus. Passages are matched by "
                "their text; is this the extraction of another corpus?"
            )
        return kept, extractions

    def _keep(self, number: int, passages: Path, extraction: Path) -> Path:
        """Leave out the passages of a shard that could not be extracted."""
        if count_rows(passages) == count_rows(extraction):
            return passages
        table, ids = read_table(passages), column([extraction], "passage_id")
        kept = self.store.path("kept", number)
        write_table(table.filter(pc.is_in(table["passage_id"], value_set=ids)), kept)
        return kept

    def _resolve(self, passages: list[Path], extractions: list[Path]) -> Resolution:
        stage = ResolveStage(self.config.graph)
        resolved = self.store.run(self.executor, stage, "passages", extractions)
        return merge([read_table(shard) for shard in resolved], column(passages, "passage_id"))

    def _embed(self, passages: list[Path], resolution: Resolution, folder: Path) -> None:
        """Embed passages, phrases and facts, and write their vectors."""
        config, size = self.config.embed, self.config.cluster.shard_texts
        phrases = resolution.phrases["phrase"].combine_chunks()
        facts = fact_texts(resolution.facts, resolution.fact_ends, phrases)
        texts = {
            "passages": [self._texts_of(number, shard) for number, shard in enumerate(passages)],
            "phrases": self.store.write_column("phrases", phrases, TEXT, size),
            "facts": self.store.write_column("facts", facts, TEXT, size),
        }
        stage = EmbedStage(config)
        shards = iter(
            self.store.run(self.executor, stage, "texts", [s for kind in texts for s in texts[kind]])
        )
        for kind, inputs in texts.items():
            outputs = list(itertools.islice(shards, len(inputs)))
            file, rows = folder / "vectors" / f"{kind}.npy", sum(map(count_rows, outputs))
            artifact.write_vectors(file, map(read_table, outputs), rows, stage.dimension, config.dtype)

    def _texts_of(self, number: int, passages: Path) -> Path:
        """Write what is embedded of a shard of passages: the title, a line break, the text."""
        table = read_table(passages)
        titled = pc.binary_join_element_wise(table["title"], table["text"], "\n")
        texts = pc.if_else(pc.equal(table["title"], ""), table["text"], titled)
        file = self.store.path("passages", number)
        write_table(pa.table([texts], schema=TEXT), file)
        return file

    def _connect(self, resolution: Resolution, folder: Path) -> EdgeCounts:
        """Find the synonym edges, build the graph, and write both."""
        vectors = np.load(folder / "vectors" / "phrases.npy", mmap_mode="r", allow_pickle=False)
        phrases = resolution.phrases["phrase"].to_pylist()
        with self.store.monitor.stage("synonyms", len(phrases), "phrases") as advance:
            synonyms = _find_synonyms(vectors, phrases, self.config.synonyms, advance)
        with self._stage("graph", "edges") as advance:
            counts = resolution.facts["count"].to_numpy()
            graph, edges = build_graph(
                resolution.fact_ends, counts, resolution.occurrence, synonyms, self.config.graph
            )
            advance(edges.graph_edges)
        artifact.write_parquet(_synonym_table(synonyms, resolution.phrases), folder / "synonyms")
        artifact.write_arrays(folder / "graph", **asdict(graph))
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
                work=self.store.work / "precompute",
                advance=advance,
            )

    def _write_tables(self, passages: list[Path], resolution: Resolution, folder: Path) -> None:
        artifact.write_parquet(pa.concat_tables(map(read_table, passages)), folder / "passages")
        artifact.write_parquet(resolution.phrases, folder / "phrases")
        artifact.write_parquet(resolution.facts, folder / "facts")
        artifact.write_parquet(self.store.all_quarantine(), folder / "quarantine")
        matrix = resolution.occurrence
        artifact.write_arrays(
            folder / "occurrence",
            indptr=matrix.indptr.astype(np.int64),
            indices=matrix.indices.astype(np.int32),
            counts=matrix.data,
        )

    def _counts(
        self,
        reader: CorpusReader,
        made: list[Path],
        extractions: list[Path],
        resolution: Resolution,
        edges: EdgeCounts,
    ) -> artifact.Counts:
        quarantine = self.store.all_quarantine()
        triples, entities = (
            pc.list_value_length(column(extractions, name)).to_numpy() for name in ("triples", "entities")
        )
        read = asdict(reader.counts)
        return artifact.Counts(
            **{name: value for name, value in read.items() if name != "quarantined"},
            quarantined_records=read["quarantined"],
            passages_made=sum(map(count_rows, made)),
            quarantined_passages=_count(quarantine, "passage", "extract"),
            passages=resolution.occurrence.shape[1],
            passages_without_triples=int(np.sum(triples == 0)),
            passages_without_extraction=int(np.sum((triples == 0) & (entities == 0))),
            triples_extracted=int(triples.sum()) + _count(quarantine, "triple", "extract"),
            triples_rejected=_count(quarantine, "triple"),
            triples=resolution.n_triples,
            facts=resolution.facts.num_rows,
            phrases=resolution.phrases.num_rows,
            **asdict(edges),
        )

    def _check_quarantine(self, what: str, quarantined: int, total: int) -> None:
        limit = self.config.max_quarantine_rate
        if total and quarantined / total > limit:
            file = self.store.work / "quarantine.parquet"
            pq.write_table(self.store.all_quarantine(), file)
            raise ThresholdError(
                f"{quarantined} of {total} {what} were quarantined ({quarantined / total:.1%}); "
                f"max_quarantine_rate allows {limit:.1%}. The reasons are in {file}. Mend the input or raise "
                "the rate and run again: what was done is kept"
            )


def _whole_document(document: Document) -> dict[str, object]:
    return {
        "passage_id": document.doc_id,
        "doc_id": document.doc_id,
        "title": document.title,
        "text": document.text,
        "span_start": 0,
        "span_end": len(document.text),
    }


def _find_synonyms(
    vectors: NDArray[np.floating], phrases: list[str], config: SynonymsConfig, advance: Advance
) -> Pairs:
    searches = np.array([count_alphanumerics(phrase) >= config.min_alphanumerics for phrase in phrases], bool)
    done = 0.0

    def on_progress(share: float) -> None:
        nonlocal done
        advance((share - done) * len(phrases))
        done = share

    watched = {"on_progress": on_progress} if config.method == "exact" else {}
    run = simjoin.spec.get(config.method).run
    pairs: Pairs = run(vectors, config.threshold, config.max_neighbors, searches, **watched)
    return pairs


def _synonym_table(synonyms: Pairs, phrases: pa.Table) -> pa.Table:
    ids = phrases["phrase_id"].to_numpy()
    columns = [ids[synonyms.first], ids[synonyms.second], synonyms.cosine]
    return pa.table([pa.array(values) for values in columns], schema=schemas.SYNONYM)


def _count(quarantine: pa.Table, kind: str, stage: str | None = None) -> int:
    mask = pc.equal(quarantine["kind"], kind)
    if stage is not None:
        mask = pc.and_(mask, pc.equal(quarantine["stage"], stage))
    return int(pc.sum(mask, min_count=0).as_py())
