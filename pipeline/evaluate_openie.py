"""How good is an extraction engine? CaRB scores, and agreement with a reference extraction."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog

from hippoindex.cluster.atomic import atomic_write
from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.artifact import json_text
from hippoindex.pipeline.config import CorpusConfig, ExtractConfig
from hippoindex.pipeline.corpus import CorpusReader
from hippoindex.pipeline.extract.base import Passage, Triple
from hippoindex.pipeline.extract.imported import ImportedExtractor
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.openie_quality import Extracted, OpenTuple, agreement, carb_score
from hippoindex.pipeline.stage import Process

log = structlog.get_logger("hippoindex")

MIN_GOLD_FIELDS = 3
"""Sentence, relation, one argument."""
CONTEXT_MARK = "C: "
"""Opens an argument that says who said it; CaRB does not score it."""
TRIPLE_ARGUMENTS = 2
BATCH_PASSAGES = 256


def evaluate_openie(
    config: ExtractConfig,
    *,
    gold: Path | None = None,
    corpus: CorpusConfig | None = None,
    reference: Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Measure an extraction engine.

    Parameters
    ----------
    config : ExtractConfig
        The engine.
    gold : Path, optional
        CaRB's gold file: sentence, relation and arguments, separated by tabs. Gives ``carb``.
    corpus : CorpusConfig, optional
        Passages to extract from, for ``agreement``.
    reference : Path, optional
        A file of OpenIE results on them, as HippoRAG writes it.
    limit : int, optional
        Only so many sentences and passages, the first ones.

    Returns
    -------
    dict
        ``{"extract": settings, "carb": {...}, "agreement": {...}}``, shares from 0 to 1; see
        :class:`~hippoindex.pipeline.openie_quality.CarbScore` and
        :func:`~hippoindex.pipeline.openie_quality.agreement`.

    Raises
    ------
    UsageError
        If there is nothing to measure, or only one of corpus and reference is given.
    InputError
        If a file cannot be used, or the reference has none of the passages.
    """
    if (corpus is None) != (reference is None):
        raise UsageError("Agreement needs both the passages (--corpus) and their extraction (--reference)")
    if gold is None and reference is None:
        raise UsageError("There is nothing to measure: give --gold FILE, or --corpus and --reference")
    tuples = None if gold is None else read_carb(gold)  # before the engine starts: errors come early
    known = None if reference is None else ImportedExtractor(reference)
    process = ExtractStage(config).open()
    settings = config.model_dump(mode="json", exclude_defaults=True)
    report: dict[str, Any] = {"extract": {"engine": config.engine, **settings}}
    if tuples is not None:
        report["carb"] = _carb(process, dict(itertools.islice(tuples.items(), limit)))
    if known is not None and corpus is not None:
        report["agreement"] = _agreement(process, corpus, known, limit)
    return report


def write_openie_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a report as JSON.

    Raises
    ------
    HippoIndexError
        If the file cannot be written.
    """
    with atomic_write(path) as file:
        file.write(json_text(report).encode())


def read_carb(path: Path) -> dict[str, list[OpenTuple]]:
    """Read a gold file of CaRB.

    Returns
    -------
    dict of str to list of OpenTuple
        By sentence, in the order of the file. A tuple that is there twice counts twice. Arguments that only
        say who said it are left out, as CaRB does.

    Raises
    ------
    InputError
        If the file cannot be read, is empty, or a line has no sentence, relation or argument.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"Cannot read the gold tuples {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from error
    tuples: dict[str, list[OpenTuple]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) < MIN_GOLD_FIELDS or not all(fields[:MIN_GOLD_FIELDS]):
            raise InputError(
                f"{path}:{number}: expected sentence, relation and arguments, separated by tabs; "
                f"got {line[:80]!r}"
            )
        arguments = tuple(field for field in fields[2:] if field and not field.startswith(CONTEXT_MARK))
        tuples.setdefault(fields[0], []).append(OpenTuple(fields[1], arguments))
    if not tuples:
        raise InputError(f"{path} holds no gold tuple")
    return tuples


def _carb(process: Process, gold: Mapping[str, Sequence[OpenTuple]]) -> dict[str, Any]:
    passages = [Passage(str(number), "", sentence) for number, sentence in enumerate(gold)]
    extracted, counts = _extract(process, passages)
    found = [
        [
            OpenTuple(triple.predicate, (triple.subject, triple.object))
            for triple in extracted[passage].triples
        ]
        if passage in extracted
        else []
        for passage, _, _ in passages
    ]
    score = carb_score(list(gold.values()), found)
    several = sum(len(one.arguments) > TRIPLE_ARGUMENTS for tuples in gold.values() for one in tuples)
    log.info("scored by CaRB", f1=round(score.best.f1, 3))
    return {
        "sentences": len(gold),
        **counts,
        **score.record(),
        "gold_with_more_arguments": several,
        "sentences_without_triples": sum(not triples for triples in found),
    }


def _agreement(
    process: Process, corpus: CorpusConfig, reference: ImportedExtractor, limit: int | None
) -> dict[str, Any]:
    documents = itertools.islice(CorpusReader(corpus), limit)
    passages = [Passage(document.doc_id, document.title, document.text) for document in documents]
    extracted, counts = _extract(process, passages)
    shared = [
        (Extracted(known.entities, known.triples), extracted[passage.passage_id])
        for passage, known in zip(passages, reference.extract(passages), strict=True)
        if not known.missing and passage.passage_id in extracted
    ]
    if not shared:
        raise InputError("The reference holds none of the passages; they are matched by title and text")
    shares = agreement(*zip(*shared, strict=True))
    log.info("compared with the reference", passages=len(shared))
    return {
        "passages": len(passages),
        "passages_compared": len(shared),
        **counts,
        **{name: share.record() for name, share in shares.items()},
    }


def _extract(process: Process, passages: Sequence[Passage]) -> tuple[dict[str, Extracted], dict[str, Any]]:
    """Return what an engine finds, by passage id, and counts; what it finds nothing for is not there."""
    started = time.perf_counter()
    extracted: dict[str, Extracted] = {}
    kinds: Counter[str] = Counter()
    for start in range(0, len(passages), BATCH_PASSAGES):
        output = process(_table(passages[start : start + BATCH_PASSAGES]))
        kinds.update(output.quarantine["kind"].to_pylist())
        for row in output.rows.to_pylist():
            triples = [Triple(**triple) for triple in row["triples"]]
            if not row["missing"]:
                extracted[row["passage_id"]] = Extracted(row["entities"], triples)
    seconds_s = time.perf_counter() - started
    return extracted, {
        "passages_quarantined": kinds["passage"],
        "passages_without_extraction": len(passages) - len(extracted) - kinds["passage"],
        "triples_rejected": kinds["triple"],
        "extract_s": round(seconds_s, 2),
    }


def _table(passages: Sequence[Passage]) -> pa.Table:
    rows = [
        {
            "passage_id": passage.passage_id,
            "doc_id": passage.passage_id,
            "title": passage.title,
            "text": passage.text,
            "span_start": 0,
            "span_end": len(passage.text),
        }
        for passage in passages
    ]
    return pa.Table.from_pylist(rows, schema=schemas.PASSAGE)
