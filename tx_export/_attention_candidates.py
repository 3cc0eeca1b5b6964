"""Where attention may have been written by hand: a softmax between two products of computed values."""

from __future__ import annotations

import onnx_ir as ir

from tx_export._graph import array_of

__all__ = ["candidates", "comes_from_product", "is_product"]

# What may stand between a product and the softmax in something that is attention at heart.
_ELEMENTWISE = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Where",
    "Max",
    "Min",
    "Clip",
    "Tanh",
    "IsNaN",
    "Cast",
    "Identity",
    "ScatterND",
)
_PASSED = frozenset((*_ELEMENTWISE, "Reshape", "Transpose", "Unsqueeze", "Squeeze"))
_NEAR = 40  # values looked at


def candidates(graph: ir.Graph) -> list[ir.Node]:
    """Each softmax of what comes from a product of computed values whose result goes into another one."""
    return [
        node
        for node in graph
        if node.op_type == "Softmax" and comes_from_product(node.inputs[0]) and _goes_into(node.outputs[0])
    ]


def comes_from_product(value: ir.Value | None) -> bool:
    """Whether a product of computed values is near, seen backwards, with at most one by a constant on the way."""
    seen, ahead = 0, [(value, 1)]
    while ahead and seen < _NEAR:
        value, allowed = ahead.pop(0)
        node = value.producer() if value is not None else None
        seen += 1
        if is_product(node):
            return True
        if node is None:
            continue
        constant = node.op_type in ("MatMul", "Einsum")
        if node.op_type in _PASSED or (constant and allowed):
            ahead += [(item, allowed - constant) for item in node.inputs if array_of(item) is None]
    return False


def _goes_into(value: ir.Value) -> bool:
    seen, ahead = 0, [(value, 1)]
    while ahead and seen < _NEAR:
        value, allowed = ahead.pop(0)
        for use in value.uses():
            node, seen = use.node, seen + 1
            if is_product(node) and (use.idx == 0 or node.op_type == "Einsum"):
                return True
            constant = node.op_type in ("MatMul", "Einsum")
            if node.op_type in _PASSED or (constant and allowed):
                ahead += [(output, allowed - constant) for output in node.outputs]
    return False


def is_product(node: ir.Node | None) -> bool:
    """Whether a node multiplies two computed matrices."""
    return (
        node is not None
        and not node.domain
        and node.op_type in ("MatMul", "Einsum")
        and len(node.inputs) == 2
        and all(array_of(value) is None for value in node.inputs)
    )
