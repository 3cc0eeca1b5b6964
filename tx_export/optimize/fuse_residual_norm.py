"""Fuse a residual connection with its norm: Add and LayerNormalization -> com.microsoft::SkipLayerNormalization."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from tx_export._graph import add_node, array_of, only_use, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseResidualNorm"]


@dataclass(frozen=True)
class FuseResidualNorm(GraphPass):
    """For GPUs, where it saves a kernel launch; on CPUs the fused operator is slower than the two it replaces."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.op_type == "LayerNormalization"]
        left = []
        for node in candidates:
            found = _residual_before(node)
            if isinstance(found, str):
                left.append(Left(node.outputs[0].name or node.op_type, found))
                continue
            inputs = [*found, *node.inputs[1:3]]
            attributes = {"epsilon": ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5))}
            sum_is_read = only_use(node.inputs[0]) is not node  # type: ignore[arg-type]
            outputs = add_node(
                node, "com.microsoft::SkipLayerNormalization", inputs, attributes, outputs=4 if sum_is_read else 1
            )
            if sum_is_read:  # pre-norm: the sum goes on beside the norm
                for unused in outputs[1:3]:
                    unused.name = ""
                replace(node.inputs[0], outputs[3])  # type: ignore[arg-type]
            replace(node.outputs[0], outputs[0])
        RemoveUnusedNodesPass()(model)
        TopologicalSortPass()(model)  # a reader of the sum may stand before the norm
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _residual_before(norm: ir.Node) -> tuple[ir.Value, ir.Value] | str:
    value = norm.inputs[0]
    add = value.producer() if value is not None else None
    if value is None or add is None or add.op_type != "Add" or add.domain:
        return "no addition before it"
    x, skip = add.inputs
    if x is None or skip is None or array_of(x) is not None or array_of(skip) is not None:
        return "what is added before it is a constant"
    if not _same_shape(x, skip):
        return "the two sides of the addition have other shapes than [batch, tokens, channels]"
    if norm.attributes.get_int("axis", -1) not in (-1, 2):
        return "it normalizes other axes than the last"
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        return "its mean is read"
    # The operator wants one number for each channel, where the norm broadcasts.
    if any(part is not None and list(part.shape or ()) != list(x.shape or ())[2:] for part in norm.inputs[1:3]):
        return "its gain or shift is not one number for each channel"
    return x, skip


def _same_shape(x: ir.Value, skip: ir.Value) -> bool:
    """Whether both are known to be [batch, tokens, channels] of the same sizes; two unknown sizes may differ."""
    if x.shape is None or skip.shape is None or len(x.shape) != 3 or list(x.shape) != list(skip.shape):
        return False
    return not any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in x.shape)
