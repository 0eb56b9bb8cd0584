"""The ONNX graph of a BERT encoder such as all-MiniLM-L6-v2, made from its safetensors without torch.

The graph takes token ids ``(B, T)`` of texts that all have exactly T tokens, so it needs neither padding nor
an attention mask, and returns the hidden states of the last layer ``(B, T, H)``. Pooling is left to the
caller: onnxruntime's reductions round differently for B = 1, everything up to here does not depend on B.

The ``int8`` graph keeps embeddings, attention scores, softmax, GELU and layer norms in float32 and runs the
linear layers on integers. Activations are quantised per token at run time (as in ZeroQuant, Yao et al. 2022,
section 3): one scale per row, so that a token's values never depend on other texts of the batch. Weights are
symmetric per output column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hippoindex.errors import ModelError

Precision = Literal["fp32", "int8"]
Weights = Mapping[str, NDArray[np.float32]]

INPUT_NAME = "input_ids"
OUTPUT_NAME = "hidden"

#: Raised when a change of the graph or of the quantisation changes vectors.
GRAPH_VERSION = 1

_CONTRIB_DOMAIN = "com.microsoft"
_OPSET = 20
_IR_VERSION = 9
_EXTERNAL_BYTES = 1024  # larger initialisers are handed over in memory instead of inside the graph

# Weights span [-64, 64]: two products with an unsigned byte then fit the signed 16-bit sums of CPUs without
# VNNI (255 * 64 * 2 < 2**15), whose kernels would saturate above. Integer results are the same on every CPU.
_WEIGHT_LEVELS = 64
_SMALLEST_SCALE = 1e-12
_GELU_MINIMUM = -0.17  # GELU(x) >= -0.16998 for every x


@dataclass(frozen=True)
class BertShape:
    """What a BERT ``config.json`` says about the graph."""

    layers: int
    heads: int
    hidden: int
    max_tokens: int
    layer_norm_eps: float


def read_shape(folder: Path) -> BertShape:
    """Read and check ``config.json``.

    Parameters
    ----------
    folder : Path
        Folder of the model.

    Returns
    -------
    BertShape

    Raises
    ------
    ModelError
        If the file is missing, malformed, or describes another architecture: only BERT with exact GELU and
        absolute positions is built here, and only mean pooling is applied to it.
    """
    config = _read_json(folder / "config.json")
    pooling_path = folder / "1_Pooling" / "config.json"
    pooling = _read_json(pooling_path) if pooling_path.exists() else {"pooling_mode_mean_tokens": True}
    expected = {"model_type": "bert", "hidden_act": "gelu"}
    for key, value in expected.items():
        if config.get(key) != value:
            raise ModelError(f"{folder / 'config.json'}: {key} is {config.get(key)!r}, expected {value!r}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{folder / 'config.json'}: only absolute position embeddings are supported")
    if not pooling.get("pooling_mode_mean_tokens"):
        raise ModelError(f"{pooling_path}: only mean pooling is supported")
    try:
        return BertShape(
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            hidden=int(config["hidden_size"]),
            max_tokens=int(config["max_position_embeddings"]),
            layer_norm_eps=float(config["layer_norm_eps"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a BERT configuration: {error!r}") from error


def read_weights(folder: Path) -> Weights:
    """Read ``model.safetensors`` as float32 arrays.

    Raises
    ------
    ModelError
        If the file is missing or malformed.
    """
    path = folder / "model.safetensors"
    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"Cannot read the weights {path}: {error}") from error
    return {
        name: array.astype(np.float32, copy=False)
        for name, array in tensors.items()
        if np.issubdtype(array.dtype, np.floating)
    }


def build_graph(
    shape: BertShape, weights: Weights, precision: Precision
) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Build the encoder.

    Parameters
    ----------
    shape : BertShape
        Sizes of the model.
    weights : mapping of str to numpy.ndarray
        Tensors by their names in a Hugging Face ``BertModel``.
    precision : {"fp32", "int8"}
        Arithmetic of the linear layers.

    Returns
    -------
    graph : bytes
        Serialised ONNX model without its large initialisers.
    initialisers : dict of str to numpy.ndarray
        Those initialisers, for ``SessionOptions.add_external_initializers``.

    Raises
    ------
    ModelError
        If a tensor is missing.
    """
    graph = _Graph(precision)
    try:
        hidden = _embeddings(graph, shape, weights)
        for layer in range(shape.layers):
            hidden = _layer(graph, shape, weights, hidden, f"encoder.layer.{layer}.")
    except KeyError as error:
        raise ModelError(f"The weights have no tensor {error}, which config.json asks for") from error
    return graph.serialise(hidden, shape.hidden), graph.external


def _embeddings(graph: _Graph, shape: BertShape, weights: Weights) -> str:
    """Sum of word, position and (only one) segment embeddings, normalised."""  # (B, T, H)
    positions = weights["embeddings.position_embeddings.weight"]
    positions = positions + weights["embeddings.token_type_embeddings.weight"][0]
    words = graph.op("Gather", graph.constant(weights["embeddings.word_embeddings.weight"]), INPUT_NAME)
    tokens = graph.op("Shape", INPUT_NAME, start=1, end=2)
    first = graph.op("Slice", graph.constant(positions), graph.integers(0), tokens)
    return _layer_norm(graph, shape, weights, graph.op("Add", words, first), "embeddings.LayerNorm")


def _layer(graph: _Graph, shape: BertShape, weights: Weights, hidden: str, prefix: str) -> str:
    """One transformer layer, ``(B, T, H) -> (B, T, H)`` (Devlin et al. 2019; Vaswani et al. 2017, 3.1)."""
    attended = _attention(graph, shape, weights, hidden, prefix + "attention.self.")
    attended = graph.linear(attended, *_linear_weights(weights, prefix + "attention.output.dense"))
    hidden = graph.op("Add", attended, hidden)
    hidden = _layer_norm(graph, shape, weights, hidden, prefix + "attention.output.LayerNorm")

    inner = graph.op("Gelu", graph.linear(hidden, *_linear_weights(weights, prefix + "intermediate.dense")))
    outer = graph.linear(inner, *_linear_weights(weights, prefix + "output.dense"), minimum=_GELU_MINIMUM)
    return _layer_norm(graph, shape, weights, graph.op("Add", outer, hidden), prefix + "output.LayerNorm")


def _attention(graph: _Graph, shape: BertShape, weights: Weights, hidden: str, prefix: str) -> str:
    """softmax(Q K^T / sqrt(width)) V; Q, K and V come from one product, Q already divided."""
    width = shape.hidden // shape.heads
    scales = {"query": np.float32(width**-0.5), "key": np.float32(1), "value": np.float32(1)}
    pairs = [_linear_weights(weights, prefix + name) for name in scales]
    weight = np.concatenate([w * s for (w, _), s in zip(pairs, scales.values(), strict=True)], axis=1)
    bias = np.concatenate([b * s for (_, b), s in zip(pairs, scales.values(), strict=True)])
    parts = graph.ops("Split", 3, graph.linear(hidden, weight, bias), axis=-1, num_outputs=3)

    by_head = graph.integers(0, 0, shape.heads, width)  # (B, T, heads, width)
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    query, key, value = (
        graph.op("Transpose", graph.op("Reshape", part, by_head), perm=order)
        for part, order in zip(parts, orders, strict=True)
    )
    attention = graph.op("Softmax", graph.op("MatMul", query, key), axis=-1)  # (B, heads, T, T)
    mixed = graph.op("Transpose", graph.op("MatMul", attention, value), perm=[0, 2, 1, 3])
    return graph.op("Reshape", mixed, graph.integers(0, 0, shape.hidden))


def _layer_norm(graph: _Graph, shape: BertShape, weights: Weights, values: str, prefix: str) -> str:
    scale, bias = (graph.constant(weights[f"{prefix}.{part}"]) for part in ("weight", "bias"))
    return graph.op("LayerNormalization", values, scale, bias, axis=-1, epsilon=shape.layer_norm_eps)


def _linear_weights(weights: Weights, prefix: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return weights[f"{prefix}.weight"].T, weights[f"{prefix}.bias"]  # (inputs, outputs), (outputs,)


class _Graph:
    """Nodes and initialisers under construction. Values are referred to by their names."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._nodes: list[onnx.NodeProto] = []
        self._initialisers: list[onnx.TensorProto] = []
        self._count = 0
        self.external: dict[str, NDArray[Any]] = {}

    def ops(self, op_type: str, outputs: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        names = [self._name() for _ in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), names, domain=domain, **attributes))
        return names

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output."""
        return self.ops(op_type, 1, *inputs, domain=domain, **attributes)[0]

    def constant(self, values: NDArray[Any] | np.generic) -> str:
        """Add an initialiser."""
        name = self._name()
        array = np.asarray(values, order="C")
        tensor = numpy_helper.from_array(array, name) if array.nbytes <= _EXTERNAL_BYTES else None
        if tensor is None:
            self.external[name] = array
            tensor = TensorProto(
                name=name,
                dims=array.shape,
                data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                data_location=TensorProto.EXTERNAL,
            )
            # The format demands a file name; it is never opened.
            tensor.external_data.add(key="location", value="memory")
        self._initialisers.append(tensor)
        return name

    def integers(self, *values: int) -> str:
        """Add a one-dimensional int64 initialiser (shapes, axes)."""
        return self.constant(np.array(values, dtype=np.int64))

    def linear(
        self,
        values: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32],
        minimum: float | None = None,
    ) -> str:
        """``values @ weight + bias``; ``minimum`` is a known lower bound of the values, if there is one."""
        if self._precision == "fp32":
            product = self.op("MatMul", values, self.constant(weight))
        else:
            product = self._integer_product(values, weight, minimum)
        return self.op("Add", product, self.constant(bias))

    def _integer_product(self, values: str, weight: NDArray[np.float32], minimum: float | None) -> str:
        column_scale = np.maximum(np.abs(weight).max(axis=0) / _WEIGHT_LEVELS, _SMALLEST_SCALE)
        levels = np.rint(weight / column_scale).astype(np.int8)
        quantised, row_scale, zero_point = self._quantise_rows(values, minimum)
        product = self.op(
            "MatMulIntegerToFloat",
            quantised,
            self.constant(levels),
            self.constant(np.float32(1)),
            self.constant(column_scale.astype(np.float32)),
            self.constant(np.uint8(zero_point)),
            domain=_CONTRIB_DOMAIN,
        )
        return self.op("Mul", product, row_scale)

    def _quantise_rows(self, values: str, minimum: float | None) -> tuple[str, str, int]:
        """Unsigned bytes with one scale per row: ``values ~ (bytes - zero_point) * scale``.

        Without a lower bound the range is symmetric. With one, most of the bytes serve the positive side.
        """
        if minimum is None:
            zero_point, smallest = 128, _SMALLEST_SCALE
            largest = self.op("ReduceMax", self.op("Abs", values), self.integers(-1), keepdims=1)
        else:
            zero_point = 32
            smallest = -minimum / zero_point
            largest = self.op("ReduceMax", values, self.integers(-1), keepdims=1)
        scale = self.op("Mul", largest, self.constant(np.float32(1 / (255 - zero_point))))
        scale = self.op("Max", scale, self.constant(np.float32(smallest)))  # (B, T, 1)
        # The cast cuts off the fraction, and what it gets is positive: adding a half makes it round.
        shifted = self.op("Add", self.op("Div", values, scale), self.constant(np.float32(zero_point + 0.5)))
        return self.op("Cast", shifted, to=TensorProto.UINT8), scale, zero_point

    def serialise(self, output: str, hidden: int) -> bytes:
        """Return the finished model with ``output`` as its result."""
        self._nodes.append(helper.make_node("Identity", [output], [OUTPUT_NAME]))
        graph = helper.make_graph(
            self._nodes,
            "bert",
            [helper.make_tensor_value_info(INPUT_NAME, TensorProto.INT64, ["batch", "tokens"])],
            [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, ["batch", "tokens", hidden])],
            self._initialisers,
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        return model.SerializeToString()

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object, got {type(content).__name__}")
    return content
