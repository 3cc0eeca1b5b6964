"""Fold constants, drop what nothing reads, and turn the weights of linear layers around once, not at every run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    IdentityEliminationPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from onnxscript.optimizer import fold_constants_ir

from tx_export._graph import add_initializer, array_of
from tx_export.passes import Coverage, GraphPass, Outcome

__all__ = ["FoldConstants"]

_FOLDED_BYTES = 1 << 20  # larger results are computed at run time: folding must not make the file grow
# Products whose zero points ONNX Runtime changes on CPUs without VNNI: one for several can't be changed twice.
_INTEGER = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention", "QLinearMatMul", "QGemm")


@dataclass(frozen=True)
class FoldConstants(GraphPass):
    """Constant folding by onnxscript; a tied weight (read by more than one node) keeps its one stored form."""

    def call(self, model: ir.Model) -> Outcome:
        before, ends = _shape_of(model), [value.name for value in model.graph.outputs]
        InlinePass()(model)
        # Without onnxscript's rewrite rules, which take any number below 1e-8 for zero.
        fold_constants_ir(
            model,
            onnx_shape_inference=True,
            input_size_limit=_FOLDED_BYTES,
            output_size_limit=_FOLDED_BYTES,
            should_fold=_not_a_weight,
        )
        RemoveUnusedOpsetsPass()(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        joined = sum(_join(model.graph, node) for node in list(model.graph) if _is_join(node))
        if not any(node.op_type in _INTEGER for node in model.graph.all_nodes()):
            DeduplicateInitializersPass(size_limit=1 << 62)(model)
        CommonSubexpressionEliminationPass()(model)
        turned = sum(_take(model.graph, node) for node in list(model.graph) if node.op_type == "Slice")
        turned += sum(_turn(model.graph, node) for node in list(model.graph) if _is_turned_weight(node))
        IdentityEliminationPass()(model)
        RemoveUnusedNodesPass()(model)
        _leave_out(model.graph)
        _part_outputs(model.graph, ends)
        after = _shape_of(model)
        return Outcome(model, before != after or joined + turned > 0, Coverage(max(before[0] - after[0], 0), before[0]))


def _shape_of(model: ir.Model) -> tuple[int, int]:
    return len(model.graph), len(model.graph.initializers)


def _leave_out(graph: ir.Graph) -> None:
    """Take the names of outputs that nothing reads: ONNX Runtime's own operators then don't compute them."""
    for node in graph:
        for value in node.outputs[1:] if node.domain == "com.microsoft" else ():
            if not value.uses() and not value.is_graph_output():
                value.name = ""


def _part_outputs(graph: ir.Graph, names: list[str | None]) -> None:
    """Give each output its own value and name again, where outputs that are equal became one."""
    seen: set[ir.Value] = set()
    for index, (value, name) in enumerate(zip(list(graph.outputs), names, strict=True)):
        if value in seen:
            node = ir.Node("", "Identity", [value])
            graph.append(node)
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            value = graph.outputs[index] = node.outputs[0]
        if value not in graph.inputs:
            value.name = name
        seen.add(value)


def _not_a_weight(node: ir.Node) -> bool | None:
    # None leaves the decision to onnxscript. Weights are turned and joined below; embeddings are looked up, not folded.
    return False if _is_turned_weight(node) or _is_join(node) else None


def _is_join(node: ir.Node) -> bool:
    """Whether weights are put together here, or multiplied."""
    if node.op_type not in ("Concat", "Mul") or node.domain not in ("", "ai.onnx"):
        return False
    arrays = [array_of(value) for value in node.inputs]
    return all(array is not None and array.dtype.kind == "f" for array in arrays) and any(map(_is_weight, node.inputs))


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and "." in str(value.name)


def _join(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace Concat or Mul of weights, of any size, by its result with their name, unless the file would grow."""
    arrays = [array for array in map(array_of, node.inputs) if array is not None]
    inputs = [value for value in node.inputs if value is not None and value.is_initializer()]
    mine = [value for value in inputs if len(value.uses()) == 1 and not value.is_graph_output()]
    if node.op_type == "Mul":
        result = arrays[0] * arrays[1]
    else:
        result = np.concatenate(arrays, node.attributes.get_int("axis", 0))
    freed = sum(array.nbytes for value, array in zip(node.inputs, arrays, strict=True) if value in mine)
    if result.nbytes - freed > _FOLDED_BYTES or node.outputs[0].is_graph_output():
        return False
    names = [str(value.name) for value in node.inputs if value is not None and _is_weight(value)]
    out = node.outputs[0]
    for value in mine:
        node.replace_input_with(list(node.inputs).index(value), None)
        graph.initializers.pop(str(value.name))
    out.replace_all_uses_with(add_initializer(graph, _joined_name(names), result))
    graph.remove(node, safe=True)
    return True


def _joined_name(names: list[str]) -> str:
    """layer.query.weight, layer.key.weight and layer.value.weight are layer.qkv.weight together."""
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) > 1:
        return names[0]
    found = ["_".join(dict.fromkeys(each)) for each in zip(*parts, strict=True)]
    return ".".join("qkv" if part == "query_key_value" else part for part in found)


def _is_turned_weight(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and array_of(node.inputs[0]) is not None


def _take(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace Slice(weight) by what it takes, where the whole weight is read by nothing but slices."""
    weight, *given = node.inputs
    arrays = [array_of(value) for value in given]
    array = array_of(weight)
    if weight is None or array is None or any(each is None for each in arrays) or node.outputs[0].is_graph_output():
        return False
    if weight.is_graph_output() or any(use.node.op_type != "Slice" for use in weight.uses()):
        return False
    starts, ends, axes, steps = (*arrays, None, None)[:4]
    assert starts is not None and ends is not None
    axes = np.arange(starts.size) if axes is None else axes
    steps = np.ones_like(starts) if steps is None else steps
    taken = [slice(None)] * array.ndim
    for start, end, axis, step in zip(*(each.tolist() for each in (starts, ends, axes, steps)), strict=True):
        taken[axis] = slice(start, end, step)
    number = [use.node for use in weight.uses()].index(node)
    node.outputs[0].replace_all_uses_with(add_initializer(graph, f"{weight.name}.{number}", array[tuple(taken)]))
    graph.remove(node, safe=True)
    if not weight.uses():
        graph.initializers.pop(str(weight.name))
    return True


def _turn(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace Transpose(weight) by a stored transpose, unless others read the weight as it is."""
    weight = node.inputs[0]
    assert weight is not None and weight.const_value is not None and weight.name is not None
    if len(weight.uses()) > 1 or weight.is_graph_output() or node.outputs[0].is_graph_output():
        return False
    perm = node.attributes.get_ints("perm", None)
    array = weight.const_value.numpy().transpose(perm)
    node.outputs[0].replace_all_uses_with(add_initializer(graph, f"{weight.name}.T", array))
    graph.remove(node, safe=True)
    graph.initializers.pop(weight.name)
    return True
