from __future__ import annotations

import csv
import gzip
import json
import os
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import corpus, schemas
from hippoindex.pipeline.config import CorpusConfig
from hippoindex.pipeline.corpus import CorpusReader

RECORDS = [
    {"id": "a-1", "title": "Honey", "text": "Bees make honey\nin a hive."},
    {"id": "a-2", "title": "", "text": "養蜂は古い仕事です。"},
    {"id": "a-3", "title": 'A "quoted", title', "text": "Wax melts at 62 degrees."},
]


def reader(*paths, **names):
    return CorpusReader(CorpusConfig(path=tuple(map(str, paths)), **names))


def read(*paths, **names):
    found = reader(*paths, **names)
    return found, list(found)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_json(path, records):
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def write_csv(path, records):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    return path


def write_parquet(path, records):
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    return path


def write_gzip(path, records):
    plain = WRITERS[path.with_suffix("").suffix](path.with_suffix(""), records)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}
FILE_NAMES = ["c.jsonl", "c.json", "c.csv", "c.parquet", "c.jsonl.gz", "c.json.gz", "c.csv.gz"]


def write(path, records):
    return (write_gzip if path.suffix == ".gz" else WRITERS[path.suffix])(path, records)


def contents(documents):
    return [(d.doc_id, d.title, d.text) for d in documents]


def fingerprint(path):
    found, documents = read(path)
    return corpus.corpus_fingerprint(found.documents(contents(documents)))


def assert_balanced(found):
    counts = found.counts
    assert counts.records == counts.documents + counts.duplicates + counts.quarantined
    assert counts.quarantined == len(found.quarantine)
    pa.Table.from_pylist(found.quarantine, schema=schemas.QUARANTINE)  # the rows fit their schema


# --- formats


@pytest.mark.parametrize("name", FILE_NAMES)
def test_every_format_gives_the_same_documents(tmp_path, name):
    found, documents = read(write(tmp_path / name, RECORDS))
    assert contents(documents) == [tuple(record.values()) for record in RECORDS]
    assert {d.source for d in documents} == {name}
    assert found.counts == corpus.CorpusCounts(files=1, records=3, documents=3)
    assert found.quarantine == []


def test_the_fingerprint_depends_on_content_alone(tmp_path):
    prints = set()
    for name in FILE_NAMES:
        prints.add(fingerprint(write(tmp_path / name, RECORDS)))
    assert len(prints) == 1
    for changed in (RECORDS[:2], RECORDS[::-1], [{**RECORDS[0], "title": "Wax"}, *RECORDS[1:]]):
        prints.add(fingerprint(write_jsonl(tmp_path / "changed.jsonl", changed)))
    assert len(prints) == 4


def test_the_fingerprint_knows_where_a_field_ends(tmp_path):
    first, second = [{"id": "ab", "text": "c"}], [{"id": "a", "text": "bc"}]
    prints = set()
    for records in (first, second):
        prints.add(fingerprint(write_jsonl(tmp_path / "c.jsonl", records)))
    assert len(prints) == 2


def test_there_is_no_table_of_documents_before_the_end(tmp_path):
    found = reader(write_jsonl(tmp_path / "c.jsonl", RECORDS))
    next(iter(found))
    with pytest.raises(UsageError, match="read to its end"):
        found.documents([])


def test_what_is_known_counts_as_read_before(tmp_path):
    first, read_first = read(write_jsonl(tmp_path / "a.jsonl", [*RECORDS[:2], RECORDS[0]]))
    known = first.documents(contents(read_first))
    assert known["records"].to_pylist() == [2, 1]
    both = write_jsonl(tmp_path / "b.jsonl", [RECORDS[1], RECORDS[2]])
    second = corpus.CorpusReader(CorpusConfig(path=(str(both),)), known)
    added = list(second)
    assert contents(added) == [tuple(RECORDS[2].values())]
    assert (second.counts.documents, second.counts.duplicates) == (1, 1)
    together = second.documents(contents(added))
    assert together["records"].to_pylist() == [2, 2, 1]
    whole, read_whole = read(write_jsonl(tmp_path / "c.jsonl", [*RECORDS, RECORDS[0], RECORDS[1]]))
    assert together.equals(whole.documents(contents(read_whole)))
    changed = write_jsonl(tmp_path / "d.jsonl", [{**RECORDS[0], "text": "Other words."}])
    with pytest.raises(InputError, match="already belongs to another title or text, in the index"):
        list(corpus.CorpusReader(CorpusConfig(path=(str(changed),)), known))


def test_reading_again_starts_anew(tmp_path):
    found = reader(write_jsonl(tmp_path / "c.jsonl", [*RECORDS, RECORDS[0], {"text": ""}]))
    first = list(found), found.counts, found.quarantine, found.repeats
    assert (list(found), found.counts, found.quarantine, found.repeats) == first


json_text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(json_text, json_text.filter(str.strip)), min_size=1, max_size=6))
def test_text_survives_every_format(tmp_path_factory, pairs):
    records = [
        {"id": f"d{i}", "title": title.replace("\0", ""), "text": text.replace("\0", "") + "."}
        for i, (title, text) in enumerate(pairs)
    ]
    folder = tmp_path_factory.mktemp("formats")
    for name in ("c.jsonl", "c.csv", "c.parquet"):
        _, documents = read(write(folder / name, records))
        assert contents(documents) == [tuple(record.values()) for record in records]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_quarantined_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("bytes")
    for name in ("c.jsonl", "c.json", "c.csv", "c.parquet", "c.jsonl.gz", "c.txt"):
        (folder / name).write_bytes(data)
        found = reader(folder / name)
        message = ""
        try:
            list(found)
        except InputError as error:
            message = str(error)
        assert not message or str(folder / name) in message
        assert_balanced(found)


def test_lines_and_record_numbers_are_those_of_the_file(tmp_path):
    lines = tmp_path / "c.jsonl"
    lines.write_text('\n{"text": "one"}\r\n\n{"text": "two"}', encoding="utf-8")
    assert [d.line for d in reader(lines)] == [2, 4]
    table = tmp_path / "c.csv"
    table.write_text('id,text\n1,"over\ntwo lines"\n\n2,next\n', encoding="utf-8")
    assert [d.line for d in reader(table)] == [2, 5]
    assert [d.line for d in reader(write_parquet(tmp_path / "c.parquet", RECORDS))] == [1, 2, 3]
    assert [d.line for d in reader(write_json(tmp_path / "c.json", RECORDS))] == [1, 2, 3]


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.csv", "c.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, name):
    path = write(tmp_path / name, RECORDS)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + gzip.decompress(path.read_bytes())))
    else:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert contents(reader(path))[0] == tuple(RECORDS[0].values())


def test_a_csv_field_may_be_longer_than_the_default_limit(tmp_path):
    _, documents = read(write_csv(tmp_path / "c.csv", [{"id": "1", "text": "long " * 100_000}]))
    assert len(documents[0].text) == 500_000


# --- folders, globs, names


def test_a_folder_of_text_files_takes_ids_from_paths_and_titles_from_headings(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "plain.txt").write_text("# not a heading in plain text", encoding="utf-8")
    (tmp_path / "deep" / "noted.v2.md").write_text("Intro\n# The Heading #\nBody", encoding="utf-8")
    (tmp_path / "untitled.md").write_text("## only a second level", encoding="utf-8")
    (tmp_path / "packed.md.gz").write_bytes(gzip.compress(b"# Packed\n"))
    (tmp_path / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (tmp_path / "_SUCCESS").write_text("", encoding="utf-8")
    _, documents = read(tmp_path)
    assert [(d.doc_id, d.title, d.source) for d in documents] == [
        ("deep/noted.v2", "The Heading", "deep/noted.v2.md"),
        ("packed", "Packed", "packed.md.gz"),
        ("plain", "plain", "plain.txt"),
        ("untitled", "untitled", "untitled.md"),
    ]
    assert documents[0].text == "Intro\n# The Heading #\nBody"


def test_a_folder_of_data_files_is_read_in_the_order_of_their_paths(tmp_path):
    for letter, name in zip("dcba", ["4.csv", "3.parquet", "2.json", "1.jsonl.gz"], strict=True):
        write(tmp_path / name, [{"id": letter, "text": f"text {letter}"}])
    found, documents = read(tmp_path)
    assert [path.name for path in found.files] == ["1.jsonl.gz", "2.json", "3.parquet", "4.csv"]
    assert [d.doc_id for d in documents] == list("abcd")


def test_globs_and_several_paths_read_every_file_once(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"id": name, "text": name}])
    (tmp_path / "other.pdf").write_bytes(b"%PDF")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "c.jsonl")
    found, documents = read(tmp_path / "c.jsonl", tmp_path / "*.jsonl", tmp_path / "**" / "a*")
    assert [d.doc_id for d in documents] == ["c", "a", "b"]
    assert [d.source for d in documents] == ["c.jsonl", "a.jsonl", "b.jsonl"]
    assert found.counts.files == 3


def test_sources_are_relative_and_tell_files_of_one_name_apart(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "part.jsonl", [{"id": name, "text": name}])
    assert [d.source for d in reader(tmp_path)] == ["x/part.jsonl", "y/part.jsonl"]
    assert [d.source for d in reader(tmp_path / "x", tmp_path / "y")] == ["x/part.jsonl", "y/part.jsonl"]
    assert [d.source for d in reader(tmp_path / "x")] == ["part.jsonl"]
    assert [d.source for d in reader(tmp_path / "*" / "*.jsonl")] == ["x/part.jsonl", "y/part.jsonl"]


def test_a_file_whose_name_has_glob_characters_is_that_file(tmp_path):
    path = write_jsonl(tmp_path / "part[1].jsonl", RECORDS)
    assert len(list(reader(path))) == 3


def test_a_configured_format_overrules_the_name(tmp_path):
    path = write_jsonl(tmp_path / "c.dat", RECORDS)
    with pytest.raises(InputError, match=r"c\.dat.*--set corpus\.format="):
        reader(path)
    assert len(list(reader(path, format="jsonl"))) == 3


def test_a_file_name_that_is_not_utf8_is_escaped_in_what_is_stored(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    found, documents = read(write_jsonl(path, [RECORDS[0], {"text": ""}]))
    assert documents[0].source == found.quarantine[0]["source"] == r"\udcff.jsonl"
    assert_balanced(found)


@pytest.mark.parametrize("given", ["nothing.jsonl", "*.jsonl", "empty"])
def test_a_path_without_files_is_refused(tmp_path, given):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"corpus\.path: no .*"):
        reader(tmp_path / given)


def test_no_path_at_all_is_refused():
    with pytest.raises(UsageError, match=r"corpus\.path"):
        reader()


def test_an_opening_heading_is_the_title_and_not_text(tmp_path):
    (tmp_path / "a.md").write_text("\n# The Old Mill\n\nHester Vane built it.\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("# Only a Title\n", encoding="utf-8")
    documents = list(CorpusReader(CorpusConfig(path=(str(tmp_path),))))
    assert [(d.title, d.text) for d in documents] == [
        ("The Old Mill", "Hester Vane built it."),
        ("Only a Title", "# Only a Title\n"),
    ]


# --- fields and ids


def test_fields_go_by_the_names_configured(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"docno": "7", "name": "Hive", "body": "A box.", "text": "no"}])
    assert contents(reader(path, id="docno", title="name", text="body")) == [("7", "Hive", "A box.")]


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.csv", "c.parquet"])
@pytest.mark.parametrize("key", ["id", "title", "text"])
def test_a_configured_field_that_no_record_has_is_an_error_that_lists_the_fields(tmp_path, name, key):
    path = write(tmp_path / name, RECORDS)
    with pytest.raises(InputError) as caught:
        list(reader(path, **{key: "nope"}))
    assert "'nope'. Fields seen: id, title, text." in str(caught.value)
    assert f"--set corpus.{key}=NAME" in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_long_file_without_the_text_field_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_FIELD_PROBE_RECORDS", 5)
    found = reader(write_jsonl(tmp_path / "c.jsonl", [{"contents": str(i)} for i in range(50)]))
    with pytest.raises(InputError, match="Fields seen: contents"):
        list(found)
    assert found.counts.records < 6


def test_the_hipporag_numbering_is_the_id_where_there_is_no_other(tmp_path):
    records = [
        {"title": "Bee", "text": "An insect.", "idx": 0},
        {"title": "Wax", "text": "Is soft.", "idx": 1},
    ]
    assert [d.doc_id for d in reader(write_json(tmp_path / "c.json", records))] == ["0", "1"]
    assert [d.doc_id for d in reader(write_parquet(tmp_path / "c.parquet", records))] == ["0", "1"]
    records[0]["id"] = "own"
    assert [d.doc_id for d in reader(write_json(tmp_path / "c.json", records))] == ["own", "1"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, "7"),
        (-1, "-1"),
        (7.0, "7"),
        (0.5, "0.5"),
        ("007", "007"),
        (" 7", " 7"),
        ("é/ü", "é/ü"),
        (2**80, str(2**80)),
    ],
)
def test_ids_are_kept_and_numbers_become_strings(tmp_path, given, expected):
    (document,) = reader(write_jsonl(tmp_path / "c.jsonl", [{"id": given, "text": "t"}]))
    assert document.doc_id == expected


@pytest.mark.parametrize("missing", [{}, {"id": None}, {"id": ""}, {"id": "  "}])
def test_a_missing_id_becomes_the_hash_of_the_content(tmp_path, missing):
    (document,) = reader(write_jsonl(tmp_path / "c.jsonl", [{**missing, "title": "T", "text": "body"}]))
    assert document.doc_id == xxhash.xxh3_128_hexdigest(b"T\0body")


def test_a_missing_title_is_empty(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": 1, "text": "t"}, {"id": 2, "title": None, "text": "t"}])
    assert [d.title for d in reader(path)] == ["", ""]


# --- duplicates


def test_exact_duplicates_are_dropped_and_counted(tmp_path):
    same_text = {"id": "b", "title": "Honey", "text": RECORDS[0]["text"]}
    no_id = {"title": "Honey", "text": "Sweet."}
    found, documents = read(
        write_jsonl(tmp_path / "1.jsonl", [RECORDS[0], same_text, no_id, RECORDS[0]]),
        write_jsonl(tmp_path / "2.jsonl", [no_id, RECORDS[0]]),
    )
    assert len(documents) == 3
    assert found.counts == corpus.CorpusCounts(files=2, records=6, documents=3, duplicates=3)


@pytest.mark.parametrize("change", [{"title": "Wax"}, {"text": "Something else."}])
def test_one_id_for_two_contents_names_both_places(tmp_path, change):
    first = write_jsonl(tmp_path / "1.jsonl", RECORDS)
    second = write_jsonl(tmp_path / "2.jsonl", [RECORDS[0], {**RECORDS[1], **change}])
    with pytest.raises(InputError) as caught:
        list(reader(tmp_path))
    assert f"{second}:2: the id 'a-2'" in str(caught.value)
    assert f"at {first}:2." in str(caught.value)


# --- quarantine


@pytest.mark.parametrize(
    ("line", "row_id", "reason"),
    [
        (b"{broken", "c.jsonl:2", "not valid JSON: Expecting property name"),
        (b'{"id": "x", "text": "\xff"}', "c.jsonl:2", "not valid UTF-8 (byte 22 of the line)"),
        (b'["a", "list"]', "c.jsonl:2", "the record is a list, not an object"),
        (b"[" * 100_000, "c.jsonl:2", "not valid JSON"),
        (b'{"id": 1' + b"0" * 5000 + b', "text": "t"}', "c.jsonl:2", "not valid JSON"),
        (b'{"id": "x"}', "x", "no field 'text'"),
        (b'{"id": "x", "text": null}', "x", "the field 'text' is null"),
        (b'{"id": "x", "text": ["t"]}', "x", "the field 'text' is a list"),
        (b'{"id": "x", "text": " \\n\\u3000"}', "x", "the field 'text' is empty"),
        (b'{"id": "x", "text": "half \\ud83d"}', "x", "the field 'text' is not valid Unicode"),
        (b'{"id": "x", "title": {}, "text": "t"}', "x", "the field 'title' is an object"),
        (b'{"id": true, "text": "t"}', "c.jsonl:2", "the field 'id' is a boolean"),
        (b'{"id": [1], "text": "t"}', "c.jsonl:2", "the field 'id' is a list"),
        (b'{"id": NaN, "text": "t"}', "c.jsonl:2", "the field 'id' is float nan"),
        (b'{"id": "\\udc00", "text": "t"}', "c.jsonl:2", "the field 'id' is not valid Unicode"),
    ],
)
def test_a_bad_line_is_set_aside_with_its_reason_and_place(tmp_path, line, row_id, reason):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "1", "text": "one"}\n' + line + b'\n{"id": "3", "text": "three"}\n')
    found, documents = read(path)
    assert [d.doc_id for d in documents] == ["1", "3"]
    (row,) = found.quarantine
    assert reason in row["reason"]
    assert (row["stage"], row["kind"], row["source"], row["line"]) == ("read", "passage", "c.jsonl", 2)
    assert row["row_id"] == row_id
    assert row["raw"] == line.decode(errors="backslashreplace")[: schemas.MAX_RAW_CHARS]
    assert_balanced(found)


def test_bad_csv_rows_are_set_aside(tmp_path):
    path = tmp_path / "c.csv"
    path.write_bytes(b"id,text,note\n1,one,\n2,two\n3,three,,\n4,\xff,\n5,five,\xff\n6, ,\n7,seven,x\n")
    found, documents = read(path)
    assert [d.doc_id for d in documents] == ["1", "7"]
    assert [(row["line"], row["reason"]) for row in found.quarantine] == [
        (3, "2 columns where the header has 3"),
        (4, "4 columns where the header has 3"),
        (5, "not valid UTF-8"),
        (6, "not valid UTF-8"),
        (7, "the field 'text' is empty"),
    ]
    assert json.loads(found.quarantine[0]["raw"]) == ["2", "two"]
    assert_balanced(found)


def test_bad_parquet_values_are_set_aside(tmp_path):
    path = tmp_path / "c.parquet"
    texts = pa.array([b"one", b"\xff", None, b"four"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": texts}), path)
    found, documents = read(path)
    assert [d.doc_id for d in documents] == ["1", "4"]
    assert [(row["row_id"], row["line"], row["reason"]) for row in found.quarantine] == [
        ("2", 2, "the field 'text' is not valid Unicode"),
        ("3", 3, "the field 'text' is null, not a string"),
    ]
    assert_balanced(found)


def test_a_text_file_that_is_not_utf8_or_is_empty_is_set_aside(tmp_path):
    (tmp_path / "latin.txt").write_bytes("fenêtre".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    found, documents = read(tmp_path)
    assert documents == []
    assert [(row["source"], row["line"]) for row in found.quarantine] == [("empty.txt", 1), ("latin.txt", 1)]
    assert_balanced(found)


records_of_any_kind = st.one_of(
    st.fixed_dictionaries(
        {"text": st.one_of(st.sampled_from(["one", "two", "", " "]), st.none(), st.integers())},
        optional={
            "id": st.one_of(st.none(), st.booleans(), st.lists(st.none(), max_size=1)),
            "title": st.just("t"),
        },
    ),
    st.none(),
    st.text(max_size=3),
)


@given(st.lists(records_of_any_kind, max_size=12))
def test_the_counts_add_up_and_nothing_is_lost(tmp_path_factory, records):
    path = write_jsonl(tmp_path_factory.mktemp("counts") / "c.jsonl", records)
    found, documents = read(path)
    assert found.counts.records == len(records)
    assert found.counts.documents == len(documents) == len({d.doc_id for d in documents})
    assert_balanced(found)


# --- files that cannot be used


def test_a_cut_off_gzip_is_refused_after_what_could_be_read(tmp_path):
    path = write_gzip(tmp_path / "c.jsonl.gz", [{"id": i, "text": f"text {i * 7919}"} for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-100])
    found = iter(reader(path))
    assert next(found).doc_id == "0"
    with pytest.raises(InputError, match=r"c\.jsonl\.gz: the gzip file is cut off"):
        list(found)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.jsonl.gz", b"not gzip", r"cannot be read: Not a gzipped file"),
        ("c.parquet", b"PAR1 but no more", r"not a readable Parquet file"),
        ("c.json", b'{"id": 1}\n{"id": 2}', r"c\.json:2: not valid JSON: Extra data.*corpus\.format=jsonl"),
        ("c.json", b'{"docs": []}', r"expected a JSON list of objects, found an object"),
        ("c.json", b"[" * 100_000, r"c\.json: not valid JSON"),
        ("c.json", b'["\xff"]', r"not valid UTF-8 \(byte 3\)"),
        ("c.csv", b'id,text\n1,"open', r"c\.csv:2: not valid CSV: unexpected end of data"),
        ("c.csv", b"id,text,id\n1,t,2", r"has a name twice: id, text, id"),
        ("c.jsonl", '{"text": "t"}'.encode("utf-16"), r"UTF-16"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        list(reader(path))
    assert str(path) in str(caught.value)


# --- scale and real data


@contextmanager
def traced_memory():
    """Yield a function that gives (bytes held, most bytes held) since the start."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tuple(size - before for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.jsonl.gz"])
def test_large_files_are_streamed(tmp_path, name):
    path = write(tmp_path / name, [{"id": f"d{i}", "text": f"{i} " * 6_000} for i in range(500)])
    found = reader(path)
    with traced_memory() as memory:
        size_bytes = sum(len(document.text) for document in found)
        _, most_bytes = memory()
    assert size_bytes > 10_000_000
    assert most_bytes < size_bytes / 10


def test_the_memory_of_deduplication_is_small(tmp_path):
    count = 20_000
    found = reader(write_jsonl(tmp_path / "c.jsonl", ({"id": f"d{i}", "text": f"{i}"} for i in range(count))))
    with traced_memory() as memory:
        assert sum(1 for _ in found) == count
        held_bytes, _ = memory()
    assert held_bytes < 200 * count


@pytest.mark.parametrize(
    ("folder", "count"),
    [("musique_train_100", 1890), ("hotpot_train_100", 994), ("2wiki_dev_375", 6119), ("path_finding", 397)],
)
def test_the_real_corpora_are_read_whole_under_their_own_ids(data_dir, folder, count):
    path = data_dir / folder / "corpus.jsonl"
    found, documents = read(path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert contents(documents) == [(row["id"], row["title"], row["text"]) for row in rows]
    assert found.counts == corpus.CorpusCounts(files=1, records=count, documents=count)


def test_the_real_distractors_are_read_from_a_folder_of_gzip_files(data_dir):
    found, documents = read(data_dir / "distractors")
    assert len(documents) == 37_101
    assert len({d.doc_id for d in documents}) == 37_101
    assert found.counts.files == 7
