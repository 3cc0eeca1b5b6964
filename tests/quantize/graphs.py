"""Graphs, and what rounding to 8 bits explains."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tx_export.artifact import open_graph
from tx_export.passes import Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.testing import graph_from_text

Array = NDArray[Any]

PRODUCTS = {  # a product in each of its spellings; whether w is turned, whether it has a bias
    "MatMul": ("y = MatMul (x, w)", False, False),
    "MatMul and bias": ("p = MatMul (x, w) y = Add (p, bias)", False, True),
    "bias and MatMul": ("p = MatMul (x, w) y = Add (bias, p)", False, True),
    "turned MatMul": ("t = Transpose <perm = [1, 0]> (w) p = MatMul (x, t) y = Add (p, bias)", True, True),
    "Gemm": ("y = Gemm (x, w)", False, False),
    "Gemm with bias": ("y = Gemm (x, w, bias)", False, True),
    "Gemm and bias": ("p = Gemm (x, w) y = Add (p, bias)", False, True),
    "Gemm with transB": ("y = Gemm <transB = 1> (x, w, bias)", True, True),
}


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def uneven(rows: int, columns: int, seed: int = 0) -> Array:
    """A weight whose columns differ in size up to 100 times, and whose rows do too: scales on the wrong axis show."""
    scales = 10 ** np.random.default_rng(seed + 100).uniform(-1, 1, size=columns)
    return (normal(rows, columns, seed=seed) * scales).astype(np.float32)


def graph(inputs: str, outputs: str, weights: dict[str, Array], body: str) -> ir.Model:
    kinds = {name: "int64" if array.dtype == np.int64 else "float" for name, array in weights.items()}
    constants = ", ".join(f"{kind}[1] {name} = {{0}}" for name, kind in kinds.items())
    head = '<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>'
    model = graph_from_text(f"{head} g ({inputs}) => ({outputs}) <{constants}> {{ {body} }}")
    for name, array in weights.items():
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
        value.dtype = ir.DataType.from_numpy(array.dtype)
    return model


def quantize(model: ir.Model, **options: Any) -> Outcome:
    outcome = DynamicInt8(**options)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def run(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """As an artifact runs it: with the setting that keeps 8-bit products exact on CPUs without VNNI."""
    return open_graph(model, Cpu().session(), threads=1)(feeds)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def activation_scale(x: Array) -> float:
    """Of DynamicQuantizeLinear: 255 steps over a range that contains 0."""
    return (max(float(x.max()), 0.0) - min(float(x.min()), 0.0)) / 255


def rounding_bound(x: Array, weight: Array, weight_scale: Array | float) -> Array:
    """How far x @ weight [.., N] can move when x moves by half a step of its tensor and w by half a step of its column.

    sum |dx| |w| + |x + dx| |dw|, and 1e-6 of sum |x| |w| for the arithmetic in float32.
    """
    half = activation_scale(x) / 2
    size = np.abs(x.astype(np.float64))
    moved = half * np.abs(weight).sum(axis=0) + (size + half).sum(axis=-1, keepdims=True) * weight_scale / 2
    bound: Array = moved + 1e-6 * size @ np.abs(weight)
    return bound


def column_scale(weight: Array) -> Array:
    scale: Array = np.abs(weight).max(axis=0) / 127
    return scale
