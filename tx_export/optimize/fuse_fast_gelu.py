"""Replace x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) by com.microsoft::FastGelu (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_node, replace
from tx_export.optimize._gelu import gated, is_constant, other
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseFastGelu"]


@dataclass(frozen=True)
class FuseFastGelu(GraphPass):
    """The tanh form as GPT-2 and ALBERT have it; the exact form is another function, and another pass."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.op_type == "Tanh" and _cubic_input(node) is not None]
        left = []
        for node in candidates:
            x = _cubic_input(node)
            assert x is not None
            output = gated(node.outputs[0], x)
            if isinstance(output, str):
                left.append(Left(node.outputs[0].name or "Tanh", output))
                continue
            producer = output.producer()
            assert producer is not None
            replace(output, add_node(producer, "com.microsoft::FastGelu", [x])[0])
        RemoveUnusedNodesPass()(model)
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _cubic_input(tanh: ir.Node) -> ir.Value | None:
    """x, where the input is sqrt(2 / pi) (x + 0.044715 x^3)."""
    scaled = _factor(tanh.inputs[0], math.sqrt(2 / math.pi))
    add = scaled.producer() if scaled is not None else None
    if add is None or add.op_type != "Add":
        return None
    for x in add.inputs:
        cube = _factor(other(add, x), 0.044715) if x is not None else None
        if x is not None and cube is not None and _is_cube(cube, x):
            return x
    return None


def _factor(product: ir.Value | None, constant: float) -> ir.Value | None:
    """The other factor of a product with that constant."""
    node = product.producer() if product is not None else None
    if node is None or node.op_type != "Mul":
        return None
    first, second = node.inputs
    return second if is_constant(first, constant) else first if is_constant(second, constant) else None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    """Pow(x, 3) or x x x."""
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "Pow":
        return node.inputs[0] is x and is_constant(node.inputs[1], 3.0)
    square = other(node, x) if node.op_type == "Mul" and x in node.inputs else None
    product = square.producer() if square is not None else None
    return product is not None and product.op_type == "Mul" and all(factor is x for factor in product.inputs)
