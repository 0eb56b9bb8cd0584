"""What a shard resolves to, against rows as dictionaries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.resolve import ResolveStage

names = st.one_of(
    st.sampled_from(["Mill", "the mill", "Orrin", "orrin", "River", "1,000", "北京", "--", "", "C++", "C"]),
    st.text(max_size=4),
)
triples = st.builds(lambda s, p, o: {"subject": s, "predicate": p, "object": o}, names, names, names)
passages = st.lists(
    st.tuples(st.lists(names, max_size=4), st.lists(triples, max_size=5)), min_size=0, max_size=6
)


def extraction(content: list[tuple[list[str], list[dict[str, str]]]]) -> pa.Table:
    rows = [
        {"passage_id": f"p{i}", "entities": entities, "triples": facts, "missing": False}
        for i, (entities, facts) in enumerate(content)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.EXTRACTION)


def as_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@settings(max_examples=150, deadline=None)
@given(
    content=passages,
    ner_nodes=st.booleans(),
    normalisation=st.sampled_from(["unicode", "hipporag"]),
    cut=st.integers(0, 3),
)
def test_a_shard_has_the_bytes_that_it_has_row_by_row(
    slow: ModuleType, content: Any, ner_nodes: bool, normalisation: Any, cut: int
) -> None:
    table = extraction(content).slice(cut)
    config = GraphConfig(ner_nodes=ner_nodes, normalisation=normalisation)
    made = ResolveStage(config).open()(table)
    rows, quarantine = slow.resolve(table, config)
    assert as_bytes(made.rows) == as_bytes(rows)
    assert made.quarantine.equals(quarantine)


def test_a_worker_resolves_every_shard_alike() -> None:
    process = ResolveStage(GraphConfig()).open()
    shards = [extraction([([name], [])]) for name in ("Orrin Mill", "ORRIN  MILL!", "Orrin Mill")]
    texts = [process(shard).rows["phrases"].to_pylist() for shard in shards]
    assert texts == [[["orrin mill"]]] * 3


def test_hipporag_mode_merges_what_it_cannot_tell_apart_and_quarantines_what_it_erases() -> None:
    content = [(["C++", "C"], [{"subject": "北京", "predicate": "is", "object": "C"}])]
    output = ResolveStage(GraphConfig(normalisation="hipporag")).open()(extraction(content))
    assert output.rows["phrases"].to_pylist() == [["c"]]
    assert output.rows["counts"].to_pylist() == [[2]]
    reasons = output.quarantine["reason"].to_pylist()
    assert reasons == ["an end of the triple is empty after normalisation"]


@pytest.mark.parametrize("end", ["subject", "object"])
def test_what_was_extracted_is_kept_with_the_reason_of_its_rejection(end: str) -> None:
    triple = {"subject": "Orrin", "predicate": "is", "object": "Mill", end: "--"}
    output = ResolveStage(GraphConfig()).open()(extraction([([], []), ([], [triple])]))
    (row,) = output.quarantine.to_pylist()
    assert (row["row_id"], row["kind"], row["raw"]) == ("p1", "triple", str(list(triple.values())))
