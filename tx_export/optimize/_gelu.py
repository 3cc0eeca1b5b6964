"""What both forms of GELU share: x / 2 (1 + f), with the factors in any order (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math

import onnx_ir as ir

from tx_export._graph import array_of, only_use

__all__ = ["gated", "is_constant", "other"]


def gated(f: ir.Value, x: ir.Value) -> ir.Value | str:
    """The value x / 2 (1 + f), or why there is none."""
    add = only_use(f)
    if add is None or add.op_type != "Add" or not is_constant(other(add, f), 1.0):
        return "1 is not added to it"
    value, missing = add.outputs[0], {"half", "x"}
    while missing:
        node = only_use(value)
        if node is None or node.op_type != "Mul":
            return "it is not multiplied by x / 2"
        factor = other(node, value)
        found = {"half"} if is_constant(factor, 0.5) else {"x"} if factor is x else _half_of(factor, x)
        if not found or not found <= missing:
            return "it is not multiplied by x / 2"
        missing -= found
        value = node.outputs[0]
    return value


def _half_of(value: ir.Value | None, x: ir.Value) -> set[str]:
    node = value.producer() if value is not None else None
    halves = node is not None and node.op_type == "Mul" and x in node.inputs and is_constant(other(node, x), 0.5)
    return {"half", "x"} if halves else set()


def other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a node that has two."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def is_constant(value: ir.Value | None, expected: float) -> bool:
    """Whether it is that number, alone."""
    array = array_of(value)
    # More dimensions than one could raise the rank of the result.
    return (
        array is not None
        and array.size == 1
        and array.ndim <= 1
        and math.isclose(float(array.reshape(())), expected, rel_tol=1e-6)
    )
