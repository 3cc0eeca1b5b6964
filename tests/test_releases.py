"""The first ONNX Runtime that computes an operator right. Each was run in releases 1.15 to 1.24 beside numpy."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tx_export._releases import first_release

_GROUPED = "q, , , pk, pv, last, total"
_HEADS = {"num_heads": 4}
_SHAPES = {"k4": [2, 4, 7, 16], "k3": [2, 7, 64]}


def _node(op: str, inputs: str, **attributes: int) -> ir.Node:
    given = [
        ir.Value(name=name, shape=ir.Shape(_SHAPES.get(name, [2, 1, 3, 3]))) if name else None
        for name in map(str.strip, inputs.split(","))
    ]
    return ir.Node("com.microsoft", op, given, [ir.AttrInt64(name, value) for name, value in attributes.items()])


@pytest.mark.parametrize(
    ("node", "release"),
    [
        (_node("GroupQueryAttention", _GROUPED), (1, 18)),
        (_node("GroupQueryAttention", f"{_GROUPED}, , , , bias"), (1, 22)),
        (_node("GroupQueryAttention", f"{_GROUPED}, , , , bias, sink"), (1, 23)),
        # 1.22 and 1.23 load it, and let a query see one position beside its window.
        (_node("GroupQueryAttention", f"{_GROUPED}, , , , bias", local_window_size=4), (1, 24)),
        (_node("GroupQueryAttention", f"{_GROUPED}, , , , bias", local_window_size=-1), (1, 22)),
        (_node("MultiHeadAttention", "q, k3, v, , mask", **_HEADS), (1, 15)),
        # 1.15 to 1.20 load it, and don't look at the mask.
        (_node("MultiHeadAttention", "q, k4, v, , mask", **_HEADS), (1, 21)),
        (_node("MultiHeadAttention", "q, k4, v", **_HEADS), (1, 15)),
        (_node("MultiHeadAttention", "q, k4, v, , mask, bias", **_HEADS), (1, 22)),
        (_node("MatMulNBits", "x, w, scale, zero", bits=4), (1, 17)),
        (_node("MatMulNBits", "x, w, scale, zero", bits=8), (1, 22)),
        (_node("SkipSimplifiedLayerNormalization", "x, y, gain"), (1, 16)),
        (_node("RotaryEmbedding", "x, at, cos, sin"), (1, 17)),
        (_node("QuickGelu", "x"), (1, 14)),
    ],
    ids=lambda value: value.op_type if isinstance(value, ir.Node) else f"{value[0]}.{value[1]}",
)
def test_the_first_release_is_the_one_that_computes_the_operator_right_as_it_is_used(
    node: ir.Node, release: tuple[int, int]
) -> None:
    assert first_release(node) == release
