from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hippoindex.cluster import atomic
from hippoindex.cluster.atomic import atomic_directory, atomic_write
from hippoindex.errors import HippoIndexError, UsageError


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with atomic_write(path) as file:
        file.write(b"{}")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"{}"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with atomic_write(tmp_path / "atomic"):
        pass
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "figures.json"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_write(path) as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(HippoIndexError, match=r"Cannot write .*absent/file: .*No such file"),
        atomic_write(tmp_path / "absent" / "file"),
    ):
        pass


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(HippoIndexError, match=r"Cannot write .*No space left"),
        atomic_write(tmp_path / "f"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert list(tmp_path.iterdir()) == []


def fill(folder: Path, text: str) -> None:
    (folder / "graph").mkdir()
    (folder / "graph" / "weights").write_text(text)
    (folder / "manifest").write_text(text)


def read(folder: Path) -> tuple[str, str]:
    return (folder / "graph" / "weights").read_text(), (folder / "manifest").read_text()


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "index"
    with atomic_directory(target) as folder:
        fill(folder, "new")
        assert not target.exists()
    assert read(target) == ("new", "new")
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    target = tmp_path / "index"
    target.mkdir()
    with atomic_directory(target) as folder:
        fill(folder, "new")
    assert read(target) == ("new", "new")


@pytest.mark.parametrize("replace", [False, True])
def test_an_exception_keeps_the_old_folder(tmp_path: Path, replace: bool) -> None:
    target = tmp_path / "index"
    target.mkdir()
    if replace:
        fill(target, "old")

    def fill_and_fail() -> None:
        with atomic_directory(target, replace=replace) as folder:
            fill(folder, "new")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        fill_and_fail()
    assert list(tmp_path.iterdir()) == [target]
    assert not replace or read(target) == ("old", "old")


def test_a_full_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with pytest.raises(UsageError, match="is not empty"), atomic_directory(tmp_path):
        pytest.fail("the block must not run")


def test_a_folder_that_was_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "index"

    def race() -> None:
        with atomic_directory(target) as folder:
            fill(folder, "new")
            target.mkdir()
            fill(target, "of another run")

    with pytest.raises(UsageError, match="is not empty"):
        race()
    assert read(target) == ("of another run", "of another run")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "index").write_text("a file")
    with pytest.raises(UsageError, match="is a file"), atomic_directory(tmp_path / "index", replace=replace):
        pytest.fail("the block must not run")
    assert (tmp_path / "index").read_text() == "a file"


def test_a_full_folder_is_replaced_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "index"
    target.mkdir()
    fill(target, "old")
    (target / "leftover").touch()
    with atomic_directory(target, replace=True) as folder:
        fill(folder, "new")
        assert read(target) == ("old", "old")
    assert read(target) == ("new", "new")
    assert sorted(path.name for path in target.iterdir()) == ["graph", "manifest"]
    assert list(tmp_path.iterdir()) == [target]


def test_without_an_exchange_in_the_kernel_it_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda _first, _second: False)
    test_a_full_folder_is_replaced_when_asked(tmp_path)


def test_a_reader_always_finds_a_folder_during_replacements(tmp_path: Path) -> None:
    target = tmp_path / "index"
    with atomic_directory(target) as folder:
        fill(folder, "0")
    found: list[bool] = []
    finished = threading.Event()

    def watch() -> None:
        while not finished.is_set():
            found.append(target.is_dir())

    reader = threading.Thread(target=watch)
    reader.start()
    for i in range(1, 30):
        with atomic_directory(target, replace=True) as folder:
            fill(folder, str(i))
    finished.set()
    reader.join()
    assert read(target) == ("29", "29")
    assert found
    assert all(found)
