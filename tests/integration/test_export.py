"""Exports read back by the programs they are for, and compared with the index they came from."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import igraph
import numpy as np
import pyarrow.parquet as pq
import pytest
import structlog

from hippoindex.errors import HippoIndexError, MissingPackageError, UsageError
from hippoindex.kernels.ppr import reference
from hippoindex.pipeline.artifact import Index, open_index
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import load_config
from hippoindex.pipeline.export import FILES, FOLDERS, edge_table, export_index, faiss_files
from hippoindex.pipeline.export.graphml import _text
from hippoindex.pipeline.export.walk import KINDS, edges
from hippoindex.pipeline.extract.base import Passage
from hippoindex.pipeline.extract.imported import ImportedExtractor
from hippoindex.pipeline.normalise import normaliser

Run = Callable[..., Any]
Edge = tuple[int, int, float, str]

PASSAGES = [
    {"id": "plain", "title": "Mill", "text": "The mill stands in Saint Orrin."},
    {"id": "again", "title": "Mill", "text": "The mill stands in Saint Orrin."},
    {
        "id": 'quote "; <b>',
        "title": "A & B <i>",
        "text": 'He said "go",\nand left;\r\nC:\\temp \x01 café 漢字',
    },
    {"id": "untitled", "text": "Nothing is told here."},
]
TRIPLES = [
    [["The Mill", "stands in", "Saint Orrin"], ["mills", "are", "a mill"]],
    [["The Mill", "stands in", "Saint Orrin"], ["The Mill", "near", "C++"]],
    [
        ["café", "serves", "漢字"],
        ["café", "serves", "漢字"],
        ["the mill", "is", "Mill's"],
        ["Mill", "is", "a mill"],
    ],
    [],
]


def build(folder: Path, triples: list[list[list[str]]], *overrides: str) -> Path:
    corpus, results = folder / "corpus.jsonl", folder / "openie.json"
    corpus.write_text("\n".join(map(json.dumps, PASSAGES)))
    docs = [
        {
            "passage": f"{passage['title']}\n{passage['text']}" if "title" in passage else passage["text"],
            "extracted_entities": [],
            "extracted_triples": found,
        }
        for passage, found in zip(PASSAGES, triples, strict=True)
    ]
    results.write_text(json.dumps({"docs": docs}))
    config = load_config(
        overrides=["extract.engine=import", f"extract.path={results}", *overrides],
        corpus__path=[str(corpus)],
        output=str(folder / "index"),
        cluster__workers=1,
        max_quarantine_rate=1.0,
    )
    return build_index(config).path


@pytest.fixture(scope="module")
def odd_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two passages with one text, names that need quoting, synonyms that are facts, weights of HippoRAG."""
    folder = tmp_path_factory.mktemp("odd")
    return build(folder, TRIPLES, "graph.weights=hipporag", "synonyms.threshold=0.5")


@pytest.fixture(scope="module")
def plain_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with synonyms added to facts."""
    return build(tmp_path_factory.mktemp("plain"), TRIPLES, "synonyms.threshold=0.5")


@pytest.fixture(scope="module")
def bare_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No phrase, no fact, no edge."""
    return build(tmp_path_factory.mktemp("bare"), [[], [], [], []])


@pytest.fixture(params=["sample_index", "odd_index", "plain_index", "bare_index"])
def index(request: pytest.FixtureRequest) -> Index:
    return open_index(request.getfixturevalue(request.param))


def expected_edges(index: Index) -> set[Edge]:
    """Return the edges of the graph, with kinds found from the tables instead of in passing."""
    facts = {tuple(sorted(ends)) for ends in index.fact_ends.tolist()}
    rows = {number: row for row, number in enumerate(index.phrases["phrase_id"].to_pylist())}
    synonyms = {(rows[row["phrase_id"]], rows[row["other_id"]]) for row in index.synonyms.to_pylist()}
    replaces = index.manifest.config["graph"]["weights"] == "hipporag"

    def kind(pair: tuple[int, int]) -> str:
        if pair[1] >= index.n_phrases:
            return "passage"
        if pair in synonyms:
            return "fact+synonym" if pair in facts and not replaces else "synonym"
        return "fact"

    matrix = index.graph.matrix().tocoo()
    cells = zip(matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist(), strict=True)
    return {(a, b, weight, kind((a, b))) for a, b, weight in cells if a < b}


def test_edges_are_those_of_the_graph(index: Index, tmp_path: Path) -> None:
    made = export_index(index.path, "parquet-edges", tmp_path / "edges.parquet")
    table = pq.read_table(tmp_path / "edges.parquet")
    assert table.schema.equals(edge_table.SCHEMA)
    found = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert set(found) == expected_edges(index)
    assert len(found) == index.manifest.counts.graph_edges
    assert found == sorted(found)
    assert made["files"] == {"edges.parquet": (tmp_path / "edges.parquet").stat().st_size}


def test_edges_do_not_depend_on_the_size_of_blocks(index: Index) -> None:
    whole = [np.concatenate(column) for column in zip(*edges(index), strict=True)]
    parts = [np.concatenate(column) for column in zip(*edges(index, cells=7), strict=True)]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_kinds_of_edges_are_met(odd_index: Path, plain_index: Path) -> None:
    odd, plain = (
        {KINDS[code] for block in edges(open_index(path)) for code in block.kind}
        for path in (odd_index, plain_index)
    )
    assert plain == {"fact", "synonym", "fact+synonym", "passage"}
    assert odd == {"fact", "synonym", "passage"}


def test_igraph_reads_the_graphml(index: Index, tmp_path: Path) -> None:
    export_index(index.path, "graphml", tmp_path / "graph.graphml")
    graph = igraph.Graph.Read_GraphML(str(tmp_path / "graph.graphml"))
    n_nodes = index.n_phrases + index.n_passages
    assert (graph.vcount(), graph.is_directed()) == (n_nodes, False)
    assert graph.vs["id"] == [f"n{number}" for number in range(n_nodes)]
    titles = [title.replace("\x01", "\ufffd") for title in index.passages["title"].to_pylist()]
    assert graph.vs["label"] == [*index.phrases["phrase"].to_pylist(), *titles]
    assert graph.vs["kind"] == ["phrase"] * index.n_phrases + ["passage"] * index.n_passages
    assert graph.vs["passage_id"][index.n_phrases :] == index.passages["passage_id"].to_pylist()
    numbers = list(map(str, index.phrases["phrase_id"].to_pylist()))
    assert not numbers or graph.vs["phrase_id"][: index.n_phrases] == numbers
    found = {(*edge.tuple, float(np.float32(edge["weight"])), edge["kind"]) for edge in graph.es}
    assert found == expected_edges(index)


def test_characters_that_xml_cannot_hold_are_replaced(odd_index: Path, tmp_path: Path) -> None:
    export_index(odd_index, "graphml", tmp_path / "graph.graphml")
    labels = igraph.Graph.Read_GraphML(str(tmp_path / "graph.graphml")).vs["label"]
    assert "A & B <i>" in labels
    assert _text("a\x00b\ud800\r<\uffff") == "a\ufffdb\ufffd&#13;&lt;\ufffd"


class Csv(NamedTuple):
    header: list[str]
    rows: list[list[str]]


def read_csv(file: Path) -> Csv:
    with file.open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    return Csv(header, rows)


def test_neo4j_files_hold_nodes_edges_and_facts(index: Index, tmp_path: Path) -> None:
    export_index(index.path, "neo4j-csv", tmp_path / "neo4j")
    phrases, passages, walked, facts = (
        read_csv(tmp_path / "neo4j" / f"{name}.csv") for name in ("phrases", "passages", "edges", "facts")
    )
    assert phrases.header == ["node:ID", "phrase_id", "phrase", "passage_count:int", ":LABEL"]
    assert phrases.rows == [
        [str(number), str(row["phrase_id"]), row["phrase"], str(row["passage_count"]), "Phrase"]
        for number, row in enumerate(index.phrases.to_pylist())
    ]
    assert passages.header == ["node:ID", "passage_id", "doc_id", "title", "text", ":LABEL"]
    assert passages.rows == [
        [str(number), row["passage_id"], row["doc_id"], row["title"], row["text"], "Passage"]
        for number, row in enumerate(index.passages.to_pylist(), start=index.n_phrases)
    ]
    assert walked.header == [":START_ID", ":END_ID", "weight:float", "kind", ":TYPE"]
    found = {(int(a), int(b), float(np.float32(w)), kind) for a, b, w, kind, _ in walked.rows}
    assert found == expected_edges(index)
    assert facts.header == [":START_ID", ":END_ID", "fact_id", "predicate", "count:int", ":TYPE"]
    assert facts.rows == [
        [*map(str, ends), str(row["fact_id"]), row["predicate"], str(row["count"]), "FACT"]
        for ends, row in zip(index.fact_ends.tolist(), index.facts.to_pylist(), strict=True)
    ]


def test_faiss_searches_the_vectors(index: Index, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    export_index(index.path, "faiss", tmp_path / "faiss")
    tables = {"passages": "passage_id", "phrases": "phrase_id", "facts": "fact_id"}
    for kind, column in tables.items():
        vectors = index.vectors(kind).astype(np.float32)
        found = faiss.read_index(str(tmp_path / "faiss" / f"{kind}.faiss"))
        assert type(found) is faiss.IndexFlatIP
        assert (found.ntotal, found.d) == vectors.shape
        assert found.metric_type == faiss.METRIC_INNER_PRODUCT
        if len(vectors):
            np.testing.assert_array_equal(found.reconstruct_n(0, found.ntotal), vectors)
            scores, rows = found.search(vectors[-1:], 1)
            assert scores[0, 0] == pytest.approx(1, abs=2e-3)
            np.testing.assert_allclose(vectors[rows[0, 0]], vectors[-1], atol=1e-3)
        ids = pq.read_table(tmp_path / "faiss" / f"{kind}.ids.parquet")
        assert ids[column].to_pylist() == getattr(index, kind)[column].to_pylist()


def test_a_faiss_file_of_another_form_is_not_guessed_at() -> None:
    faiss = pytest.importorskip("faiss")

    class Other:
        __version__ = "99"
        IndexFlatIP = faiss.IndexFlatIP

        @staticmethod
        def serialize_index(index: Any) -> Any:
            return np.append(faiss.serialize_index(index), np.zeros(8, np.uint8))

    with pytest.raises(HippoIndexError, match="FAISS 99 writes IndexFlatIP in a way not known here"):
        faiss_files._header(Other, 5, 4)


class Store(NamedTuple):
    hash_id: list[str]
    content: list[str]
    embedding: np.ndarray


def read_store(working: Path, name: str) -> Store:
    table = pq.read_table(working / f"{name}_embeddings" / f"vdb_{name}.parquet")
    assert table.column_names == ["hash_id", "content", "embedding"]
    store = Store(
        table["hash_id"].to_pylist(), table["content"].to_pylist(), np.array(table["embedding"].to_pylist())
    )
    hashes = [f"{name}-{hashlib.md5(text.encode()).hexdigest()}" for text in store.content]  # noqa: S324
    assert store.hash_id == hashes
    assert len(set(hashes)) == len(hashes)
    return store


def full_texts(index: Index) -> list[str]:
    rows = index.passages.to_pylist()
    return [f"{row['title']}\n{row['text']}" if row["title"] else row["text"] for row in rows]


def test_hipporag_finds_its_stores_and_its_graph(index: Index, tmp_path: Path) -> None:
    export_index(index.path, "hipporag", tmp_path / "out", llm_model="meta/llm", embedding_model="nv/embed")
    working = tmp_path / "out" / "meta_llm_nv_embed"
    chunks, entities, facts = (read_store(working, name) for name in ("chunk", "entity", "fact"))
    texts = full_texts(index)
    assert chunks.content == list(dict.fromkeys(texts))
    first = [texts.index(text) for text in chunks.content]
    np.testing.assert_array_equal(chunks.embedding, index.vectors("passages")[first].astype(np.float32))
    phrases = index.phrases["phrase"].to_pylist()
    assert entities.content == phrases
    predicates = index.facts["predicate"].to_pylist()
    assert [ast.literal_eval(text) for text in facts.content] == [
        (phrases[a], predicate, phrases[b])
        for (a, b), predicate in zip(index.fact_ends.tolist(), predicates, strict=True)
    ]
    for store, kind in ((entities, "phrases"), (facts, "facts")):
        vectors = index.vectors(kind).astype(np.float32)
        np.testing.assert_array_equal(store.embedding.reshape(vectors.shape), vectors)
    graph = igraph.Graph.Read_Pickle(str(working / "graph.pickle"))
    assert not graph.is_directed()
    assert graph.vs["name"] == graph.vs["hash_id"] == [*entities.hash_id, *chunks.hash_id]
    assert graph.vs["content"] == [*entities.content, *chunks.content]
    vertex = {name: number for number, name in enumerate(graph.vs["content"][len(phrases) :], len(phrases))}
    node = [*range(len(phrases)), *(vertex[text] for text in texts)]
    wanted = {(node[a], node[b]): weight for a, b, weight, _ in expected_edges(index)}
    assert (
        dict(zip(graph.get_edgelist(), graph.es["weight"], strict=True)) == wanted
        if wanted
        else not graph.ecount()
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "meta_llm_nv_embed",
        "openie_results_ner_meta_llm.json",
    }


def test_hipporag_walks_to_the_same_scores(sample_index: Path, tmp_path: Path) -> None:
    index = open_index(sample_index)
    export_index(sample_index, "hipporag", tmp_path / "out")
    graph = igraph.Graph.Read_Pickle(str(tmp_path / "out" / "rules_all-MiniLM-L6-v2" / "graph.pickle"))
    restart = np.zeros(graph.vcount())
    restart[[3, 17, -1]] = 0.5, 0.3, 0.2
    walked = graph.personalized_pagerank(
        vertices=range(graph.vcount()),
        damping=0.5,
        directed=False,
        weights="weight",
        reset=restart,
        implementation="prpack",
    )
    np.testing.assert_allclose(walked, reference(index.graph, restart[:, None]).scores[:, 0], atol=1e-7)


def test_openie_results_are_what_was_extracted(index: Index, tmp_path: Path) -> None:
    export_index(index.path, "hipporag", tmp_path / "out", llm_model="llm")
    file = tmp_path / "out" / "openie_results_ner_llm.json"
    content = json.loads(file.read_bytes())
    assert set(content) == {"docs", "avg_ent_chars", "avg_ent_words"}
    docs = content["docs"]
    chunks = read_store(next((tmp_path / "out").glob("llm_*")), "chunk")
    assert [doc["idx"] for doc in docs] == chunks.hash_id
    assert [doc["passage"] for doc in docs] == chunks.content
    triples: dict[str, Counter[tuple[str, ...]]] = {text: Counter() for text in full_texts(index)}
    entities: dict[str, set[str]] = {text: set() for text in triples}
    for text, row in zip(full_texts(index), index.extractions.to_pylist(), strict=True):
        triples[text].update(tuple(triple.values()) for triple in row["triples"])
        entities[text].update(row["entities"])
    assert {doc["passage"]: Counter(map(tuple, doc["extracted_triples"])) for doc in docs} == triples
    assert {doc["passage"]: set(doc["extracted_entities"]) for doc in docs} == entities
    sizes = [(len(name), len(name.split())) for doc in docs for name in doc["extracted_entities"]]
    averages = np.mean(sizes, axis=0) if sizes else (0, 0)
    assert (content["avg_ent_chars"], content["avg_ent_words"]) == pytest.approx(averages, abs=1e-4)


def test_openie_results_can_be_imported_again(index: Index, tmp_path: Path) -> None:
    export_index(index.path, "hipporag", tmp_path / "out", llm_model="llm")
    imported = ImportedExtractor(tmp_path / "out" / "openie_results_ner_llm.json")
    passages = [Passage(row["passage_id"], row["title"], row["text"]) for row in index.passages.to_pylist()]
    normalise = normaliser(index.manifest.config["graph"]["normalisation"])
    found = {
        tuple(map(normalise, triple))
        for extraction in imported.extract(passages)
        for triple in extraction.triples
    }
    phrases, predicates = index.phrases["phrase"].to_pylist(), index.facts["predicate"].to_pylist()
    assert {triple for triple in found if triple[0] and triple[2]} == {
        (phrases[a], predicate, phrases[b])
        for (a, b), predicate in zip(index.fact_ends.tolist(), predicates, strict=True)
    }
    assert not any(extraction.missing or extraction.rejected for extraction in imported.extract(passages))


def test_hipporag_warns_of_what_differs(odd_index: Path, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        export_index(odd_index, "hipporag", tmp_path / "out")
    warnings = {line["event"]: line for line in logs if line["log_level"] == "warning"}
    assert any("graph.pickle is a pickle" in event for event in warnings)
    assert warnings["passages with equal text are one passage in HippoRAG"]["merged"] == 1
    changed = next(line for event, line in warnings.items() if "would normalise otherwise" in event)
    phrases = open_index(odd_index).phrases["phrase"].to_pylist()
    assert changed["phrases"] == sum(
        not phrase.replace(" ", "").isalnum() or not phrase.isascii() for phrase in phrases
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "import_all-MiniLM-L6-v2",
        "openie_results_ner_import.json",
    }


def written(output: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(output.rglob("*")) or [output]:
        if file.is_file():
            yield file.relative_to(output).as_posix(), file.read_bytes()


@pytest.mark.parametrize("form", sorted({*FILES, *FOLDERS}))
def test_the_same_index_gives_the_same_bytes(sample_index: Path, form: str, tmp_path: Path) -> None:
    if form == "faiss":
        pytest.importorskip("faiss")
    made = [export_index(sample_index, form, tmp_path / name) for name in ("one", "two")]
    first, second = (dict(written(tmp_path / name)) for name in ("one", "two"))
    assert first == second
    assert list(made[0]["files"].values()) == [len(content) for content in first.values()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("form", sorted({*FILES, *FOLDERS}))
def test_a_taken_output_is_refused(bare_index: Path, form: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(UsageError, match="exists already: choose another name"):
            export_index(bare_index, form, tmp_path / name)
    with pytest.raises(UsageError, match="lies inside the index"):
        export_index(bare_index, form, bare_index / "vectors" / "copy")
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "precious"


def test_a_folder_that_is_not_there_is_made(bare_index: Path, tmp_path: Path) -> None:
    export_index(bare_index, "parquet-edges", tmp_path / "a" / "b" / "edges.parquet")
    assert pq.read_metadata(tmp_path / "a" / "b" / "edges.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("form", "package", "install"),
    [("faiss", "faiss", "pip install faiss-cpu"), ("hipporag", "igraph", "pip install igraph")],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    bare_index: Path, form: str, package: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackageError, match=f"--format {form} needs the package '{package}'.*{install}"
    ):
        export_index(bare_index, form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_meant_is_refused(bare_index: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no format 'gexf'; there are faiss, graphml, hipporag"):
        export_index(bare_index, "gexf", tmp_path / "out")
    with pytest.raises(UsageError, match="are for the format hipporag, not faiss"):
        export_index(bare_index, "faiss", tmp_path / "out", llm_model="llm")


def test_the_command_writes_and_says_what(run_cli: Run, sample_index: Path, tmp_path: Path) -> None:
    output = tmp_path / "edges.parquet"
    command = ["export", "--index", sample_index, "--format", "parquet-edges", "--output", output, "--json"]
    done = run_cli(*command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "format": "parquet-edges",
        "output": str(output),
        "files": {"edges.parquet": output.stat().st_size},
    }
    again = run_cli(*command)
    assert again.returncode == 2
    assert "exists already" in again.stderr
