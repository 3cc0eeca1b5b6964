"""Dividing the channels of a value where it is made: by the constants of a norm, of a linear layer, of v."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, array_of, linear_at
from tx_export.quantize._weights import attention_left

__all__ = ["Edit", "apply_edits", "fold", "is_alone", "rescale"]

# By operator: which inputs are the weight and bias that its first output is linear in.
_NORMS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    ("com.microsoft", "SkipLayerNormalization"): (2, 3),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (2,),
}
_HOMOGENEOUS = ("Identity", "Relu", "LeakyRelu", "Neg", "Abs")  # f(a x) = a f(x) for a > 0


@dataclass(frozen=True)
class Edit:
    """The constant that is this input of this node, times a factor that its shape takes."""

    node: ir.Node
    index: int
    factor: np.ndarray


def fold(value: ir.Value, readers: Collection[ir.Node], factor: np.ndarray) -> list[Edit] | None:
    """What multiplies the channels of a value by a factor [K] > 0; None if that takes a node of its own.

    `readers` are those that want it so; with others beside them, or where it is an output, it can't be changed.
    """
    node = value.producer()
    if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
        return None
    kind = (node.domain, node.op_type)
    if kind in _NORMS:
        return _norm(node, value, factor)
    if kind in (("", "MatMul"), ("", "Gemm")):
        return _linear(node, factor)
    if kind in _RULES:
        return _RULES[kind](node, value, factor)
    return _input(node, 0, factor) if not node.domain and node.op_type in _HOMOGENEOUS else None


def apply_edits(edits: Sequence[Edit]) -> None:
    """A constant that others read too stays theirs."""
    for edit in edits:
        constant = edit.node.inputs[edit.index]
        array = array_of(constant)
        assert constant is not None and array is not None
        if is_alone(constant):
            rescale(constant, array * edit.factor)
        else:
            graph = edit.node.graph
            assert isinstance(graph, ir.Graph)
            scaled = add_initializer(graph, f"{constant.name}.scaled", array * edit.factor)
            edit.node.replace_input_with(edit.index, scaled)


def rescale(constant: ir.Value, array: np.ndarray) -> None:
    """Give a constant another array, under its name."""
    constant.const_value = ir.tensor(np.asarray(array, np.float32, order="C"), name=constant.name)
    constant.shape = ir.Shape(array.shape)


def _norm(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    constants = [index for index in _NORMS[node.domain, node.op_type] if _input_of(node, index) is not None]
    arrays = [array_of(node.inputs[index]) for index in constants]
    if value is not node.outputs[0] or any(array is None or array.shape != factor.shape for array in arrays):
        return None
    return [Edit(node, index, factor) for index in constants]


def _linear(node: ir.Node, factor: np.ndarray) -> list[Edit] | None:
    """Columns of the weight; a weight that others read too is not stored twice for it."""
    linear = linear_at(node)
    if isinstance(linear, str) or linear.weight.dtype != np.float32:
        return None
    value = node.inputs[1]
    producer = value.producer() if value is not None else None
    reader = node if producer is None else producer  # a Transpose
    if not is_alone(value) or not is_alone(linear.weight_value):
        return None
    weight = Edit(reader, 1 if producer is None else 0, factor[:, None] if linear.turned else factor)
    return [weight, Edit(node, 2, factor)] if _input_of(node, 2) is not None else [weight]


def _sum(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    parts = [_operand(node, index, factor) for index in (0, 1)]
    if node.inputs[0] is node.inputs[1] or any(part is None for part in parts):
        return None
    return [edit for part in parts if part is not None for edit in part]


def _product(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    """One of the two: a constant if there is one."""
    if node.inputs[0] is node.inputs[1]:
        return None
    order = sorted((0, 1), key=lambda index: array_of(node.inputs[index]) is None)
    parts = [_operand(node, index, factor) for index in order]
    return next((part for part in parts if part is not None), None)


def _quotient(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    return None if node.inputs[0] is node.inputs[1] else _operand(node, 0, factor)


def _operand(node: ir.Node, index: int, factor: np.ndarray) -> list[Edit] | None:
    """Of an elementwise operator: a constant takes any shape that broadcasts."""
    array = array_of(node.inputs[index])
    if array is None:
        return _input(node, index, factor)
    return [Edit(node, index, factor)] if array.dtype == np.float32 else None


def _input(node: ir.Node, index: int, factor: np.ndarray) -> list[Edit] | None:
    """What is computed, with as many channels."""
    value = _input_of(node, index)
    if value is None or value.shape is None or not value.shape or value.shape[-1] != len(factor):
        return None
    return fold(value, (node,), factor)


def _split(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    """The channels of one part."""
    whole, sizes = node.inputs[0], array_of(_input_of(node, 1))
    rank = None if whole is None or whole.shape is None else len(whole.shape)
    if rank is None or sizes is None or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    number = list(node.outputs).index(value)
    parts = [np.ones(size, factor.dtype) for size in sizes]
    parts[number] = factor
    return _input(node, 0, np.concatenate(parts))


def _packed_attention(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    """Attention is linear in v: the last columns of the weight and bias."""
    weight = array_of(node.inputs[1])
    if weight is None or attention_left(node) is not None or not is_alone(node.inputs[1]):
        return None
    columns = np.ones(weight.shape[1], factor.dtype)
    columns[-len(factor) :] = factor
    return [Edit(node, 1, columns), Edit(node, 2, columns)]


def _attention(node: ir.Node, value: ir.Value, factor: np.ndarray) -> list[Edit] | None:
    """v [B, S, K] of as many heads as there are queries; its bias stands behind those of q and k."""
    v, bias = _input_of(node, 2), _input_of(node, 3) if node.domain else None
    has_past = any(_input_of(node, index) is not None for index in (range(6, 10) if node.domain else (4, 5)))
    used = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    if v is None or v.shape is None or len(v.shape) != 3 or has_past or used or bias is not None:
        return None
    return None if v in node.inputs[:2] else _input(node, 2, factor)


_RULES: dict[tuple[str, str], Callable[[ir.Node, ir.Value, np.ndarray], list[Edit] | None]] = {
    ("", "Add"): _sum,
    ("", "Mul"): _product,
    ("", "Div"): _quotient,
    ("", "Split"): _split,
    ("", "Attention"): _attention,
    ("com.microsoft", "MultiHeadAttention"): _attention,
    ("com.microsoft", "Attention"): _packed_attention,
}


def _input_of(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def is_alone(constant: ir.Value | None) -> bool:
    """Read at one place only."""
    return constant is not None and len(constant.uses()) == 1 and not constant.is_graph_output()
