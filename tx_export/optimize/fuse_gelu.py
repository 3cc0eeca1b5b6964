"""Replace 0.5 x (1 + erf(x / sqrt 2)) by one com.microsoft::Gelu, the exact form (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_node, replace
from tx_export.optimize._gelu import gated, is_constant
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseGelu"]


@dataclass(frozen=True)
class FuseGelu(GraphPass):
    """Only the exact form is matched; the tanh form is another function, and another pass."""

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
    output = gated(erf.outputs[0], x)
    return output if isinstance(output, str) else (x, output)


def _scaled_input(erf: ir.Node) -> ir.Value | None:
    source = erf.inputs[0]
    node = source.producer() if source is not None else None
    if node is None:
        return None
    if node.op_type == "Div" and is_constant(node.inputs[1], math.sqrt(2)):
        return node.inputs[0]
    if node.op_type == "Mul":
        for x, factor in (node.inputs, node.inputs[::-1]):
            if is_constant(factor, 1 / math.sqrt(2)):
                return x
    return None
