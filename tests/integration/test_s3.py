"""Corpus in, index out and retrieval with a real S3 server, and with storage whose requests fail."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from hippoindex.cluster.ledger import Lease, LeaseHeldError
from hippoindex.cluster.storage import Storage, open_storage
from hippoindex.cluster.storage_backend import StorageError
from hippoindex.errors import ArtifactError, InputError, UsageError
from hippoindex.pipeline import build as build_module
from hippoindex.pipeline import collect as collect_module
from hippoindex.pipeline import remote, work
from hippoindex.pipeline.artifact import open_index
from hippoindex.pipeline.build import BuildResult, build_index
from hippoindex.pipeline.collect import collect
from hippoindex.pipeline.config import CorpusConfig, load_config
from hippoindex.pipeline.corpus import CorpusReader
from hippoindex.pipeline.precompute import refresh
from hippoindex.pipeline.progress import Monitor
from hippoindex.pipeline.update import append, delete
from hippoindex.pipeline.verify import verify_index

Digests = Callable[[Path], dict[str, str]]
_numbers = itertools.count()

RECORDS = [
    {"id": "mill", "title": "Mill", "text": "Hester Vane built the Orrin Mill in Saint Orrin in 1802."},
    {"id": "vane", "title": "Vane", "text": "Hester Vane was born in Port Calder and met Josiah Tremlett."},
    {"id": "calder", "title": "Calder", "text": "Port Calder is a harbour town on the River Sele."},
    {"id": "sele", "title": "Sele", "text": "The River Sele rises near Saint Orrin."},
]


@pytest.fixture
def prefix(s3_server: Any) -> str:
    return f"s3://{s3_server.bucket}/index-test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(tmp_path / "cache", monkeypatch)


def use_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as another machine would, which has the models and nothing else."""
    from hippoindex.pipeline.models import cache_folder

    models = cache_folder().resolve()
    cache.mkdir()
    (cache / "models").symlink_to(models)
    monkeypatch.setenv("HIPPOINDEX_CACHE", str(cache))


def build(corpus: str | Path, output: str | Path, **values: object) -> BuildResult:
    given = {"cluster__workers": 1, "cluster__shard_passages": 2, "precompute__enabled": False} | values
    return build_index(load_config(corpus__path=[str(corpus)], output=str(output), **given))


def write(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def objects(url: str) -> set[str]:
    return {entry.name for entry in open_storage(url).entries()}


@pytest.mark.slow
def test_corpus_index_and_retrieval_on_s3_are_as_on_disk(
    prefix: str, tmp_path: Path, run_cli: Callable[..., Any], sample: Path, digests: Digests, s3_server: Any
) -> None:
    content = (sample / "passages.jsonl").read_bytes()
    corpus = open_storage(f"{prefix}/corpus")
    corpus.create("part/one.jsonl.gz", gzip.compress(content))
    url, local = f"{prefix}/index", tmp_path / "local"
    made = run_cli(
        "--log-level", "debug", "index", "--corpus", f"{prefix}/corpus", "--output", url, "--workers", 2
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.jsonl.gz").write_bytes(gzip.compress(content))
    build_index(load_config(corpus__path=[str(tmp_path / "part")], output=str(local)))
    copied = tmp_path / "copied"
    assert run_cli("copy", url, copied).returncode == 0
    assert digests(copied) == digests(local)
    verify_index(copied).require_sound()
    assert objects(url) == remote.referenced((copied / "manifest.json").read_bytes(), url)
    assert objects(f"{url}.work") == set(), "the work is gone"
    questions = sample / "questions.jsonl"
    answers = [
        run_cli("retrieve", "--index", index, "--queries", questions, "--json") for index in (url, local)
    ]
    assert answers[0].returncode == 0, answers[0].stderr
    assert json.loads(answers[0].stdout)["answers"] == json.loads(answers[1].stdout)["answers"]
    for secret in (s3_server.secret_key, s3_server.access_key):
        assert secret not in made.stderr + made.stdout
        assert all(secret.encode() not in open_storage(url).read_bytes(name) for name in objects(url))
    again = run_cli("index", "--corpus", f"{prefix}/corpus", "--output", url)
    assert (again.returncode, "nothing was done" in again.stdout) == (0, True), again.stderr


@pytest.mark.slow
def test_another_machine_goes_on_where_a_run_was_killed(
    prefix: str, tmp_path: Path, sample: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, corpus = f"{prefix}/index", sample / "passages.jsonl"
    command = [sys.executable, "-m", "hippoindex.cli", "index", "--corpus", corpus, "--output", url]
    command += ["--set", "cluster.shard_passages=4", "--set", "precompute.enabled=false", "--workers", "2"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    storage = open_storage(f"{url}.work")
    while len(done := list(storage.entries("extract/done/"))) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert open_storage(url).read("manifest.json") is None
    use_machine(tmp_path / "other", monkeypatch)
    with structlog.testing.capture_logs() as logs:
        build(corpus, url, cluster__shard_passages=4)
    found = next(log for log in logs if log["event"] == "shards found done" and log["stage"] == "extract")
    assert found["done"] >= len(done)
    build(corpus, tmp_path / "local", cluster__shard_passages=4)
    remote.copy(url, tmp_path / "copied")
    assert digests(tmp_path / "copied") == digests(tmp_path / "local")
    assert objects(f"{url}.work") == set()


@pytest.mark.slow
def test_a_replaced_version_stays_readable_until_it_is_collected(
    prefix: str, tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{prefix}/index"
    build(write(tmp_path / "most.jsonl", RECORDS[:3]), url)
    first = open_storage(url).read_bytes("manifest.json")
    held = open_index(url)
    refresh(url)
    append(url, [str(write(tmp_path / "rest.jsonl", RECORDS[3:]))])
    assert append(url, [str(tmp_path / "rest.jsonl")]) is None
    full = build(write(tmp_path / "all.jsonl", RECORDS), tmp_path / "full", precompute__enabled=True)
    remote.copy(url, tmp_path / "appended")
    same, expected = digests(tmp_path / "appended"), digests(Path(full.path))
    assert {n: d for n, d in same.items() if n != "manifest.json"} == {
        n: d for n, d in expected.items() if n != "manifest.json"
    }
    assert held.passages.num_rows == 3, "a reader of the old version keeps it"
    assert remote.referenced(first, url) <= objects(url), "its objects stay for those that fetch it now"
    delete(url, ["sele"])
    assert open_index(url).passages["passage_id"].to_pylist() == ["mill", "vane", "calder"]
    assert collect(url) == [], "what is young stays"
    garbage = collect(url, older_than_s=-60.0)
    assert {item.kind for item in garbage} == {"replaced version"}
    before = objects(url)
    removed = collect(url, older_than_s=-60.0, remove=True)
    assert before - objects(url) == {item.name.removeprefix(f"{url}/") for item in removed}
    assert objects(url) == remote.referenced(open_storage(url).read_bytes("manifest.json"), url)
    for place in (url, f"{url}.work"):
        open_storage(place)._backend.begin("vectors/phrases.npy", "0" * 32)
    parts = collect(url, older_than_s=-60.0, remove=True)
    assert [item.kind for item in parts] == ["part of a killed write"] * 2
    assert collect(url, older_than_s=-60.0) == []
    use_machine(tmp_path / "other", monkeypatch)
    verify_index(url).require_sound()


@pytest.mark.slow
def test_one_run_at_a_time_and_no_version_overwritten_unseen(prefix: str, tmp_path: Path) -> None:
    url, corpus = f"{prefix}/index", write(tmp_path / "all.jsonl", RECORDS)
    with (
        Lease.acquire(open_storage(f"{url}.work"), "the first", 2.0, name=work.LEASE),
        pytest.raises(LeaseHeldError, match="the first"),
    ):
        build(corpus, url)
    build(corpus, url)
    with pytest.raises(UsageError, match="made of another corpus"):
        build(write(tmp_path / "few.jsonl", RECORDS[:2]), url)
    opened = open_index(url)
    storage = open_storage(url)
    held = remote.read_manifest(storage)
    changed = storage.replace("manifest.json", held.data + b"\n", held.version)
    with pytest.raises(UsageError, match="was changed by another run in the meantime"):
        remote.publish(storage, opened.path, held)
    assert changed is not None


@pytest.mark.slow
def test_what_is_damaged_or_missing_is_named(prefix: str, tmp_path: Path) -> None:
    url = f"{prefix}/index"
    with pytest.raises(ArtifactError, match="is not an index"):
        open_index(url)
    build(write(tmp_path / "all.jsonl", RECORDS), tmp_path / "local")
    remote.copy(tmp_path / "local", url)
    storage = open_storage(url)
    name = next(n for n in sorted(objects(url)) if n.startswith("graph/weights."))
    good = storage.read_bytes(name)
    with storage.write(name) as file:
        file.write(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=rf"{name} has the SHA-256"):
        verify_index(url)
    storage.delete(name)
    with pytest.raises(ArtifactError, match=r"is not complete: .*weights"):
        open_index(url)
    with storage.write("graph/weights.npy") as file:  # as when a folder is copied file by file
        file.write(good)
    verify_index(url).require_sound()


def test_files_of_a_corpus_on_s3_are_found_as_on_disk(prefix: str) -> None:
    storage = open_storage(prefix)
    for name in ("a/one.jsonl", "a/b/two.jsonl", "a/.hidden.jsonl", "a/notes.txt", "ab/three.jsonl"):
        storage.create(name, b'{"id": "%s", "text": "Some text."}\n' % name.encode())

    def found(pattern: str) -> list[str]:
        reader = CorpusReader(CorpusConfig(path=(f"{prefix}/{pattern}",)))
        return [document.source for document in reader]

    assert found("a/one.jsonl") == ["one.jsonl"]
    assert found("a") == found("a/") == ["b/two.jsonl", "notes.txt", "one.jsonl"]
    assert found("a/*.jsonl") == ["one.jsonl"]
    assert found("a/**/*.jsonl") == ["b/two.jsonl", "one.jsonl"]
    assert found("*/?ne.jsonl") == ["a/one.jsonl"]
    with pytest.raises(InputError, match="no files found under"):
        found("none")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Settings of a quick build, and its index on disk."""
    folder = tmp_path_factory.mktemp("expected")
    docs = [
        {
            "passage": f"{record['title']}\n{record['text']}",
            "extracted_entities": [record["title"]],
            "extracted_triples": [[record["title"], "is near", "Saint Orrin"]],
        }
        for record in RECORDS
    ]
    (folder / "openie.json").write_text(json.dumps({"docs": docs}))
    chosen = ["extract.engine=import", f"extract.path={folder / 'openie.json'}", "precompute.enabled=false"]
    chosen += ["cluster.shard_passages=1", "cluster.workers=1"]
    corpus = write(folder / "all.jsonl", RECORDS)
    build_index(load_config(overrides=chosen, corpus__path=[str(corpus)], output=str(folder / "index")))
    return chosen, folder


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_job_on_storage_that_fails_ends_with_the_same_index(
    expected: tuple[list[str], Path],
    faults: ModuleType,
    digests: Digests,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    chosen, folder = expected
    kinds = st.sampled_from(list(faults.Fault))
    injected = data.draw(st.lists(kinds, min_size=100, max_size=300), label="faults")
    disk, supply = tmp_path_factory.mktemp("store"), iter(injected)

    def open_faulty(url: str | Path, options: Any = None) -> Storage:
        """Take a folder for the object store, and let its requests fail."""
        if not remote.is_remote(url):
            return open_storage(url, options)
        inner = open_storage(disk / str(url).removeprefix("s3://"))
        storage, backend = faults.faulty(inner, supply, attempts=3)
        monkeypatch.setattr(type(backend), "local_path", lambda _, __: None)
        return Storage(str(url), storage._backend, storage._options)

    for module in (work, remote, build_module, collect_module):
        monkeypatch.setattr(module, "open_storage", open_faulty)
    monkeypatch.setattr(work, "LEASE_TTL_S", 0.4)
    config = load_config(
        overrides=chosen, corpus__path=[str(folder / "all.jsonl")], output="s3://bucket/index"
    )
    for _ in range(len(injected)):
        try:
            build_index(config)
            break
        except (StorageError, LeaseHeldError):
            continue
    copied = tmp_path_factory.mktemp("copied") / "index"
    supply = iter(())
    remote.copy("s3://bucket/index", copied)
    assert digests(copied) == digests(folder / "index")
    assert collect("s3://bucket/index", older_than_s=-60, work=True) == []


@pytest.mark.slow
def test_a_language_model_on_ray_with_storage_on_s3(prefix: str, tmp_path: Path) -> None:
    """What it uses is told meanwhile and passages are embedded; the last shard waits for both."""
    hostile = load_hostile_server()
    records = [
        {"id": str(i), "title": "", "text": f"Mill{i} stands in Town{i % 3}, beside River{i}."}
        for i in range(24)
    ]
    corpus, url = write(tmp_path / "mills.jsonl", records), f"{prefix}/index"
    with structlog.testing.capture_logs() as log:

        async def answer(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            awaited = config.cluster.executor == "ray" and "Mill23 " in body["messages"][5]["content"]
            while awaited and not (told() and ahead()):
                await asyncio.sleep(0.1)
            return web.json_response(hostile.completion(hostile.good_answer(body["messages"])))

        def told() -> bool:
            uses = [entry["uses"] for entry in log if entry["event"] == "stage at work"]
            return any(not text.startswith("0 tokens/s") and text.endswith(" USD") for text in uses)

        def ahead() -> bool:
            return any(open_storage(f"{url}.work").entries("embed/done/"))

        with hostile.HostileServer((answer,), 1.0) as server:
            chosen = {
                "extract__engine": "openai",
                "extract__model": "m",
                "extract__base_url": server.base_url,
                "extract__price_usd": {"prompt": 1e3, "generated": 1e3},
                "cluster__shard_passages": 4,
                "cluster__workers": 2,
                "precompute__enabled": False,
            }
            config = load_config(corpus__path=[str(corpus)], output=url, cluster__executor="ray", **chosen)
            monitor = Monitor(Console(file=io.StringIO()), log_interval_s=0.2)
            made = build_index(config, monitor=monitor)
            config = load_config(corpus__path=[str(corpus)], output=str(tmp_path / "here"), **chosen)
            assert build_index(config).manifest.files == made.manifest.files
    events = [entry["event"] for entry in log]
    assert "it cannot be seen what the stage is using" not in events
    assert "a stage that ran ahead has stopped" not in events
    assert next(entry["shards"] for entry in log if entry["event"] == "embedded during extraction") >= 1
    used = made.stats["language_model"]
    assert (used["passages"], used["requests"]) == (24, 48)
    assert len(used["workers"]) == 2
    assert used["usd"] == pytest.approx(48 * 15 / 1e3)
    assert objects(f"{url}.work") == set()


def load_hostile_server() -> ModuleType:
    folder = Path(__file__).parents[1] / "pipeline"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module("hostile_server")
