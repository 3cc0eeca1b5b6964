"""8-bit integer products: weights quantized per output channel once, activations per tensor at each run.

w = scale_w q_w with q_w = round(w / scale_w) in [-127, 127]; x by DynamicQuantizeLinear (ONNX); the product is exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import add_node, array_of, linear_at, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome
from tx_export.quantize._int8_weights import Int8Weights, check_pair_bits, pair_bits_for
from tx_export.quantize._weights import already, attention_left, candidates, name_of, part_attention

__all__ = ["DynamicInt8"]

_KEPT_ATTRIBUTES = {"num_heads", "unidirectional", "mask_filter_value"}  # those that QAttention has too


@dataclass(frozen=True)
class DynamicInt8(GraphPass):
    """Products of MatMul, Gemm and packed attention, with their biases, and embedding tables (one scale per row)."""

    per_channel: bool = True  # one scale for each output channel; per tensor costs 7 dB on MiniLM
    embeddings: bool = True  # a quarter of the bytes at no measurable error, with a scale for each row
    min_elements: int = 4096  # of a table; smaller ones gain nothing
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all
    pair_bits: int = 0  # that hold the sum of two products: 16 on x86 without VNNI, else 32; 0: 16 for --isa avx2

    budget: ClassVar[str | None] = "sqnr_db=10"

    def __post_init__(self) -> None:
        check_pair_bits(self.pair_bits)

    def call(self, model: ir.Model) -> Outcome:
        if (bits := pair_bits_for(self.pair_bits, self.context)) != self.pair_bits:
            chosen = dataclasses.replace(self, pair_bits=bits)
            outcome = chosen.call(model)
            outcome.coverage = dataclasses.replace(outcome.coverage, repeat=(chosen,))
            return outcome
        left: list[Left] = []
        done = 0
        rewrite = _Rewrite(model.graph, self)
        nodes = candidates(model.graph, self.only)
        for node in nodes if self.embeddings else (each for each in nodes if each.op_type != "Gather"):
            name, reason = name_of(node), rewrite(node)
            if reason is None:
                done += 1
            elif reason != "both operands are computed":  # no weight, nothing to quantize
                left.append(Left(name, reason))
        RemoveUnusedNodesPass()(model)
        told = tuple(left) if left or done else already(model.graph)
        coverage = Coverage(done, done + len(left), told, stored=tuple(rewrite.weights.made))
        return Outcome(model, done > 0, coverage, subject="quantized")


class _Rewrite:
    """Rewrites single nodes; each method returns None, or the reason why it left the node as it was."""

    def __init__(self, graph: ir.Graph, options: DynamicInt8) -> None:
        self.graph, self.options = graph, options
        self.activations: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}
        self.weights = Int8Weights(graph, options.per_channel, options.min_elements, options.pair_bits)

    def __call__(self, node: ir.Node) -> str | None:
        if node.op_type == "Gather":
            return self.weights.table(node)
        return self.attention(node) if node.op_type == "Attention" else self.product(node)

    def product(self, node: ir.Node) -> str | None:
        linear = linear_at(node)
        if isinstance(linear, str):
            return linear
        if linear.weight.dtype != np.float32:
            return f"its weight is {linear.weight.dtype}, not float32"
        weight, scale, zero = self.weights.of(linear)
        x, x_scale, x_zero = self.activation(node, linear.x)
        inputs = [x, weight, x_scale, scale, x_zero, zero, self.weights.bias(linear)]
        (out,) = add_node(node, "com.microsoft::MatMulIntegerToFloat", inputs)
        replace(linear.output, out)
        return None

    def attention(self, node: ir.Node) -> str | None:
        reason = attention_left(node)
        if reason is not None:
            return reason
        # What QAttention can't do (a bias of the scores, a scale, other widths): a product, then attention.
        if set(node.attributes) - _KEPT_ATTRIBUTES or any(value is not None for value in node.inputs[5:]):
            return self.product(part_attention(node))
        x, weight_value, bias_value, mask = (*node.inputs, None)[:4]
        weight = array_of(weight_value)
        assert x is not None and weight_value is not None and weight is not None
        quantized, scale, zero = self.weights.stored(weight_value, weight)
        x_int8, x_scale, x_zero = self.activation(node, x)
        inputs = [x_int8, quantized, bias_value, x_scale, scale, mask, x_zero, zero]
        (out,) = add_node(node, "com.microsoft::QAttention", inputs, node.attributes)
        replace(node.outputs[0], out)
        return None

    def activation(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """uint8 values, scale and zero point of x, quantized once for all products that read it."""
        if x not in self.activations:
            first = next(reader for reader in self.graph if x in reader.inputs)
            values, scale, zero = add_node(first, "DynamicQuantizeLinear", [x], outputs=3)
            values.dtype, values.shape = ir.DataType.UINT8, x.shape
            self.activations[x] = (values, scale, zero)
        return self.activations[x]
