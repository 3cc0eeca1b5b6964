"""What is added to the scores of attention, as the operator takes it: a key padding mask, or a bias for each pair.

Steps between product and softmax are summed up as scores * scale + offset. A number that a mask puts in the place of a
score becomes one that is added: so low that nothing is left of the score, and rows without a visible key stay even.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer
from tx_export.optimize._attention_match import Step
from tx_export.optimize._attention_products import Dims, broadcast, same, same_all, shape_of
from tx_export.optimize._attention_rows import emit, integers, times
from tx_export.optimize._attention_values import finite, low_constants, narrow, value_set

__all__ = ["Mask", "masked", "scale_of"]

_LOWEST = float(np.finfo(np.float32).min)
_HIDES = -1e4  # e^x of what is that much lower is zero in float32
_ABSORBS = -1e9  # a score up to 32 is rounded away when it is added


@dataclass(frozen=True)
class Mask:
    """Inputs of the operator: keys int32 [B, S] with what is added where they are 0, and bias float [., ., T, S]."""

    keys: ir.Value | None = None
    fill: float = 0.0
    bias: ir.Value | None = None


def scale_of(steps: Sequence[Step]) -> float:
    """What a score is multiplied by on its way to the softmax."""
    return math.prod(step.number for step in steps if step.kind == "times")


def masked(before: ir.Node, steps: Sequence[Step], dims: Dims, q: ir.Value, k: ir.Value) -> Mask | str:
    """The mask that the steps make of scores [B, H, T, S], or why it can't be expressed."""
    offset = _offset(before, steps, dims)
    if offset is None or isinstance(offset, str):
        return offset or Mask()
    batch, _, queries, keys = dims
    mine = shape_of(offset)
    values = value_set(offset)
    fill = min(values, default=0.0) if values is not None else 0.0
    by_key = same(mine[0], batch) and mine[1] == 1 and mine[2] == 1 and same(mine[3], keys)
    if by_key and values == frozenset((0.0, fill)) and -math.inf < fill < 0:
        return Mask(keys=_visible(before, offset, [batch, keys]), fill=fill)
    if not (same(mine[2], queries) and same(mine[3], keys)):
        sizes = [
            emit(
                before, "Shape", [value], [1], ir.AttrInt64("start", 1), ir.AttrInt64("end", 2), dtype=ir.DataType.INT64
            )
            for value in (q, k)
        ]
        shape = emit(
            before, "Concat", [integers(before, 1, 1), *sizes], [4], ir.AttrInt64("axis", 0), dtype=ir.DataType.INT64
        )
        offset = emit(before, "Expand", [offset, shape], [*mine[:2], queries, keys])
    return Mask(bias=offset)


def _visible(before: ir.Node, offset: ir.Value, dims: Dims) -> ir.Value:
    flat = emit(before, "Reshape", [offset, integers(before, 0, -1)], dims)
    zero = emit(before, "Equal", [flat, _number(before, 0.0)], dims, dtype=ir.DataType.BOOL)
    to = ir.AttrInt64("to", ir.DataType.INT32)
    return emit(before, "Cast", [zero], dims, to, dtype=ir.DataType.INT32)


def _offset(before: ir.Node, steps: Sequence[Step], dims: Dims) -> ir.Value | str | None:
    """What the steps make of scores of zero; None if they only scale."""
    fills = _fills(steps)
    if isinstance(fills, str):
        return fills
    offset: ir.Value | None = None
    for at, step in enumerate(steps):
        if step.value is None:
            continue
        part = finite(step.value) if fills.all_infinite else step.value
        lifted = _lifted(before, part, step.rank, dims)
        if isinstance(lifted, str):
            return lifted
        if step.kind in ("plus", "minus"):
            factor = scale_of(steps[at:]) * (1 if step.kind == "plus" else -1)
            if factor != 1:
                lifted = emit(before, "Mul", [lifted, _number(before, factor)], shape_of(lifted))
            offset = lifted if offset is None else _join(before, "Add", [offset, lifted])
            continue
        fill = _number(before, fills.numbers[at])
        score = _number(before, 0.0) if offset is None else offset
        offset = _join(before, "Where", [lifted, fill, score] if step.kind == "hidden" else [lifted, score, fill])
    return offset


@dataclass(frozen=True)
class _Fills:
    numbers: dict[int, float]  # by the place of the step
    all_infinite: bool  # every number that hides is -inf, and the lowest one does as well


def _fills(steps: Sequence[Step]) -> _Fills | str:
    """What to add in the place of each number that a mask puts in."""
    put = {at: step.number * scale_of(steps[at:]) for at, step in enumerate(steps) if step.kind in ("hidden", "kept")}
    added = [low_constants(step.value, _HIDES) for step in steps if step.kind in ("plus", "minus") and step.value]
    known = {number for numbers in added if numbers is not None for number in numbers}
    if None not in added and {*put.values(), *known} == {-math.inf}:
        return _Fills(dict.fromkeys(put, _LOWEST), True)
    if any(not number <= _HIDES for number in put.values()):
        return f"its mask puts in {max(put.values()):g}, which hides nothing for sure"
    alone = None not in added and not known and len(set(put.values())) == 1
    if any(number > _ABSORBS for number in put.values()) and not (alone and _is_last(steps)):
        return f"its mask puts in {max(put.values()):g} beside other masks and biases"
    return _Fills(dict.fromkeys(put, _LOWEST) if alone else put, False)


def _is_last(steps: Sequence[Step]) -> bool:
    """Whether nothing is added to a number that a mask put in: it would make uneven what is even."""
    kinds = [step.kind for step in steps if step.kind != "times"]
    return not {"plus", "minus"} & set(itertools.dropwhile(lambda kind: kind in ("plus", "minus"), kinds))


def _lifted(before: ir.Node, value: ir.Value, rank: int, dims: Dims) -> ir.Value | str:
    """A value that is broadcast to scores of that rank, with four axes that fit to [B, H, T, S]."""
    value = narrow(value)
    shape = shape_of(value)
    if value.shape is None or len(shape) > rank:
        return "its mask has an unknown shape"
    heads = int(dims[1])  # type: ignore[arg-type]
    if rank == 3 and len(shape) == 3 and heads > 1 and same(shape[0], times(dims[0], heads)):
        value = _headed(before, value, heads, dims)
    elif rank == 3 and heads == 1:
        value = _unsqueezed(before, value, len(shape) - 2) if len(shape) == 3 else value
    value = narrow(value)
    while len(shape_of(value)) < 4:
        value = _unsqueezed(before, value, 0)
    mine = shape_of(value)
    if not all(one == 1 or same(one, other) for one, other in zip(mine, dims, strict=True)):
        return f"its mask has the shape [{', '.join(map(str, mine))}], its scores [{', '.join(map(str, dims))}]"
    return value


def _headed(before: ir.Node, value: ir.Value, heads: int, dims: Dims) -> ir.Value:
    """[B, H, ., .] of [B * H, ., .]."""
    node, shape = value.producer(), shape_of(value)
    source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if source is not None and same_all(shape_of(source), [dims[0], heads, *shape[1:]]):
        return source
    assert value.dtype is not None
    start = ir.AttrInt64("start", 1)
    tail = emit(before, "Shape", [value], [2], start, dtype=ir.DataType.INT64)
    axis = ir.AttrInt64("axis", 0)
    target = emit(before, "Concat", [integers(before, -1, heads), tail], [4], axis, dtype=ir.DataType.INT64)
    return emit(before, "Reshape", [value, target], [dims[0], heads, *shape[1:]], dtype=value.dtype)


def _unsqueezed(before: ir.Node, value: ir.Value, axis: int) -> ir.Value:
    shape = list(shape_of(value))
    assert value.dtype is not None
    return emit(
        before, "Unsqueeze", [value, integers(before, axis)], [*shape[:axis], 1, *shape[axis:]], dtype=value.dtype
    )


def _join(before: ir.Node, op: str, values: list[ir.Value]) -> ir.Value:
    return emit(before, op, values, broadcast([shape_of(value) for value in values]))


def _number(before: ir.Node, number: float) -> ir.Value:
    assert isinstance(before.graph, ir.Graph)
    return add_initializer(before.graph, f"attention.{number:g}", np.array(number, np.float32))
