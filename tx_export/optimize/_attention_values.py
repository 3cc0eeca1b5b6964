"""Which numbers a mask can hold, read from the nodes that make it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, array_of
from tx_export.optimize._attention_products import broadcast, shape_of
from tx_export.optimize._attention_rows import emit

__all__ = ["finite", "low_constants", "narrow", "value_set"]

_MOST = 4  # different numbers in a set, constants looked at
_FAR = 64  # values looked at
_NEAR = 8  # nodes behind one another
_PLACED = ("Expand", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Trilu", "Unsqueeze", "Flatten", "Tile")
_LAYOUT = frozenset(("Cast", "Identity", "Neg", *_PLACED))
_TRUTHS = frozenset(
    ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor", "IsNaN", "IsInf")
)
_CASTS: dict[ir.DataType | None, Callable[[float], float]] = {
    ir.DataType.BOOL: bool,
    ir.DataType.FLOAT: float,
    ir.DataType.INT32: np.trunc,
    ir.DataType.INT64: np.trunc,
}
_STEEP = frozenset(("Exp", "Log", "Pow", "Reciprocal"))
_SUMS = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


def value_set(value: ir.Value | None, depth: int = 2 * _NEAR) -> frozenset[float] | None:
    """All numbers that a value can hold, if they are known to be few; inputs named *mask hold 0 and 1 by contract."""
    if value is None or depth == 0:
        return None
    array = array_of(value)
    if array is not None:
        return _few(np.unique(array).tolist()) if array.dtype.kind in "biuf" and array.size <= 1 << 20 else None
    if value.is_graph_input():
        is_mask = value.dtype == ir.DataType.BOOL or (_is_integer(value) and (value.name or "").endswith("mask"))
        return frozenset((0.0, 1.0)) if is_mask else None
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type in _TRUTHS:
        return frozenset((0.0, 1.0))
    known = []
    for source in _sources(node):
        numbers = value_set(source, depth - 1)
        if numbers is None:
            return None
        known.append(numbers)
    if not known:
        return None
    if node.op_type == "Cast":
        cast = _CASTS.get(value.dtype)
        return None if cast is None else _few(map(cast, known[0]))
    if node.op_type == "Neg":
        return _few(-x for x in known[0])
    if node.op_type == "Div" and _is_integer(value):
        return None
    if node.op_type in _SUMS:
        with np.errstate(all="ignore"):
            pairs = itertools.product(*known)
            return _few(float(_SUMS[node.op_type](np.float32(x), np.float32(y))) for x, y in pairs)
    return _few([*itertools.chain.from_iterable(known), *([0.0] if node.op_type == "Trilu" else [])])


def low_constants(value: ir.Value, limit: float) -> set[float] | None:
    """The constants of a size of -limit and more that a value is made of; None where something else may be as low."""
    found: set[float] = set()
    ahead: list[ir.Value | None] = [value]
    for _ in range(_FAR):
        if not ahead:
            return found
        item = ahead.pop()
        array, node = array_of(item), item.producer() if item is not None else None
        if array is not None and array.dtype.kind in "iuf":
            numbers = np.unique(array[np.abs(array) >= -limit].astype(np.float64))[:_MOST]
            found |= set(numbers.tolist())
        elif item is not None and item.is_graph_input() and not _is_integer(item):
            return None
        elif node is not None:
            if node.op_type in _STEEP or (node.op_type == "Div" and array_of(node.inputs[1]) is None):
                return None
            ahead += _sources(node)
    return None


def narrow(value: ir.Value, depth: int = _NEAR) -> ir.Value:
    """The same without the Expand in it, where broadcasting does that: smaller, and maybe with a rank less."""
    node = value.producer()
    if node is None or node.domain or depth == 0 or value.dtype is None:
        return value
    if node.op_type == "Expand" and node.inputs[0] is not None:
        return narrow(node.inputs[0])
    if node.op_type not in {*_SUMS, *_TRUTHS, "Cast", "Where"}:
        return value
    inputs = [narrow(source, depth - 1) for source in node.inputs if source is not None]
    if inputs == list(node.inputs):
        return value
    dims = broadcast([shape_of(source) for source in inputs])
    return emit(node, node.op_type, inputs, dims, *node.attributes.values(), dtype=value.dtype)


def finite(value: ir.Value) -> ir.Value:
    """The same with the lowest float in the place of each -inf constant that it is made of."""
    array, node = array_of(value), value.producer()
    if array is not None and array.dtype == np.float32 and np.isneginf(array).any():
        graph = value.graph
        assert graph is not None
        return add_initializer(graph, f"{value.name}.finite", np.maximum(array, np.finfo(np.float32).min))
    if array is not None or node is None or node.domain:
        return value
    sources = _sources(node)
    changed = {source: new for source in sources if source is not None and (new := finite(source)) is not source}
    if not changed:
        return value
    inputs = [changed.get(source, source) if source is not None else None for source in node.inputs]
    assert value.dtype is not None
    return emit(node, node.op_type, inputs, shape_of(value), *node.attributes.values(), dtype=value.dtype)


def _sources(node: ir.Node) -> list[ir.Value | None]:
    """The inputs whose numbers, or sums of whose numbers, the output holds; none for what computes otherwise."""
    if node.domain:
        return []
    if node.op_type in _SUMS or node.op_type in ("Clip", "Concat", "Max", "Min"):
        return list(node.inputs)
    if node.op_type == "Where":
        return list(node.inputs[1:])
    return list(node.inputs[:1]) if node.op_type in _LAYOUT else []


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and (value.dtype.is_integer() or value.dtype == ir.DataType.BOOL)


def _few(numbers: Iterable[float]) -> frozenset[float] | None:
    found = frozenset(float(number) for number in numbers)
    return found if len(found) <= _MOST and not any(np.isnan(number) for number in found) else None
