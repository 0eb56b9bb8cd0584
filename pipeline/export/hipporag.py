"""``hipporag``: a ``save_dir`` that HippoRAG 2 opens and answers questions from.

HippoRAG knows a passage, phrase or fact by the MD5 of its text. What it holds in memory when it runs is held
here too, save for the vectors: texts, ids and the edges of the graph.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from numpy.typing import NDArray

from hippoindex.errors import MissingPackageError
from hippoindex.pipeline.artifact import Index
from hippoindex.pipeline.export.walk import edges
from hippoindex.pipeline.normalise import hipporag_phrase
from hippoindex.pipeline.progress import Advance

log = structlog.get_logger("hippoindex")

STORE = pa.schema([("hash_id", pa.string()), ("content", pa.string()), ("embedding", pa.list_(pa.float32()))])
STORE_ROWS = 1 << 14
PICKLE_PROTOCOL = 4


class _Chunks(NamedTuple):
    """Distinct texts of passages: HippoRAG's nodes.

    Attributes
    ----------
    texts : list of str
        Title, line feed, text, as they were embedded.
    rows : ndarray of int64, shape (chunks,)
        The first passage with that text.
    of_passage : ndarray of int64, shape (passages,)
    """

    texts: list[str]
    rows: NDArray[np.int64]
    of_passage: NDArray[np.int64]


def write(
    index: Index,
    folder: Path,
    advance: Advance,
    *,
    llm_model: str | None = None,
    embedding_model: str | None = None,
) -> None:
    """Write the embedding stores, the OpenIE results and the graph.

    The graph has one edge per pair, with the weight of ``graph/``; HippoRAG walks parallel edges as their
    sum.

    Parameters
    ----------
    index : Index
    folder : Path
        Becomes HippoRAG's ``save_dir``.
    advance : callable
    llm_model, embedding_model : str, optional
        What HippoRAG is started with: they name the files. By default the extractor and the embedding model.

    Raises
    ------
    MissingPackageError
        If igraph is not installed, which pickles the graph.
    """
    igraph = _import_igraph()
    config = index.manifest.config
    llm = llm_model or config["extract"]["model"] or config["extract"]["engine"]
    llm, embedding = (name.replace("/", "_") for name in (llm, embedding_model or config["embed"]["model"]))
    working = folder / f"{llm}_{embedding}"
    phrases: list[str] = index.phrases["phrase"].to_pylist()
    chunks, facts = _chunks(index), list(map(str, _facts(index, phrases)))
    _warn(index, phrases, chunks)
    every = {kind: np.arange(len(texts)) for kind, texts in (("phrases", phrases), ("facts", facts))}
    chunk_ids = _write_store(working, "chunk", chunks.texts, index.vectors("passages"), chunks.rows, advance)
    phrase_ids = _write_store(working, "entity", phrases, index.vectors("phrases"), every["phrases"], advance)
    _write_store(working, "fact", facts, index.vectors("facts"), every["facts"], advance)
    _write_openie(index, folder / f"openie_results_ner_{llm}.json", chunks, chunk_ids)
    graph = igraph.Graph(n=len(phrases) + len(chunk_ids), directed=False)
    graph.vs["hash_id"] = graph.vs["name"] = [*phrase_ids, *chunk_ids]
    graph.vs["content"] = [*phrases, *chunks.texts]
    for pairs, weights in _edges(index, chunks):
        graph.add_edges(pairs.tolist(), attributes={"weight": weights.tolist()})
        advance(len(pairs))
    graph.write_pickle(str(working / "graph.pickle"), PICKLE_PROTOCOL)


def _warn(index: Index, phrases: Sequence[str], chunks: _Chunks) -> None:
    log.warning(
        "graph.pickle is a pickle, as HippoRAG needs it: whoever opens a pickle runs what is in it. Take one "
        "only from those you trust"
    )
    merged = index.n_passages - len(chunks.texts)
    if merged:
        log.warning("passages with equal text are one passage in HippoRAG", merged=merged)
    changed = sum(hipporag_phrase(phrase) != phrase for phrase in phrases)
    if changed:
        log.warning(
            "phrases that HippoRAG would normalise otherwise: it will not know how many passages hold them. "
            "Build with graph.normalisation=hipporag for phrases as it makes them",
            phrases=changed,
        )


def _chunks(index: Index) -> _Chunks:
    known: dict[str, int] = {}
    of_passage = np.empty(index.n_passages, dtype=np.int64)
    row = 0
    for batch in index.reader.batches("passages", ["title", "text"]):
        titled = pc.binary_join_element_wise(batch["title"], batch["text"], "\n")
        texts = pc.if_else(pc.equal(batch["title"], ""), batch["text"], titled)
        for text in texts.to_pylist():
            of_passage[row] = known.setdefault(text, len(known))
            row += 1
    return _Chunks(list(known), np.unique(of_passage, return_index=True)[1], of_passage)


def _facts(index: Index, phrases: Sequence[str]) -> list[tuple[str, str, str]]:
    subject, obj = index.fact_ends.T.tolist()
    predicates = index.facts["predicate"].to_pylist()
    return [(phrases[s], p, phrases[o]) for s, p, o in zip(subject, predicates, obj, strict=True)]


def _write_store(
    working: Path,
    name: str,
    texts: Sequence[str],
    vectors: NDArray[np.floating],
    rows: NDArray[np.integer],
    advance: Advance,
) -> list[str]:
    """Write ``NAME_embeddings/vdb_NAME.parquet``, text i with vector ``rows[i]``, and return the ids."""
    folder = working / f"{name}_embeddings"
    folder.mkdir(parents=True)
    ids: list[str] = []
    with pq.ParquetWriter(folder / f"vdb_{name}.parquet", STORE, compression="snappy") as writer:
        for start in range(0, len(texts), STORE_ROWS):
            block = slice(start, start + STORE_ROWS)
            found = vectors[rows[block]].astype(np.float32)
            offsets = np.arange(len(found) + 1, dtype=np.int32) * np.int32(vectors.shape[1])
            embedding = pa.ListArray.from_arrays(pa.array(offsets), pa.array(found.ravel()))
            ids += [_hash_id(name, text) for text in texts[block]]
            columns = [pa.array(ids[start:]), pa.array(texts[block]), embedding]
            writer.write_table(pa.table(columns, schema=STORE))
            advance(len(found))
    return ids


def _hash_id(name: str, text: str) -> str:
    return f"{name}-{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"


def _write_openie(index: Index, file: Path, chunks: _Chunks, ids: Sequence[str]) -> None:
    """Write what was found in every passage, one document a line."""
    n_chars = n_words = n_entities = 0
    with file.open("w", encoding="ascii") as stream:
        stream.write('{"docs": [')
        found = _extractions(index, chunks)
        for number, (chunk_id, text, (entities, triples)) in enumerate(
            zip(ids, chunks.texts, found, strict=True)
        ):
            n_entities += len(entities)
            n_chars += sum(map(len, entities))
            n_words += sum(len(entity.split()) for entity in entities)
            document = {
                "idx": chunk_id,
                "passage": text,
                "extracted_entities": entities,
                "extracted_triples": triples,
            }
            stream.write((",\n" if number else "\n") + json.dumps(document))
        averages = (round(total / max(n_entities, 1), 4) for total in (n_chars, n_words))
        stream.write('\n], "avg_ent_chars": {}, "avg_ent_words": {}}}\n'.format(*averages))


def _extractions(index: Index, chunks: _Chunks) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield entities and triples of every chunk; those of passages with equal text are joined."""
    later: dict[int, list[dict[str, Any]]] = defaultdict(list)
    is_first = np.zeros(len(chunks.of_passage), dtype=bool)
    is_first[chunks.rows] = True
    if not is_first.all():
        for row, record in enumerate(_records(index)):
            if not is_first[row]:
                later[int(chunks.of_passage[row])].append(record)
    for row, record in enumerate(_records(index)):
        if is_first[row]:
            joined = [record, *later.get(int(chunks.of_passage[row]), [])]
            entities = dict.fromkeys(entity for part in joined for entity in part["entities"])
            yield list(entities), [list(triple.values()) for part in joined for triple in part["triples"]]


def _records(index: Index) -> Iterator[dict[str, Any]]:
    for batch in index.reader.batches("extractions", ["entities", "triples"]):
        yield from batch.to_pylist()


def _edges(index: Index, chunks: _Chunks) -> Iterable[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Yield pairs of vertices, shape (E, 2), and weights; passages with equal text are one vertex."""
    n_phrases = index.n_phrases
    vertex = np.concatenate([np.arange(n_phrases), n_phrases + chunks.of_passage])
    for block in edges(index):
        pairs = np.stack([block.source, vertex[block.target]], axis=1)
        weights = block.weight.astype(np.float64)
        if len(chunks.texts) < index.n_passages:
            pairs, first = np.unique(pairs, axis=0, return_index=True)
            weights = weights[first]
        yield pairs, weights


def _import_igraph() -> Any:
    try:
        return importlib.import_module("igraph")
    except ImportError as error:
        raise MissingPackageError("igraph", "--format hipporag", "pip install igraph") from error
