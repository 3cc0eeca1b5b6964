"""Pack the query, key and value products of self-attention: three MatMul and MultiHeadAttention -> Attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import Linear, add_initializer, add_node, array_of, linear_behind, only_use, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["PackQkv"]


@dataclass(frozen=True)
class PackQkv(GraphPass):
    """One product of width 3 d instead of three of width d; com.microsoft::Attention does it and the attention."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.op_type == "MultiHeadAttention"]
        left = []
        for node in candidates:
            found = _match(node)
            if isinstance(found, str):
                left.append(Left(node.outputs[0].name or node.op_type, found))
            else:
                _pack(model.graph, node, found)
        RemoveUnusedNodesPass()(model)
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _match(node: ir.Node) -> list[Linear] | str:
    """The three products, or why they can't be one."""
    if any(value is not None for value in node.inputs[6:]):
        return "it has a past"
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return "its query, key and value biases stand in the operator"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its keys and values are outputs too"
    linears: list[Linear] = []
    for value in (*node.inputs, None, None)[:3]:
        linear = _linear(value, node) if value is not None else "an input is missing"
        if isinstance(linear, str):
            return linear
        if linear.turned or _is_read_otherwise(linear.weight_value):
            return "a weight is tied"
        if value is None or only_use(value) is not node:
            return "a product has other readers"
        linears.append(linear)
    if len({linear.x for linear in linears}) > 1:
        return "query, key and value come from different inputs"
    return linears


def _linear(value: ir.Value, node: ir.Node) -> Linear | str:
    """The linear layer that gives a value, as a whole or with a range of its columns."""
    cut = value.producer()
    if cut is None or cut.op_type not in ("Slice", "Split") or cut.inputs[0] is None:
        return linear_behind(value)
    whole = cut.inputs[0]
    linear, columns = linear_behind(whole), _columns(cut, value, len(whole.shape or ()))
    if isinstance(linear, str) or columns is None:
        return "not columns of a linear layer"
    if whole.is_graph_output() or any(only_use(part) is not node for use in whole.uses() for part in use.node.outputs):
        return "a product has other readers"
    bias = None if linear.bias is None else linear.bias[columns]
    return dataclasses.replace(linear, weight=linear.weight[:, columns], bias=bias, output=value)


def _columns(cut: ir.Node, value: ir.Value, rank: int) -> slice | None:
    """What a Slice or Split takes of the last of `rank` axes."""
    given = [array_of(each) for each in cut.inputs[1:]]
    if cut.op_type == "Split":
        if not given or given[0] is None or cut.attributes.get_int("axis", 0) not in (-1, rank - 1):
            return None
        ends, number = np.cumsum(given[0]).tolist(), list(cut.outputs).index(value)
        return slice(ends[number - 1] if number else 0, ends[number])
    if len(given) != 3 or any(each is None or each.size != 1 for each in given):
        return None
    start, end, axis = (each.item() for each in given if each is not None)
    return slice(start, end) if axis in (-1, rank - 1) else None


def _is_read_otherwise(weight: ir.Value) -> bool:
    return weight.is_graph_output() or any(use.node.op_type != "MatMul" for use in weight.uses())


def _pack(graph: ir.Graph, node: ir.Node, linears: list[Linear]) -> None:
    weight = np.concatenate([linear.weight for linear in linears], axis=1)  # [d_model, 3 H head_dim]
    biases = [
        linear.bias if linear.bias is not None else np.zeros(linear.weight.shape[1], weight.dtype) for linear in linears
    ]
    name = linears[0].weight_value.name or "query"
    for part, whole in ((".query.", ".qkv."), (".weight.T", ".weight")):
        name = name.replace(part, whole)
    packed = add_initializer(graph, name, weight)
    bias = add_initializer(graph, name.replace("weight", "bias"), np.concatenate(biases))
    widths = [linear.weight.shape[1] for linear in linears]
    attributes = dict(node.attributes)
    if len(set(widths)) > 1:  # equal widths are what the operator expects, whatever the width of the input
        attributes["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", widths)
    mask, attention_bias = (*node.inputs, *[None] * 6)[4:6]
    inputs = [linears[0].x, packed, bias, mask, *([] if attention_bias is None else [None, attention_bias])]
    (context,) = add_node(node, "com.microsoft::Attention", inputs, attributes)
    replace(node.outputs[0], context)
