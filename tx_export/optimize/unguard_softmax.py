"""Attention without the guard that exporters put behind its softmax: rows that are hidden whole are zeroed further on.

Where(IsNaN(p), 0, p) v, p = softmax(scores + mask)  ->  p v, or Where(max(mask) = -inf, 0, p v) where a mask hides by
-inf. The guard is two passes over [B, H, T, S], and keeps attention from being fused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._attention_candidates import comes_from_product, is_product
from tx_export._graph import add_initializer, only_use
from tx_export.optimize._attention_products import same, scalar, shape_of
from tx_export.optimize._attention_rows import emit, integers
from tx_export.optimize._attention_values import low_constants
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["UnguardSoftmax"]

_REDUCED = 18  # the opset from which ReduceMax takes its axes as an input


@dataclass(frozen=True)
class UnguardSoftmax(GraphPass):
    """Equal in every row of finite scores, also one whose keys are all hidden: it gives zeros."""

    def call(self, model: ir.Model) -> Outcome:
        left: list[Left] = []
        guards = [node for node in model.graph if _guarded(node) is not None]
        rows: dict[ir.Value, ir.Value] = {}
        for node in guards:
            reason = _unguard(node, rows)
            if reason is not None:
                left.append(Left(node.outputs[0].name or "Where", reason))
        RemoveUnusedNodesPass()(model)
        done = len(guards) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(guards), tuple(left)))


def _guarded(node: ir.Node) -> ir.Value | None:
    """p of Where(IsNaN(p), 0, p), the result of a softmax."""
    if node.op_type != "Where" or node.domain or scalar(node.inputs[1]) != 0:
        return None
    condition = node.inputs[0].producer() if node.inputs[0] is not None else None
    weights = node.inputs[2]
    if condition is None or condition.op_type != "IsNaN" or condition.inputs[0] is not weights or weights is None:
        return None
    softmax = weights.producer()
    return weights if softmax is not None and softmax.op_type == "Softmax" else None


def _unguard(guard: ir.Node, rows: dict[ir.Value, ir.Value]) -> str | None:
    """Take the guard away, or say why it stays."""
    weights, product = _guarded(guard), only_use(guard.outputs[0])
    if weights is None or product is None or product.op_type != "MatMul" or not is_product(product):
        return "it is not read by the product with the values alone"
    softmax = weights.producer()
    assert softmax is not None
    mask = _added(softmax.inputs[0])
    infinite = set() if mask is None else low_constants(mask, -math.inf)
    if infinite is None:
        return "its mask may hold any number"
    context = product.outputs[0]
    if mask is not None and infinite:
        if not 2 <= len(shape_of(mask)) <= len(shape_of(context)) or _opset(guard) < _REDUCED:
            return "the shape of its mask is unknown"
        if context.is_graph_output():
            return "its product is an output"
        if mask not in rows:
            rows[mask] = _hidden(product, mask)
        _zero(context, rows[mask])
    guard.outputs[0].replace_all_uses_with(weights)
    return None


def _opset(node: ir.Node) -> int:
    return 0 if node.graph is None else node.graph.opset_imports.get("", 0)


def _added(scores: ir.Value | None) -> ir.Value | None:
    """What is added to the product, if anything is."""
    node = scores.producer() if scores is not None else None
    if node is None or node.op_type != "Add":
        return None
    others = [value for value in node.inputs if not comes_from_product(value)]
    return others[0] if len(others) == 1 else None


def _hidden(before: ir.Node, mask: ir.Value) -> ir.Value:
    """Whether no key of a row is visible, bool [..., T, 1]."""
    assert isinstance(before.graph, ir.Graph)
    dims = [*shape_of(mask)[:-1], 1]
    lowest = add_initializer(before.graph, "attention.-inf", np.array(-math.inf, np.float32))
    most = emit(before, "ReduceMax", [mask, integers(before, -1)], dims)
    return emit(before, "Equal", [most, lowest], dims, dtype=ir.DataType.BOOL)


def _zero(context: ir.Value, hidden: ir.Value) -> None:
    """Put zeros in hidden rows of a context [B, H, T, D]; where heads lie side by side again, if they do."""
    place, dims = _rows(context), shape_of(hidden)
    if place is None or place.is_graph_output() or (len(dims) > 2 and dims[-3] != 1):
        place = context
    node = place.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    graph = node.graph
    if place is not context and len(dims) == 4:
        product = context.producer()
        assert product is not None
        hidden = emit(product, "Squeeze", [hidden, integers(product, 1)], [dims[0], *dims[2:]], dtype=ir.DataType.BOOL)
    uses = list(place.uses())
    zero = add_initializer(graph, "attention.0", np.array(0, np.float32))
    where = ir.node("Where", [hidden, zero, place])
    graph.insert_after(node, where)
    where.outputs[0].type, where.outputs[0].shape = place.type, place.shape
    for use in uses:
        use.node.replace_input_with(use.idx, where.outputs[0])


def _rows(context: ir.Value) -> ir.Value | None:
    """[B, T, H * D] of a context [B, H, T, D], where it is laid out like that."""
    turned = only_use(context)
    if turned is None or turned.op_type != "Transpose" or turned.attributes.get_ints("perm", []) != [0, 2, 1, 3]:
        return None
    joined = only_use(turned.outputs[0])
    if joined is None or joined.op_type != "Reshape":
        return None
    dims, whole = shape_of(turned.outputs[0]), shape_of(joined.outputs[0])
    return joined.outputs[0] if len(whole) == 3 and all(map(same, dims[:2], whole[:2])) else None
