"""Write com.microsoft operators with standard ONNX ones, for other runtimes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from tx_export._graph import add_initializer, add_node, replace
from tx_export.optimize._lower_blocks import lookup_in_blocks, product_in_blocks
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["LowerContrib"]


@dataclass(frozen=True)
class LowerContrib(GraphPass):
    """Quantized products and lookups, Gelu and FastGelu; attention is emitted plain in the first place."""

    def call(self, model: ir.Model) -> Outcome:
        candidates = [node for node in model.graph if node.domain == "com.microsoft"]
        left = []
        for node in candidates:
            lower = _LOWERED.get(node.op_type)
            if lower is None:
                left.append(Left(node.outputs[0].name or node.op_type, f"{node.op_type} has no standard form here"))
            else:
                replace(node.outputs[0], lower(model.graph, node))
        RemoveUnusedNodesPass()(model)
        RemoveUnusedOpsetsPass()(model)
        done = len(candidates) - len(left)
        return Outcome(model, done > 0, Coverage(done, len(candidates), tuple(left)))


def _integer_product(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """(x - x_zero) @ (w - w_zero) * (x_scale * w_scale) + bias"""
    x, weight, x_scale, w_scale, x_zero, w_zero, bias = (*node.inputs, None, None, None)[:7]
    (product,) = add_node(node, "MatMulInteger", [x, weight, x_zero, w_zero])
    (real,) = add_node(node, "Cast", [product], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})
    (scale,) = add_node(node, "Mul", [x_scale, w_scale])
    (out,) = add_node(node, "Mul", [real, scale])
    return out if bias is None else add_node(node, "Add", [out, bias])[0]


def _gelu(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """x (0.5 + 0.5 erf(x / sqrt 2))"""
    x = node.inputs[0]
    half = _scalar(graph, "gelu.half", 0.5)
    (scaled,) = add_node(node, "Mul", [x, _scalar(graph, "gelu.root", 1 / math.sqrt(2))])
    (erf,) = add_node(node, "Erf", [scaled])
    (part,) = add_node(node, "Mul", [erf, half])
    (gate,) = add_node(node, "Add", [part, half])
    return add_node(node, "Mul", [x, gate])[0]


def _fast_gelu(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """x (0.5 + 0.5 tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    x, half, root = node.inputs[0], _scalar(graph, "gelu.half", 0.5), math.sqrt(2 / math.pi)
    (square,) = add_node(node, "Mul", [x, x])
    (cubic,) = add_node(node, "Mul", [square, _scalar(graph, "gelu.cubic", 0.044715 * root)])
    (slope,) = add_node(node, "Add", [cubic, _scalar(graph, "gelu.linear", root)])
    (inner,) = add_node(node, "Mul", [slope, x])
    (tanh,) = add_node(node, "Tanh", [inner])
    (part,) = add_node(node, "Mul", [tanh, half])
    (gate,) = add_node(node, "Add", [part, half])
    return add_node(node, "Mul", [x, gate])[0]


_LOWERED: dict[str, Callable[[ir.Graph, ir.Node], ir.Value]] = {
    "MatMulIntegerToFloat": _integer_product,
    "MatMulNBits": product_in_blocks,
    "GatherBlockQuantized": lookup_in_blocks,
    "FastGelu": _fast_gelu,
    "Gelu": _gelu,
}


def _scalar(graph: ir.Graph, name: str, value: float) -> ir.Value:
    return add_initializer(graph, name, np.array(value, np.float32))
