"""8-bit integer products with a fixed scale for each activation, found on calibration text.

x = scale_x (q_x - zero) with q_x in [0, 255], w = scale_w q_w with q_w in [-127, 127]. Written as QDQ (QuantizeLinear
and DequantizeLinear around each MatMul), which runtimes make integer products of. No answer depends on the mates in its
batch or on padding, as it does where each run finds its ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import Linear, add_initializer, add_node, linear_at, replace
from tx_export.errors import PassError
from tx_export.passes import Coverage, GraphPass, Left, Outcome
from tx_export.quantize._calibration import observe
from tx_export.quantize._int8_weights import Int8Weights
from tx_export.quantize._static_histogram import Histogram
from tx_export.quantize._static_ranges import METHODS, Range, find, read, write
from tx_export.quantize._weights import attention_left, candidates, check_finite, name_of, part_attention

__all__ = ["StaticInt8"]


@dataclass(frozen=True)
class StaticInt8(GraphPass):
    """Products of MatMul, Gemm and packed attention, and embedding tables (one scale per row)."""

    method: str = "mse"  # minmax, percentile, entropy or mse; on MiniLM 18.1, 18.3, 8.5 and 18.7 dB
    percentile: float = 99.999  # of the values, that method=percentile keeps within either end of a range
    symmetric: bool = False  # activations around 128; costs 4 dB on MiniLM and saves nothing on CPUs
    per_channel: bool = True  # one scale for each output channel of a weight
    embeddings: bool = True  # a quarter of the bytes at no measurable error, with a scale for each row
    min_elements: int = 4096  # of a table; smaller ones gain nothing
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all
    ranges: str = ""  # NAME:LOW:HIGH of each activation, with blanks between; empty: found on the text

    budget: ClassVar[str | None] = "sqnr_db=10"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; known: {', '.join(METHODS)}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile}; it must be over 50 and at most 100")
        read(self.ranges)

    def call(self, model: ir.Model) -> Outcome:
        left: list[Left] = []
        nodes = candidates(model.graph, self.only)
        products = _products([node for node in nodes if node.op_type != "Gather"], left)
        ranges = self._ranges(model, [linear.x for linear in products])
        rewrite = _Rewrite(model.graph, self, ranges)
        for linear in products:
            rewrite.product(linear)
        done = len(products)
        for node in nodes if self.embeddings else ():
            if node.op_type == "Gather":
                name, reason = name_of(node), rewrite.weights.table(node)
                done += reason is None
                left += [] if reason is None else [Left(name, reason)]
        RemoveUnusedNodesPass()(model)
        repeat = dataclasses.replace(self, ranges=write(ranges))
        stored = tuple(rewrite.weights.made)
        coverage = Coverage(done, done + len(left), tuple(left), repeat=(repeat,), stored=stored)
        return Outcome(model, done > 0, coverage, subject="quantized")

    def _ranges(self, model: ir.Model, activations: Sequence[ir.Value]) -> dict[str, Range]:
        """By the names of the activations, in the order of the graph."""
        names = list(dict.fromkeys(value.name or "" for value in activations))
        if not self.ranges:
            if self.context is None:
                raise PassError("static_int8: without ranges it needs a context with text to calibrate on")
            histograms = {name: Histogram() for name in names}
            for batch in observe(model, activations, self.context) if names else ():
                for name, rows in batch.items():
                    histograms[name].add(rows)
            return {name: find(each, self.method, self.percentile, self.symmetric) for name, each in histograms.items()}
        given = read(self.ranges)
        if missing := [name for name in names if name not in given]:
            raise PassError(
                f"static_int8: ranges has none for {', '.join(missing)}; without ranges they are calibrated"
            )
        return {name: given[name] for name in names}


def _products(nodes: Iterable[ir.Node], left: list[Left]) -> list[Linear]:
    """Those that can be quantized, packed attention parted; the reasons for the others are added to `left`."""
    found = []
    for node in nodes:
        name, reason = name_of(node), attention_left(node) if node.op_type == "Attention" else None
        linear = reason or linear_at(part_attention(node) if node.op_type == "Attention" else node)
        if isinstance(linear, Linear) and linear.weight.dtype != np.float32:
            linear = f"its weight is {linear.weight.dtype}, not float32"
        if isinstance(linear, Linear):
            check_finite(linear.weight_value, linear.weight, 8)
            found.append(linear)
        elif linear != "both operands are computed":  # no weight, nothing to quantize
            left.append(Left(name, linear))
    return found


class _Rewrite:
    """Puts QuantizeLinear and DequantizeLinear around products."""

    def __init__(self, graph: ir.Graph, options: StaticInt8, ranges: dict[str, Range]) -> None:
        self.graph, self.options, self.ranges = graph, options, ranges
        self.weights = Int8Weights(graph, options.per_channel, options.min_elements)
        self.made: dict[ir.Value, ir.Value] = {}

    def product(self, linear: Linear) -> None:
        (out,) = add_node(linear.node, "MatMul", [self.activation(linear.x), self.weight(linear)])
        if linear.node.op_type == "Gemm" and len(linear.node.inputs) > 2:
            (out,) = add_node(linear.node, "Add", [out, linear.node.inputs[2]])
        replace(linear.node.outputs[0], out)

    def activation(self, x: ir.Value) -> ir.Value:
        """x, quantized once for all products that read it."""
        if x not in self.made:
            scale, zero = self.ranges[x.name or ""].parameters(self.options.symmetric)
            first = next(reader for reader in self.graph if x in reader.inputs)
            parameters = [
                add_initializer(self.graph, f"{x.name}.{what}", np.asarray(number))
                for what, number in (("scale", scale), ("zero", zero))
            ]
            (values,) = add_node(first, "QuantizeLinear", [x, *parameters])
            values.dtype, values.shape = ir.DataType.UINT8, x.shape
            self.made[x] = _dequantized(first, [values, *parameters], x.shape)
        return self.made[x]

    def weight(self, linear: Linear) -> ir.Value:
        if linear.weight_value not in self.made:
            values, scale, zero = self.weights.of(linear)
            self.made[linear.weight_value] = _dequantized(
                linear.node, [values, scale, *([] if zero is None else [zero])], ir.Shape(linear.weight.shape)
            )
        return self.made[linear.weight_value]


def _dequantized(before: ir.Node, inputs: Sequence[ir.Value], shape: ir.Shape | None) -> ir.Value:
    """Along the last of two dimensions where there are several scales."""
    (out,) = add_node(before, "DequantizeLinear", inputs, {"axis": ir.AttrInt64("axis", 1)})
    out.dtype, out.shape = ir.DataType.FLOAT, shape
    return out
