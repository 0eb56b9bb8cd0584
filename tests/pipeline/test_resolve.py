"""Numbering and counting against plain dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import HippoIndexError
from hippoindex.pipeline import resolve, schemas
from hippoindex.pipeline.config import GraphConfig
from hippoindex.pipeline.normalise import phrase_id, unicode_phrase
from hippoindex.pipeline.resolve import RESOLVED, Resolution, ResolveStage, combine, fact_texts, merge

names = st.sampled_from(["Mill", "the mill", "Orrin", "orrin", "River", "1,000", "北京", "--", "C++", "C"])
triples = st.builds(
    lambda s, p, o: {"subject": s, "predicate": p, "object": o}, names, st.sampled_from(["is", "has"]), names
)
passages = st.lists(
    st.tuples(st.lists(names, max_size=4), st.lists(triples, max_size=5)), min_size=1, max_size=8
)


def extraction(content: list[tuple[list[str], list[dict[str, str]]]]) -> pa.Table:
    rows = [
        {"passage_id": f"p{i}", "entities": entities, "triples": facts, "missing": False}
        for i, (entities, facts) in enumerate(content)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.EXTRACTION)


def resolved(
    table: pa.Table, shard_rows: int = 100, **settings: Any
) -> tuple[Resolution, list[dict[str, Any]]]:
    process = ResolveStage(GraphConfig(**settings)).open()
    outputs = [process(table.slice(start, shard_rows)) for start in range(0, table.num_rows, shard_rows)]
    quarantine = [row for output in outputs for row in output.quarantine.to_pylist()]
    ids = table["passage_id"].combine_chunks()
    return merge([output.rows for output in outputs], ids), quarantine


@settings(max_examples=100, deadline=None)
@given(content=passages, ner_nodes=st.booleans())
def test_everything_is_counted_as_a_dictionary_would(content: Any, ner_nodes: bool) -> None:
    result, quarantine = resolved(extraction(content), ner_nodes=ner_nodes)
    mentions: dict[str, Counter[int]] = defaultdict(Counter)
    facts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    rejected = 0
    for number, (entities, extracted) in enumerate(content):
        for triple in extracted:
            s, p, o = (unicode_phrase(triple[key]) for key in ("subject", "predicate", "object"))
            if s and o:
                mentions[s][number] += 1
                mentions[o][number] += 1
                facts[s, p, o][f"p{number}"] += 1
            else:
                rejected += 1
        for entity in entities if ner_nodes else ():
            if unicode_phrase(entity):
                mentions[unicode_phrase(entity)][number] += 1
    order = sorted(mentions, key=phrase_id)
    assert result.phrases["phrase"].to_pylist() == order
    assert result.phrases["phrase_id"].to_pylist() == [phrase_id(phrase) for phrase in order]
    assert result.phrases["passage_count"].to_pylist() == [len(mentions[phrase]) for phrase in order]
    dense = [[mentions[phrase][i] for i in range(len(content))] for phrase in order]
    expected = np.array(dense, dtype=np.int32).reshape(len(order), len(content))
    np.testing.assert_array_equal(result.occurrence.toarray(), expected)
    found = {}
    for row, (a, b) in zip(result.facts.to_pylist(), result.fact_ends.tolist(), strict=True):
        found[order[a], row["predicate"], order[b]] = (row["count"], row["passage_ids"])
    assert found == {
        fact: (sum(c.values()), sorted(c, key=lambda i: int(i[1:]))) for fact, c in facts.items()
    }
    assert result.n_triples + rejected == sum(len(extracted) for _, extracted in content)
    assert len(quarantine) == rejected
    assert all(row["kind"] == "triple" and row["row_id"].startswith("p") for row in quarantine)
    texts = fact_texts(result.facts, result.fact_ends, result.phrases["phrase"].combine_chunks()).to_pylist()
    assert set(texts) == {" ".join(fact) for fact in facts}


@settings(max_examples=30, deadline=None)
@given(content=passages, shard_rows=st.integers(1, 4))
def test_the_number_of_shards_does_not_matter(content: Any, shard_rows: int) -> None:
    whole, parts = (resolved(extraction(content), rows)[0] for rows in (100, shard_rows))
    assert whole.phrases.equals(parts.phrases)
    assert whole.facts.equals(parts.facts)
    assert (whole.occurrence != parts.occurrence).nnz == 0


@settings(max_examples=60, deadline=None)
@given(content=passages, split=st.integers(0, 8), ner_nodes=st.booleans())
def test_two_resolutions_combine_to_that_of_both(content: Any, split: int, ner_nodes: bool) -> None:
    table = extraction(content)
    whole, _ = resolved(table, ner_nodes=ner_nodes)
    parts = [resolved(part, ner_nodes=ner_nodes)[0] for part in (table.slice(0, split), table.slice(split))]
    combined = combine(*parts)
    assert combined.phrases.equals(whole.phrases)
    assert combined.facts.equals(whole.facts)
    assert np.array_equal(combined.fact_ends, whole.fact_ends)
    assert combined.n_triples == whole.n_triples
    for name in ("indptr", "indices", "data"):
        got, expected = getattr(combined.occurrence, name), getattr(whole.occurrence, name)
        assert np.array_equal(got, expected)
        assert got.dtype == expected.dtype


def test_hipporag_mode_merges_what_it_cannot_tell_apart_and_quarantines_what_it_erases() -> None:
    content = [(["C++", "C"], [{"subject": "北京", "predicate": "is", "object": "C"}])]
    result, quarantine = resolved(extraction(content), normalisation="hipporag")
    assert result.phrases["phrase"].to_pylist() == ["c"]
    assert [row["reason"] for row in quarantine] == ["an end of the triple is empty after normalisation"]


def test_equal_ids_of_different_phrases_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "phrase_id", len)
    with pytest.raises(HippoIndexError, match=r"same 64-bit id: '(abc|xyz)' and '(abc|xyz)'"):
        resolved(extraction([(["abc", "xyz"], [])]))


def test_shards_of_other_passages_are_refused() -> None:
    with pytest.raises(HippoIndexError, match="do not hold the passages"):
        merge([RESOLVED.empty_table()], pa.array(["p0"]))


def test_a_corpus_without_any_extraction_has_no_phrases() -> None:
    result, _ = resolved(extraction([([], []), ([], [])]))
    assert result.phrases.num_rows == result.facts.num_rows == result.n_triples == 0
    assert result.occurrence.shape == (0, 2)
    assert result.fact_ends.shape == (0, 2)
