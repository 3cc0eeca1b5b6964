"""Fuse the bias of a product with the GELU behind it: Add and Gelu -> com.microsoft::BiasGelu."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_node, array_of, only_use, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseBiasGelu"]


@dataclass(frozen=True)
class FuseBiasGelu(GraphPass):
    """After fuse_gelu, for graphs whose products stay in floating point: an integer product has its bias already."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.op_type == "Gelu" and node.domain == "com.microsoft"]
        left = []
        for node in candidates:
            found = _bias_before(node)
            if isinstance(found, str):
                left.append(Left(node.outputs[0].name or "Gelu", found))
                continue
            replace(node.outputs[0], add_node(node, "com.microsoft::BiasGelu", found)[0])
        RemoveUnusedNodesPass()(model)
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _bias_before(gelu: ir.Node) -> tuple[ir.Value, ir.Value] | str:
    value = gelu.inputs[0]
    add = value.producer() if value is not None else None
    if value is None or add is None or add.op_type != "Add" or add.domain:
        return "no addition before it"
    if only_use(value) is not gelu:
        return "the sum before it has other readers"
    for x, bias in (tuple(add.inputs), tuple(add.inputs)[::-1]):
        array = array_of(bias)
        if x is None or bias is None or array is None:
            continue
        # The operator wants one number for each channel, where Add also takes one for all.
        if array.ndim == 1 and x.shape is not None and x.shape[-1:] == array.shape:
            return x, bias
    return "what is added before it is no bias"
