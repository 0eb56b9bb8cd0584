from __future__ import annotations

import itertools
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hippoindex.errors import UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.chunk import ChunkStage, chunk_spans, chunk_table, sentence_spans
from hippoindex.pipeline.config import EmbedConfig

WORDS = re.compile(r"\S+")


def word_offsets(text):
    return [match.span() for match in WORDS.finditer(text)]


def word_offsets_of_all(texts):
    return [word_offsets(text) for text in texts]


def sentences(text):
    return [text[start:end] for start, end in sentence_spans(text)]


def chunks(text, max_tokens, overlap_tokens=0):
    return [text[a:b] for a, b in chunk_spans(text, max_tokens, overlap_tokens, word_offsets(text))]


# --- sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t ", []),
        ("One bee. Two bees! Three?", ["One bee.", "Two bees!", "Three?"]),
        ("It costs 3.14 now. Buy it.", ["It costs 3.14 now.", "Buy it."]),
        ('She said "No." Then she left.', ['She said "No."', "Then she left."]),
        ("Heading\n\nBody of it", ["Heading", "Body of it"]),
        ("Heading\r\n \r\nBody of it", ["Heading", "Body of it"]),
        ("蜂は飛ぶ。花は咲く！なぜ？", ["蜂は飛ぶ。", "花は咲く！", "なぜ？"]),
        ("「はい。」と答えた。終わり。", ["「はい。」", "と答えた。", "終わり。"]),
        ("मधुमक्खी उड़ती है। फूल खिलता है।", ["मधुमक्खी उड़ती है।", "फूल खिलता है।"]),
        ("هل تطير النحلة؟ نعم تطير.", ["هل تطير النحلة؟", "نعم تطير."]),
    ],
)
def test_sentences_end_at_the_marks_of_their_script(text, expected):
    assert sentences(text) == expected


@given(st.text(st.sampled_from("ab .!?\n\t\r。！」न।؟é\u200b\u00a0\u2028"), max_size=60))
def test_sentences_hold_every_visible_character_once_and_in_order(text):
    spans = sentence_spans(text)
    assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
    assert all(text[a:b] == text[a:b].strip() != "" for a, b in spans)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_a_paragraph_beyond_the_default_length_limit_of_spacy_is_read():
    text = "Bees fly. " * 110_000
    assert len(text) > 1_000_000
    assert len(sentence_spans(text)) == 110_000


# --- chunks


def test_chunks_take_whole_sentences_as_long_as_they_fit():
    text = "One two three. Four five. Six seven eight nine. Ten."
    assert chunks(text, 5) == ["One two three. Four five.", "Six seven eight nine. Ten."]


def test_the_overlap_is_made_of_whole_sentences_that_fit():
    text = "One one one. Two two. Three. Four four four. Five five."
    first = "One one one. Two two. Three."
    assert chunks(text, 6, 3) == [first, "Two two. Three. Four four four.", "Four four four. Five five."]
    assert chunks(text, 6, 2) == [first, "Three. Four four four. Five five."]


def test_the_overlap_yields_to_a_sentence_that_needs_the_room():
    text = "One one. Two two. Four four four four. Five."
    assert chunks(text, 4, 2) == ["One one. Two two.", "Four four four four.", "Five."]


def test_a_sentence_longer_than_a_chunk_is_cut():
    assert chunks("a b c d e f g. H.", 3) == ["a b c", "d e f", "g. H."]


def test_a_long_sentence_is_cut_between_words_rather_than_within():
    text = "abc def ghi"
    two_tokens_a_word = [(0, 2), (2, 3), (4, 6), (6, 7), (8, 10), (10, 11)]
    assert chunk_spans(text, 3, 0, two_tokens_a_word) == [(0, 3), (4, 7), (8, 11)]


def test_a_word_longer_than_a_chunk_is_cut_between_tokens():
    assert chunk_spans("abcdef", 4, 0, [(i, i + 1) for i in range(6)]) == [(0, 4), (4, 6)]


def test_tokens_of_one_character_stay_together():
    assert chunk_spans("가나", 3, 0, [(0, 1), (0, 1), (1, 2), (1, 2)]) == [(0, 1), (1, 2)]
    with pytest.raises(UsageError, match="max_tokens=1 is too small"):
        chunk_spans("가나", 1, 0, [(0, 1), (0, 1), (1, 2)])


def test_tokens_of_white_space_alone_make_no_chunk():
    assert chunk_spans("a    b", 1, 0, [(0, 1), (1, 3), (3, 5), (5, 6)]) == [(0, 1), (5, 6)]


def test_an_overlap_as_large_as_the_chunk_is_refused():
    with pytest.raises(UsageError, match="below max_tokens, got 4 and 4"):
        chunk_spans("text", 4, 4, [(0, 4)])


@st.composite
def chunk_cases(draw):
    """A text, tokens that may split words, touch or skip characters, and sizes."""
    pieces = ["bee", " hive", " ", ". ", "! ", "\n\n", "蜂", "。", "ना", "। ", "é", "\u200b"]
    text = "".join(draw(st.lists(st.sampled_from(pieces), max_size=40)))
    max_tokens = draw(st.integers(1, 12))
    overlap_tokens = draw(st.integers(0, max_tokens - 1))
    offsets = []
    for start, end in word_offsets(text):
        cuts = sorted(draw(st.sets(st.integers(start + 1, end - 1), max_size=4))) if end - start > 1 else []
        offsets.extend(itertools.pairwise([start, *cuts, end]))
    skipped = draw(st.sets(st.integers(0, max(len(offsets) - 1, 0)), max_size=2))
    return text, max_tokens, overlap_tokens, [span for i, span in enumerate(offsets) if i not in skipped]


@settings(max_examples=300)
@given(chunk_cases())
def test_chunks_keep_their_promises(case):
    text, max_tokens, overlap_tokens, offsets = case

    def tokens(start, end):
        return sum(a < end and b > start for a, b in offsets)

    spans = chunk_spans(text, max_tokens, overlap_tokens, offsets)
    covered = {i for start, end in spans for i in range(start, end)}
    assert covered >= {i for i, char in enumerate(text) if not char.isspace()}
    assert all(text[a:b] == text[a:b].strip() != "" for a, b in spans)
    assert all(tokens(a, b) <= max_tokens for a, b in spans)
    for (start, end), (next_start, next_end) in itertools.pairwise(spans):
        assert start < next_start
        assert end < next_end
        assert next_start >= end or tokens(next_start, end) <= overlap_tokens


# --- tables and the stage


def documents(**texts):
    rows = [(name, name, name.upper(), text, 0, len(text)) for name, text in texts.items()]
    columns = zip(*rows, strict=True)
    return pa.table(list(map(pa.array, columns)), schema=schemas.PASSAGE)


def test_a_document_of_one_chunk_is_left_as_it_is():
    table = documents(short="  Just this. ", empty="")
    assert chunk_table(table, 8, 2, word_offsets_of_all).equals(table)


def test_chunks_carry_document_title_and_span():
    text = "One two three.  Four five six.\nSeven."
    result = chunk_table(documents(long=text, short="Eight."), 4, 0, word_offsets_of_all)
    assert result.schema == schemas.PASSAGE
    assert result.column("passage_id").to_pylist() == ["long#0", "long#1", "short"]
    assert result.column("doc_id").to_pylist() == ["long", "long", "short"]
    assert result.column("title").to_pylist() == ["LONG", "LONG", "SHORT"]
    for row in result.to_pylist()[:2]:
        assert text[row["span_start"] : row["span_end"]] == row["text"]
    assert result.column("text").to_pylist() == ["One two three.", "Four five six.\nSeven.", "Eight."]


def test_the_key_of_the_stage_follows_what_decides_the_chunks():
    stage = ChunkStage(64, 8, EmbedConfig())
    assert stage.key_part() != ChunkStage(64, 9, EmbedConfig()).key_part()
    assert stage.key_part() != ChunkStage(65, 8, EmbedConfig()).key_part()
    assert stage.key_part() == ChunkStage(64, 8, EmbedConfig(precision="int8", dtype="float32")).key_part()


@pytest.mark.slow
def test_the_stage_counts_tokens_of_the_embedding_model():
    from hippoindex.pipeline.embed import open_embedder

    text = "Unquestionably, hummingbirds hover. " * 40 + "벌이 날아간다. " * 40
    stage = ChunkStage(32, 8, EmbedConfig())
    output = stage.open()(documents(long=text))
    assert output.quarantine.num_rows == 0
    parts = output.rows.column("text").to_pylist()
    assert len(parts) > 10
    assert max(len(offsets) for offsets in open_embedder(EmbedConfig()).token_offsets(parts)) <= 32
