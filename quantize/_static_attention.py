"""com.microsoft::MultiHeadAttention with 8-bit operands of its two products: softmax(scale q k^T + fill) v.

q, k and v have calibrated ranges; what softmax gives lies in [0, 1]. Heads are laid out in 8 bits, so a quarter of the
bytes moves. Softmax itself stays in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of, replace
from tx_export.passes import Context
from tx_export.quantize._auto_times import times
from tx_export.quantize._static_ranges import Range
from tx_export.timing import Shape

__all__ = ["Quantize", "int8_attention", "operands", "scores_left", "slower"]

_KNOWN = {"num_heads", "scale", "mask_filter_value", "unidirectional"}
_FILL = -10000.0  # of ONNX Runtime, where the attribute is not given

_PROBABILITIES = Range(0.0, 1.0)
_LEAST_GAIN = 0.98  # of the time; smaller differences change sign from run to run

Quantize = Callable[[ir.Value, ir.Node, Range | None], list[ir.Value]]  # 8-bit values, scale and zero point


def operands(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value [B, T, H head_dim]."""
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None
    return q, k, v


def scores_left(node: ir.Node) -> str | None:
    """Why the products of a MultiHeadAttention can't have 8-bit operands; None if they can."""
    q, k, v, bias, mask, *more = (*node.inputs, *[None] * 8)[:8]
    if q is None or k is None or v is None or bias is not None or any(value is not None for value in more[1:]):
        return "it has packed operands, a bias or a past"
    if _width(q) is None:
        return "the width of its operands is not known"
    if mask is not None and (mask.shape is None or len(mask.shape) != 2):
        return "its mask is not [batch, tokens]"
    if node.attributes.get_int("unidirectional", 0):
        return "it is causal"
    if unknown := sorted(set(node.attributes) - _KNOWN):
        return f"it has {', '.join(unknown)}"
    return "it has a present" if any(value.uses() for value in node.outputs[1:]) else None


def _width(x: ir.Value) -> int | None:
    """H head_dim of [B, T, H head_dim]; of a part, as it was split off."""
    if x.shape is not None and len(x.shape) == 3 and isinstance(x.shape[2], int):
        return x.shape[2]
    node = x.producer()
    sizes = array_of(node.inputs[1]) if node is not None and node.op_type == "Split" else None
    return None if sizes is None or node is None else int(sizes[node.outputs.index(x)])


def int8_attention(graph: ir.Graph, node: ir.Node, quantize: Quantize) -> None:
    """Write it with MatMul between DequantizeLinear, which runtimes make integer products of."""
    q, k, v = operands(node)
    heads = node.attributes.get_int("num_heads", 1)
    width = _width(q)
    assert width is not None
    scale = node.attributes.get_float("scale", 0.0) or (width / heads) ** -0.5
    parts = add_initializer(graph, f"heads.{heads}", np.array([0, 0, heads, -1]))

    def by_heads(x: ir.Value, order: tuple[int, ...]) -> ir.Value:
        values, *parameters = quantize(x, node, None)
        (split,) = add_node(node, "Reshape", [values, parts])
        (turned,) = add_node(node, "Transpose", [split], {"perm": ir.AttrInt64s("perm", order)})
        return _dequantized(node, [turned, *parameters])

    (scores,) = add_node(node, "MatMul", [by_heads(q, (0, 2, 1, 3)), by_heads(k, (0, 2, 3, 1))])
    (scores,) = add_node(node, "Mul", [scores, add_initializer(graph, f"scale.{heads}", np.array(scale, np.float32))])
    for bias in (_fill(graph, node), (*node.inputs, *[None] * 6)[5]):
        if bias is not None:
            (scores,) = add_node(node, "Add", [scores, bias])
    (shares,) = add_node(node, "Softmax", [scores], {"axis": ir.AttrInt64("axis", -1)})
    shares.dtype = ir.DataType.FLOAT
    shares = _dequantized(node, quantize(shares, node, _PROBABILITIES))
    (mixed,) = add_node(node, "MatMul", [shares, by_heads(v, (0, 2, 1, 3))])
    (turned,) = add_node(node, "Transpose", [mixed], {"perm": ir.AttrInt64s("perm", [0, 2, 1, 3])})
    (out,) = add_node(node, "Reshape", [turned, add_initializer(graph, "whole", np.array([0, 0, -1]))])
    replace(node.outputs[0], out)


def _fill(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """What is added to the scores of keys that the mask [B, T] leaves out: [B, 1, 1, T]."""
    mask = (*node.inputs, *[None] * 6)[4]
    if mask is None:
        return None
    fill = np.array(node.attributes.get_float("mask_filter_value", _FILL), np.float32)
    one, axes = (add_initializer(graph, name, each) for name, each in _CONSTANTS.items())
    (real,) = add_node(node, "Cast", [mask], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})
    (padding,) = add_node(node, "Sub", [one, real])
    (filled,) = add_node(node, "Mul", [padding, add_initializer(graph, "fill", fill)])
    return add_node(node, "Unsqueeze", [filled, axes])[0]


_CONSTANTS = {"one": np.array(1, np.float32), "axes.1.2": np.array([1, 2])}


def _dequantized(node: ir.Node, inputs: Sequence[ir.Value]) -> ir.Value:
    (out,) = add_node(node, "DequantizeLinear", inputs)
    out.dtype = ir.DataType.FLOAT
    return out


def slower(whole: ir.Model, lowered: ir.Model, context: Context) -> str | None:
    """Why 8-bit operands don't pay, by the time of both graphs at the lengths of the text; None if they do."""
    lengths = [max(array.shape[1] for array in feeds.values() if array.ndim > 1) for feeds in context.feeds]
    median, longest = int(np.median(lengths)), max(lengths)
    shapes = list(dict.fromkeys((Shape(1, median), Shape(8, median), Shape(1, longest))))
    found = times({"float": whole, "int8": lowered}, shapes, context.provider, "batch")
    ratio = float(np.mean([slow / quick for slow, quick in zip(found["int8"], found["float"], strict=True)]))
    if ratio <= _LEAST_GAIN:
        return None
    return f"stays in float: with 8-bit operands it takes {ratio:.2f} times as long, over {', '.join(map(str, shapes))}"
