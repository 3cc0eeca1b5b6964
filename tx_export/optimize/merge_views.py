"""Shorten chains of Reshape, Transpose, Slice and the like: to nothing, to one Slice, one Transpose or one Reshape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_initializer, add_node, array_of, replace
from tx_export.optimize._view_chains import bases, viewed
from tx_export.passes import Coverage, GraphPass, Outcome

__all__ = ["MergeViews"]


@dataclass(frozen=True)
class MergeViews(GraphPass):
    """Heads that are split and merged again around a fused operator leave such chains; proved by symbolic shapes."""

    def call(self, model: ir.Model) -> Outcome:
        before = len(model.graph)
        done = sum(_shortened(model.graph, value) for node in list(model.graph) for value in node.outputs)
        RemoveUnusedNodesPass()(model)
        return Outcome(model, done > 0, Coverage(done, done or before))


def _shortened(graph: ir.Graph, value: ir.Value) -> bool:
    found = bases(value)
    if not found or (not value.uses() and not value.is_graph_output()):
        return False
    node = value.producer()
    assert node is not None
    for base in found:
        if array_of(base) is not None:
            continue
        view = viewed(value, base)
        direct = base is node.inputs[0]
        if view is None:
            continue
        if view.is_whole():
            return _is_free(value, base) and _replaced(value, base)
        if (part := view.part()) is not None and not (direct and node.op_type in ("Slice", "Split")):
            return _replaced(value, _slice(graph, node, base, part))
        if direct:
            return False
        if (order := view.permutation()) is not None:
            return _replaced(value, add_node(node, "Transpose", [base], {"perm": ir.AttrInt64s("perm", order)})[0])
        if view.is_order_kept() and node.op_type == "Reshape":
            return _reshaped(graph, node, base)
    return False


def _reshaped(graph: ir.Graph, node: ir.Node, base: ir.Value) -> bool:
    """Let a Reshape read `base`; a 0 in a target means the size that its input has there, so it is written anew."""
    before, after = list(base.shape or ()), list(node.outputs[0].shape or ())
    kept = [axis < len(before) and before[axis] == size for axis, size in enumerate(after)]
    target = [size if isinstance(size, int) else 0 if same else -1 for size, same in zip(after, kept, strict=True)]
    if target.count(-1) <= 1:
        node.replace_input_with(1, add_initializer(graph, "view.shape", np.array(target)))
        node.attributes.pop("allowzero", None)  # with it a 0 would mean no elements
    elif array_of(node.inputs[1]) is not None:
        return False
    node.replace_input_with(0, base)
    return True


def _is_free(value: ir.Value, base: ir.Value) -> bool:
    """Whether the base may take the value's name, if that is an output of the graph."""
    return not value.is_graph_output() or not (base.is_graph_input() or base.is_graph_output())


def _replaced(value: ir.Value, new: ir.Value) -> bool:
    replace(value, new)
    return True


def _slice(graph: ir.Graph, before: ir.Node, base: ir.Value, part: tuple[int, int, int]) -> ir.Value:
    axis, start, end = (add_initializer(graph, f"view.{number}", np.array([number])) for number in part)
    return add_node(before, "Slice", [base, start, end, axis])[0]
