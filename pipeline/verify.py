"""Checking an index against ``docs/artifact.md``: bytes, tables, references, arrays, sums.

Files are read in blocks. What builds on something that has a fault is not looked at further: a phrase id that
has changed would make every fact with that phrase look wrong, and a damaged offset would be followed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from hippoindex.errors import ArtifactError
from hippoindex.kernels.coverage import Cells
from hippoindex.kernels.ppr import Graph
from hippoindex.kernels.ppr.assemble import held_titles
from hippoindex.kernels.ppr.csr import FINE, first_offence
from hippoindex.kernels.ppr.graph import OFFENCES
from hippoindex.pipeline import artifact, schemas
from hippoindex.pipeline.blocks import blocks, row_blocks, row_numbers
from hippoindex.pipeline.corpus import corpus_fingerprint
from hippoindex.pipeline.normalise import fact_id, phrase_id
from hippoindex.pipeline.progress import Advance, Monitor
from hippoindex.pipeline.remote import fetch, is_remote
from hippoindex.pipeline.titles import title_rows
from hippoindex.pipeline.words import passage_words
from hippoindex.reader import BATCH_ROWS, Reader, load_manifest, table_parts

MAX_LISTED = 20
"""Faults of one check that are listed; all are counted."""
READ_BYTES = 1 << 20
MAX_COSINE = 1.001
"""What rounding can make of the cosine of a vector with itself."""
ADVICE = "restore the file or build the index again"

SCHEMAS = {
    "documents": schemas.DOCUMENT,
    "passages": schemas.PASSAGE,
    "extractions": schemas.EXTRACTION,
    "phrases": schemas.PHRASE,
    "facts": schemas.FACT,
    "synonyms": schemas.SYNONYM,
    "words": schemas.WORD,
    "quarantine": schemas.QUARANTINE,
}
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")


@dataclass(frozen=True)
class Fault:
    """Something that is not as the specification says.

    Attributes
    ----------
    file : str
        File, table (its folder) or folder of arrays, relative to the index.
    what : str
    row : int, optional
        Row of the table or array, from 0, over all parts of a table.
    """

    file: str
    what: str
    row: int | None = None

    def __str__(self) -> str:
        return f"{self.file} {self.what}" if self.row is None else f"{self.file}, row {self.row}: {self.what}"


@dataclass(frozen=True)
class Checked:
    """What one check has looked at, and what came out.

    Attributes
    ----------
    name : str
    items : int
        How much was looked at, in ``unit``.
    unit : str
    seconds_s : float
    faults : int
    skipped : str
        Why it was not made; empty if it was.
    """

    name: str
    items: int
    unit: str
    seconds_s: float
    faults: int
    skipped: str = ""


@dataclass(frozen=True)
class Verification:
    """What :func:`verify_index` found.

    Attributes
    ----------
    path : Path
    checks : list of Checked
    faults : list of Fault
        At most :data:`MAX_LISTED` of each check.
    """

    path: Path
    checks: list[Checked]
    faults: list[Fault]

    @property
    def n_faults(self) -> int:
        """Number of faults, those that are not listed included."""
        return sum(check.faults for check in self.checks)

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON-ready values."""
        return {
            "index": str(self.path),
            "sound": not self.n_faults,
            "checks": [
                {**asdict(check), "seconds_s": round(check.seconds_s, 3), "skipped": check.skipped or None}
                for check in self.checks
            ],
            "faults": [asdict(fault) for fault in self.faults],
        }

    def require_sound(self) -> None:
        """Raise :class:`ArtifactError` with the first fault if there is any."""
        if self.n_faults:
            more = f" (and {self.n_faults - 1:,} more)" if self.n_faults > 1 else ""
            raise ArtifactError(f"{self.path}/{self.faults[0]}{more}")


@dataclass
class _Faults:
    """Faults of one check, the first ones listed."""

    listed: list[Fault] = field(default_factory=list)
    count: int = 0

    def add(self, file: str, what: str) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(Fault(file, what))

    def at(self, file: str, rows: NDArray[np.integer], what: str) -> None:
        self.count += len(rows)
        room = MAX_LISTED - len(self.listed)
        self.listed += [Fault(file, what, row) for row in rows[:room].tolist()]

    def where(self, file: str, mask: NDArray[np.bool_], what: str, first: int = 0) -> None:
        """Add the rows of a mask, the first of which has the number ``first``."""
        self.at(file, np.flatnonzero(mask) + first, what)


class _Index:
    """The index that is checked. What one check has read is kept for those that build on it."""

    document_ids: pa.Array
    passage_ids: pa.Array
    phrase_ids: NDArray[np.uint64]
    passage_counts: NDArray[np.int32]
    occurrence: _Csr
    graph: Graph
    words: pa.Table

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = artifact.parse_manifest(folder, load_manifest(folder))
        self.counts = self.manifest.counts
        self.damaged: set[str] = set()
        self.advance: Advance

    def setting(self, section: str, key: str, kind: type | tuple[type, ...]) -> Any:
        values = self.manifest.config.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        if not isinstance(value, kind):
            raise ArtifactError(f"config.{section}.{key} is {value!r}")
        return value


class _Csr(NamedTuple):
    indptr: NDArray[np.int64]
    indices: NDArray[np.integer]
    values: NDArray


class _Check(NamedTuple):
    name: str
    unit: str
    needs: tuple[str, ...]
    run: Callable[[_Index, _Faults], None]


def verify_index(path: str | Path, *, monitor: Monitor | None = None) -> Verification:
    """Check every file, table, reference and sum of an index.

    Parameters
    ----------
    path : str or Path
        Folder, or ``s3://bucket/prefix``: what is not in the cache yet is fetched then.
    monitor : Monitor, optional

    Returns
    -------
    Verification

    Raises
    ------
    ArtifactError
        If there is no manifest of this schema version, or one that names files outside the index: there is
        nothing to compare with then.
    """
    folder = fetch(str(path)) if is_remote(path) else Path(path)
    index, monitor = _Index(folder), monitor or Monitor()
    total_bytes = sum(entry.bytes for entry in index.manifest.files.values())
    checks: list[Checked] = []
    faults: list[Fault] = []
    for check in CHECKS:
        reason, found = _reason_to_skip(check, index, checks), _Faults()
        if reason:
            checks.append(Checked(check.name, 0, check.unit, 0.0, 0, reason))
            continue
        with monitor.stage(check.name, total_bytes if check.unit == "bytes" else 0, check.unit) as advance:
            index.advance = advance
            try:
                check.run(index, found)
            except ArtifactError as error:
                found.add(artifact.MANIFEST, f"is wrong: {error}")
        took = monitor.times[-1]
        checks.append(Checked(check.name, took.items, check.unit, took.seconds_s, found.count))
        faults += found.listed
    return Verification(index.folder, checks, faults)


def _reason_to_skip(check: _Check, index: _Index, done: list[Checked]) -> str:
    if any(name.startswith(f"{check.name}/") for name in index.damaged):
        return "its files have changed"
    unsound = [other.name for other in done if other.name in check.needs and (other.faults or other.skipped)]
    return f"it builds on {', '.join(unsound)}" if unsound else ""


# Bytes


def _files(index: _Index, faults: _Faults) -> None:
    """Compare every file with the manifest, and all of them with ``SHA256SUMS``."""
    listed, present = index.manifest.files, set(artifact.covered_files(index.folder))
    digests: dict[str, str] = {}
    for name in [*sorted(listed), artifact.MANIFEST, *artifact.TIMED]:
        if not (index.folder / name).is_file():
            if name in listed:
                faults.add(name, f"is missing: {ADVICE}")
                index.damaged.add(name)
            continue
        try:
            digests[name], size = _sha256(index.folder / name, index.advance)
        except OSError as error:
            faults.add(name, f"cannot be read: {error.strerror}")
            index.damaged.add(name)
            continue
        if name in listed and artifact.FileEntry(bytes=size, sha256=digests[name]) != listed[name]:
            faults.add(name, f"has changed: {ADVICE}")
            index.damaged.add(name)
    for name in sorted(present - set(listed)):
        faults.add(name, "is not in the manifest: remove it")
    _checksums(index, faults, digests)


def _sha256(file: Path, advance: Advance) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            size += len(block)
            advance(len(block))
    return digest.hexdigest(), size


def _checksums(index: _Index, faults: _Faults, digests: Mapping[str, str]) -> None:
    """Compare ``SHA256SUMS`` with the files; those that are named already are left out."""
    file = index.folder / artifact.CHECKSUMS
    if not file.is_file():
        faults.add(artifact.CHECKSUMS, f"is missing: {ADVICE}")
        return
    text = file.read_bytes().decode("utf-8", errors="replace")
    matches = [_SUM_LINE.fullmatch(line) for line in text.splitlines()]
    stated = {match[2]: match[1] for match in matches if match}
    before = faults.count
    for number, match in enumerate(matches, start=1):
        if match is None:
            faults.add(artifact.CHECKSUMS, f"line {number} is not as sha256sum writes it")
    for name in sorted(stated.keys() | digests.keys()):
        if name in index.damaged or stated.get(name) == digests.get(name):
            continue
        if name in index.manifest.files or name not in digests or name not in stated:
            faults.add(artifact.CHECKSUMS, f"does not hold the SHA-256 of {name!r}, or that file is missing")
        else:
            faults.add(name, f"has changed, or its line in {artifact.CHECKSUMS}: {ADVICE}")
    expected = artifact.checksums_text({name: digests.get(name, digest) for name, digest in stated.items()})
    if faults.count == before and not index.damaged and text != expected:
        faults.add(artifact.CHECKSUMS, "is not in the form in which it is written: sorted, each file once")


def _sums(index: _Index, _: _Faults) -> None:
    index.advance(len(artifact.Counts.model_fields))
    index.counts.check()


def _expect(faults: _Faults, what: str, found: int, count: str, index: _Index) -> None:
    """Compare something that was counted with the manifest's count of that name."""
    stated = getattr(index.counts, count)
    if found != stated:
        faults.add(artifact.MANIFEST, f"has counts.{count} = {stated}, but there are {found} {what}")


# Tables


def _parts(
    index: _Index, faults: _Faults, table: str, rows: int = artifact.ROWS_PER_FILE
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yield file, number of the first row, and rows: of every part that has the table's schema."""
    first = 0
    names = table_parts(index.manifest.files, table)
    if not names:
        faults.add(table, f"is missing: {ADVICE}")
    for number, name in enumerate(names):
        if name != f"{table}/part-{number:05d}.parquet":
            faults.add(name, "is out of the sequence part-00000.parquet, part-00001.parquet, ...")
        try:
            with pq.ParquetFile(index.folder / name, memory_map=True) as file:
                if not file.schema_arrow.equals(SCHEMAS[table]):
                    found = ", ".join(f"{column.name}: {column.type}" for column in file.schema_arrow)
                    faults.add(name, f"does not have the columns and types of its table; it has {found}")
                    continue
                if file.metadata.num_rows > artifact.ROWS_PER_FILE:
                    faults.add(name, f"holds more than {artifact.ROWS_PER_FILE:,} rows")
                for batch in file.iter_batches(batch_size=rows):
                    batch.validate(full=True)
                    index.advance(batch.num_rows)
                    yield name, first, batch
                    first += batch.num_rows
        except (OSError, ValueError, pa.ArrowException) as error:
            faults.add(name, f"cannot be read: {error}")


def _documents(index: _Index, faults: _Faults) -> None:
    tables = []
    for name, first, batch in _parts(index, faults, "documents"):
        wrong = pc.invert(pc.match_substring_regex(batch["digest"], "^[0-9a-f]{32}$"))
        faults.where(name, wrong.to_numpy(zero_copy_only=False), "digest is not 32 hexadecimal digits", first)
        faults.where(name, batch["records"].to_numpy() < 1, "records is less than 1", first)
        tables.append(pa.Table.from_batches([batch]))
    documents = pa.concat_tables([schemas.DOCUMENT.empty_table(), *tables])
    index.document_ids = _unique(faults, "documents", "doc_id", documents["doc_id"])
    _expect(faults, "rows of documents", len(documents), "documents", index)
    repeats = int(documents["records"].to_numpy().sum(dtype=np.int64)) - len(documents)
    _expect(faults, "records beyond the first of a document", repeats, "duplicates", index)
    if not faults.count and corpus_fingerprint(documents) != index.manifest.corpus_fingerprint:
        faults.add(artifact.MANIFEST, "has a corpus_fingerprint that is not that of documents/")


def _unique(faults: _Faults, table: str, column: str, ids: pa.ChunkedArray) -> pa.Array:
    """Check that ids are all different, and return them in one piece."""
    whole = ids.cast(pa.large_string()).combine_chunks()
    seen = pc.index_in(whole, value_set=whole).to_numpy(zero_copy_only=False)
    faults.where(table, seen != np.arange(len(seen)), f"its {column} stands in an earlier row too")
    return whole


def _passages(index: _Index, faults: _Faults) -> None:
    ids = []
    for name, first, batch in _parts(index, faults, "passages", BATCH_ROWS):
        start, end = (batch[column].to_numpy().astype(np.int64) for column in ("span_start", "span_end"))
        length = pc.utf8_length(batch["text"]).to_numpy()
        wrong = (start < 0) | (end - start != length)
        faults.where(name, wrong, "span_start and span_end do not bound a text of its length", first)
        ids.append(batch.select(["passage_id", "doc_id"]))
    schema = pa.schema([schemas.PASSAGE.field(name) for name in ("passage_id", "doc_id")])
    table = pa.Table.from_batches(ids, schema)
    index.passage_ids = _unique(faults, "passages", "passage_id", table["passage_id"])
    _expect(faults, "rows of passages", len(table), "passages", index)
    names = table["doc_id"].cast(pa.large_string()).combine_chunks()
    document = pc.fill_null(pc.index_in(names, value_set=index.document_ids), -1).to_numpy()
    faults.where("passages", document < 0, "doc_id names no document")
    falling = (document[1:] < document[:-1]) & (document[1:] >= 0)
    faults.where("passages", falling, "its document stands before that of the row before", first=1)


def _extractions(index: _Index, faults: _Faults) -> None:
    bare = empty = rows = 0
    for name, first, batch in _parts(index, faults, "extractions", BATCH_ROWS):
        expected = index.passage_ids[first : first + len(batch)]
        ids = batch["passage_id"].cast(pa.large_string())[: len(expected)]
        differs = pc.not_equal(ids, expected).to_numpy(zero_copy_only=False)
        faults.where(name, differs, "passage_id is not that of the passage of this row", first)
        triples, entities = (pc.list_value_length(batch[c]).to_numpy() for c in ("triples", "entities"))
        bare += int(np.sum(triples == 0))
        empty += int(np.sum((triples == 0) & (entities == 0)))
        rows += len(batch)
    if rows != len(index.passage_ids):
        faults.add("extractions", f"has {rows} rows for {len(index.passage_ids)} passages")
    _expect(faults, "extractions without triples", bare, "passages_without_triples", index)
    _expect(faults, "extractions without anything", empty, "passages_without_extraction", index)


def _phrases(index: _Index, faults: _Faults) -> None:
    ids: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    counts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    for name, first, batch in _parts(index, faults, "phrases"):
        number, count = batch["phrase_id"].to_numpy(), batch["passage_count"].to_numpy()
        _ascending(faults, name, "phrase_id", number, ids[-1][-1:], first)
        hashes = np.array([phrase_id(text) for text in batch["phrase"].to_pylist()], dtype=np.uint64)
        faults.where(name, hashes != number, "phrase_id is not the hash of the phrase", first)
        faults.where(name, count < 1, "passage_count is less than 1", first)
        if len(number):
            ids.append(number)
            counts.append(count)
    index.phrase_ids, index.passage_counts = np.concatenate(ids), np.concatenate(counts)
    _expect(faults, "rows of phrases", len(index.phrase_ids), "phrases", index)


def _ascending(faults: _Faults, file: str, column: str, ids: NDArray, previous: NDArray, first: int) -> None:
    """Ids must grow from row to row; ``previous`` holds that of the row before the first, if there is one."""
    joined = np.concatenate([previous, ids])
    wrong = joined[1:] <= joined[:-1]
    what = f"{column} is not greater than in the row before"
    faults.where(file, wrong, what, first + 1 - len(previous))


def _facts(index: _Index, faults: _Faults) -> None:
    previous, rows, triples = np.empty(0, np.uint64), 0, 0
    pairs: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for name, first, batch in _parts(index, faults, "facts"):
        number, count = batch["fact_id"].to_numpy(), batch["count"].to_numpy()
        subject, obj = (batch[column].to_numpy() for column in ("subject_id", "object_id"))
        _ascending(faults, name, "fact_id", number, previous, first)
        texts = zip(subject.tolist(), batch["predicate"].to_pylist(), obj.tolist(), strict=True)
        hashes = np.array([fact_id(*text) for text in texts], dtype=np.uint64)
        faults.where(name, hashes != number, "fact_id is not the hash of the fact", first)
        _ends(index, faults, name, {"subject_id": subject, "object_id": obj}, first)
        _holders(index, faults, name, batch["passage_ids"], count, first)
        ends = np.sort(np.searchsorted(index.phrase_ids, np.stack([subject, obj])), axis=0)
        pairs.append((ends[0] * len(index.phrase_ids) + ends[1])[ends[0] != ends[1]])
        previous = number[-1:] if len(number) else previous
        rows, triples = rows + len(number), triples + int(count.sum(dtype=np.int64))
    _expect(faults, "rows of facts", rows, "facts", index)
    _expect(faults, "extractions of facts", triples, "triples", index)
    joined = len(np.unique(np.concatenate(pairs)))
    _expect(faults, "pairs of phrases with a fact", joined, "fact_edges", index)


def _ends(
    index: _Index, faults: _Faults, file: str, columns: Mapping[str, NDArray[np.uint64]], first: int
) -> None:
    known = index.phrase_ids
    for column, ids in columns.items():
        rows = np.searchsorted(known, ids).clip(max=max(len(known) - 1, 0))
        dangling = known[rows] != ids if len(known) else np.ones(len(ids), dtype=bool)
        faults.where(file, dangling, f"{column} is the id of no phrase", first)


def _holders(
    index: _Index, faults: _Faults, file: str, lists: pa.ListArray, count: NDArray[np.int32], first: int
) -> None:
    """Check that the passages of a fact exist, stand in node order, and are no more than its extractions."""
    facts = pc.list_parent_indices(lists).to_numpy()
    names = pc.list_flatten(lists).cast(pa.large_string())
    rows = pc.index_in(names, value_set=index.passage_ids).fill_null(-1).to_numpy(zero_copy_only=False)
    faults.at(file, np.unique(facts[rows < 0]) + first, "passage_ids names no passage")
    falling = (facts[1:] == facts[:-1]) & (rows[1:] <= rows[:-1])
    faults.at(file, np.unique(facts[1:][falling]) + first, "passage_ids are not in node order, each once")
    held = np.bincount(facts, minlength=len(lists))
    faults.where(file, held == 0, "passage_ids is empty", first)
    faults.where(file, count < held, "count is less than the number of passage_ids", first)


def _synonyms(index: _Index, faults: _Faults) -> None:
    last: tuple[NDArray[np.uint64], ...] = (np.empty(0, np.uint64), np.empty(0, np.uint64))
    rows, threshold = 0, np.float32(index.setting("synonyms", "threshold", (int, float)))
    for name, first, batch in _parts(index, faults, "synonyms"):
        low, high = (batch[column].to_numpy() for column in ("phrase_id", "other_id"))
        cosine = batch["cosine"].to_numpy()
        faults.where(name, low >= high, "phrase_id is not less than other_id", first)
        a, b = (np.concatenate([end, column]) for end, column in zip(last, (low, high), strict=True))
        wrong = (a[1:] < a[:-1]) | ((a[1:] == a[:-1]) & (b[1:] <= b[:-1]))
        faults.where(name, wrong, "the pair is not greater than in the row before", first + 1 - len(last[0]))
        _ends(index, faults, name, {"phrase_id": low, "other_id": high}, first)
        fine = (cosine >= threshold) & (cosine <= MAX_COSINE)  # false for NaN
        faults.where(name, ~fine, f"cosine is not between {threshold} and 1", first)
        last, rows = (a[-1:], b[-1:]), rows + len(low)
    _expect(faults, "rows of synonyms", rows, "synonym_edges", index)


def _quarantine(index: _Index, faults: _Faults) -> None:
    kinds: list[tuple[str, str]] = []
    for name, first, batch in _parts(index, faults, "quarantine"):
        line = pc.fill_null(batch["line"], 1).to_numpy()
        faults.where(name, line < 1, "line is less than 1", first)
        empty = pc.equal(batch["reason"], "").to_numpy(zero_copy_only=False)
        faults.where(name, empty, "reason is empty", first)
        kinds += zip(batch["kind"].to_pylist(), batch["stage"].to_pylist(), strict=True)
    for count, found in {
        "quarantined_records": kinds.count(("passage", "read")),
        "quarantined_passages": kinds.count(("passage", "extract")),
        "triples_rejected": sum(kind == "triple" for kind, _ in kinds),
    }.items():
        _expect(faults, "such rows of quarantine", found, count, index)


# Arrays


def _array(
    index: _Index, faults: _Faults, name: str, types: tuple[str, ...], shape: tuple[int | None, ...]
) -> NDArray | None:
    """Map an array; ``None`` with a fault if it is not of one of the types or not of the shape."""
    file = f"{name}.npy"
    if file not in index.manifest.files:
        faults.add(file, f"is missing: {ADVICE}")
        return None
    try:
        with (index.folder / file).open("rb") as stream:
            version = np.lib.format.read_magic(stream)
        array: NDArray = np.load(index.folder / file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        faults.add(file, f"cannot be read: {error}")
        return None
    sizes_fit = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if version != (1, 0) or not array.flags.c_contiguous:
        faults.add(file, "is not of .npy format 1.0 in C order")
    elif array.dtype.name not in types or not sizes_fit:
        wanted = f"{' or '.join(types)} of shape {str(shape).replace('None', 'any')}"
        faults.add(file, f"is {array.dtype.name} of shape {array.shape}; expected {wanted}")
    else:
        return array
    return None


def _csr(
    index: _Index,
    faults: _Faults,
    shape: tuple[int, int],
    index_types: tuple[str, ...],
    names: tuple[str, str, str],
    value_type: str,
) -> _Csr | None:
    """Map a CSR matrix and check its cells; ``None`` with a fault if they cannot be followed."""
    values = _array(index, faults, names[2], (value_type,), (None,))
    cells = _cells(index, faults, shape, index_types, names[:2])
    if cells is None or values is None:
        return None
    if len(values) != len(cells.indices):
        faults.add(f"{names[2]}.npy", f"has {len(values)} numbers for {len(cells.indices)} cells")
        return None
    for start, stop in row_blocks(cells.indptr):
        numbers = values[cells.indptr[start] : cells.indptr[stop]]
        wrong = ~((numbers > 0) & np.isfinite(numbers))
        rows = row_numbers(cells.indptr, start, stop)
        faults.at(f"{names[2]}.npy", np.unique(rows[wrong]), "a number is not positive and finite")
    return _Csr(*cells, values)


def _cells(
    index: _Index,
    faults: _Faults,
    shape: tuple[int, int],
    index_types: tuple[str, ...],
    names: tuple[str, str],
) -> Cells | None:
    """Map the offsets and columns of a CSR matrix and check them; ``None`` if they cannot be followed."""
    indptr = _array(index, faults, names[0], ("int64",), (shape[0] + 1,))
    indices = _array(index, faults, names[1], index_types, (None,))
    if indptr is None or indices is None:
        return None
    before, file = faults.count, f"{names[0]}.npy"
    if indptr[0] != 0 or indptr[-1] != len(indices):
        faults.add(file, f"does not run from 0 to the number of cells, {len(indices)}")
    faults.where(file, indptr[1:] < indptr[:-1], "the row ends before it begins")
    if faults.count > before:
        return None
    for start, stop in row_blocks(indptr):
        rows, columns = row_numbers(indptr, start, stop), indices[indptr[start] : indptr[stop]]
        outside = (columns < 0) | (columns >= shape[1])
        faults.at(f"{names[1]}.npy", np.unique(rows[outside]), f"a column is not in 0 to {shape[1] - 1}")
        falling = (rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1])
        faults.at(f"{names[1]}.npy", np.unique(rows[1:][falling]), "columns are not sorted, each once")
        index.advance(len(columns))
    return Cells(indptr, indices)


def _occurrence(index: _Index, faults: _Faults) -> None:
    names = ("occurrence/indptr", "occurrence/indices", "occurrence/counts")
    shape = (index.counts.phrases, index.counts.passages)
    matrix = _csr(index, faults, shape, ("int32",), names, "int32")
    if matrix is None:
        return
    index.occurrence = matrix
    differs = np.diff(matrix.indptr) != index.passage_counts
    faults.where("phrases", differs, "passage_count is not that of occurrence/")
    _expect(faults, "mentions in occurrence/", len(matrix.indices), "passage_edges", index)


def _graph(index: _Index, faults: _Faults) -> None:
    counts = index.counts
    n_nodes = counts.phrases + counts.passages
    names = ("graph/indptr", "graph/indices", "graph/weights")
    matrix = _csr(index, faults, (n_nodes, n_nodes), ("int32", "int64"), names, "float32")
    if matrix is None:
        return
    if not faults.count:
        kind, row = first_offence(*matrix)  # self-loops and asymmetry are left
        if kind != FINE:
            faults.at("graph", np.array([row]), OFFENCES[kind])
    if not faults.count:
        _mentions(index, faults, matrix)
    _expect(faults, "edges in graph/", len(matrix.indices) // 2, "graph_edges", index)
    facts, synonyms = counts.fact_edges, counts.synonym_edges
    joined = counts.graph_edges - counts.passage_edges
    if not max(facts, synonyms) <= joined <= facts + synonyms:
        what = f"joins {joined} pairs of phrases, which {facts} facts and {synonyms} synonyms cannot give"
        faults.add("graph", what)
    index.graph = Graph(*matrix)


def _mentions(index: _Index, faults: _Faults, graph: _Csr) -> None:
    """Check that the edges from phrases to passages are those of ``occurrence/``.

    They weigh 1, but those of titles more.
    """
    n_phrases, held = index.counts.phrases, index.occurrence
    factor = index.setting("graph", "title_weight", (int, float))
    titles = _titles(index, faults, graph)
    if titles is None:
        return
    of_title = (1 + factor * np.diff(graph.indptr[n_phrases:])).astype(np.float32)
    for start, stop in row_blocks(graph.indptr[: n_phrases + 1]):
        cells = slice(graph.indptr[start], graph.indptr[stop])
        rows, columns = row_numbers(graph.indptr, start, stop), graph.indices[cells]
        mention = columns >= n_phrases
        rows, columns = rows[mention], columns[mention].astype(np.int64) - n_phrases
        wrong = graph.values[cells][mention] != np.where(titles[columns] == rows, of_title[columns], 1)
        what = "the weight of an edge to a passage is not 1, or not its title's"
        faults.at("graph/weights.npy", np.unique(rows[wrong]), what)
        expected = row_numbers(held.indptr, start, stop)
        targets = held.indices[held.indptr[start] : held.indptr[stop]]
        if np.array_equal(rows, expected):
            differing = np.unique(rows[columns != targets])
        else:
            numbers = [np.bincount(side - start, minlength=stop - start) for side in (rows, expected)]
            differing = np.flatnonzero(numbers[0] != numbers[1]) + start
        faults.at("graph/indices.npy", differing, "the edges to passages are not those of occurrence/")


def _titles(index: _Index, faults: _Faults, graph: _Csr) -> NDArray[np.integer] | None:
    """Map the titles of passages; ``None`` if they are not what the passages are called."""
    counts = index.counts
    stored = _array(index, faults, "graph/titles", (graph.indices.dtype.name,), (counts.passages,))
    if stored is None:
        return None
    before, first = faults.count, 0
    phrases, mode = pa.table({"phrase_id": index.phrase_ids}), index.setting("graph", "normalisation", str)
    for batch in _again(index, ["title"]):
        titles = np.empty(len(batch), stored.dtype)
        candidates = title_rows(pa.Table.from_batches([batch]), phrases, mode)
        held_titles(graph.indptr, graph.indices, candidates, counts.phrases + first, titles)
        differs = titles != stored[first : first + len(batch)]
        faults.where("graph/titles.npy", differs, "is not the phrase of the passage's title", first)
        first += len(batch)
    return stored if faults.count == before else None


def _again(index: _Index, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Read passages that were found sound once more."""
    return Reader(index.folder, index.manifest.model_dump()).batches("passages", columns, BATCH_ROWS)


def _words(index: _Index, faults: _Faults) -> None:
    parts = [batch for _, _, batch in _parts(index, faults, "words")]
    index.words = pa.Table.from_batches(parts, schemas.WORD)
    pairs = itertools.pairwise(index.words["word"].to_pylist())
    falling = np.array([one >= other for one, other in pairs], bool)
    faults.where("words", falling, "word is not greater than in the row before", first=1)


def _passage_words(index: _Index, faults: _Faults) -> None:
    """Compare the words of passages with their texts."""
    known, stated = index.words["word"].to_pylist(), index.words["passage_count"].to_numpy()
    names, shape = ("passage_words/indptr", "passage_words/indices"), (index.counts.passages, len(known))
    cells = _cells(index, faults, shape, ("int32",), names)
    if cells is None or faults.count:
        return
    differs = np.bincount(cells.indices, minlength=len(known)) != stated
    faults.where("words", differs, "passage_count is not that of passage_words/")
    row = 0
    for batch in _again(index, ["title", "text"]):
        for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True):
            held = cells.indices[cells.indptr[row] : cells.indptr[row + 1]]
            if [known[word] for word in held] != sorted(passage_words(title, text)):
                faults.at("passage_words", np.array([row]), "the words are not those of the passage")
            row += 1


def _vectors(index: _Index, faults: _Faults) -> None:
    dtype = index.setting("embed", "dtype", str)
    dimensions = set()
    for kind in artifact.VECTOR_KINDS:
        name = f"vectors/{kind}"
        array = _array(index, faults, name, (dtype,), (getattr(index.counts, kind), None))
        if array is not None:
            _finite(index, faults, name, array)
            dimensions.add(array.shape[1])
    if len(dimensions) > 1:
        faults.add("vectors", f"have different dimensions: {', '.join(map(str, sorted(dimensions)))}")


def _finite(index: _Index, faults: _Faults, name: str, array: NDArray) -> None:
    for rows in blocks(len(array), array[:1].size):
        finite = np.isfinite(array[rows]).all(axis=tuple(range(1, array.ndim)))
        faults.where(f"{name}.npy", ~finite, "a number is not finite", rows.start)
        index.advance(array[rows].size)


def _ppr(index: _Index, faults: _Faults) -> None:
    if not index.setting("precompute", "enabled", bool):
        return
    dtype, n_passages = index.setting("precompute", "dtype", str), index.counts.passages
    wanted: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "ppr/transition": ("float32", index.graph.weights.shape),
        "ppr/z": (dtype, (n_passages, None)),
        "ppr/z1": ("float32", (n_passages,)),
    }
    arrays = {name: _array(index, faults, name, (kind,), shape) for name, (kind, shape) in wanted.items()}
    for name, array in arrays.items():
        if array is not None:
            _finite(index, faults, name, array)
    stored = arrays["ppr/transition"]
    if stored is not None:
        _transition(index, faults, stored)


def _transition(index: _Index, faults: _Faults, stored: NDArray[np.float32]) -> None:
    expected, indptr = index.graph.transition, index.graph.indptr
    for start, stop in row_blocks(indptr):
        cells = slice(indptr[start], indptr[stop])
        close = np.isclose(stored[cells], expected[cells], rtol=1e-5, atol=0)
        stale = np.unique(row_numbers(indptr, start, stop)[~close])
        faults.at("ppr/transition.npy", stale, "is not of this graph: run hippoindex precompute")


CHECKS = (
    _Check("files", "bytes", (), _files),
    _Check("counts", "counts", (), _sums),
    _Check("documents", "rows", (), _documents),
    _Check("passages", "rows", ("documents",), _passages),
    _Check("extractions", "rows", ("passages",), _extractions),
    _Check("phrases", "rows", (), _phrases),
    _Check("facts", "rows", ("passages", "phrases"), _facts),
    _Check("synonyms", "rows", ("phrases",), _synonyms),
    _Check("quarantine", "rows", (), _quarantine),
    _Check("occurrence", "cells", ("passages", "phrases"), _occurrence),
    _Check("graph", "cells", ("occurrence",), _graph),
    _Check("words", "rows", (), _words),
    _Check("passage_words", "cells", ("passages", "words"), _passage_words),
    _Check("vectors", "numbers", (), _vectors),
    _Check("ppr", "numbers", ("graph",), _ppr),
)


def verification_view(result: Verification) -> RenderableType:
    """Return what ``hippoindex verify`` shows: the checks with their seconds, and the faults."""
    table = Table(title=f"Index {escape(str(result.path))}", title_justify="left")
    for heading in ("check", "looked at", "seconds", "faults"):
        table.add_column(heading, justify="left" if heading == "check" else "right")
    for check in result.checks:
        if check.skipped:
            table.add_row(check.name, "[yellow]skipped[/]", "", escape(check.skipped))
        else:
            shown = f"[red]{check.faults:,}[/]" if check.faults else "0"
            table.add_row(check.name, f"{check.items:,} {check.unit}", f"{check.seconds_s:.2f}", shown)
    lines = [f"[red]fault:[/] {escape(str(fault))}" for fault in result.faults]
    if len(lines) < result.n_faults:
        lines.append(f"... and {result.n_faults - len(lines):,} more")
    return Group(table, *lines)
