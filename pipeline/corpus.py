"""The corpus: documents out of the user's files, one at a time, under the user's own ids.

Every record becomes a :class:`Document`, a counted duplicate, or a quarantine row that says what was wrong
with it and where. What makes a whole file unusable (cut-off gzip, unreadable Parquet, a wrong field name, one
id for two contents) is an :class:`~hippoindex.errors.InputError`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.errors import InputError, UsageError
from hippoindex.pipeline import schemas
from hippoindex.pipeline.config import CorpusConfig
from hippoindex.pipeline.remote import is_remote

_FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
}
_MARKDOWN_SUFFIXES = {".md", ".markdown"}
_MARKDOWN_HEADING = re.compile(r"^# +(.+?)[ #]*$", re.MULTILINE)

#: HippoRAG's corpora number their passages in this field.
_HIPPORAG_ID = "idx"

#: A JSON file none of whose first records has the text field is refused without reading the rest.
_FIELD_PROBE_RECORDS = 10_000

_DEFAULT = CorpusConfig()

_PARQUET_BATCH_ROWS = 1_024

#: The csv module's default limit is 128 KiB a field; documents may be longer.
_CSV_FIELD_LIMIT_CHARS = 2**31 - 1

_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}

# A place in the corpus packed into 64 bits: file number, then line.
_PLACE_BITS = 64
_LINE_BITS = 40
_IN_INDEX = (1 << _PLACE_BITS) - 1
"""The place of what was read before."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus.

    Attributes
    ----------
    doc_id : str
        The user's id, or the 128-bit xxh3 of title, NUL and text in hex where the record has none.
    title : str
        Empty where the record has none.
    text : str
        As read, never blank.
    source : str
        Path of the file, relative to the file, folder or glob pattern given.
    line : int
        1-based line (JSON Lines, CSV) or record number (JSON, Parquet) in the file.
    """

    doc_id: str
    title: str
    text: str
    source: str
    line: int


@dataclass
class CorpusCounts:
    """What was read. ``records == documents + duplicates + quarantined`` at every moment of reading."""

    files: int = 0
    records: int = 0
    documents: int = 0
    duplicates: int = 0
    quarantined: int = 0


class RecordError(ValueError):
    """A single record that cannot be used; the message is the reason."""


class Record(NamedTuple):
    """What was read at one place. If that is no record, ``fields`` is ``None`` and ``problem`` says why."""

    line: int
    fields: Mapping[str, Any] | None
    problem: str = ""
    raw: bytes = b""


class CorpusReader:
    """The documents of a corpus: valid, each id once, in input order.

    Paths are read in the order given, the files of a folder or glob pattern sorted by path; a file found
    twice is read once. Names in a folder that begin with ``.`` or ``_`` are passed over, as Arrow does.
    Iterating reads the files anew and sets ``counts`` and ``quarantine`` back; one iteration at a time.

    JSON Lines, CSV and Parquet are streamed; a JSON list is read whole. A text file is one document: its id
    is its path without the suffix, its title the first ``# heading`` of Markdown, else the file's name.

    Parameters
    ----------
    config : CorpusConfig
    known : pyarrow.Table, optional
        Documents of an index that this corpus is added to, ``schemas.DOCUMENT``: they count as read before.

    Attributes
    ----------
    files : list of Path
        The files, in reading order.
    counts : CorpusCounts
    repeats : Counter of str
        Ids of the documents that were read again, with how often.
    quarantine : list of dict
        Rows of :data:`schemas.QUARANTINE`, stage ``read``.

    Raises
    ------
    UsageError
        If no path is configured.
    InputError
        If a path matches no file or a file's format is not known. While iterating: if a file cannot be read,
        lacks the text field in every record, or gives an id that another content already has.
    """

    def __init__(self, config: CorpusConfig, known: pa.Table | None = None) -> None:
        self._known = schemas.DOCUMENT.empty_table() if known is None else known
        self._names = FieldNames(config.id, config.title, config.text)
        self._files = _find_files(config)
        self.files = [file.path for file in self._files]
        self._start()

    def _start(self) -> None:
        self.counts = CorpusCounts(files=len(self._files))
        self.quarantine: list[dict[str, object]] = []
        # xxh3_128 of an id -> xxh3_128 of its content and its place, packed into one integer: two small
        # objects a document, where strings and tuples would take several times that.
        known = zip(self._known["doc_id"].to_pylist(), self._known["digest"].to_pylist(), strict=True)
        self._seen = {_hash(doc_id): int(digest, 16) << _PLACE_BITS | _IN_INDEX for doc_id, digest in known}
        self.repeats: Counter[str] = Counter()
        self._complete = False

    def __iter__(self) -> Iterator[Document]:
        self._start()
        for number, file in enumerate(self._files):
            for record in _READERS[file.format](file, self._names):
                self.counts.records += 1
                document = self._accept(number, record)
                if document is not None:
                    yield document
        self._complete = True

    def documents(self, read: Iterable[tuple[str, str, str]]) -> pa.Table:
        """Return the table of the documents that are known or were read.

        Parameters
        ----------
        read : iterable of (str, str, str)
            Id, title and text of the documents that this reader has yielded, in order.

        Returns
        -------
        pyarrow.Table
            ``schemas.DOCUMENT``.

        Raises
        ------
        UsageError
            If the corpus was not yet read to its end.
        """
        if not self._complete:
            raise UsageError("The documents of a corpus are known only after it was read to its end.")
        return self._table((doc_id, _content(title, text)) for doc_id, title, text in read)

    def read_through(self) -> pa.Table:
        """Read the corpus to its end for :meth:`documents` alone; texts are not kept.

        Returns
        -------
        pyarrow.Table
            ``schemas.DOCUMENT``.
        """
        return self._table([(doc.doc_id, _content(doc.title, doc.text)) for doc in self])

    def _table(self, read: Iterable[tuple[str, int]]) -> pa.Table:
        ids, digests = self._known["doc_id"].to_pylist(), self._known["digest"].to_pylist()
        records = self._known["records"].to_pylist()
        for doc_id, content in read:
            ids.append(doc_id)
            digests.append(f"{content:032x}")
            records.append(1)
        if self.repeats:
            records = [count + self.repeats[doc_id] for doc_id, count in zip(ids, records, strict=True)]
        return pa.table([ids, digests, records], schema=schemas.DOCUMENT)

    def _accept(self, number: int, record: Record) -> Document | None:
        """Return the record's document, or count why there is none."""
        file = self._files[number]
        try:
            document, content = _to_document(file, self._names, record)
        except RecordError as error:
            self.counts.quarantined += 1
            self.quarantine.append(_quarantine_row(file, self._names, record, str(error)))
            return None
        if self._is_duplicate(document, content, number):
            self.counts.duplicates += 1
            self.repeats[document.doc_id] += 1
            return None
        self.counts.documents += 1
        return document

    def _is_duplicate(self, document: Document, content: int, number: int) -> bool:
        entry = content << _PLACE_BITS | number << _LINE_BITS | document.line
        earlier = self._seen.setdefault(_hash(document.doc_id), entry)
        if earlier == entry:
            return False
        if earlier >> _PLACE_BITS == content:
            return True
        place = earlier & _IN_INDEX
        where = "in the index"
        if place != _IN_INDEX:
            where = f"at {self.files[place >> _LINE_BITS]}:{place & (1 << _LINE_BITS) - 1}"
        raise InputError(
            f"{self.files[number]}:{document.line}: the id {document.doc_id!r} already belongs to another "
            f"title or text, {where}. Every document needs an id of its own; corpus.id names the field that "
            "holds it."
        )


def corpus_fingerprint(documents: pa.Table) -> str:
    """Return the hex xxh3_128 over ids and contents of documents in order; paths and formats do not enter.

    Parameters
    ----------
    documents : pyarrow.Table
        ``schemas.DOCUMENT``.

    Returns
    -------
    str
    """
    digest = xxhash.xxh3_128()
    rows = zip(documents["doc_id"].to_pylist(), documents["digest"].to_pylist(), strict=True)
    for doc_id, content in rows:
        name = doc_id.encode()
        digest.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(content))
    return str(digest.hexdigest())


def _hash(text: str) -> int:
    return int(xxhash.xxh3_128_intdigest(text.encode()))


def _content(title: str, text: str) -> int:
    return _hash(f"{title}\0{text}")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What the user calls the fields of a record."""

    id: str
    title: str
    text: str

    def required(self) -> set[str]:
        """Names that some record of every file must have: the text, and names that the user chose."""
        chosen = {self.text}
        if self.id != _DEFAULT.id:
            chosen.add(self.id)
        if self.title != _DEFAULT.title:
            chosen.add(self.title)
        return chosen

    def check(self, path: Path | RemoteFile, seen: Iterable[str]) -> None:
        """Raise ``InputError`` unless ``seen``, the field names of a file, has all that are required."""
        seen = list(seen)
        missing = self.required().difference(seen)
        if not missing:
            return
        key = next(key for key in ("text", "id", "title") if getattr(self, key) in missing)
        raise InputError(
            f"{path}: no record has the field {getattr(self, key)!r}. "
            f"Fields seen: {', '.join(seen) or 'none'}. Name the right one with --set corpus.{key}=NAME"
        )


# --- files


@dataclass(frozen=True)
class RemoteFile:
    """A file of the corpus on S3, in place of its ``Path``; what is read of it is fetched.

    Attributes
    ----------
    storage : Storage
        Of its bucket.
    name : str
        In the bucket.
    """

    storage: Storage
    name: str

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.name}"

    def open(self) -> io.BufferedReader:
        """Open it for reading bytes."""
        return cast("io.BufferedReader", self.storage.open(self.name))


@dataclass(frozen=True, slots=True)
class _CorpusFile:
    path: Path | RemoteFile
    source: str
    format: str


def _find_files(config: CorpusConfig) -> list[_CorpusFile]:
    if not config.path:
        raise UsageError("No corpus given: name files, folders or glob patterns in corpus.path")
    found: dict[Path | RemoteFile, _CorpusFile] = {}
    for given in config.path:
        for path, source in _expand_remote(given) if is_remote(given) else _expand(given):
            file = _CorpusFile(path, to_valid_unicode(source), _format_of(path, config.format))
            found.setdefault(path.resolve() if isinstance(path, Path) else path, file)
    return _with_distinct_sources(list(found.values()))


def _expand(given: str) -> list[tuple[Path, str]]:
    """Return the files meant by one entry of ``corpus.path``, each with its path relative to that entry."""
    path = Path(given).expanduser()
    if path.is_file():
        return [(path, path.name)]
    if path.is_dir():
        root, paths = path, _files_below(path)
    elif glob.has_magic(given):
        root = _root_of_pattern(path)
        pattern = str(path.relative_to(root))
        # Path.glob would match hidden files too.
        matches = [root / match for match in glob.glob(pattern, root_dir=root, recursive=True)]  # noqa: PTH207
        paths = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
    else:
        raise InputError(f"corpus.path: no such file or folder: {given}")
    if not paths:
        raise InputError(f"corpus.path: no files found under {given}")
    sources = {path.relative_to(root).as_posix(): path for path in paths}
    return [(path, source) for source, path in sorted(sources.items())]


def _expand_remote(given: str) -> list[tuple[RemoteFile, str]]:
    """Do the same for an entry on S3: an object, the objects below a prefix, or a pattern."""
    bucket, _, rest = given.rstrip("/").removeprefix("s3://").partition("/")
    storage = open_storage(f"s3://{bucket}")
    if rest and not glob.has_magic(rest) and storage.exists(rest):
        return [(RemoteFile(storage, rest), rest.rpartition("/")[2])]
    parts = rest.split("/") if rest else []
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), parts)
    prefix = "".join(f"{part}/" for part in fixed)
    pattern = _translated(rest.removeprefix(prefix)) if glob.has_magic(rest) else re.compile(".*", re.DOTALL)
    names = [entry.name.removeprefix(prefix) for entry in storage.entries(prefix)]
    visible = [name for name in names if not any(part.startswith((".", "_")) for part in name.split("/"))]
    found = [(RemoteFile(storage, prefix + name), name) for name in visible if pattern.fullmatch(name)]
    if not found:
        raise InputError(f"corpus.path: no files found under {given}")
    return found


def _translated(pattern: str) -> re.Pattern[str]:
    """Return a glob pattern of a relative path as a regular expression: only ``**`` matches a slash."""
    found = []
    for part in pattern.split("/"):
        pieces = [_WILDCARDS.get(piece) or re.escape(piece) for piece in re.split(r"([*?])", part)]
        found.append("(?:.*/)?" if part == "**" else "".join(pieces) + "/")
    return re.compile("".join(found).removesuffix("/"), re.DOTALL)


def _files_below(folder: Path) -> list[Path]:
    def is_visible(path: Path) -> bool:
        return not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)

    return [path for path in folder.rglob("*") if is_visible(path) and path.is_file()]


def _root_of_pattern(pattern: Path) -> Path:
    """Return the part of a glob pattern before its first folder with a wildcard."""
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def _format_of(path: Path | RemoteFile, configured: str) -> str:
    if configured != "auto":
        return configured
    name = PurePosixPath(str(path))
    is_gzip = name.suffix.lower() == ".gz"
    suffix = (name.with_suffix("") if is_gzip else name).suffix.lower()
    found = _FORMAT_OF_SUFFIX.get(suffix)
    if found is None or (is_gzip and found == "parquet"):
        raise InputError(
            f"{path}: the format cannot be told from the name. Known are {', '.join(_FORMAT_OF_SUFFIX)}, "
            "all but Parquet also with .gz. Name the format with --set corpus.format=jsonl (json, csv, "
            "parquet, text), or leave the file out with a glob pattern such as 'folder/*.jsonl'."
        )
    return found


def _with_distinct_sources(files: list[_CorpusFile]) -> list[_CorpusFile]:
    """Give paths from the common folder instead if two files have the same path under different roots."""
    if len({file.source for file in files}) == len(files):
        return files
    paths = [str(f.path.absolute() if isinstance(f.path, Path) else f.path) for f in files]
    root = os.path.commonpath(paths) if not any(map(is_remote, paths)) else ""
    return [
        replace(file, source=to_valid_unicode(os.path.relpath(path, root) if root else path))
        for file, path in zip(files, paths, strict=True)
    ]


# --- records out of files


@contextmanager
def open_bytes(path: Path | RemoteFile) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """Open a UTF-8 file for reading bytes, after its byte order mark; ``.gz`` is decompressed.

    Raises
    ------
    InputError
        If the file cannot be read, is a damaged gzip file, or is UTF-16. Also while reading inside the block.
    """
    try:
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(path.open("rb") if isinstance(path, Path) else path.open())
            if str(path).lower().endswith(".gz"):
                file = stack.enter_context(gzip.open(file))
            start = file.peek(4)[:4]
            if start.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError(f"{path}: the file is UTF-16 or UTF-32; convert it to UTF-8")
            yield file
    except EOFError as error:
        raise InputError(f"{path}: the gzip file is cut off; fetch or compress it again") from error
    except (OSError, zlib.error) as error:
        raise InputError(f"{path}: the file cannot be read: {error}") from error


def read_json_lines(path: Path | RemoteFile) -> Iterator[Record]:
    """Read one JSON object a line, skipping blank lines; a bad line is a record with a ``problem``."""
    with open_bytes(path) as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                yield _parse_line(line, raw)


def _parse_line(line: int, raw: bytes) -> Record:
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return Record(line, None, f"not valid UTF-8 (byte {error.start + 1} of the line)", raw)
    except json.JSONDecodeError as error:
        return Record(line, None, f"not valid JSON: {error.msg} (column {error.colno})", raw)
    except (ValueError, RecursionError) as error:
        return Record(line, None, f"not valid JSON: {error}", raw)
    return _object_record(line, value, raw)


def _object_record(line: int, value: object, raw: bytes = b"") -> Record:
    if isinstance(value, dict):
        return Record(line, value, raw=raw)
    return Record(line, None, f"the record is {_kind(value)}, not an object", raw or _dump(value))


_JSON_LINES_HINT = (
    ". A corpus of one object a line is JSON Lines: name it .jsonl, or --set corpus.format=jsonl"
)


def read_json_list(path: Path | RemoteFile, hint: str = "") -> Iterator[Record]:
    """Read a JSON list of objects, the whole file at once; ``line`` is the 1-based number in the list.

    Parameters
    ----------
    path : Path or RemoteFile
    hint : str
        What to do if it is no JSON, for the error.

    Raises
    ------
    InputError
        If the file is not valid UTF-8 or JSON, or not a list.
    """
    with open_bytes(path) as file:
        data = file.read()
    try:
        values = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not valid UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}){hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, list):
        raise InputError(f"{path}: expected a JSON list of objects, found {_kind(values)}")
    for number, value in enumerate(values, start=1):
        yield _object_record(number, value)


def _checked(records: Iterator[Record], path: Path | RemoteFile, names: FieldNames) -> Iterator[Record]:
    """Pass records on; raise if the required fields are in none of them, or in none of the first many."""
    missing = names.required()
    seen: dict[str, None] = {}
    objects = 0
    for record in records:
        if missing and record.fields is not None:
            objects += 1
            missing.difference_update(record.fields)
            seen.update(dict.fromkeys(record.fields))
            if objects == _FIELD_PROBE_RECORDS:
                names.check(path, seen)
        yield record
    if objects:
        names.check(path, seen)


def _read_jsonl(file: _CorpusFile, names: FieldNames) -> Iterator[Record]:
    return _checked(read_json_lines(file.path), file.path, names)


def _read_json(file: _CorpusFile, names: FieldNames) -> Iterator[Record]:
    return _checked(read_json_list(file.path, _JSON_LINES_HINT), file.path, names)


def _read_csv(file: _CorpusFile, names: FieldNames) -> Iterator[Record]:
    csv.field_size_limit(_CSV_FIELD_LIMIT_CHARS)
    with open_bytes(file.path) as stream:
        # Invalid UTF-8 becomes lone surrogates, so that the one row with them can be set aside.
        lines = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) < len(header):
                raise InputError(f"{file.path}: the header has a name twice: {', '.join(header)}")
            names.check(file.path, header)
            line = reader.line_num + 1
            for row in reader:
                if row:
                    yield _csv_record(line, header, row)
                line = reader.line_num + 1
        except csv.Error as error:
            raise InputError(f"{file.path}:{reader.line_num}: not valid CSV: {error}") from error


def _csv_record(line: int, header: Sequence[str], row: Sequence[str]) -> Record:
    if len(row) != len(header):
        return Record(line, None, f"{len(row)} columns where the header has {len(header)}", _dump(row))
    if not _is_unicode("".join(row)):
        return Record(line, None, "not valid UTF-8", _dump(row))
    return Record(line, dict(zip(header, row, strict=True)))


def _read_parquet(file: _CorpusFile, names: FieldNames) -> Iterator[Record]:
    try:
        source = file.path if isinstance(file.path, Path) else file.path.open()
        with pq.ParquetFile(source) as parquet:
            present = parquet.schema_arrow.names
            names.check(file.path, present)
            wanted = {names.id, names.title, names.text, _HIPPORAG_ID}
            columns = [name for name in present if name in wanted]
            number = 0
            for batch in parquet.iter_batches(_PARQUET_BATCH_ROWS, columns=columns):
                for row in zip(*map(_column_values, batch.columns), strict=True):
                    number += 1
                    yield Record(number, dict(zip(batch.schema.names, row, strict=True)))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file.path}: not a readable Parquet file: {error}") from error


def _column_values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        # Some string is not UTF-8: leave it recognisable, so that only its row is set aside.
        values = column.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode(errors="surrogateescape") for value in values]


def _read_text(file: _CorpusFile, names: FieldNames) -> Iterator[Record]:
    with open_bytes(file.path) as stream:
        raw = stream.read()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        yield Record(1, None, f"not valid UTF-8 (byte {error.start + 1} of the file)", raw)
        return
    name = Path(file.source)
    if name.suffix.lower() == ".gz":
        name = name.with_suffix("")
    heading = _MARKDOWN_HEADING.search(text) if name.suffix.lower() in _MARKDOWN_SUFFIXES else None
    title = heading.group(1) if heading else name.stem
    if heading and not text[: heading.start()].strip():
        text = text[heading.end() :].strip() or text  # an opening heading is the title, not a sentence
    yield Record(1, {names.id: name.with_suffix("").as_posix(), names.title: title, names.text: text})


_READERS: dict[str, Callable[[_CorpusFile, FieldNames], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "text": _read_text,
}


# --- documents out of records


def _to_document(file: _CorpusFile, names: FieldNames, record: Record) -> tuple[Document, int]:
    """Return the document of a record and the hash of its content, or raise ``RecordError``."""
    fields = record.fields
    if fields is None:
        raise RecordError(record.problem)
    doc_id = scalar_string(fields.get(names.id, fields.get(_HIPPORAG_ID)), names.id)
    title = scalar_string(fields.get(names.title), names.title)
    if names.text not in fields:
        raise RecordError(f"no field {names.text!r}")
    text = fields[names.text]
    if not isinstance(text, str):
        raise RecordError(f"the field {names.text!r} is {_kind(text)}, not a string")
    if not text.strip():
        raise RecordError(f"the field {names.text!r} is empty")
    if not _is_unicode(text):
        raise RecordError(f"the field {names.text!r} is not valid Unicode")
    content = _content(title, text)
    if not doc_id.strip():
        doc_id = f"{content:032x}"
    return Document(doc_id, title, text, file.source, record.line), content


def scalar_string(value: object, name: str) -> str:
    """Return an id or a title as a string: numbers as they are written, null as the empty string.

    Raises
    ------
    RecordError
        If the value is neither string, finite number nor null, or holds lone surrogates.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        if not _is_unicode(value):
            raise RecordError(f"the field {name!r} is not valid Unicode")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # Data frames turn a column of integers with gaps into floats.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    raise RecordError(f"the field {name!r} is {_kind(value)}, not a string or number")


def _quarantine_row(file: _CorpusFile, names: FieldNames, record: Record, reason: str) -> dict[str, object]:
    fields = record.fields or {}
    try:
        row_id = scalar_string(fields.get(names.id, fields.get(_HIPPORAG_ID)), names.id)
    except RecordError:
        row_id = ""
    raw = (record.raw or _dump(fields)).decode(errors="backslashreplace")
    return schemas.quarantine_row(
        "read",
        row_id or f"{file.source}:{record.line}",
        reason,
        raw.rstrip("\r\n"),
        source=file.source,
        line=record.line,
    )


def _is_unicode(text: str) -> bool:
    """Whether a string has a UTF-8 form, which one with lone surrogates has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_valid_unicode(text: str) -> str:
    r"""Return the text with lone surrogates written as ``\udcXX`` escapes."""
    return text.encode(errors="backslashreplace").decode()


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", bool: "a boolean", type(None): "null", str: "a string"}
    return kinds.get(type(value), f"{type(value).__name__} {value!r:.40}")
