"""Replace 0.5 x (1 + erf(x / sqrt 2)) by one com.microsoft::Gelu, the exact form (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_node, array_of, only_use, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseGelu"]


@dataclass(frozen=True)
class FuseGelu(GraphPass):
    """Only the exact form is matched; the tanh form is another function and stays as it was written."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.op_type == "Erf"]
        left = []
        for node in candidates:
            found = _match(node)
            if isinstance(found, str):
                left.append(Left(node.outputs[0].name or "Erf", found))
                continue
            x, output = found
            producer = output.producer()
            assert producer is not None
            (gelu,) = add_node(producer, "com.microsoft::Gelu", [x])
            replace(output, gelu)
        RemoveUnusedNodesPass()(model)
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _match(erf: ir.Node) -> tuple[ir.Value, ir.Value] | str:
    """x and gelu(x), or why this error function belongs to no exact GELU."""
    x = _scaled_input(erf)
    if x is None:
        return "its input is not x / sqrt(2)"
    add = only_use(erf.outputs[0])
    if add is None or add.op_type != "Add" or not _is_constant(_other(add, erf.outputs[0]), 1.0):
        return "1 is not added to it"
    # What is left is a product of (1 + erf), x and 0.5, in any order.
    value, missing = add.outputs[0], {"half", "x"}
    while missing:
        node = only_use(value)
        if node is None or node.op_type != "Mul":
            return "it is not multiplied by x / 2"
        factor = _other(node, value)
        found = {"half"} if _is_constant(factor, 0.5) else {"x"} if factor is x else _half_of(factor, x)
        if not found or not found <= missing:
            return "it is not multiplied by x / 2"
        missing -= found
        value = node.outputs[0]
    return x, value


def _scaled_input(erf: ir.Node) -> ir.Value | None:
    source = erf.inputs[0]
    node = source.producer() if source is not None else None
    if node is None:
        return None
    if node.op_type == "Div" and _is_constant(node.inputs[1], math.sqrt(2)):
        return node.inputs[0]
    if node.op_type == "Mul":
        for x, factor in (node.inputs, node.inputs[::-1]):
            if _is_constant(factor, 1 / math.sqrt(2)):
                return x
    return None


def _half_of(value: ir.Value | None, x: ir.Value) -> set[str]:
    node = value.producer() if value is not None else None
    halves = node is not None and node.op_type == "Mul" and x in node.inputs and _is_constant(_other(node, x), 0.5)
    return {"half", "x"} if halves else set()


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _is_constant(value: ir.Value | None, expected: float) -> bool:
    array = array_of(value)
    # More dimensions than one could raise the rank of the result.
    return (
        array is not None
        and array.size == 1
        and array.ndim <= 1
        and math.isclose(float(array.reshape(())), expected, rel_tol=1e-6)
    )
