"""The two products of attention, as MatMul or Einsum: scores = q k^T and context = weights v, for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tx_export._graph import array_of

__all__ = [
    "Dims",
    "Operand",
    "broadcast",
    "context_product",
    "factor_of",
    "same",
    "same_all",
    "scalar",
    "scores_product",
    "shape_of",
]

Dims = Sequence[int | ir.SymbolicDim]


@dataclass(frozen=True)
class Operand:
    """A value read along these of its axes, [..., rows, columns]; an axis that it lacks is None and counts as 1."""

    value: ir.Value
    axes: tuple[int | None, ...]

    @property
    def dims(self) -> Dims:
        shape = shape_of(self.value)
        return [1 if axis is None else shape[axis] for axis in self.axes]


def shape_of(value: ir.Value | None) -> Dims:
    """The dimensions of a value; none where they are unknown."""
    return [] if value is None or value.shape is None else list(value.shape)


def same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """Whether two dimensions are known to be equal."""
    if isinstance(one, ir.SymbolicDim) and isinstance(other, ir.SymbolicDim):
        return one.value is not None and one.value == other.value
    return one == other


def same_all(one: Dims, other: Dims) -> bool:
    """Whether two shapes are known to be equal."""
    return len(one) == len(other) and all(map(same, one, other))


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """The shape of what is computed elementwise from values of these shapes, aligned at the last axis."""
    rank = max(map(len, shapes))
    padded = [[*[1] * (rank - len(shape)), *shape] for shape in shapes]
    return [next((dim for dim in axis if dim != 1), 1) for axis in zip(*padded, strict=True)]


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds, also where it is expanded."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Expand":
        value = node.inputs[0]
    array = array_of(value)
    return float(array.reshape(())) if array is not None and array.size == 1 and array.dtype.kind == "f" else None


def factor_of(node: ir.Node, inner: int) -> float | None:
    """The number by which a Mul or Div multiplies its input `inner`, if it is one that can be told and undone."""
    number = scalar(node.inputs[1 - inner])
    if number is None or number == 0 or not math.isfinite(number):
        return None
    return number if node.op_type == "Mul" else 1 / number


def scores_product(node: ir.Node) -> tuple[Operand, Operand] | str:
    """q [..., T, D] and k [..., S, D] of a product [..., T, S]."""
    q, k = node.inputs
    assert q is not None and k is not None
    if node.op_type == "MatMul":
        rank = len(shape_of(q))
        if rank != len(shape_of(k)):
            return f"its query and key have {rank} and {len(shape_of(k))} dimensions"
        return Operand(q, tuple(range(rank))), Operand(k, (*range(rank - 2), rank - 1, rank - 2))
    equation = _letters(node)
    if isinstance(equation, str):
        return equation
    of_q, of_k, out = equation
    if out[-1:] in of_q:
        q, k, of_q, of_k = k, q, of_k, of_q
    lead, shared = out[:-2], set(of_q) & set(of_k) - set(out)
    if len(shared) != 1 or set(of_q) - {*lead, out[-2], *shared} or set(of_k) - {*lead, out[-1], *shared}:
        return "its scores are summed over other axes than the channels of a head"
    (channel,) = shared
    return _operand(q, of_q, [*lead, out[-2], channel]), _operand(k, of_k, [*lead, out[-1], channel])


def context_product(node: ir.Node, weights: ir.Value) -> tuple[Operand, tuple[int, ...]] | str:
    """v [..., S, D] of a product with weights [..., T, S], and the order of [..., T, D] in its output."""
    left, v = node.inputs
    assert left is not None and v is not None
    rank = len(shape_of(weights))
    if node.op_type == "MatMul":
        if rank != len(shape_of(v)):
            return f"its weights and values have {rank} and {len(shape_of(v))} dimensions"
        return Operand(v, tuple(range(rank))), tuple(range(rank))
    equation = _letters(node)
    if isinstance(equation, str):
        return equation
    of_weights, of_v, out = equation
    if left is not weights:
        v, of_weights, of_v = left, of_v, of_weights
    lead, key = of_weights[:-2], of_weights[-1]
    channel = set(of_v) - {*lead, key}
    canonical = [*of_weights[:-1], *channel]
    if len(channel) != 1 or key not in of_v or sorted(canonical) != sorted(out):
        return "its weights are not summed over the keys"
    return _operand(v, of_v, [*lead, key, *channel]), tuple(canonical.index(letter) for letter in out)


def _letters(node: ir.Node) -> tuple[str, str, str] | str:
    """The axes of both inputs and of the output of an Einsum."""
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = [*inputs.split(","), out]
    if not arrow or len(terms) != 3 or len(out) < 3 or any(len(set(term)) < len(term) for term in terms):
        return f"its product is an Einsum of the form {equation}"
    return terms[0], terms[1], terms[2]


def _operand(value: ir.Value, letters: str, order: Sequence[str]) -> Operand:
    return Operand(value, tuple(letters.index(letter) if letter in letters else None for letter in order))
