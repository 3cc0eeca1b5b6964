"""Emit nodes around the attention operator: heads side by side in rows [B, T, H * D], and apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node
from tx_export.optimize._attention_products import Dims, Operand, factor_of, same_all, shape_of

__all__ = ["emit", "integers", "rows", "times", "unrowed", "unscaled"]


def emit(
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    dims: Dims,
    *attributes: ir.Attr,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Value:
    """The one output of a new node, with its shape and type."""
    (value,) = add_node(before, op, inputs, {attribute.name: attribute for attribute in attributes})
    value.shape, value.dtype = ir.Shape(dims), dtype
    return value


def integers(before: ir.Node, *numbers: int) -> ir.Value:
    """A constant of int64."""
    assert isinstance(before.graph, ir.Graph)
    name = ".".join(["attention", *(str(number) for number in numbers)])
    return add_initializer(before.graph, name, np.array(numbers, np.int64))


def unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """A value as it is without a number that it is multiplied by, maybe before it was laid out, and that number."""
    node = value.producer()
    if node is None or node.domain or node.inputs[0] is None:
        return value, 1.0
    if node.op_type in ("Mul", "Div"):
        for inner in (0, 1) if node.op_type == "Mul" else (0,):
            factor, source = factor_of(node, inner), node.inputs[inner]
            if factor is not None and source is not None and same_all(shape_of(source), shape_of(value)):
                inside, before = unscaled(source)
                return inside, before * factor
    if node.op_type in ("Reshape", "Transpose", "Unsqueeze"):
        inside, factor = unscaled(node.inputs[0])
        if factor != 1:
            attributes = list(node.attributes.values())
            return emit(node, node.op_type, [inside, *node.inputs[1:]], shape_of(value), *attributes), factor
    return value, 1.0


def rows(before: ir.Node, operand: Operand, heads: int) -> ir.Value:
    """[B, T, H * D] of an operand [B, H, T, D], [B * H, T, D] or, where all heads share one, [B, 1, T, D]."""
    value, axes, dims = operand.value, operand.axes, operand.dims
    size = int(dims[-1])  # type: ignore[arg-type]
    if len(axes) == 3 and heads == 1:
        return _turned(before, value, axes)
    if len(axes) == 3:
        batch_heads, tokens, channels = axes
        side = _turned(before, value, (tokens, batch_heads, channels))  # [T, B * H, D]
        apart = emit(
            before,
            "Reshape",
            [side, integers(before, 0, -1, heads * size)],
            [dims[1], _over(dims[0], heads), heads * size],
        )
        return _turned(before, apart, (1, 0, 2))
    batch, head, tokens, channels = axes
    turned = _turned(before, value, (batch, tokens, head, channels))
    width = int(dims[1]) * size  # type: ignore[arg-type]
    if head is not None:
        turned = emit(before, "Reshape", [turned, integers(before, 0, 0, width)], [dims[0], dims[2], width])
    if dims[1] == heads:
        return turned
    return emit(before, "Tile", [turned, integers(before, 1, 1, heads)], [dims[0], dims[2], heads * size])


def unrowed(before: ir.Node, context: ir.Value, heads: int, axes: tuple[int, ...]) -> ir.Value:
    """The axes of [B, H, T, D] or [B * H, T, D], in this order, of a context [B, T, H * D]."""
    batch, tokens, width = shape_of(context)
    size = int(width) // heads  # type: ignore[arg-type]
    if len(axes) == 3 and heads == 1:
        return _turned(before, context, axes)
    if len(axes) == 3:
        turned = _turned(before, context, (1, 0, 2))  # [T, B, H * D]
        side = emit(before, "Reshape", [turned, integers(before, 0, -1, size)], [tokens, times(batch, heads), size])
        return _turned(before, side, tuple((1, 0, 2)[axis] for axis in axes))
    apart = emit(before, "Reshape", [context, integers(before, 0, 0, heads, size)], [batch, tokens, heads, size])
    return _turned(before, apart, tuple((0, 2, 1, 3)[axis] for axis in axes))


def _turned(before: ir.Node, value: ir.Value, order: Sequence[int | None]) -> ir.Value:
    perm = [axis for axis in order if axis is not None]
    if perm == list(range(len(perm))):
        return value
    shape = shape_of(value)
    return emit(before, "Transpose", [value], [shape[axis] for axis in perm], ir.AttrInt64s("perm", perm))


def _over(size: int | ir.SymbolicDim, heads: int) -> int | ir.SymbolicDim:
    return size // heads if isinstance(size, int) else ir.SymbolicDim(str(size.value).removeprefix(f"{heads}*"))


def times(size: int | ir.SymbolicDim, heads: int) -> int | ir.SymbolicDim:
    """B * H."""
    return size * heads if isinstance(size, int) else ir.SymbolicDim(f"{heads}*{size.value}")
