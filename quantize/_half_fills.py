"""Numbers that hide scores from a softmax: -1e9 and the like, brought to where every half precision adds them safely.

e^-4096 is 0 in any precision, and a few masks and a score together stay in range. The attribute mask_filter_value of
attention is float32 in every precision, and added in float32: it keeps what it says of rows that are hidden as a whole.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, array_of

__all__ = ["bring_fills_into_range", "is_fill"]

_FILL = 4096.0
_ABSORBS = 1e8  # a score up to 2 is rounded away
# What may stand between a fill and the softmax: each keeps the number, adds to it, or chooses.
_ON_THE_WAY = {
    "Add", "Cast", "Clip", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Reshape", "Slice",
    "Softmax", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
}  # fmt: skip
_BIAS = {"Attention": (3, 5), "MultiHeadAttention": (5,), "GroupQueryAttention": (10,)}  # of scores, by operator


def bring_fills_into_range(graph: ir.Graph, nodes: Collection[ir.Node]) -> None:
    """Shorten the fills that `nodes` read; infinite ones stay, as half precisions have infinities too."""
    for value in list(graph.initializers.values()):
        if is_fill(value):
            _shorten(graph, value, nodes)


def is_fill(value: ir.Value) -> bool:
    """Whether it is a constant with large finite numbers that do nothing but hide scores."""
    array = array_of(value)
    if array is None or value.dtype != ir.DataType.FLOAT:
        return False
    largest = np.abs(array[np.isfinite(array)]).max(initial=0)
    return bool(largest > _FILL) and _only_hides(value, absorbs=bool(largest > _ABSORBS))


def _only_hides(value: ir.Value, absorbs: bool) -> bool:
    """Whether all that is made of the value are softmaxes, biases of attention, and questions whether it is 0.

    One that `absorbs` the score that it is added to does more: it makes rows even that are hidden as a whole.
    """
    seen: set[ir.Value] = set()
    todo, hides = [(value, False)], False
    while todo:
        each, added = todo.pop()
        if each.is_graph_output():
            return False
        for use in each.uses():
            node, index = use.node, use.idx
            if node.op_type == "Softmax" and added and absorbs:
                return False
            if node.op_type == "Softmax" or index in _BIAS.get(node.op_type, ()) or _compares_with_zero(node):
                hides = True
            elif node.op_type not in _ON_THE_WAY or node.graph is not value.graph:
                return False
            else:
                adds = added or node.op_type in ("Add", "Sub")
                todo += [(output, adds) for output in node.outputs if output not in seen]
                seen.update(node.outputs)
    return hides


def _compares_with_zero(node: ir.Node) -> bool:
    constants = [array for array in map(array_of, node.inputs) if array is not None]
    return node.op_type == "Equal" and len(constants) == 1 and not constants[0].any()


def _shorten(graph: ir.Graph, value: ir.Value, nodes: Collection[ir.Node]) -> None:
    uses = [use for use in value.uses() if use.node in nodes]
    array = array_of(value)
    if uses and array is not None:
        finite = np.isfinite(array)
        near = np.where(finite, np.clip(array, -_FILL, _FILL), array).astype(np.float32)
        short = add_initializer(graph, f"{value.name}.fill", near)
        for use in uses:
            use.node.replace_input_with(use.idx, short)
