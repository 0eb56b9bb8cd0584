from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hippoindex.cluster.executor import LocalExecutor
from hippoindex.cluster.storage import open_storage
from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import ExtractConfig
from hippoindex.pipeline.extract.stage import ExtractStage
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.shards import ShardStore
from hippoindex.pipeline.stage import StageOutput, completion_key


def passages(*rows: tuple[str, str, str]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "passage_id": i,
                "doc_id": i,
                "title": title,
                "text": text,
                "span_start": 0,
                "span_end": len(text),
            }
            for i, title, text in rows
        ],
        schema=schemas.PASSAGE,
    )


def entry(text: str, entities: list[Any], triples: list[Any]) -> dict[str, Any]:
    return {"passage": text, "extracted_entities": entities, "extracted_triples": triples}


def importing(folder: Path, *docs: dict[str, Any], **settings: Any) -> ExtractStage:
    path = folder / "openie.json"
    path.write_text(json.dumps({"docs": docs}), encoding="utf-8")
    return ExtractStage(ExtractConfig(engine="import", path=str(path), **settings))


def run(stage: ExtractStage, table: pa.Table) -> StageOutput:
    output = stage.open()(table)
    output.rows.validate(full=True)
    output.quarantine.validate(full=True)
    assert output.rows.schema == schemas.EXTRACTION
    assert output.quarantine.schema == schemas.QUARANTINE
    return output


def test_rows_keep_order_distinct_entities_and_repeated_triples(tmp_path: Path) -> None:
    rye = ["Corbel Mill", "grinds", "rye"]
    stage = importing(
        tmp_path,
        entry("Ferry\nIt crosses the Lomm.", ["Lomm", "ferry", "Lomm "], []),
        entry("Corbel Mill\nIt grinds rye.", [], [rye, rye]),
    )
    output = run(
        stage,
        passages(
            ("m", "Corbel Mill", "It grinds rye."),
            ("x", "", "Nobody has read this."),
            ("f", "Ferry", "It crosses the Lomm."),
        ),
    )
    triple = {"subject": "Corbel Mill", "predicate": "grinds", "object": "rye"}
    assert output.rows.to_pylist() == [
        {"passage_id": "m", "entities": [], "triples": [triple, triple], "missing": False},
        {"passage_id": "x", "entities": [], "triples": [], "missing": True},
        {"passage_id": "f", "entities": ["Lomm", "ferry"], "triples": [], "missing": False},
    ]
    assert output.quarantine.num_rows == 0


def test_rejected_items_are_quarantined_under_their_passage(tmp_path: Path) -> None:
    docs = entry("It grinds rye.", ["mill", 3, "\ud83d"], [["mill", "grinds"], ["mill", "grinds", "rye"]])
    output = run(importing(tmp_path, docs), passages(("m", "", "It grinds rye.")))
    assert output.rows.num_rows == 1
    assert output.quarantine.select(["stage", "kind", "row_id", "reason", "raw"]).to_pylist() == [
        {"stage": "extract", "kind": kind, "row_id": "m", "reason": reason, "raw": raw}
        for kind, reason, raw in [
            ("entity", "entity is not a string (int)", "3"),
            ("entity", "entity is not valid Unicode (lone surrogate)", '"\\ud83d"'),
            ("triple", "triple has 2 fields instead of 3", '["mill", "grinds"]'),
        ]
    ]


def test_a_passage_that_is_too_long_is_quarantined(tmp_path: Path) -> None:
    stage = importing(tmp_path, entry("It grinds rye.", ["mill"], []), max_passage_chars=14)
    output = run(stage, passages(("l", "Mill", "It grinds rye."), ("m", "", "It grinds rye.")))
    assert output.rows["passage_id"].to_pylist() == ["m"]
    (row,) = output.quarantine.to_pylist()
    assert (row["kind"], row["row_id"], row["raw"]) == ("passage", "l", "It grinds rye.")
    assert "18 characters" in row["reason"]
    assert "chunk.max_tokens" in row["reason"]


def test_an_empty_shard_gives_empty_tables(tmp_path: Path) -> None:
    output = run(importing(tmp_path), passages())
    assert (output.rows.num_rows, output.quarantine.num_rows) == (0, 0)


def test_travels_to_a_worker_and_writes_its_shard(tmp_path: Path) -> None:
    stage = importing(tmp_path, entry("It grinds rye.", ["mill"], [["mill", "grinds"]]))
    key = completion_key(stage, "0" * 64)
    copy = pickle.loads(pickle.dumps(stage))  # noqa: S301 (our own bytes)
    assert copy == stage
    assert completion_key(copy, "0" * 64) == key
    store = ShardStore(open_storage(tmp_path / "work"), tmp_path / "work", Monitor())
    shard = store.write(passages(("m", "", "It grinds rye.")))
    (output,) = store.run(LocalExecutor(1), copy, "passages", [shard])
    assert output.read()["entities"].to_pylist() == [["mill"]]
    assert store.all_quarantine().num_rows == 1


def test_the_key_follows_what_decides_the_result(tmp_path: Path) -> None:
    def key(**settings: Any) -> str:
        return json.dumps(ExtractStage(ExtractConfig(**settings)).key_part(), sort_keys=True)

    one, two, copy = (tmp_path / name for name in ("one.json", "two.json", "copy.json"))
    for path, content in ((one, "1"), (two, "2"), (copy, "1")):
        path.write_text(content, encoding="utf-8")
    openai = {"engine": "openai", "model": "tiny"}

    assert key(engine="import", path=str(one)) == key(engine="import", path=str(copy))
    assert key(**openai) == key(**openai, base_url="http://127.0.0.1:9/v1", concurrency=2, timeout_s=9)
    assert key(**openai) == key(**openai, cache="a", tokens_per_s=9, max_usd=1, request_attempts=2)
    assert key() == key(model="en_core_web_sm")
    different = [
        key(),
        key(max_passage_chars=9),
        key(engine="import", path=str(one)),
        key(engine="import", path=str(two)),
        key(**openai),
        key(**openai, max_output_tokens=99),
        key(**openai, mode="joint"),
        key(**openai, structured="none"),
        key(**openai, max_passage_tokens=99),
        key(engine="openai", model="small"),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"engine": "import"}, UsageError, r"--set extract\.path="),
        ({"engine": "import", "path": "/nowhere/openie.json"}, InputError, "/nowhere/openie.json"),
        ({"engine": "openai"}, UsageError, r"--set extract\.model="),
    ],
)
def test_a_missing_setting_or_file_is_named_by_key_and_open(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    stage = ExtractStage(ExtractConfig(**settings))
    with pytest.raises(error, match=message):
        stage.key_part()
    with pytest.raises(error, match=message):
        stage.open()


class _Handler(BaseHTTPRequestHandler):
    """A language model that answers about mills and rambles about all else, with half a character in it."""

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        content = "Well, \ud83d"
        if "rye" in messages[5]["content"]:
            content = (
                '{"entities": ["mill"]}' if len(messages) == 6 else '{"triples": [["mill", "grinds", ""]]}'
            )
        data = json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        """Keep quiet."""


@pytest.fixture
def base_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def test_a_passage_that_the_language_model_fails_on_is_quarantined(base_url: str) -> None:
    stage = ExtractStage(ExtractConfig(engine="openai", model="tiny", base_url=base_url, max_attempts=1))
    output = run(stage, passages(("o", "", "Something odd."), ("m", "", "It grinds rye.")))
    assert output.rows.to_pylist() == [
        {"passage_id": "m", "entities": ["mill"], "triples": [], "missing": False}
    ]
    assert [
        (row["kind"], row["row_id"], row["reason"], row["raw"]) for row in output.quarantine.to_pylist()
    ] == [
        ("passage", "o", 'the answer is not a JSON object with a list "entities"', "Well, \\ud83d"),
        ("triple", "m", "object is empty", '["mill", "grinds", ""]'),
    ]


@pytest.mark.slow
def test_rules_need_no_file_and_no_server() -> None:
    text = "Marie Curie discovered polonium in Paris."
    output = run(
        ExtractStage(ExtractConfig()), passages(("c", "Marie Curie", text), ("l", "", "x" * 100_001))
    )
    (row,) = output.rows.to_pylist()
    assert "Marie Curie" in row["entities"]
    assert {"subject": "Marie Curie", "predicate": "discovered", "object": "polonium"} in row["triples"]
    assert output.quarantine["row_id"].to_pylist() == ["l"]
