"""From float32 to a half precision: which nodes stay, what their neighbours read, and every weight stored once.

A node of float32 either becomes half as a whole, or stays with a reason. Where the two meet stands one Cast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from tx_export._graph import array_of
from tx_export.errors import PassError
from tx_export.passes import Context, Coverage, GraphPass, Left, Outcome, Stored
from tx_export.quantize._half_fills import bring_fills_into_range
from tx_export.quantize._half_on_cpu import note_on
from tx_export.quantize._half_ranges import Ranges, measured
from tx_export.quantize._half_rules import kept_nodes, without_form
from tx_export.quantize._half_types import Half, computes, fill_in_types

__all__ = ["HalfPass"]

_INTEGER = ("DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "QAttention")


@dataclass(frozen=True)
class HalfPass(GraphPass):
    """Ranges are measured on calibration text; without any, only the weights are looked at."""

    keep_io: bool = True  # inputs and outputs stay float32
    keep: str = ""  # outputs of the nodes that stay, with | between them, or `none`; empty: decided by ranges and rules

    half: ClassVar[Half]

    def call(self, model: ir.Model) -> Outcome:
        return _to_half(model, self, self.context)


def _to_half(model: ir.Model, asked: HalfPass, context: Context | None) -> Outcome:
    """Convert the graph in place; nodes inside of control flow stay. PassError where it computes in 8 bits already."""
    graph, half, keep = model.graph, asked.half, asked.keep
    quantized = next((node for node in graph.all_nodes() if node.op_type in _INTEGER), None)
    if quantized is not None:
        raise PassError(
            f"{half.name}: the graph has {quantized.op_type}, so an 8-bit pass ran before; each of its products would "
            "stand between casts; choose one of the two"
        )
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fill_in_types(graph)
    nodes = [node for node in graph if computes(node)]
    kept = _listed(nodes, half, keep) if keep else kept_nodes(graph, half, _ranges(model, context))
    lowered = {node for node in nodes if node not in kept}
    if not any(_has_weight(node) for node in lowered):
        lowered.clear()  # nothing would be smaller
    bring_fills_into_range(graph, lowered)
    stored = _store(graph, half, lowered)
    if lowered:
        _lower(graph, half.dtype, lowered, asked.keep_io)
    RemoveUnusedNodesPass()(model)
    left = tuple(Left(node.outputs[0].name or node.op_type, reason) for node, reason in kept.items())
    notes = (note_on(model, half.name, context.provider),) if lowered and context is not None else ()
    repeat = dataclasses.replace(asked, keep="|".join(each.name for each in left) or "none")
    coverage = Coverage(len(lowered), len(nodes), left + notes, repeat=(repeat,), stored=stored)
    return Outcome(model, bool(lowered), coverage, subject="quantized")


def _listed(nodes: Sequence[ir.Node], half: Half, keep: str) -> dict[ir.Node, str]:
    """The nodes whose outputs are listed, and those that can't be half."""
    names = set(keep.split("|")) - {"none"}
    unknown = sorted(names - {node.outputs[0].name for node in nodes})
    if unknown:
        raise PassError(f"{half.name}: keep lists {', '.join(unknown)}, which no node of float32 makes")
    reasons = {node: "listed" if node.outputs[0].name in names else without_form(node, half) for node in nodes}
    return {node: reason for node, reason in reasons.items() if reason is not None}


def _ranges(model: ir.Model, context: Context | None) -> Ranges:
    """Of the graph with its fills in range: how far they reach is no matter of what the model computes."""
    if context is None or not (context.feeds or context.probes):
        return Ranges()
    copy = model.clone()
    bring_fills_into_range(copy.graph, set(copy.graph))
    return measured(copy, context)


def _has_weight(node: ir.Node) -> bool:
    return any(array_of(value) is not None for value in node.inputs if value and value.dtype == ir.DataType.FLOAT)


def _lower(graph: ir.Graph, half: ir.DataType, lowered: Collection[ir.Node], keep_io: bool) -> None:
    # Types are set as new objects: values share theirs with those that they replaced or were cloned from.
    produced = [value for node in graph for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    inputs = [value for value in graph.inputs if value.dtype == ir.DataType.FLOAT]
    for node in lowered:
        _lower_attributes(node, half)
    for value in produced:
        if not (value.uses() or value.is_graph_output()):  # it may stay float32, as the deviation of a norm does
            value.type = value.shape = None
        elif value.producer() in lowered:
            value.type = ir.TensorType(half)
    for value in inputs if not keep_io else ():
        value.type = ir.TensorType(half)
    constants = [value for value in graph.initializers.values() if value.dtype in (half, ir.DataType.FLOAT)]
    for value in (*produced, *inputs, *constants):
        _connect(graph, value, half, lowered)
    wanted = ir.DataType.FLOAT if keep_io else half
    for index, value in enumerate(graph.outputs):
        if value.dtype in (half, ir.DataType.FLOAT) and value.dtype != wanted:
            _cast_output(graph, index, wanted)


def _lower_attributes(node: ir.Node, half: ir.DataType) -> None:
    """What an operator makes by an attribute: the type of a cast, and the values of constants."""
    to = node.attributes.get("to")
    if node.op_type == "Cast" and to is not None and to.as_int() == ir.DataType.FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", half)
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == ir.DataType.FLOAT:
            narrow = ir.tensor(attribute.as_tensor().numpy().astype(half.numpy()))
            node.attributes[name] = ir.AttrTensor(name, narrow)


def _store(graph: ir.Graph, half: Half, lowered: Collection[ir.Node]) -> tuple[Stored, ...]:
    """Round the constants that half nodes read; returns the weights among them."""
    weights = []
    for value in graph.initializers.values():
        array = array_of(value)
        read = any(use.node in lowered for use in value.uses())
        if array is None or value.dtype != ir.DataType.FLOAT or not read:
            continue
        value.const_value = ir.tensor(array.astype(half.dtype.numpy()), name=value.name)
        value.type = ir.TensorType(half.dtype)
        if array.ndim > 1:
            weights.append(Stored((value.name or "").removesuffix(".T"), array.nbytes, array.nbytes // 2, half.name))
    return tuple(weights)


def _connect(graph: ir.Graph, value: ir.Value, half: ir.DataType, lowered: Collection[ir.Node]) -> None:
    """Let each reader have the value in its own precision: one cast for all that read the other one."""
    has_half = value.dtype == half
    others = [use for use in value.uses() if (use.node in lowered) != has_half]
    if not others:
        return
    cast = _cast(graph, value, ir.DataType.FLOAT if has_half else half)
    for use in others:
        use.node.replace_input_with(use.idx, cast)


def _cast(graph: ir.Graph, value: ir.Value, to: ir.DataType) -> ir.Value:
    node = ir.node("Cast", [value], {"to": int(to)})
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, node)
    else:
        graph.insert_before(graph[0], node)
    out = node.outputs[0]
    out.type, out.shape = ir.TensorType(to), value.shape
    return out


def _cast_output(graph: ir.Graph, index: int, to: ir.DataType) -> None:
    value = graph.outputs[index]
    name, value.name = value.name, f"{value.name}.inner"
    out = _cast(graph, value, to)
    out.name = name
    graph.outputs[index] = out
