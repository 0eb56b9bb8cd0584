from __future__ import annotations

import itertools
import pickle
import resource
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hippoindex.cluster.storage import Storage, StorageOptions, open_storage
from hippoindex.cluster.storage_backend import ObjectMissingError, StorageError
from hippoindex.errors import MissingPackageError, UsageError

MIB = 1 << 20
RACERS = 16


class InProcesses(Protocol):
    def __call__(self, work: Any, storage: Storage) -> list[Any]: ...


def data_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write(storage: Storage, name: str, content: bytes) -> None:
    with storage.write(name) as out:
        out.write(content)


def names(storage: Storage, prefix: str = "") -> list[str]:
    return [entry.name for entry in storage.entries(prefix)]


def unfinished(storage: Storage) -> list[str]:
    return [upload.name for upload in storage.remove_stale_uploads(older_than_s=-60, dry_run=True)]


# Reading and writing


def test_what_is_written_is_read(storage: Storage) -> None:
    with storage.write("graph/weights.npy") as out:
        out.write(b"some ")
        out.write(b"weights")
        assert not storage.exists("graph/weights.npy")
    assert storage.exists("graph/weights.npy")
    assert not storage.exists("graph")
    assert not storage.exists("graph/weights.npy/below")
    assert storage.read_bytes("graph/weights.npy") == b"some weights"
    storage.delete("graph/weights.npy")
    storage.delete("graph/weights.npy")
    assert not storage.exists("graph/weights.npy")
    assert names(storage) == []


def test_a_missing_object_is_named(storage: Storage) -> None:
    for read in (storage.read_bytes, storage.open, lambda name: storage.download(name, "unused")):
        with pytest.raises(ObjectMissingError, match=r"There is no 'a/b' in "):
            read("a/b")
    assert storage.read("a/b") is None


def test_an_object_is_replaced_as_a_whole(storage: Storage) -> None:
    for content in (b"a long first content", b"short", b""):
        write(storage, "x", content)
        assert storage.read_bytes("x") == content
        assert [entry.size_bytes for entry in storage.entries()] == [len(content)]


def test_only_what_is_read_is_fetched(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    content = data_of(12 * MIB)
    write(storage, "big", content)
    fetched = []
    read_range = storage._backend.read_range

    def counted(name: str, start: int, stop: int, etag: str) -> bytes:
        fetched.append(stop - start)
        return read_range(name, start, stop, etag)

    monkeypatch.setattr(storage._backend, "read_range", counted)
    with storage.open("big") as file:
        assert file.seek(-100, 2) == len(content) - 100
        assert file.read() == content[-100:]
        file.seek(6 * MIB + 1)
        assert file.read(1000) == content[6 * MIB + 1 :][:1000]
        assert file.tell() == 6 * MIB + 1001
        assert sum(fetched) <= 2 * MIB
        file.seek(5)
        assert file.read(7 * MIB) == content[5 : 7 * MIB + 5]
        file.seek(len(content) + 5)
        assert file.read(10) == b""
        file.seek(1)
        assert file.read() == content[1:]


def test_parquet_is_written_and_a_column_read(storage: Storage) -> None:
    table = pa.table({"id": range(1000), "text": [f"passage {i}" for i in range(1000)]})
    with storage.write("passages/part.parquet") as out:
        pq.write_table(table, out)
    with storage.open("passages/part.parquet") as file:
        assert pq.read_table(file, columns=["id"]) == table.select(["id"])


def test_an_array_is_streamed(storage: Storage) -> None:
    array = np.arange(300_000, dtype=np.float64).reshape(300, 1000)
    with storage.write("vectors.npy") as out:
        np.lib.format.write_array(out, array, allow_pickle=False)
        out.write(memoryview(array[:0]))
    with storage.open("vectors.npy") as file:
        assert np.array_equal(np.lib.format.read_array(file, allow_pickle=False), array)


def test_files_go_up_and_down(storage: Storage, tmp_path: Path) -> None:
    for size in (0, 10, 11 * MIB):
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(data_of(size))
        storage.upload(source, "file")
        storage.download("file", target)
        assert target.read_bytes() == source.read_bytes()
    with pytest.raises(StorageError, match=r"Cannot read .*absent"):
        storage.upload(tmp_path / "absent", "other")
    assert names(storage) == ["file"]


def test_a_reader_notices_a_replacement(storage: Storage) -> None:
    write(storage, "x", data_of(3 * MIB, seed=1))
    with storage.open("x") as file:
        file.read(10)
        write(storage, "x", data_of(3 * MIB, seed=2))
        file.seek(2 * MIB)
        with pytest.raises(StorageError, match="was replaced or deleted while it was read"):
            file.read(10)
        storage.delete("x")
        with pytest.raises(StorageError, match="was replaced or deleted while it was read"):
            file.read(10)


def test_a_listing_has_sizes_and_is_ordered(storage: Storage) -> None:
    content = {"b/2": b"22", "b/1": b"1", "a": b"", "bc": b"333", "b/d/ä": b"55555", "B": b"4444"}
    for name, data in content.items():
        storage.create(name, data)
    ordered = sorted(content, key=str.encode)
    assert [(e.name, e.size_bytes) for e in storage.entries()] == [(n, len(content[n])) for n in ordered]
    assert names(storage, "b") == ["b/1", "b/2", "b/d/ä", "bc"]
    assert names(storage, "b/") == ["b/1", "b/2", "b/d/ä"]
    assert names(storage, "b/d/") == ["b/d/ä"]
    assert names(storage, "c/d") == []
    assert storage.delete_all("b/") == 3
    assert names(storage) == ["B", "a", "bc"]


@pytest.mark.parametrize("kind", ["s3"])
def test_a_listing_of_many_pages_is_whole(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    call, pages = storage._backend._call, []

    def call_for_small_pages(operation: str, name: str | None, **arguments: Any) -> Any:
        if operation == "list_objects_v2":
            arguments["MaxKeys"] = 10
            pages.append(operation)
        return call(operation, name, **arguments)

    monkeypatch.setattr(storage._backend, "_call", call_for_small_pages)
    expected = [f"done/{i:04d}" for i in range(35)]
    for name in expected:
        storage.create(name, b"{}")
    assert names(storage, "done/") == expected
    assert len(pages) == 4
    assert storage.delete_all("") == len(expected)
    assert names(storage) == []


def test_storage_can_be_pickled(storage: Storage) -> None:
    storage.create("x", b"1")
    assert pickle.loads(pickle.dumps(storage)).read_bytes("x") == b"1"  # noqa: S301


def test_files_are_read_in_place_only_on_disk(storage: Storage, kind: str) -> None:
    storage.create("x", b"1")
    path = storage.local_path("x")
    assert (path is None) == (kind == "s3")
    assert path is None or path.read_bytes() == b"1"


@pytest.mark.parametrize(
    "name", ["", "/x", "x/", "a//b", "../x", "a/../b", ".", "a\nb", ".x.tmp", "a/.x.lock"]
)
def test_a_name_that_leaves_the_storage_is_refused(tmp_path: Path, name: str) -> None:
    storage = open_storage(tmp_path / "storage")
    for use in (storage.exists, storage.read_bytes, storage.open, storage.delete, storage.local_path):
        with pytest.raises(UsageError, match="object name"):
            use(name)
    for write in (lambda: storage.create(name, b""), lambda: storage.write(name).__enter__()):
        with pytest.raises(UsageError, match="object name"):
            write()


# Streams that fail


def test_a_stream_is_sent_in_parts_while_it_is_written(storage: Storage) -> None:
    content = data_of(20 * MIB)
    with storage.write("big") as out:
        for start in range(0, len(content), MIB):
            out.write(content[start : start + MIB])
        assert unfinished(storage) == ["big"]
        assert out.tell() == len(content)
    assert unfinished(storage) == []
    assert storage.read_bytes("big") == content
    assert [(e.name, e.size_bytes) for e in storage.entries()] == [("big", len(content))]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("size", [10, 12 * MIB])
def test_a_stream_that_fails_leaves_nothing(storage: Storage, error: type[BaseException], size: int) -> None:
    storage.create("big", b"old")

    def write_half() -> None:
        with storage.write("big") as out:
            out.write(data_of(size))
            raise error("half-way")

    with pytest.raises(error, match="half-way"):
        write_half()
    assert storage.read_bytes("big") == b"old"
    assert unfinished(storage) == []
    assert names(storage) == ["big"]


def test_parts_that_cannot_be_sent_are_removed(storage: Storage, faults: ModuleType) -> None:
    lost = faults.after(2, [faults.Fault.REFUSED] * 4)
    broken, _ = faults.faulty(storage, lost, attempts=2)
    with pytest.raises(StorageError, match=r"Cannot write a part of .*/big: 2 attempts failed.*refused"):
        write(broken, "big", data_of(25 * MIB))
    assert unfinished(storage) == []
    assert not storage.exists("big")


def test_parts_of_killed_processes_are_found_and_removed(storage: Storage) -> None:
    backend = storage._backend
    uploads = {}
    for name in ("a/x", "b/y"):
        uploads[name] = backend.begin(name, f"token-{name[-1]}")
        backend.put_part(name, uploads[name], 1, 0, data_of(5 * MIB))
    assert storage.remove_stale_uploads(older_than_s=3600) == []
    found = storage.remove_stale_uploads("a/", older_than_s=-60, dry_run=True)
    assert [(upload.name, upload.id) for upload in found] == [("a/x", uploads["a/x"])]
    assert abs(found[0].age_s) < 60
    assert unfinished(storage) == ["a/x", "b/y"] or unfinished(storage) == ["b/y", "a/x"]
    storage.remove_stale_uploads("a/", older_than_s=-60)
    assert unfinished(storage) == ["b/y"]
    storage.remove_stale_uploads(older_than_s=-60)
    assert unfinished(storage) == []
    assert names(storage) == []


def test_a_write_whose_parts_were_removed_says_so(storage: Storage) -> None:

    def write_too_slowly() -> None:
        with storage.write("x") as out:
            out.write(data_of(6 * MIB))
            out._parts[0].result()
            storage.remove_stale_uploads(older_than_s=-60)

    with pytest.raises(StorageError, match="were removed before it was complete"):
        write_too_slowly()
    assert not storage.exists("x")


def test_a_disk_that_takes_no_more_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "storage", StorageOptions(part_bytes=MIB))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"Cannot write .*big: File too large"):
            write(storage, "big", data_of(4 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "storage").iterdir()) == []


# Races


def test_create_and_replace(storage: Storage) -> None:
    first = storage.create("lease", b"1")
    assert first is not None
    assert storage.create("lease", b"2") is None
    assert storage.read_bytes("lease") == b"1"
    second = storage.replace("lease", b"3", first)
    assert second not in {None, first}
    assert storage.replace("lease", b"4", first) is None
    content = storage.read("lease")
    assert content is not None
    assert (content.data, content.version) == (b"3", second)
    storage.delete("lease")
    assert storage.replace("lease", b"5", second) is None
    assert not storage.exists("lease")


def test_of_many_threads_one_creates(storage: Storage) -> None:
    barrier = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        barrier.wait(30)
        return storage.create("x", b"%d" % number) is not None

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    assert sum(won) == 1
    assert storage.read_bytes("x") == b"%d" % won.index(True)


def test_of_many_threads_each_replacement_is_kept(storage: Storage, workers: ModuleType) -> None:
    storage.create("sum", b"0")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: workers.add(storage, 3), range(4)))
    assert storage.read_bytes("sum") == b"12"


def test_of_many_processes_one_creates_and_each_replacement_is_kept(
    storage: Storage, workers: ModuleType, in_processes: InProcesses
) -> None:
    storage.create("sum", b"0")
    assert sum(in_processes(workers.race, storage)) == 1
    assert storage.read_bytes("sum") == b"16"
    assert 0 <= int(storage.read_bytes("created")) < RACERS


# Faults


def test_a_lost_answer_is_recognised_as_own_success(storage: Storage, faults: ModuleType) -> None:
    lost = faults.Fault.LOST
    unreliable, backend = faults.faulty(storage, itertools.cycle([lost, faults.Fault.NONE]), attempts=20)
    version = unreliable.create("x", b"same")
    assert version is not None
    assert unreliable.create("x", b"same") is None  # of equal content, and yet not ours
    second = unreliable.replace("x", b"other", version)
    assert second is not None
    assert unreliable.replace("x", b"other", version) is None
    write(unreliable, "big", data_of(11 * MIB))
    assert storage.read_bytes("big") == data_of(11 * MIB)
    assert backend.injected[lost] >= 5


def test_what_does_not_pass_is_given_up_and_told(storage: Storage, faults: ModuleType) -> None:
    broken, backend = faults.faulty(storage, itertools.repeat(faults.Fault.REFUSED), attempts=3)
    with pytest.raises(StorageError, match=r"Cannot write .*/x: 3 attempts failed, .*injected: refused"):
        broken.create("x", b"1")
    assert backend.injected[faults.Fault.REFUSED] == 3
    assert not storage.exists("x")


NAMES = st.sampled_from(["a", "b/c", "b/d"])
CONTENT = st.binary(max_size=3) | st.binary(min_size=9, max_size=12)  # of one part, or of several
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), NAMES, CONTENT),
        st.tuples(st.just("replace"), NAMES, CONTENT),
        st.tuples(st.just("replace stale"), NAMES, CONTENT),
        st.tuples(st.just("write"), NAMES, CONTENT),
        st.tuples(st.just("fail"), NAMES, CONTENT),
        st.tuples(st.just("open"), NAMES, CONTENT),
        st.tuples(st.just("delete"), NAMES, CONTENT),
        st.tuples(st.just("list"), NAMES, CONTENT),
    ),
    max_size=8,
)


class AbandonedError(Exception):
    pass


def operate(storage: Storage, operation: str, name: str, content: bytes) -> object:
    """Carry out one operation and return what it gave, versions left out."""
    if operation == "create":
        return storage.create(name, content) is not None
    if operation.startswith("replace"):
        found = storage.read(name)
        version = found.version if found is not None and operation == "replace" else '"stale"'
        return storage.replace(name, content, version) is not None
    if operation in {"write", "fail"}:
        with suppress(AbandonedError), storage.write(name) as out:
            out.write(content)
            if operation == "fail":
                raise AbandonedError
        return None
    if operation == "open":
        if not storage.exists(name):
            return None
        with storage.open(name) as file:
            file.seek(1)
            return file.read()
    if operation == "delete":
        return storage.delete(name)
    return [(entry.name, entry.size_bytes) for entry in storage.entries()]


def expect(objects: dict[str, bytes], operation: str, name: str, content: bytes) -> object:
    """Do to a dictionary what :func:`operate` does to storage."""
    if operation in {"create", "replace"} and (name in objects) == (operation == "replace"):
        objects[name] = content
        return True
    if operation == "write":
        objects[name] = content
    elif operation == "open":
        return objects[name][1:] if name in objects else None
    elif operation == "delete":
        objects.pop(name, None)
    elif operation == "list":
        return [(name, len(objects[name])) for name in sorted(objects)]
    return False if operation.startswith(("create", "replace")) else None


def check_operations(
    storage: Storage, faults: ModuleType, operations: list[Any], injected: list[str], part_bytes: int
) -> None:
    """Compare storage with faults with a dictionary; streams are of parts that hold four bytes' worth."""
    made = [faults.Fault(name) for name in injected]
    unreliable, _ = faults.faulty(storage, made, attempts=len(made) + 1, part_bytes=part_bytes)
    objects: dict[str, bytes] = {}
    for operation, name, few in operations:
        content = few * (part_bytes // 4) if operation in {"write", "fail"} else few
        done = operate(unreliable, operation, name, content)
        assert done == expect(objects, operation, name, content), (operation, name, few)
    assert {entry.name: storage.read_bytes(entry.name) for entry in storage.entries()} == objects


FAULTS = st.lists(st.sampled_from(["none", "refused", "lost", "cut", "slow"]), max_size=60)
ON_BOTH = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(ON_BOTH, max_examples=100)
@given(operations=OPERATIONS, injected=FAULTS)
def test_faults_change_nothing_on_disk(
    tmp_path_factory: pytest.TempPathFactory, faults: ModuleType, operations: list[Any], injected: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("storage")
    check_operations(open_storage(folder), faults, operations, injected, part_bytes=4)
    assert not list(folder.rglob(".*.tmp"))


s3_numbers = itertools.count()


@settings(ON_BOTH, max_examples=10)
@given(operations=OPERATIONS, injected=FAULTS)
def test_faults_change_nothing_on_s3(
    s3_server: Any, faults: ModuleType, operations: list[Any], injected: list[str]
) -> None:
    storage = open_storage(f"s3://{s3_server.bucket}/faults-{next(s3_numbers)}")
    check_operations(storage, faults, operations, injected, part_bytes=5 * MIB)
    # A write that has begun twice, because the first answer was lost, leaves an empty one to be cleaned up.
    storage.remove_stale_uploads(older_than_s=-60)
    assert unfinished(storage) == []


# Errors


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no name"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://Bucket/prefix", "is no name of a bucket"),
        ("s3://b/prefix", "is no name of a bucket"),
        ("s3://bucket/a/../b", "is not a relative name"),
        ("s3://bucket//a", "is not a relative name"),
        ("s3://bucket/prefix?versionId=3", "no '@', '[?]' or '#'"),
        ("s3://bucket/prefix#part", "no '@', '[?]' or '#'"),
        ("gs://bucket/prefix", "of the kind gs:// is not known"),
        (Path("s3://bucket/prefix"), "not as a Path"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str | Path, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_storage(url)


@pytest.mark.parametrize("url", ["s3://KEY:hush-hush@bucket/x", "s3://bucket/x?secret=hush-hush"])
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert "hush" not in str(caught.value)


def test_without_s3fs_the_pip_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=r"s3://bucket needs .*pip install 'hippoindex\[s3\]'"):
        open_storage("s3://bucket/prefix")


def test_a_check_passes_and_leaves_nothing(storage: Storage) -> None:
    storage.check()
    assert names(storage) == []


class IgnoresConditions:
    """A server of the kind that accepts conditional writes and does not look at the condition."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, name: str, data: bytes, token: str, **_: Any) -> str:
        return str(self._inner.put(name, data, token))


def test_a_check_finds_storage_that_ignores_conditions(storage: Storage) -> None:
    careless = Storage(storage.url, IgnoresConditions(storage._backend), StorageOptions())
    with pytest.raises(StorageError, match="does not honour conditional writes"):
        careless.check()
    assert names(storage) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    storage = open_storage(tmp_path / "file" / "below")
    with pytest.raises(StorageError, match=r"Cannot write .*file/below/.*(Not a directory|File exists)"):
        storage.check()


def test_an_object_cannot_be_a_folder_on_disk(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.create("a/b", b"1")
    for name in ("a", "a/b/c"):
        assert storage.read(name) is None
        with pytest.raises(StorageError, match="Cannot write"):
            write(storage, name, b"2")
    assert names(storage) == ["a/b"]


@pytest.mark.usefixtures("s3_server")
def test_a_missing_bucket_is_named() -> None:
    storage = open_storage("s3://no-such-bucket/prefix")
    for use in (storage.check, lambda: names(storage), lambda: storage.read_bytes("x")):
        with pytest.raises(StorageError, match="There is no bucket 'no-such-bucket': create it"):
            use()


def all_of(error: BaseException) -> str:
    """What a user may see of an error: its message, and the traceback with every cause."""
    return str(error) + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("wrong", ["secret", "key"])
def test_denied_access_is_explained_without_secrets(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], wrong: str
) -> None:
    variable = {"secret": "AWS_SECRET_ACCESS_KEY", "key": "AWS_ACCESS_KEY_ID"}[wrong]
    monkeypatch.setenv(variable, "hush-hush-97")
    storage = open_storage(f"s3://{s3_server.bucket}/denied")
    for use in (storage.check, lambda: storage.exists("x"), lambda: names(storage)):
        with pytest.raises(StorageError, match="is denied: are the AWS credentials the right ones") as caught:
            use()
        seen = all_of(caught.value) + "".join(capfd.readouterr())
        for secret in ("hush-hush-97", s3_server.secret_key, s3_server.access_key):
            assert secret not in seen


def test_who_may_only_read_is_told_so_before_the_work(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{s3_server.bucket}/read-only"
    open_storage(url).create("x", b"1")
    for name, value in s3_server.reader().items():
        monkeypatch.setenv(name, value)
    storage = open_storage(url)
    assert storage.read_bytes("x") == b"1"
    with pytest.raises(StorageError, match="is denied"):
        storage.check()


def test_missing_credentials_are_explained(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    storage = open_storage(f"s3://{s3_server.bucket}/x")
    with pytest.raises(StorageError, match=r"no usable AWS credentials .*set AWS_PROFILE"):
        storage.check()


def test_credentials_of_fsspecs_own_configuration_are_not_used(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    settings_of_s3 = {"key": "other", "secret": "other", "endpoint_url": "http://127.0.0.1:1"}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings_of_s3)
    open_storage(f"s3://{s3_server.bucket}/x").check()


def test_an_endpoint_out_of_reach_is_retried_and_named_without_its_password(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    [port] = sys.modules["s3_server"].free_ports(1)
    options = StorageOptions(attempts=2, first_wait_s=0.01)
    for endpoint in (f"http://127.0.0.1:{port}", f"http://me:hush-hush@127.0.0.1:{port}"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        storage = open_storage(f"s3://{s3_server.bucket}/x", options)
        with pytest.raises(StorageError, match="2 attempts failed, the last one so: ") as caught:
            storage.create("x", b"1")
        output = capfd.readouterr()
        seen = all_of(caught.value) + output.out + output.err
        assert "storage request failed" in seen
        assert "hush-hush" not in seen


def test_settings_that_are_wrong_are_not_retried(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:hush-hush@in valid")
    storage = open_storage(f"s3://{s3_server.bucket}/x")
    with pytest.raises(
        StorageError, match=r"cannot be used with these AWS settings .*Invalid endpo"
    ) as caught:
        storage.create("x", b"1")
    assert "hush-hush" not in all_of(caught.value)


class FlakyServer(ThreadingHTTPServer):
    """Gives the scripted answers, one a request, and then the object "content" whatever is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FlakyHandler)
        self.script: list[str] = []
        self.requests = 0


class FlakyHandler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        self.server.requests += 1
        answer = self.server.script.pop(0) if self.server.script else "content"
        if answer == "reset":
            self.close_connection = True
        elif answer == "cut":
            self.reply(200, b"con", size=7)
            self.close_connection = True
        elif answer == "content":
            self.reply(200, b"content", size=7)
        elif answer == "garbage":
            self.reply(500, b"<html>Bad", size=9)
        else:
            status, code = answer.split()
            key = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
            text = f"<Error><Code>{code}</Code><Message>your key is {key}</Message></Error>".encode()
            self.reply(int(status), text, size=len(text))

    def reply(self, status: int, body: bytes, *, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", '"0123"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def flaky_server(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyServer]:  # noqa: ARG001
    """A server that fails as S3 does, and this process's environment set for it."""
    with FlakyServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHUSHHUSH")
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_what_passes_on_the_way_is_tried_again(flaky_server: FlakyServer) -> None:
    storage = open_storage("s3://flaky/prefix", StorageOptions(attempts=3, first_wait_s=0.01))
    refusals = ["503 SlowDown", "500 InternalError", "429 TooManyRequests", "400 RequestTimeout"]
    for answer in ("reset", "cut", "garbage", *refusals):
        flaky_server.script, flaky_server.requests = [answer, answer], 0
        assert storage.read_bytes("x") == b"content", answer
        assert flaky_server.requests == 3, answer


def test_what_stays_is_not_and_its_text_holds_no_key(flaky_server: FlakyServer) -> None:
    storage = open_storage("s3://flaky/prefix")
    for answer, says in {
        "403 InvalidAccessKeyId": "is denied",
        "301 PermanentRedirect": "in another region: set AWS_REGION",
        "400 AuthorizationHeaderMalformed": "in another region: set AWS_REGION",
        "501 NotImplemented": "the server refused get_object: 501 NotImplemented",
    }.items():
        flaky_server.script, flaky_server.requests = [answer], 0
        with pytest.raises(StorageError, match=says) as caught:
            storage.read_bytes("x")
        assert flaky_server.requests == 1, answer
        assert "your key is ***" in str(caught.value)
        assert "AKIAHUSHHUSH" not in all_of(caught.value)
