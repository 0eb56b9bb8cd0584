"""A query file against an index: rankings as records or files, and evaluation reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hippoindex.cluster.atomic import atomic_write
from hippoindex.cluster.executor import choose_executor
from hippoindex.cluster.usage import available_cores
from hippoindex.errors import UsageError
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.bulk import rank_in_shards
from hippoindex.pipeline.config import ClusterConfig, load_config
from hippoindex.pipeline.evaluate import evaluate
from hippoindex.pipeline.evaluation_report import reader_remark, remarks
from hippoindex.pipeline.explanation_svg import explanation_svg
from hippoindex.pipeline.parity import check_index, check_methods, retrieve_settings
from hippoindex.pipeline.queries import PassageLookup, Query, QuerySet, read_queries
from hippoindex.pipeline.reader.model import ReaderModel
from hippoindex.pipeline.retrieve.base import PARTS, Ranking
from hippoindex.pipeline.retrieve.engine import Retriever
from hippoindex.pipeline.retrieve.explain import Explanation

MANY_QUESTIONS = 2000
"""From so many questions on, workers are worth their start."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Rankings of one query file.

    Attributes
    ----------
    index : Index
    queries : sequence of Query, length Q
    method : str
    ranking : Ranking
    explanations : sequence of sequence of Explanation, or None
        For each question and passage; ``None`` if they were not asked for.
    seconds_s : float
        Embedding of the questions and ranking; explanations are not in it, nor the start of this process,
        but that of workers is.
    parts_s : dict of str to float
        How much of it each part took; where workers did it, all their seconds by their number.
    reader : dict or None
        Which language model was asked, and what it used; ``None`` if there was none.
    """

    index: Index
    queries: Sequence[Query]
    method: str
    ranking: Ranking
    explanations: Sequence[Sequence[Explanation]] | None
    seconds_s: float
    parts_s: dict[str, float]
    reader: dict[str, Any] | None = None

    def records(self) -> list[dict[str, Any]]:
        """Return one JSON-ready record per question, its passages best first."""
        return list(self._records())

    def summary(self) -> dict[str, Any]:
        """Return how many questions were answered, how, and how fast."""
        return {
            "queries": len(self.queries),
            "method": self.method,
            "solver": self.ranking.solver,
            "certified_share": self.ranking.certified_share,
            "fallbacks": self.ranking.fallbacks,
            "notes": self.ranking.notes,
            "recognition_memory": self.ranking.recognition,
            "reader": self.reader,
            "seconds_s": round(self.seconds_s, 3),
            "queries_per_s": round(len(self.queries) / self.seconds_s, 1),
            "parts_queries_per_s": {
                name: round(len(self.queries) / seconds_s, 1)
                for name, seconds_s in self.parts_s.items()
                if seconds_s
            },
        }

    def remarks(self) -> list[str]:
        """Return what a reader of the rankings must know: whether facts were chosen, what a model used."""
        summary = self.summary()
        return [text for text in (*remarks(self.method, summary), reader_remark(summary)) if text]

    def _records(self) -> Iterator[dict[str, Any]]:
        names = {name: self.index.passages[name] for name in ("passage_id", "doc_id", "title")}
        for number, query in enumerate(self.queries):
            passages = []
            pairs = zip(self.ranking.rows[number].tolist(), self.ranking.scores[number].tolist(), strict=True)
            for rank, (row, score) in enumerate(pairs):
                passage = {"rank": rank + 1, "score": score}
                passage |= {name: column[row].as_py() for name, column in names.items()}
                if self.explanations is not None:
                    passage["explanation"] = self.explanations[number][rank].as_dict()
                passages.append(passage)
            yield {
                "id": query.query_id,
                "question": query.question,
                "method": self.method,
                "passages": passages,
            }


def answer_queries(
    index: str | Path,
    queries: str | Path,
    *,
    method: str | None = None,
    top_k: int | None = None,
    explain: bool = False,
    overrides: Iterable[str] = (),
    config: str | Path | None = None,
    parity: str | None = None,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008 - immutable
    work: str | Path | None = None,
) -> Answers:
    """Rank the passages of an index for every question of a file.

    Parameters
    ----------
    index, queries : str or Path
    method : str, optional
        By default the index's ``retrieve.method``.
    top_k : int, optional
        By default the index's ``retrieve.top_k``.
    explain : bool
        Whether to find what each passage's score is made of, and the paths to it; ``hipporag2`` and
        ``hippoindex`` only.
    overrides : iterable of str
        ``retrieve.key=value`` settings in place of those stored with the index, and ``reader.key=value``.
    config, parity
        See :func:`open_retriever`.
    cluster : ClusterConfig
        Where questions are ranked: in shards by workers or, where the executor is ``auto`` and neither
        workers nor an address are given, and there are fewer than 2,000 questions, or one core, or
        recognition memory, or ``explain``, in this process.
    work : str or Path, optional
        Folder for what workers write; a call that was interrupted goes on from there, and at the end it is
        removed. By default a temporary one. On a cluster
        all machines must see it, and the index, under the same path.

    Returns
    -------
    Answers

    Raises
    ------
    UsageError
        If a method or setting is unknown, or ``explain`` or ``parity`` is asked of another method.
    """
    with closing(open_retriever(index, overrides, config=config, parity=parity)) as retriever:
        found = read_gold(retriever.index, queries).queries
        name = method or retriever.config.method
        if parity is not None:
            check_methods(parity, [name])
        return _answer(retriever, found, name, top_k, explain=explain, cluster=cluster, work=work)


def _answer(
    retriever: Retriever,
    found: Sequence[Query],
    name: str,
    top_k: int | None,
    *,
    explain: bool,
    cluster: ClusterConfig,
    work: str | Path | None,
) -> Answers:
    started = time.perf_counter()
    batch, parts_s = None, {}
    recognises = retriever.reader is not None and retriever.reader.config.recognition
    many = len(found) >= MANY_QUESTIONS and available_cores() > 1 and not recognises and not explain
    if many or _needs_workers(cluster):
        if recognises:
            raise UsageError(
                "Recognition memory is asked by one process for all questions: leave out --executor, "
                "--workers and --address, or set reader.recognition=false"
            )
        with choose_executor(
            cluster.executor, address=cluster.address, workers=cluster.workers, limits=cluster.limits()
        ) as executor:
            ranking = rank_in_shards(
                retriever.index.url,
                found,
                executor,
                retriever.config,
                method=name,
                top_k=top_k,
                work=work,
            )
            if ranking.parts_s is not None:
                each = ranking.parts_s.sum(axis=0) / executor.workers
                parts_s = dict(zip(PARTS, each.tolist(), strict=True))
    else:
        batch = retriever.encode(found)
        ranking = retriever.rank(batch, name, top_k=top_k)
        parts_s = dict(batch.clock.seconds_s)
    seconds_s = time.perf_counter() - started
    explanations = None
    if explain:
        batch = retriever.encode(found) if batch is None else batch
        explanations = retriever.explain(batch, ranking, name)
    return Answers(
        retriever.index, found, name, ranking, explanations, seconds_s, parts_s, retriever.reader_report()
    )


def _needs_workers(cluster: ClusterConfig) -> bool:
    return cluster.executor != "auto" or cluster.workers is not None or cluster.address is not None


def evaluate_queries(
    index: str | Path,
    queries: str | Path,
    methods: Sequence[str],
    *,
    overrides: Iterable[str] = (),
    config: str | Path | None = None,
    parity: str | None = None,
    allow_missing: bool = False,
    qa: bool = False,
    ircot_steps: int | None = None,
) -> dict[str, Any]:
    """Measure methods on a file of questions with gold passages; see :func:`evaluate`.

    Parameters
    ----------
    index, queries : str or Path
    methods : sequence of str
    overrides : iterable of str
        ``retrieve.key=value`` settings in place of those stored with the index, and ``reader.key=value``.
    config, parity
        See :func:`open_retriever`.
    allow_missing : bool
        Whether gold passages that are not in the index are counted instead of refused.
    qa, ircot_steps
        See :func:`evaluate`.

    Returns
    -------
    dict
    """
    if parity is not None:
        check_methods(parity, methods)
    with closing(open_retriever(index, overrides, config=config, parity=parity)) as retriever:
        found = read_gold(retriever.index, queries).queries
        return evaluate(
            retriever, found, methods, allow_missing=allow_missing, qa=qa, ircot_steps=ircot_steps
        )


def open_retriever(
    index: str | Path,
    overrides: Iterable[str] = (),
    *,
    config: str | Path | None = None,
    parity: str | None = None,
) -> Retriever:
    """Open an index for retrieval, with other settings in place of the stored ones.

    Parameters
    ----------
    index : str or Path
    overrides : iterable of str
        ``retrieve.key=value`` and ``reader.key=value`` settings; they go before all others.
    config : str or Path, optional
        YAML file whose section ``retrieve`` is applied to the stored settings, as ``hippoindex tune`` writes
        it, and whose section ``reader`` names a language model for questions.
    parity : str, optional
        "hipporag1" or "hipporag2": rank as the authors' code does.

    Raises
    ------
    UsageError
        If a setting of another section is given: those were fixed when the index was built. If an index was
        not built for the parity that is asked for.
    """
    opened = open_index(index)
    settings = list(overrides)
    for setting in settings:
        if not setting.startswith(("retrieve.", "reader.")):
            raise UsageError(
                f"--set {setting}: only retrieve.* and reader.* can be set once an index is built"
            )
    kept = _as_settings("retrieve", opened.manifest.config["retrieve"])
    if config is not None:
        given = load_config(config).model_dump(mode="json", exclude_unset=True)
        kept += _as_settings("retrieve", given.get("retrieve", {}))
        kept += _as_settings("reader", given.get("reader", {}))
    if parity is not None:
        kept += retrieve_settings(parity)
        check_index(opened.path, opened.manifest.config)
    chosen = load_config(overrides=[*kept, *settings])
    reader = None if chosen.reader.engine is None else ReaderModel(chosen.reader)
    return Retriever(opened, chosen.retrieve, reader=reader, threads=available_cores())


def _as_settings(section: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{section}.{name}={json.dumps(value)}" for name, value in values.items()]


def read_gold(index: Index, queries: str | Path) -> QuerySet:
    """Read a query file; gold passages named by title and text are looked up in the index.

    Of a document that was split its first passage stands in: it is found by its title.
    """
    columns = (index.passages[name].to_pylist() for name in ("doc_id", "title", "text"))
    documents = {row[0]: row for row in reversed(list(zip(*columns, strict=True)))}
    return read_queries(queries, PassageLookup(documents.values()))


def write_answers(answers: Answers, path: Path) -> None:
    """Write rankings: JSON Lines, one question a line, or Parquet, one passage a row.

    Parameters
    ----------
    answers : Answers
    path : Path
        ``.parquet`` makes Parquet, everything else JSON Lines. An existing file is replaced.
    """
    with atomic_write(path) as file:
        if path.suffix == ".parquet":
            pq.write_table(_as_table(answers), file)
            return
        for record in answers.records():
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _as_table(answers: Answers) -> pa.Table:
    """Return rankings as a table, one passage a row."""
    rows = answers.ranking.rows
    n_queries, k = rows.shape
    passages = answers.index.passages.take(rows.ravel())
    asked = np.repeat(np.arange(n_queries), k)
    columns: dict[str, Any] = {
        "id": pa.array([query.query_id for query in answers.queries]).take(asked),
        "question": pa.array([query.question for query in answers.queries]).take(asked),
        "method": pa.repeat(answers.method, len(asked)),
        "rank": np.tile(np.arange(1, k + 1), n_queries),
        "score": answers.ranking.scores.ravel(),
        **{name: passages[name] for name in ("passage_id", "doc_id", "title")},
    }
    explained = [found for row in answers.explanations or () for found in row]
    texts = [json.dumps(found.as_dict(), ensure_ascii=False) for found in explained]
    column = pa.array(texts) if texts else pa.nulls(len(asked), pa.string())
    return pa.table(columns | {"explanation": column})


def write_drawings(answers: Answers, folder: Path) -> list[Path]:
    """Write the paths to each question's passages as ``0001.svg``, ``0002.svg``, ... in the questions' order.

    Raises
    ------
    UsageError
        If the answers were not explained.
    """
    if answers.explanations is None:
        raise UsageError("--svg draws explanations: ask for them with --explain")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--svg {folder}: the folder cannot be made: {error.strerror}") from error
    files = []
    for number, (query, explained) in enumerate(zip(answers.queries, answers.explanations, strict=True), 1):
        files.append(folder / f"{number:04d}.svg")
        with atomic_write(files[-1]) as file:
            file.write(explanation_svg(query.question, explained).encode())
    return files
