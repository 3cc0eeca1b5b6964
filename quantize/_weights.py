"""Which weights a pass is asked for and may quantize, and packed attention as a product with one, then attention."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of, replace
from tx_export.errors import PassError
from tx_export.passes import Left

__all__ = [
    "already",
    "attention_left",
    "candidates",
    "check_finite",
    "chosen",
    "name_of",
    "part_attention",
    "weight_of",
]

_PRODUCTS = (("", "MatMul"), ("", "Gemm"), ("com.microsoft", "Attention"))
_STORED = (np.int8, np.uint8)  # by a pass that ran before
_QUANTIZED = ("MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QLinearMatMul")
_LAST_AXIS = {"axis": ir.AttrInt64("axis", -1)}


def candidates(graph: ir.Graph, only: str) -> list[ir.Node]:
    """Products, and behind them lookups in constant tables: all, or those whose weights `only` names."""
    products = [node for node in graph if (node.domain, node.op_type) in _PRODUCTS]
    nodes = [*products, *(node for node in graph if node.op_type == "Gather" and _is_table(array_of(node.inputs[0])))]
    weights = {weight_of(node) for node in nodes} if not only.strip() else chosen("only", only, nodes)
    return [node for node in nodes if weight_of(node) in weights]


def already(graph: ir.Graph) -> tuple[Left, ...]:
    """Where there was nothing to do: what the products are already."""
    counted = Counter(node.op_type for node in graph if node.op_type in _QUANTIZED)
    return tuple(Left(name, f"{number} products have quantized weights already") for name, number in counted.items())


def _is_table(array: np.ndarray | None) -> bool:
    """One of a single column, say of scales, has nothing to gain."""
    return array is not None and array.dtype not in _STORED and (array.ndim != 2 or array.shape[1] > 1)


def weight_of(node: ir.Node) -> ir.Value | None:
    """The initializer that a product or a lookup reads, as it is or turned; what is computed there if it is none."""
    value = node.inputs[0 if node.op_type == "Gather" else 1]
    producer = None if value is None else value.producer()
    return producer.inputs[0] if producer is not None and producer.op_type == "Transpose" else value


def name_of(node: ir.Node) -> str:
    """Of the weight of a product or a lookup; of the output where there is none."""
    weight = weight_of(node)
    return _plain(node.outputs[0] if weight is None or array_of(weight) is None else weight)


def _plain(value: ir.Value) -> str:
    return (value.name or "").removesuffix(".T")


def chosen(option: str, text: str, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """The weights with one of these names, or of the modules; PassError for a name that matches none.

    A packed product has the name of the query's with `qkv` for `query`.
    """
    weights = {
        weight: _plain(weight)
        for weight in map(weight_of, nodes)
        if weight is not None and array_of(weight) is not None
    }
    found: set[ir.Value] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        of_name = {weight for weight, full in weights.items() if f"{full}.".startswith(f"{name}.")}
        if not of_name:
            near = ", ".join(difflib.get_close_matches(name, set(weights.values()), n=5, cutoff=0))
            raise PassError(f"{option}: no weight or module is named {name!r}; nearest weights: {near or 'none'}")
        found |= of_name
    return found


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
