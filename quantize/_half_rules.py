"""Which nodes stay in float32, and why: operators, constants, ranges, and what rounding would move too far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from tx_export._graph import array_of
from tx_export.quantize._half_fills import is_fill
from tx_export.quantize._half_ranges import Ranges
from tx_export.quantize._half_types import Half, computes, has_form

__all__ = ["kept_nodes", "without_form"]

# Between a small number that keeps a divisor from 0 and the quotient.
_TO_QUOTIENT = {
    "Cast", "Clip", "Expand", "Identity", "Max", "Pow", "Reciprocal", "Reshape", "Sqrt", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
_HEADROOM = 2.0  # text that was not in the calibration may reach farther
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
          "SkipSimplifiedLayerNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization",
          "EmbedLayerNormalization", "BatchNormalization")  # fmt: skip
# As torch's autocast has it: sums of many, powers and their inverses.
_PRECISE = {
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Cos", "Cosh", "CumSum", "Exp", "Log", "LogSoftmax", "Mod", "Pow",
    "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "Sin", "Sinh", "Softplus", "Sqrt", "Tan",
}  # fmt: skip
_ANGLES = ("Sin", "Cos")
_ANGLE_STEP = 2.0**-8


def kept_nodes(graph: ir.Graph, half: Half, ranges: Ranges) -> dict[ir.Node, str]:
    """The nodes that compute in float32 and must go on so, in order, each with the reason."""
    nodes = [node for node in graph if computes(node)]
    rules: tuple[Callable[[ir.Node], str | None], ...] = (
        lambda node: without_form(node, half),
        lambda node: _rounded_constant(node, half),
        lambda node: _out_of_range(node, half, ranges),
        lambda node: _norm(node, half, ranges),
        _imprecise,
    )
    kept = {node: reason for node in nodes if (reason := next(filter(None, (rule(node) for rule in rules)), None))}
    for node in nodes:
        for reader in _quotients(node, half):
            kept.setdefault(reader, f"it divides by what {node.outputs[0].name} keeps from 0")
        reason = _sensitive(node, half, ranges)
        if reason is not None:
            kept[node] = kept.get(node, reason)
            for earlier in _before(node):
                kept.setdefault(earlier, f"{node.outputs[0].name} is computed from it: {reason}")
    return {node: kept[node] for node in nodes if node in kept}


def without_form(node: ir.Node, half: Half) -> str | None:
    """Why a node can't be half at all; None for most."""
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        return "it holds a graph of its own"
    return None if has_form(node, half) else f"{node.op_type} has no {half.name} form"


def _imprecise(node: ir.Node) -> str | None:
    if node.op_type in _PRECISE and not node.domain:
        return f"{node.op_type} needs more bits"
    if node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
        return "it squares"
    return None


def _rounded_constant(node: ir.Node, half: Half) -> str | None:
    for value in node.inputs:
        array = array_of(value)
        if value is None or array is None or value.dtype != ir.DataType.FLOAT or not array.size or is_fill(value):
            continue
        largest = float(np.abs(array).max())
        if math.isfinite(largest) and largest > half.largest:
            return f"its constant {value.name} reaches {largest:.4g}, over {half.largest:.4g}"
        lost = _lost(array, half)
        if lost > 4 * half.epsilon:
            return f"its constant {value.name} (up to {largest:.4g}) loses {lost:.0%} when it is rounded"
    return None


def _quotients(node: ir.Node, half: Half) -> Iterator[ir.Node]:
    """Where the node sets a least value that is 0 in half precision: what divides by it, and all on the way there."""
    arrays = [array for array in map(array_of, node.inputs) if array is not None and array.dtype == np.float32]
    if not any(array.size == 1 and 0 < abs(array.item()) < half.smallest for array in arrays):
        return
    todo = [node]
    while todo:
        readers = {use.node for value in todo.pop().outputs for use in value.uses()}
        yield from (reader for reader in readers if reader.op_type in _TO_QUOTIENT or reader.op_type in ("Div", "Mul"))
        todo += [reader for reader in readers if reader.op_type in _TO_QUOTIENT]


def _lost(array: np.ndarray, half: Half) -> float:
    """The size of the rounding, relative to that of the finite numbers."""
    finite = array[np.isfinite(array)].astype(np.float64)
    size = float(np.linalg.norm(finite))
    rounded = finite.astype(half.dtype.numpy()).astype(np.float64)
    return float(np.linalg.norm(rounded - finite)) / size if size else 0.0


def _out_of_range(node: ir.Node, half: Half, ranges: Ranges) -> str | None:
    for value in (*node.outputs, *node.inputs):
        largest = ranges.largest.get((value.name if value is not None else None) or "", 0.0)
        if largest > half.largest / _HEADROOM:
            return f"{value.name} reaches {largest:.4g}"  # type: ignore[union-attr]
        if 0 < largest < half.smallest * _HEADROOM:
            return f"{value.name} reaches no more than {largest:.4g}"  # type: ignore[union-attr]
    return None


def _norm(node: ir.Node, half: Half, ranges: Ranges) -> str | None:
    """Fused norms of some providers square and add the epsilon in half precision."""
    if node.op_type not in _NORMS:
        return None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    if np.array(epsilon).astype(half.dtype.numpy()) == 0:
        return f"its epsilon {epsilon:.4g} is 0 in {half.name}"
    sizes = (
        ranges.largest.get(value.name or "", 0.0) for value in (*node.inputs[:2], *node.outputs) if value is not None
    )
    largest = max(sizes, default=0.0)
    if largest**2 > half.largest / _HEADROOM:
        return f"its operand reaches {largest:.4g}, whose square is over {half.largest:.4g}"
    return None


def _sensitive(node: ir.Node, half: Half, ranges: Ranges) -> str | None:
    """Why all that a node is computed from must be exact; None for most."""
    size = ranges.scores.get(node.outputs[0].name or "", 0.0)
    noise = math.sqrt(2) * half.epsilon * size
    if noise > half.score_noise:
        return f"its scores are of the size {size:.2g}, so rounding moves them by {noise:.2g}"
    operand = node.inputs[0].name if node.inputs and node.inputs[0] is not None else None
    step = half.epsilon * ranges.largest.get(operand or "", math.inf)
    if node.op_type in _ANGLES and step > _ANGLE_STEP:
        return f"{node.op_type} of a large angle needs all its bits"
    becomes = node.outputs[0].dtype
    if node.op_type == "Cast" and becomes is not None and becomes.is_integer() and step > 1:
        return "whole numbers are made of it"
    return None


def _before(node: ir.Node) -> Iterable[ir.Node]:
    """The nodes of the graph that compute in float32 what this one is computed from."""
    found: dict[ir.Node, None] = {}
    todo = [node]
    while todo:
        for value in todo.pop().inputs:
            producer = value.producer() if value is not None and value.dtype == ir.DataType.FLOAT else None
            if producer is not None and producer not in found:
                found[producer] = None
                todo.append(producer)
    return found
