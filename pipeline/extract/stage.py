"""The OpenIE stage: passages in, entities and triples out, whatever the engine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from hippoindex.cluster.storage import Storage
from hippoindex.cluster.task_queue import Resources
from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.base import Extraction, Extractor, Passage, RejectedTriple
from hippoindex.pipeline.extract.imported import (
    ImportedExtractor,
    RejectedEntity,
    parse_entities,
    parse_triples,
)
from hippoindex.pipeline.extract.llm import LlmExtractor, Note, llm_fingerprint
from hippoindex.pipeline.llm.accounting import UsageLog
from hippoindex.pipeline.llm.engines import open_engine
from hippoindex.pipeline.llm.vllm import vllm_fingerprint, vllm_resources
from hippoindex.pipeline.models import model_fingerprint
from hippoindex.pipeline.stage import Process, StageOutput, quarantine_table

Row = dict[str, object]

_KINDS: dict[type, str] = {RejectedEntity: "entity", Note: "answer"}


@dataclass(frozen=True)
class ExtractStage:
    """OpenIE over a shard of passages.

    A passage that is too long or that the engine could not process is quarantined (kind ``passage``) and has
    no row. An entity or triple that is not one is quarantined (kind ``entity`` or ``triple``, ``row_id`` is
    the passage's id), and its passage keeps its row; so does one of which an answer was cut or a part failed
    (kind ``answer``). A row's entities are distinct; a triple that was extracted twice is there twice.

    Attributes
    ----------
    config : ExtractConfig
    workers : int
        How many workers share what the configuration allows in all.
    usage : Storage, optional
        Where workers leave what a language model has used.
    """

    name: ClassVar[str] = "extract"
    version: ClassVar[int] = 2
    reads: ClassVar[pa.Schema] = schemas.PASSAGE
    writes: ClassVar[pa.Schema] = schemas.EXTRACTION

    config: ExtractConfig
    workers: int = 1
    usage: Storage | None = None

    @property
    def resources(self) -> Resources:
        """What a worker needs: the GPUs of its engine, where it runs one."""
        return vllm_resources(self.config.vllm) if self.config.engine == "vllm" else Resources()

    @property
    def shards_in_flight(self) -> int:
        """Shards that a worker is at, at once."""
        return self.config.shards_in_flight if self.config.engine in ("openai", "vllm") else 1

    def key_part(self) -> Mapping[str, Any]:
        """Name what decides the result: the longest passage, and the engine's model, prompts or file."""
        return self._key_part

    @cached_property
    def _key_part(self) -> Mapping[str, Any]:
        common = {"engine": self.config.engine, "max_passage_chars": self.config.max_passage_chars}
        if self.config.engine == "import":
            return common | {"file_sha256": _sha256(_import_path(self.config))}
        if self.config.engine == "openai":
            return common | {"fingerprint": llm_fingerprint(self.config)}
        if self.config.engine == "vllm":
            model = vllm_fingerprint(self.config.model) if self.config.model else None
            return common | {"fingerprint": llm_fingerprint(self.config, model)}
        model = model_fingerprint(_spacy_model(self.config))
        rules = {"model": model, "spacy": importlib.metadata.version("spacy")}
        return (
            common
            | rules
            | ({} if self.config.arguments == "names" else {"arguments": self.config.arguments})
        )

    def open(self) -> Process:
        """Load the engine and return the function from passages to extractions.

        Raises
        ------
        HippoIndexError
            If the engine lacks a setting, its model or its file.
        """
        extractor = self._open_extractor()
        return lambda passages: _process(extractor, passages, self.config.max_passage_chars)

    def _open_extractor(self) -> Extractor:
        config = self.config
        if config.engine == "import":
            return ImportedExtractor(_import_path(config))
        if config.engine in ("openai", "vllm"):
            llm_fingerprint(config)  # refuses what is not set before anything is opened
            log = None if self.usage is None else UsageLog(self.usage, self.name)
            return LlmExtractor(config, functools.partial(open_engine, config, self.workers), log)
        from hippoindex.pipeline.extract.rules import RulesExtractor  # spaCy takes seconds to import

        return RulesExtractor(_spacy_model(config), whole_arguments=config.arguments == "clauses")


def _spacy_model(config: ExtractConfig) -> str:
    return config.model or "en_core_web_sm"


def _import_path(config: ExtractConfig) -> Path:
    if not config.path:
        raise UsageError("extract.engine=import needs the file of OpenIE results: --set extract.path=FILE")
    return Path(config.path)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"Cannot read the OpenIE results {path} (extract.path): {error.strerror}") from error


def _process(extractor: Extractor, table: pa.Table, max_passage_chars: int) -> StageOutput:
    passages = [
        Passage(*row) for row in zip(*(table[name].to_pylist() for name in Passage._fields), strict=True)
    ]
    fitting = [passage for passage in passages if _chars(passage) <= max_passage_chars]
    extractions = iter(extractor.extract(fitting))
    rows: list[Row] = []
    quarantine: list[Row] = []
    for passage in passages:
        if _chars(passage) > max_passage_chars:
            quarantine.append(_too_long(passage, max_passage_chars))
            continue
        extraction = next(extractions)
        if extraction.error is not None:
            quarantine.append(_quarantine(passage, extraction.error, extraction.raw, "passage"))
            continue
        row, rejected = _row(passage, extraction)
        rows.append(row)
        quarantine.extend(rejected)
    return StageOutput(pa.Table.from_pylist(rows, schema=schemas.EXTRACTION), quarantine_table(quarantine))


def _chars(passage: Passage) -> int:
    return len(passage.title) + len(passage.text)


def _too_long(passage: Passage, max_passage_chars: int) -> Row:
    reason = (
        f"passage of {_chars(passage):,} characters is longer than extract.max_passage_chars="
        f"{max_passage_chars}; set chunk.max_tokens to split it"
    )
    return _quarantine(passage, reason, passage.text, "passage")


def _row(passage: Passage, extraction: Extraction) -> tuple[Row, list[Row]]:
    """Return a passage's row, and the quarantine rows of what was rejected in it."""
    entities, bad_entities = parse_entities(extraction.entities)
    triples, bad_triples = parse_triples(extraction.triples)
    row: Row = {
        "passage_id": passage.passage_id,
        "entities": entities,
        "triples": [triple._asdict() for triple in triples],
        "missing": extraction.missing,
    }
    return row, list(_rejected(passage, [*extraction.rejected, *bad_entities, *bad_triples]))


def _rejected(passage: Passage, items: Sequence[RejectedTriple]) -> Iterator[Row]:
    for item in items:
        yield _quarantine(passage, item.reason, item.raw, _KINDS.get(type(item), "triple"))


def _quarantine(passage: Passage, reason: str, raw: str, kind: str) -> Row:
    return schemas.quarantine_row(
        ExtractStage.name,
        passage.passage_id,
        _utf8(reason),
        _utf8(raw),
        kind=kind,
    )


def _utf8(text: str) -> str:
    """Escape lone surrogates, which an answer may hold and an Arrow string may not."""
    return text.encode(errors="backslashreplace").decode()
