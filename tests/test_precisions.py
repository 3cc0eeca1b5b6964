"""Precisions are read from a graph: what weights are stored in, and what products are computed in."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from tx_export._precisions import multiply_adds, weights
from tx_export.passes import GraphPass
from tx_export.quantize.blockwise import Blockwise
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.quantize.float16 import Float16
from tx_export.testing import graph_from_text

_HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
# 600 x 32 words, 32 x 96, 32 x 64 and 64 x 32: 7168 multiply-adds for a token, and 96 x 32 = 3072 of them packed.
_LAYER = (
    "(int64[b, t] ids) => (float[b, t, 32] y)",
    "float[600, 32] words, float[32, 96] packed, float[96] bias, float[64, 32] up, float[64, 32] down",
    """x = Gather (words, ids) a = com.microsoft.Attention <num_heads = 2> (x, packed, bias)
    t = Transpose <perm = [1, 0]> (up) h = MatMul (a, t) y = MatMul (h, down)""",
)
_WHOLE = 32 * 96 + 2 * 32 * 64


def filled(signature: str, constants: str, body: str) -> ir.Model:
    """A graph with seeded constants."""
    found = re.findall(r"(\w+)\[(.*?)\] (\w+)", constants)
    ones = ", ".join(f"{kind}[1] {name} = {{1}}" for kind, _, name in found)
    model = graph_from_text(f"{_HEAD} g {signature} {f'<{ones}>' if found else ''} {{ {body} }}")
    for seed, (_, dims, name) in enumerate(found):
        value, shape = model.graph.initializers[name], [int(dim) for dim in dims.split(",")]
        array = 3 * np.random.default_rng(seed).normal(size=shape)
        assert value.dtype is not None
        value.const_value, value.shape = ir.tensor(array.astype(value.dtype.numpy()), name=name), ir.Shape(shape)
    return model


def passed(*passes: GraphPass) -> ir.Graph:
    model = filled(*_LAYER)
    for item in passes:
        assert item(model).modified
    return model.graph


_BYTES = {"words": 4 * 600 * 32, "packed": 4 * 32 * 96, "up": 4 * 32 * 64, "down": 4 * 64 * 32}
_FORMS: dict[str, tuple[tuple[GraphPass, ...], dict[str, tuple[str, float]], dict[str, float]]] = {
    "as exported": ((), {name: ("float32", size) for name, size in _BYTES.items()}, {"float32": _WHOLE}),
    # A byte for each weight, 4 for the scale of a row of the table or a column.
    "dynamic_int8": (
        (DynamicInt8(),),
        {"words": ("int8", 600 * 36), "packed": ("int8", 96 * 36), "up": ("int8", 64 * 36), "down": ("int8", 32 * 68)},
        {"int8": _WHOLE},
    ),
    # Half a byte for each weight, 4 for the scale of a block of 32 inputs, half a byte for its zero point, of which one
    # in a row takes a byte; words have an odd number of blocks in a row, so no zero points.
    "blockwise": (
        (Blockwise(),),
        {"words": ("int4", 600 * 20), "packed": ("int4", 96 * 21), "up": ("int4", 64 * 21), "down": ("int4", 32 * 41)},
        {"int4": _WHOLE},
    ),
    "both, one weight left": (
        (DynamicInt8(only="packed,words"), Blockwise(bits=8, only="up")),
        {
            "words": ("int8", 600 * 36),
            "packed": ("int8", 96 * 36),
            "up": ("int8", 64 * 37),
            "down": ("float32", 4 * 64 * 32),
        },
        {"int8": 32 * 96 + 32 * 64, "float32": 32 * 64},
    ),
    "float16": (
        (Float16(),),
        {name: ("float16", size / 2) for name, size in _BYTES.items()},
        {"float16": _WHOLE},
    ),
}


@pytest.mark.parametrize("form", _FORMS)
def test_weights_and_multiply_adds_are_read_from_the_graph(form: str) -> None:
    passes, stored, counted = _FORMS[form]
    graph = passed(*passes)
    assert {each.name: (each.form, each.after) for each in weights(graph)} == stored
    assert {each.name: each.elements for each in weights(graph)} == {name: size // 4 for name, size in _BYTES.items()}
    assert multiply_adds(graph) == {precision: count / _WHOLE for precision, count in counted.items()}


_EIGHT = "int8[16, 8] w, float[8] s, int8[8] z, float[1] xs, uint8[1] xz"
_WEIGHT = "d = DequantizeLinear <axis = 1> (w, s, z)"
_ROUNDED = "q = QuantizeLinear (x, xs, xz) r = DequantizeLinear (q, xs, xz)"
_Read = tuple[tuple[str, str, str], list[tuple[str, str, int]], dict[str, float]]
_OTHERS: dict[str, _Read] = {
    # The weight alone in 8 bits: the product is in float32.
    "weight only": (
        ("(float[n, 16] x) => (float[n, 8] y)", _EIGHT, f"{_WEIGHT} y = MatMul (x, d)"),
        [("w", "int8", 128 + 32 + 8)],
        {"float32": 1.0},
    ),
    "both": (
        ("(float[n, 16] x) => (float[n, 8] y)", _EIGHT, f"{_WEIGHT} {_ROUNDED} y = MatMul (r, d)"),
        [("w", "int8", 128 + 32 + 8)],
        {"int8": 1.0},
    ),
    "integers": (
        (
            "(uint8[n, 16] x, float[n, 16] f) => (float[n, 8] y, int32[n, 8] i)",
            "uint8[16, 8] w, uint8[8] z, float[16, 8] v",
            "i = MatMulInteger (x, w, , z) y = MatMul (f, v)",
        ),
        [("w", "uint8", 128 + 8), ("v", "float32", 512)],
        {"int8": 0.5, "float32": 0.5},
    ),
    "on the left": (
        ("(float[8, n] x) => (float[16, n] y)", "float[16, 8] w", "y = MatMul (w, x)"),
        [("w", "float32", 512)],
        {"float32": 1.0},
    ),
    "one label": (
        ("(float[n, 8] x) => (float[n, 1] y)", "float[8, 1] w", "y = MatMul (x, w)"),
        [("w", "float32", 32)],
        {"float32": 1.0},
    ),
    "no weights": (("(float[n, 8] x, float[8, n] z) => (float[n, n] y)", "", "y = MatMul (x, z)"), [], {}),
}


@pytest.mark.parametrize("form", _OTHERS)
def test_products_as_other_tools_write_them_are_read_too(form: str) -> None:
    text, stored, counted = _OTHERS[form]
    model = filled(*text)
    assert [(each.name, each.form, each.after) for each in weights(model.graph)] == stored
    assert multiply_adds(model.graph) == counted


def test_a_weight_that_several_products_read_is_stored_once_and_multiplied_each_time() -> None:
    twice = "h = MatMul (x, w) y = MatMul (h, w)"
    model = filled("(float[n, 16] x) => (float[n, 16] y)", "float[16, 16] w", twice)
    DynamicInt8()(model)
    (weight,) = weights(model.graph)
    assert (weight.form, weight.elements, weight.after) == ("uint8", 256, 256 + 64 + 16)
    assert multiply_adds(model.graph) == {"int8": 1.0}
