"""What is built, and the rules of the house."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import hippoindex

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pipeline", "kernels", "cluster", "configs")


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_linked_into_the_package_and_shadow_nothing(room: str) -> None:
    link = ROOT / "src" / "hippoindex" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room
    assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    [wheel] = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hippoindex/")}
    wanted = {"hippoindex/py.typed", "hippoindex/sample/passages.jsonl", "hippoindex/sample/questions.jsonl"}
    wanted |= {f"hippoindex/{path.name}" for path in (ROOT / "src" / "hippoindex").glob("*.py")}
    for room in ROOMS:
        files = [path for path in (ROOT / room).rglob("*") if path.suffix in {".py", ".yaml", ".j2"}]
        wanted |= {f"hippoindex/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert wanted <= inside, wanted - inside
    assert not [name for name in inside if "test" in name]


def test_versions_agree() -> None:
    assert hippoindex.__version__ == importlib.metadata.version("hippoindex")


def test_the_pinned_installation_has_no_torch() -> None:
    assert "torch" not in (ROOT / "constraints.txt").read_text()


def test_constraints_pin_versions_and_hold_no_addresses() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    assert [line for line in lines if line.count("==") != 1 or "/" in line or "@" in line] == []


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {normal(requirement) for requirement in required}
    pinned = {normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names <= pinned, names - pinned


def normal(requirement: str) -> str:
    for mark in "[<>=!~ ;":
        requirement = requirement.split(mark)[0]
    return requirement.lower().replace("_", "-")


@pytest.mark.slow
def test_style() -> None:
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types() -> None:
    run("mypy", "-p", "hippoindex")


def test_import_rules() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
