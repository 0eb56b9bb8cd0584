"""Answering queries: an opened index with the models that its vectors were made by."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from spacy.language import Language

from hippoindex.errors import ModelError, UsageError
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.config import EmbedConfig, GraphConfig, RetrieveConfig
from hippoindex.pipeline.embed import embedder_fingerprint, open_embedder
from hippoindex.pipeline.embed.base import Embedder
from hippoindex.pipeline.extract.query_entities import open_question_nlp, query_entities
from hippoindex.pipeline.llm.known import with_known
from hippoindex.pipeline.normalise import normaliser
from hippoindex.pipeline.queries import Query
from hippoindex.pipeline.reader.model import ReaderModel
from hippoindex.pipeline.reader.recognition import FactRecogniser
from hippoindex.pipeline.retrieve.base import Clock, FactFilter, Method, QueryBatch, Ranking, find_method
from hippoindex.pipeline.retrieve.baselines import bm25, dense
from hippoindex.pipeline.retrieve.explain import Explanation, explain_ranking
from hippoindex.pipeline.retrieve.fusion import hippoindex
from hippoindex.pipeline.retrieve.hipporag import hipporag1, hipporag2

log = structlog.get_logger("hippoindex")

METHODS: dict[str, Method] = {
    "bm25": bm25,
    "dense": dense,
    "hipporag1": hipporag1,
    "hipporag2": hipporag2,
    "hippoindex": hippoindex,
}


class Retriever:
    """Ranks passages of an index for batches of queries.

    Parameters
    ----------
    index : Index or str or Path
    config : RetrieveConfig, optional
        By default the one stored with the index.
    threads : int
        Threads of the embedding model.
    fact_filter : FactFilter, optional
        Recognition memory; without it, and without a reader, the nearest facts are used as they are.
    reader : ReaderModel, optional
        Language model for questions. It is the recognition memory too, unless ``reader.recognition`` is off
        or ``fact_filter`` is given.

    Attributes
    ----------
    index : Index
    config : RetrieveConfig
    reader : ReaderModel or None

    Raises
    ------
    ArtifactError
        If there is no index.
    ModelError
        If the embedding model at hand is not the one that made the index's vectors.
    """

    def __init__(
        self,
        index: Index | str | Path,
        config: RetrieveConfig | None = None,
        *,
        threads: int = 1,
        fact_filter: FactFilter | None = None,
        reader: ReaderModel | None = None,
    ) -> None:
        self.index = index if isinstance(index, Index) else open_index(index)
        stored = self.index.manifest.config
        self.config = config or RetrieveConfig.model_validate(stored["retrieve"])
        self._embed = EmbedConfig.model_validate(stored["embed"])
        self._normalise = normaliser(GraphConfig.model_validate(stored["graph"]).normalisation)
        self._threads = threads
        self.reader = reader
        self._recogniser = FactRecogniser(reader) if reader and reader.config.recognition else None
        self._fact_filter = fact_filter or self._recogniser
        made_by, here = self.index.manifest.stages["embed"]["embedder"], embedder_fingerprint(self._embed)
        if made_by != here:
            raise ModelError(
                f"{self.index.path} was embedded by a model with fingerprint {made_by[:12]}; the model "
                f"{self._embed.model!r} here has {here[:12]}: their vectors cannot be compared"
            )

    def close(self) -> None:
        """Release the language model, if there is one."""
        if self.reader is not None:
            self.reader.close()

    def reader_report(self) -> dict[str, Any] | None:
        """Return which language model was asked, and what it has used so far; ``None`` if there is none."""
        if self.reader is None:
            return None
        recognition = None if self._recogniser is None else self._recogniser.report()
        return self.reader.report() | {"recognition_memory": recognition}

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._embed, threads=self._threads)

    @cached_property
    def _nlp(self) -> Language:
        return open_question_nlp()

    def encode(self, queries: Sequence[Query]) -> QueryBatch:
        """Embed questions and find their entities, unless the query file gave them.

        Entities that are phrases of the index have their vectors there. With several threads, entities are
        found while questions are embedded.
        """
        clock = Clock()
        questions = [query.question for query in queries]
        told = with_known(self._embed).instructions
        for_facts = None
        with ThreadPoolExecutor(1) as beside:
            finding = beside.submit(self._entities, queries, clock)
            if self._threads == 1:
                wait([finding])
            with clock.part("embedding"):
                vectors = self._embedder.encode(questions, "query_to_passage")
                if told.query_to_fact != told.query_to_passage:
                    for_facts = self._embedder.encode(questions, "query_to_fact")
            entities = finding.result()
        with clock.part("embedding"):
            rows, flat = self._entity_vectors([phrase for phrases in entities for phrase in phrases])
        ends = np.cumsum([0, *map(len, entities)])
        of_question = [slice(start, end) for start, end in itertools.pairwise(ends)]
        return QueryBatch(
            questions,
            vectors,
            entities,
            [flat[part] for part in of_question],
            [rows[part] for part in of_question],
            for_facts,
            self._fact_filter,
            clock,
        )

    def _entities(self, queries: Sequence[Query], clock: Clock) -> list[list[str]]:
        with clock.part("entities"):
            missing = [query.question for query in queries if query.entities is None]
            found = iter(query_entities(self._nlp, missing) if missing else [])
            given = [next(found) if query.entities is None else query.entities for query in queries]
            return [self._phrases(names, query.question) for names, query in zip(given, queries, strict=True)]

    def _entity_vectors(self, phrases: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return rows, -1 where the index has no such phrase, and vectors; each text is embedded once."""
        rows = self.index.phrase_rows(phrases)
        vectors = np.empty((len(rows), self._embedder.dimension), dtype=np.float32)
        vectors[rows >= 0] = self.index.vectors("phrases")[rows[rows >= 0]]
        unknown = np.flatnonzero(rows < 0)
        places: dict[str, int] = {}
        which = [places.setdefault(phrases[number], len(places)) for number in unknown.tolist()]
        if places:
            vectors[unknown] = self._embedder.encode(list(places))[which]
        return rows, vectors

    def _phrases(self, names: Sequence[str], question: str) -> list[str]:
        """Normalise entity names, each once; a question without any is one itself, as a whole."""
        phrases = dict.fromkeys(phrase for phrase in map(self._normalise, names) if phrase)
        whole = self._normalise(question)
        return list(phrases) or ([whole] if whole else [])

    def rank(self, batch: QueryBatch, method: str | None = None, *, top_k: int | None = None) -> Ranking:
        """Rank passages.

        Parameters
        ----------
        batch : QueryBatch
        method : str, optional
            One of :data:`METHODS`; by default ``config.method``.
        top_k : int, optional
            By default ``config.top_k``.

        Returns
        -------
        Ranking

        Raises
        ------
        UsageError
            If there is no such method, or no question.
        """
        if not len(batch):
            raise UsageError("There is no question to rank passages for")
        config = self.config if top_k is None else self.config.model_copy(update={"top_k": top_k})
        ranks = find_method(METHODS, method or config.method)
        counting = replace(batch, recognised=Counter())
        with batch.clock.part("ranking"):
            ranking = ranks(self.index, counting, config)
        recognition = dict(counting.recognised) or ranking.recognition
        return replace(ranking, recognition=recognition)

    def explain(
        self, batch: QueryBatch, ranking: Ranking, method: str | None = None
    ) -> list[list[Explanation]]:
        """Explain every passage of a ranking; see :func:`explain_ranking`.

        Raises
        ------
        UsageError
            If the method cannot be explained.
        """
        return explain_ranking(self.index, batch, ranking, method or self.config.method, self.config)
