from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import scipy.special
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from hippoindex.errors import HippoIndexError, InputError, ModelError, UsageError
from hippoindex.pipeline.config import EmbedConfig
from hippoindex.pipeline.embed import embedder_dimension, embedder_fingerprint, open_embedder
from hippoindex.pipeline.embed.minilm_graph import Precision
from hippoindex.pipeline.embed.onnx import OnnxEmbedder
from hippoindex.pipeline.models import model_path

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
MINILM = "all-MiniLM-L6-v2"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

TEXTS = [
    "",
    "river",
    "Rivers of northern Italy",
    "The composer of the opera was born in a village near the lake.",
    "C++ and Rust",
    "北京 is the capital of China",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "The bridge, finished in 1932, carries trains over the harbour. " * 5,
    "He moved to Vienna as a boy and studied there with two teachers of the violin. " * 30,
]


def write_tokenizer(path: Path) -> int:
    """A WordPiece tokenizer that knows the letters, one by one; returns the size of its vocabulary."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=64)  # published tokenizers pad and cut by themselves
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path))
    return len(words)


def write_model(folder: Path, *, layers: int = 2, heads: int = 4, hidden: int = 32, inner: int = 80) -> Path:
    """A small random BERT, of sizes unlike MiniLM's."""
    folder.mkdir()
    rng = np.random.default_rng(20)
    words = write_tokenizer(folder / "tokenizer.json")
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 48,
        "layer_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "embeddings.word_embeddings.weight": (words, hidden),
        "embeddings.position_embeddings.weight": (48, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm": (hidden,),
    }
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            shapes[prefix + name] = (hidden, hidden)
        shapes[prefix + "attention.output.dense"] = (hidden, hidden)
        shapes[prefix + "attention.output.LayerNorm"] = (hidden,)
        shapes[prefix + "intermediate.dense"] = (inner, hidden)
        shapes[prefix + "output.dense"] = (hidden, inner)
        shapes[prefix + "output.LayerNorm"] = (hidden,)
    weights: dict[str, NDArray[Any]] = {"embeddings.position_ids": np.arange(48)[None]}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * (0.5 if len(shape) == 2 else 0.1)
        if name.startswith("embeddings.") and name.endswith(".weight"):
            weights[name] = values
        else:
            weights[f"{name}.weight"] = values + (1 if name.endswith("LayerNorm") else 0)
            weights[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32) * np.float32(0.1)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def reference_vector(folder: Path, text: str, max_tokens: int) -> NDArray[np.float64]:
    """The textbook forward pass, one text at a time, in float64."""
    config = json.loads((folder / "config.json").read_text())
    w = {
        k: v.astype(np.float64) for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()
    }
    heads, hidden = config["num_attention_heads"], config["hidden_size"]

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config["layer_norm_eps"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.encode(text).ids
    if len(ids) > max_tokens:
        ids = [*ids[: max_tokens - 1], ids[-1]]
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{layer}."
        query, key, value = (
            linear(x, f"{p}attention.self.{name}").reshape(len(ids), heads, hidden // heads).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = scipy.special.softmax(query @ key.swapaxes(1, 2) / np.sqrt(hidden // heads), axis=-1)
        mixed = (scores @ value).swapaxes(0, 1).reshape(len(ids), hidden)
        x = norm(x + linear(mixed, f"{p}attention.output.dense"), f"{p}attention.output.LayerNorm")
        inner = linear(x, f"{p}intermediate.dense")
        inner = inner * (1 + scipy.special.erf(inner / np.sqrt(2))) / 2
        x = norm(x + linear(inner, f"{p}output.dense"), f"{p}output.LayerNorm")
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def cosines_to_reference(
    folder: Path, precision: Precision, max_tokens: int, texts: list[str]
) -> NDArray[np.float64]:
    expected = np.stack([reference_vector(folder, text, max_tokens) for text in texts])
    return (OnnxEmbedder(folder, precision, max_tokens).encode(texts) * expected).sum(axis=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny_embedders(tiny: Path) -> dict[Precision, OnnxEmbedder]:
    return {precision: OnnxEmbedder(tiny, precision, max_tokens=40) for precision in PRECISIONS}


def copy_model(tiny: Path, folder: Path) -> Path:
    shutil.copytree(tiny, folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_fp32_is_the_textbook_forward_pass(tiny: Path) -> None:
    texts = [text for text in TEXTS if text.isascii()] + list(LETTERS)
    assert cosines_to_reference(tiny, "fp32", 48, texts).min() > 1 - 1e-5


def test_int8_stays_close_to_it(tiny: Path) -> None:
    cosines = cosines_to_reference(tiny, "int8", 48, list(LETTERS) + TEXTS)
    assert cosines.min() > 0.99
    assert cosines.max() < 1 - 1e-7  # it is not the fp32 graph under another name


@pytest.mark.parametrize("precision", PRECISIONS)
@given(texts=st.lists(st.text(alphabet="abc xyz", max_size=60), max_size=40))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_vector_does_not_depend_on_the_batch(
    tiny_embedders: dict[Precision, OnnxEmbedder], precision: Precision, texts: list[str]
) -> None:
    embedder = tiny_embedders[precision]
    vectors = embedder.encode(texts)
    assert vectors.shape == (len(texts), 32)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(embedder.encode([text])[0], vector)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_groups_are_split_without_a_trace(
    tiny_embedders: dict[Precision, OnnxEmbedder], precision: Precision
) -> None:
    embedder = tiny_embedders[precision]
    words = [a + b + c for a in LETTERS[:13] for b in LETTERS[:13] for c in LETTERS[:13]]  # 5 tokens each
    vectors = embedder.encode(words)
    order = np.random.default_rng(3).permutation(len(words))
    np.testing.assert_array_equal(embedder.encode([words[i] for i in order]), vectors[order])
    np.testing.assert_array_equal(embedder.encode(words[1234:1237]), vectors[1234:1237])


def test_long_texts_are_cut(tiny_embedders: dict[Precision, OnnxEmbedder]) -> None:
    embedder = tiny_embedders["fp32"]  # 38 tokens and the two special ones
    cut, whole, longer = embedder.encode(["a " * 38, "a " * 38 + "b " * 500, "a " * 37 + "b"])
    np.testing.assert_array_equal(cut, whole)
    assert np.abs(cut - longer).max() > 1e-3


def test_token_offsets_cover_all_of_a_text(tiny_embedders: dict[Precision, OnnxEmbedder]) -> None:
    text = "ab, " * 100
    for embedder in tiny_embedders.values():
        offsets = embedder.token_offsets([text, "", " x"])
        assert offsets[1:] == [[], [(1, 2)]]
        assert len(offsets[0]) == 300
        assert offsets[0][3:6] == [(4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize("bad", ["\ud800", None, 7])
def test_text_that_is_not_text(tiny_embedders: dict[Precision, OnnxEmbedder], bad: Any) -> None:
    with pytest.raises(InputError, match="Text 1 of the batch"):
        tiny_embedders["fp32"].encode(["fine", bad])


def test_fingerprint_covers_what_decides_a_vector(tiny: Path, tmp_path: Path) -> None:
    config = EmbedConfig(model=str(tiny), max_tokens=40)
    embedder = open_embedder(config, threads=2)
    assert embedder.fingerprint == embedder_fingerprint(config)
    assert embedder.dimension == embedder_dimension(config) == 32
    other = copy_model(tiny, tmp_path / "other")
    assert embedder_fingerprint(config.model_copy(update={"model": str(other)})) == embedder.fingerprint
    changes: list[dict[str, object]] = [{"precision": "fp32"}, {"max_tokens": 41}, {"model": MINILM}]
    edit_config(other, layer_norm_eps=1e-6)
    changes.append({"model": str(other)})
    fingerprints = {embedder_fingerprint(config.model_copy(update=change)) for change in changes}
    assert len(fingerprints | {embedder.fingerprint}) == 5
    assert embedder_fingerprint(config.model_copy(update={"dtype": "float32"})) == embedder.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', expected 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "absolute"),
        ({"num_hidden_layers": "many"}, "not a BERT configuration"),
        ({"num_hidden_layers": 3}, r"no tensor 'encoder\.layer\.2\."),
    ],
)
def test_other_architecture_is_refused(
    tiny: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = copy_model(tiny, tmp_path / "other")
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        OnnxEmbedder(folder, max_tokens=40)


def test_other_pooling_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = copy_model(tiny, tmp_path / "other")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(ModelError, match="mean pooling"):
        OnnxEmbedder(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]"])
def test_missing_or_malformed_file_is_named(
    tiny: Path, tmp_path: Path, file: str, content: bytes | None
) -> None:
    folder = copy_model(tiny, tmp_path / "other")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")):
        OnnxEmbedder(folder, max_tokens=40)


@pytest.mark.parametrize("max_tokens", [2, 49])
def test_impossible_length_is_refused(tiny: Path, max_tokens: int) -> None:
    with pytest.raises(UsageError, match="allows 3 to 48"):
        OnnxEmbedder(tiny, max_tokens=max_tokens)


@pytest.mark.slow
def test_minilm_fp32_is_the_textbook_forward_pass() -> None:
    assert cosines_to_reference(model_path(MINILM), "fp32", 256, TEXTS).min() > 1 - 1e-5


@pytest.mark.slow
def test_minilm_int8_stays_close_to_it() -> None:
    cosines = cosines_to_reference(model_path(MINILM), "int8", 256, TEXTS)
    assert cosines.min() > 0.98
    assert cosines.mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_minilm_vector_depends_on_neither_batch_nor_threads(precision: Precision) -> None:
    config = EmbedConfig(precision=precision)
    rng = np.random.default_rng(8)
    words = " ".join(TEXTS).split()
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 40))) for _ in range(300)] + TEXTS
    embedder = open_embedder(config)
    vectors = embedder.encode(texts)
    for row in range(0, len(texts), 7):
        np.testing.assert_array_equal(embedder.encode([texts[row]])[0], vectors[row])
    np.testing.assert_array_equal(open_embedder(config, threads=2).encode(texts), vectors)


@pytest.mark.slow
def test_minilm_knows_what_is_alike() -> None:
    near, far, anchor = open_embedder(EmbedConfig()).encode(
        ["A doctor treats ill people.", "The train was late again.", "The physician cares for patients."]
    )
    assert anchor @ near > 0.6 > 0.2 > anchor @ far


@pytest.mark.slow
def test_changed_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models" / MINILM
    shutil.copytree(model_path(MINILM), cache)
    with (cache / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x3f")
    monkeypatch.setenv("HIPPOINDEX_CACHE", str(tmp_path))
    with pytest.raises(HippoIndexError, match="not the expected"):
        open_embedder(EmbedConfig())
