from __future__ import annotations

from pathlib import Path

import pytest

from hippoindex.errors import UsageError
from hippoindex.pipeline.build import build_index
from hippoindex.pipeline.config import Config, load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    "file",
    sorted(set(CONFIGS.glob("*.yaml")) - {CONFIGS / name for name in ("gpus.yaml", "models.yaml")}),
    ids=lambda file: file.name,
)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    load_config(file)


def test_the_laptop_file_writes_out_the_defaults() -> None:
    assert load_config(CONFIGS / "laptop.yaml") == Config()


def test_later_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("synonyms: {threshold: 0.7, max_neighbors: 5}\ncorpus: {path: a.jsonl}\n")
    config = load_config(file, ["synonyms.threshold=0.75", "output=x"], synonyms__threshold=0.9, output=None)
    assert (config.synonyms.threshold, config.synonyms.max_neighbors) == (0.9, 5)
    assert config.corpus.path == ("a.jsonl",)
    assert config.output == "x"
    assert load_config(overrides=["corpus.path=[a, b]"]).corpus.path == ("a", "b")
    assert load_config(overrides=["extract.path=null"]).extract.path is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("graph", "expected section.key=value"),
        ("=1", "expected section.key=value"),
        ("graph.wieghts=plain", "unknown key graph.wieghts; did you mean 'weights'"),
        ("grahp.weights=plain", "unknown key grahp; did you mean 'graph'"),
        ("graph.weights=heavy", "graph.weights: .*'plain' or 'hipporag'"),
        ("synonyms.threshold=2", r"synonyms.threshold: .*less than or equal to 1 \(got 2\)"),
        ("chunk.overlap_tokens=[", "is not valid YAML"),
        ("output.folder=x", "output: "),
    ],
)
def test_wrong_settings_are_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(overrides=[override])


def test_overlap_must_be_smaller_than_a_chunk() -> None:
    with pytest.raises(UsageError, match="overlap_tokens must be smaller"):
        load_config(overrides=["chunk.max_tokens=16", "chunk.overlap_tokens=16"])


@pytest.mark.parametrize(
    ("content", "message"), [("[1, 2]", "expected a mapping"), ("a: [", "not valid YAML"), ("", None)]
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str, message: str | None) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    if message is None:
        assert load_config(file) == Config()
        return
    with pytest.raises(UsageError, match=message):
        load_config(file)


def test_where_it_runs_and_lies_is_not_part_of_the_result() -> None:
    here = load_config(
        overrides=["cluster.workers=2", "cluster.executor=ray"], corpus__path=["a"], output="x"
    )
    assert here.result_part() == Config().result_part()
    assert load_config(overrides=["synonyms.threshold=0.7"]).result_part() != Config().result_part()


@pytest.mark.parametrize("output", [".", "/", ".."])
def test_an_output_without_a_name_is_refused(output: str) -> None:
    with pytest.raises(UsageError, match="does not name a folder of its own"):
        build_index(load_config(corpus__path=["a.jsonl"], output=output))


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_numbers_are_finite(value: str) -> None:
    with pytest.raises(UsageError, match=r"retrieve\.dense_weight"):
        load_config(overrides=[f"retrieve.dense_weight={value}"])
