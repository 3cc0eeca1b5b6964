"""What is asked of a weight before it is quantized, and packed attention as a product with one, then attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of, replace
from tx_export.errors import PassError

__all__ = ["attention_left", "check_finite", "part_attention"]

_LAST_AXIS = {"axis": ir.AttrInt64("axis", -1)}


def check_finite(value: ir.Value, array: np.ndarray, bits: int) -> None:
    """PassError names the weight and how many of its values are NaN or infinite."""
    if bad := int(array.size - np.isfinite(array).sum()):
        raise PassError(
            f"{value.name}: {bad} of {array.size} weights are NaN or infinite; they have no {bits}-bit form"
        )


def attention_left(node: ir.Node) -> str | None:
    """Why the packed weight of a com.microsoft::Attention can't be quantized; None if it can."""
    x, weight, bias, *_ = (*node.inputs, None, None)
    weight_array = array_of(weight)
    if x is None or weight_array is None or array_of(bias) is None:
        return "its weights are computed"
    if (*node.inputs, *[None] * 5)[4] is not None or len(node.outputs) > 1:
        return "it has a past"
    if weight_array.dtype != np.float32:
        return f"its weight is {weight_array.dtype}, not float32"
    return None


def part_attention(node: ir.Node) -> ir.Node:
    """com.microsoft::Attention as MatMul, Add, Split and MultiHeadAttention; returns the MatMul."""
    mask, attention_bias = (*node.inputs, *[None] * 6)[3:6:2]
    weight = array_of(node.inputs[1])
    assert weight is not None
    third = weight.shape[1] // 3
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    widths = np.array(node.attributes.get_ints("qkv_hidden_sizes", [third] * 3))
    (product,) = add_node(node, "MatMul", node.inputs[:2])
    (whole,) = add_node(node, "Add", [product, node.inputs[2]])
    q, k, v = add_node(node, "Split", [whole, add_initializer(graph, "widths", widths)], _LAST_AXIS, outputs=3)
    attributes = {name: value for name, value in node.attributes.items() if name != "qkv_hidden_sizes"}
    inputs = [q, k, v, None, mask, attention_bias]
    (out,) = add_node(node, "com.microsoft::MultiHeadAttention", inputs, attributes)
    replace(node.outputs[0], out)
    matmul = product.producer()
    assert matmul is not None
    return matmul
