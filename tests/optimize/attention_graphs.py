"""Graphs of hand-written attention in ONNX's text form, their feeds, and the comparison with what they computed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

from tx_export.metrics import fidelity_bound
from tx_export.optimize.fuse_attention import FuseAttention
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text

Array = NDArray[Any]

LOWEST = float(np.finfo(np.float32).min)
KINDS = ("full", "ragged", "left", "holed", "empty")
SIZES = ((1, 1), (2, 7), (3, 17))  # batch and tokens

PRODUCT = "kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) "
SCALED = PRODUCT + "d = Mul (s, scale) "
HIDDEN = "m4 = Unsqueeze (mask, middle) hidden = Equal (m4, none) "
CONTEXT = "w = Softmax <axis = -1> (f) y = MatMul (w, v)"

_Y = "float[batch, 4, tokens, 6]"
_INPUTS = {
    "q": "float[batch, 4, tokens, 8]",
    "k": "float[batch, 4, tokens, 8]",
    "v": "float[batch, 4, tokens, 6]",
    "mask": "int64[batch, tokens]",
}
_NUMBERS = {"scale": 0.35, "two": 2.0, "one": 1.0, "zero": 0.0, "low": -1e9, "inf": -np.inf, "lowest": LOWEST}
_INTEGERS = {"middle": [1, 2], "first": [0], "second": [1], "none": 0}


def graph(body: str, constants: Mapping[str, Any] | None = None, y: str = _Y, **inputs: str) -> ir.Model:
    """Attention of q, k, v [batch, 4, tokens, .] under mask [batch, tokens]; `constants` add to ours."""
    made: dict[str, Array] = {name: np.array(number, np.float32) for name, number in _NUMBERS.items()}
    made |= {name: np.array(number, np.int64) for name, number in _INTEGERS.items()}
    made |= {name: np.asarray(value) for name, value in (constants or {}).items()}
    declared = ", ".join(f"{kind} {name}" for name, kind in (_INPUTS | inputs).items())
    typed = ", ".join(f"{_type(array)}[1] {name} = {{0}}" for name, array in made.items())
    outputs = y if " y" in y else f"{y} y"
    model = graph_from_text(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({declared}) => ({outputs}) <{typed}> {{ {body} }}'
    )
    for name, array in made.items():
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    for value in model.graph.inputs:  # the text form has no names of products
        dims = [ir.SymbolicDim("4*batch") if str(dim) == "rows" else dim for dim in value.shape or ()]
        value.shape = ir.Shape(dims)
    ShapeInferencePass()(model)
    return model


def _type(array: Array) -> str:
    return {"f": "float", "i": "int64", "b": "bool"}[array.dtype.kind]


def fuse(model: ir.Model) -> Outcome:
    outcome = FuseAttention()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def both(
    body: str, constants: Mapping[str, Any] | None = None, y: str = _Y, **inputs: str
) -> tuple[ir.Model, ir.Model]:
    """The graph as it was, and as the pass leaves it, which must fuse the one attention of it."""
    before, after = graph(body, constants, y, **inputs), graph(body, constants, y, **inputs)
    outcome = fuse(after)
    assert outcome.coverage.left == ()
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    assert len(attention_nodes(after)) == 1
    assert not {"Softmax", "Einsum"} & {node.op_type for node in after.graph}
    return before, after


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "MultiHeadAttention"]


def given(node: ir.Node) -> set[str]:
    """Which masks the operator was given."""
    names = dict(enumerate(("query", "key", "value", "", "keys", "bias")))
    return {names[i] for i, value in enumerate(node.inputs) if value is not None} & {"keys", "bias"}


def padding(kind: str, batch: int, tokens: int) -> Array:
    mask = np.ones((batch, tokens), np.int64)
    if kind == "ragged":
        mask[0, tokens // 2 + 1 :] = 0
    if kind == "left":
        mask[0, : tokens // 2] = 0
    if kind == "holed":
        mask[-1, 1::2] = 0
    if kind == "empty":
        mask[0] = 0
    return mask


def feeds(model: ir.Model, kind: str, batch: int, tokens: int) -> dict[str, Array]:
    """Seeded inputs; scores reach about 10, so that rows prefer some keys clearly."""
    rng, made = np.random.default_rng(7), {}
    sizes = {"batch": batch, "tokens": tokens, "keys": tokens + 2, "4*batch": 4 * batch}
    for value in model.graph.inputs:
        assert value.shape is not None and value.name is not None
        shape = [dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in value.shape]
        if value.name.endswith("mask"):
            made[value.name] = padding(kind, *shape)
        elif value.dtype == ir.DataType.FLOAT:
            made[value.name] = rng.normal(size=shape).astype(np.float32) * 2
        else:
            made[value.name] = rng.integers(0, 3, shape).astype(np.int64)
    return made


def assert_equal_everywhere(before: ir.Model, after: ir.Model) -> None:
    """What was finite stays so and is equal: the reference is the graph before, the bound the fidelity of fp32."""
    reference, fused = opened(before), opened(after)
    names = [output.name for output in reference.get_outputs()]
    for (batch, tokens), kind in itertools.product(SIZES, KINDS):
        fed = feeds(before, kind, batch, tokens)
        for name, expected, found in zip(names, reference.run(names, fed), fused.run(names, fed), strict=True):
            close(found, expected, f"{name} {batch}x{tokens} {kind}")


def opened(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def close(found: Array, expected: Array, where: str) -> None:
    finite = np.isfinite(expected)
    error = np.abs(found - expected)[finite].max(initial=0)
    assert error <= fidelity_bound(float(np.abs(expected[finite]).max(initial=0))), f"{where}: {error}"
