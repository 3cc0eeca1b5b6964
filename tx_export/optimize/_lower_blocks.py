"""Weights in blocks with standard operators: (q - zero) scale in float, which a runtime can compute when it loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of

__all__ = ["lookup_in_blocks", "product_in_blocks"]


def product_in_blocks(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """MatMulNBits: x @ weight^T, and its bias if it has one."""
    x, values, scale, zero, _, bias = (*node.inputs, *[None] * 3)[:6]
    weight = _weight(graph, node, [values, scale, zero])
    (weight,) = add_node(
        node, "Slice", [weight, *(_numbers(graph, [at]) for at in (0, node.attributes["K"].as_int(), 1))]
    )
    (turned,) = add_node(node, "Transpose", [weight], {"perm": ir.AttrInt64s("perm", [1, 0])})
    (out,) = add_node(node, "MatMul", [x, turned])
    return out if bias is None else add_node(node, "Add", [out, bias])[0]


def lookup_in_blocks(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """GatherBlockQuantized of rows."""
    values, indices, scale, zero = (*node.inputs, None)[:4]
    return add_node(node, "Gather", [_weight(graph, node, [values, scale, zero]), indices])[0]


def _weight(graph: ir.Graph, node: ir.Node, stored: Sequence[ir.Value | None]) -> ir.Value:
    """float32 [N, blocks * block_size] of values, scales and zero points."""
    values, scale, zero = stored
    scales = array_of(scale)
    assert scales is not None and values is not None
    rows, blocks = scales.shape
    bits, block_size = node.attributes.get_int("bits", 4), node.attributes["block_size"].as_int()
    q = _unpacked(graph, node, values, bits, [rows, blocks, block_size])
    if zero is None:
        middle = add_initializer(graph, f"middle.{bits}", np.array(2 ** (bits - 1), np.float32))
    else:
        padded = _unpacked(graph, node, zero, bits, [rows, -1, 1])
        (middle,) = add_node(node, "Slice", [padded, *(_numbers(graph, [at]) for at in (0, blocks, 1))])
    (centred,) = add_node(node, "Sub", [q, middle])
    (each,) = add_node(node, "Unsqueeze", [scale, _numbers(graph, [-1])])
    (weight,) = add_node(node, "Mul", [centred, each])
    return add_node(node, "Reshape", [weight, _numbers(graph, [rows, blocks * block_size])])[0]


def _unpacked(graph: ir.Graph, node: ir.Node, values: ir.Value, bits: int, shape: list[int]) -> ir.Value:
    """The numbers of bytes in float32; of 4 bits, the low half first."""
    if bits == 4:
        (low,) = add_node(node, "BitwiseAnd", [values, add_initializer(graph, "low.half", np.array(15, np.uint8))])
        right = {"direction": ir.AttrString("direction", "RIGHT")}
        (high,) = add_node(node, "BitShift", [values, add_initializer(graph, "half", np.array(4, np.uint8))], right)
        pair = [add_node(node, "Unsqueeze", [half, _numbers(graph, [-1])])[0] for half in (low, high)]
        (values,) = add_node(node, "Concat", pair, {"axis": ir.AttrInt64("axis", -1)})
    (shaped,) = add_node(node, "Reshape", [values, _numbers(graph, shape)])
    return add_node(node, "Cast", [shaped], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})[0]


def _numbers(graph: ir.Graph, numbers: list[int]) -> ir.Value:
    return add_initializer(graph, f"numbers.{'.'.join(map(str, numbers))}", np.array(numbers))
