"""8-bit products as x86 CPUs without VNNI compute them: x[2k] w[2k] + x[2k+1] w[2k+1] stops at the ends of int16.

y' = y - scale_x scale_w sum over k of what goes beyond, in nodes that every CPU has; x is uint8 and w int8. Which pairs
of weights can go beyond is known beforehand, so a graph without any is proved to be exact.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of, replace

__all__ = ["saturated"]

_LOW, _HIGH = np.iinfo(np.int16).min, np.iinfo(np.int16).max
_LAST = {"axis": ir.AttrInt64("axis", -1)}


def saturated(model: ir.Model) -> ir.Model:
    """The model itself where no pair can saturate, else a copy that says what those CPUs do."""
    if not any(_at_risk(node) is not None for node in model.graph):
        return model
    copy = model.clone()
    for node in list(copy.graph):
        if node.op_type == "QAttention" and _at_risk(node) is not None:
            node = _product_of(node)
        if (pairs := _at_risk(node)) is not None:
            _subtract(node, pairs)
    return copy


def _operands(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None, list[ir.Value | None]] | None:
    """x in uint8, w in int8, and the scales of both, of a product as ONNX Runtime computes it."""
    given = [*node.inputs, *[None] * 6]
    if node.op_type == "MatMulInteger":
        return given[0], given[1], []
    if node.op_type == "MatMulIntegerToFloat":
        return given[0], given[1], given[2:4]
    if node.op_type == "QAttention":
        return given[0], given[1], given[3:5]
    sources = [value.producer() for value in node.inputs[:2] if value is not None]
    if node.op_type != "MatMul" or [source.op_type for source in sources if source] != ["DequantizeLinear"] * 2:
        return None
    x, w = (source.inputs for source in sources if source is not None)
    return x[0], w[0], [x[1], w[1]]


def _at_risk(node: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """Of each column the pairs that can saturate: where they begin [N, P], and their weights [N, P, 2]."""
    found = _operands(node)
    weight = None if found is None else _array(found[1])
    if weight is None or weight.dtype != np.int8 or weight.ndim != 2:
        return None
    pairs = np.pad(weight, [(0, len(weight) % 2), (0, 0)]).astype(np.int64).T.reshape(weight.shape[1], -1, 2)
    beyond = (np.maximum(pairs, 0).sum(-1) * 255 > _HIGH) | (np.minimum(pairs, 0).sum(-1) * 255 < _LOW)  # [N, K / 2]
    number = int(beyond.sum(axis=1).max(initial=0))
    if number == 0:
        return None
    first = np.argsort(~beyond, axis=1, kind="stable")[:, :number]  # those at risk, then any, with weights of zero
    chosen = np.take_along_axis(pairs * beyond[..., None], first[..., None], axis=1)
    return first * 2, chosen.astype(np.float32)


def _array(value: ir.Value | None) -> np.ndarray | None:
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Transpose":
        return array_of(value)
    turned = array_of(producer.inputs[0])
    return None if turned is None else turned.T


def _subtract(node: ir.Node, pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """Put in the place of a product the same, less what its pairs have beyond the ends of int16."""
    graph, found, (first, weights) = node.graph, _operands(node), pairs
    assert isinstance(graph, ir.Graph) and found is not None
    (x, w, scales), name = found, node.outputs[0].name
    array = _array(w)
    assert array is not None
    terms: list[ir.Value] = []
    for half in range(2):
        place = add_initializer(graph, f"{name}.place.{half}", np.minimum(first + half, len(array) - 1))
        factor = add_initializer(graph, f"{name}.factor.{half}", weights[..., half])
        (values,) = add_node(node, "Gather", [x, place], _LAST)  # [.., N, P]
        (values,) = add_node(node, "Cast", [values], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})
        terms += add_node(node, "Mul", [values, factor])
    (sums,) = add_node(node, "Add", terms)
    ends = [add_initializer(graph, f"int16.{end}", np.array(end, np.float32)) for end in (_LOW, _HIGH)]
    (inside,) = add_node(node, "Clip", [sums, *ends])
    (beyond,) = add_node(node, "Sub", [sums, inside])
    axes = add_initializer(graph, "last.axis", np.array([-1]))
    (beyond,) = add_node(node, "ReduceSum", [beyond, axes], {"keepdims": ir.AttrInt64("keepdims", 0)})
    for scale in scales:
        (beyond,) = add_node(node, "Mul", [beyond, scale])
    if not scales:
        (beyond,) = add_node(node, "Cast", [beyond], {"to": ir.AttrInt64("to", ir.DataType.INT32)})
    (exact,) = add_node(node, f"{node.domain}::{node.op_type}", node.inputs, node.attributes)
    (result,) = add_node(node, "Sub", [exact, beyond])
    replace(node.outputs[0], result)
    graph.remove(node, safe=True)


def _product_of(node: ir.Node) -> ir.Node:
    """com.microsoft::QAttention as MatMulIntegerToFloat, Split and MultiHeadAttention; returns the product."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    x, weight, bias, x_scale, scale, mask, x_zero, zero = [*node.inputs, *[None] * 3][:8]
    array = _array(weight)
    assert array is not None
    inputs = [x, weight, x_scale, scale, x_zero, zero, bias]
    (whole,) = add_node(node, "com.microsoft::MatMulIntegerToFloat", inputs)
    thirds = add_initializer(graph, "thirds", np.full(3, array.shape[1] // 3))
    parts = add_node(node, "Split", [whole, thirds], _LAST, outputs=3)
    (out,) = add_node(node, "com.microsoft::MultiHeadAttention", [*parts, None, mask], node.attributes)
    replace(node.outputs[0], out)
    graph.remove(node, safe=True)
    product = whole.producer()
    assert product is not None
    return product
