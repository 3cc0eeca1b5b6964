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
from tx_export.quantize._int8_weights import Int8Weights, check_pair_bits, pair_bits_for
from tx_export.quantize._static_attention import int8_attention, operands, scores_left, slower
from tx_export.quantize._static_histogram import Histogram
from tx_export.quantize._static_ranges import METHODS, Range, find, read, write
from tx_export.quantize._weights import attention_left, candidates, check_finite, name_of, part_attention

__all__ = ["StaticInt8"]

_ATTENTION = ("float", "int8", "measured")


@dataclass(frozen=True)
class StaticInt8(GraphPass):
    """Products of MatMul, Gemm and packed attention, and embedding tables (one scale per row)."""

    method: str = "mse"  # minmax, percentile, entropy or mse; on MiniLM 18.1, 18.3, 8.5 and 18.7 dB
    percentile: float = 99.999  # of the values, that method=percentile keeps within either end of a range
    symmetric: bool = False  # activations around 128; costs 4 dB on MiniLM and saves nothing on CPUs
    per_channel: bool = True  # one scale for each output channel of a weight
    embeddings: bool = True  # a quarter of the bytes at no measurable error, with a scale for each row
    min_elements: int = 4096  # of a table; smaller ones gain nothing
    attention: str = "float"  # or int8, the operands of its products; or measured, whichever is quicker here
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all
    pair_bits: int = 0  # that hold the sum of two products: 16 on x86 without VNNI, else 32; 0: 16 for --isa avx2
    ranges: str = ""  # NAME:LOW:HIGH of each activation, with blanks between; empty: found on the text

    budget: ClassVar[str | None] = "sqnr_db=10"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; known: {', '.join(METHODS)}")
        if self.attention not in _ATTENTION:
            raise ValueError(f"attention is {self.attention!r}; known: {', '.join(_ATTENTION)}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile}; it must be over 50 and at most 100")
        check_pair_bits(self.pair_bits)
        read(self.ranges)

    def call(self, model: ir.Model) -> Outcome:
        chosen = dataclasses.replace(self, pair_bits=pair_bits_for(self.pair_bits, self.context))
        return chosen._measured(model) if self.attention == "measured" else chosen._quantized(model)

    def _measured(self, model: ir.Model) -> Outcome:
        """With attention in 8 bits if it is quicker, in float with the reason if not."""
        if self.context is None or not self.context.feeds:
            raise PassError("static_int8: attention=measured needs a context with text, whose length is measured at")
        lowered = dataclasses.replace(self, attention="int8")
        graph = model.clone()
        (found,) = lowered._quantized(graph).coverage.repeat
        assert isinstance(found, StaticInt8)
        kept = dataclasses.replace(found, attention="float", context=self.context)
        whole = model.clone()
        kept._quantized(whole)
        reason = slower(whole, graph, self.context)
        outcome = (kept if reason is not None else dataclasses.replace(found, context=self.context))._quantized(model)
        if reason is not None:
            coverage = outcome.coverage
            outcome.coverage = dataclasses.replace(coverage, left=(*coverage.left, Left("attention", reason)))
        return outcome

    def _quantized(self, model: ir.Model) -> Outcome:
        left: list[Left] = []
        nodes = candidates(model.graph, self.only)
        products = _products([node for node in nodes if node.op_type != "Gather"], left)
        attentions = _attentions(model.graph, left) if self.attention == "int8" else []
        operands_of = {value: None for node in attentions for value in operands(node)}
        ranges = self._ranges(model, [*(linear.x for linear in products), *operands_of])
        rewrite = _Rewrite(model.graph, self, ranges)
        for linear in products:
            rewrite.product(linear)
        for node in attentions:
            int8_attention(model.graph, node, rewrite.quantized)
        done = len(products) + len(attentions)
        for node in nodes if self.embeddings else ():
            if node.op_type == "Gather":
                name, reason = name_of(node), rewrite.weights.table(node)
                done += reason is None
                left += [] if reason is None else [Left(name, reason)]
        RemoveUnusedNodesPass()(model)
        repeat = dataclasses.replace(self, ranges=write(ranges), context=None)
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
        name = name_of(node)
        linear = _parted(node) if node.op_type == "Attention" else linear_at(node)
        if isinstance(linear, Linear) and linear.weight.dtype != np.float32:
            linear = f"its weight is {linear.weight.dtype}, not float32"
        if isinstance(linear, Linear):
            check_finite(linear.weight_value, linear.weight, 8)
            found.append(linear)
        elif linear != "both operands are computed":  # no weight, nothing to quantize
            left.append(Left(name, linear))
    return found


def _parted(attention: ir.Node) -> Linear | str:
    """The packed product of attention, which is taken out of it."""
    reason, graph = attention_left(attention), attention.graph
    if reason is not None:
        return reason
    product = part_attention(attention)
    assert graph is not None
    graph.remove(attention, safe=True)  # it would read the weight a second time
    return linear_at(product)


def _attentions(graph: ir.Graph, left: list[Left]) -> list[ir.Node]:
    nodes = [node for node in graph if node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft"]
    reasons = {node: scores_left(node) for node in nodes}
    left += [
        Left(node.outputs[0].name or node.op_type, reason) for node, reason in reasons.items() if reason is not None
    ]
    return [node for node, reason in reasons.items() if reason is None]


class _Rewrite:
    """Puts QuantizeLinear and DequantizeLinear around products; for Gemm, whose input is a matrix, one operator."""

    def __init__(self, graph: ir.Graph, options: StaticInt8, ranges: dict[str, Range]) -> None:
        self.graph, self.options, self.ranges = graph, options, ranges
        self.weights = Int8Weights(graph, options.per_channel, options.min_elements, options.pair_bits)
        self.made: dict[ir.Value, ir.Value] = {}
        self.values: dict[ir.Value, list[ir.Value]] = {}

    def product(self, linear: Linear) -> None:
        if _may_become_gemm(linear.x):
            values, x_scale, x_zero = self.quantized(linear.x, linear.node, None)
            weight, scale, zero = self.weights.of(linear)
            inputs = [values, weight, x_scale, scale, x_zero, zero, self.weights.bias(linear)]
            (out,) = add_node(linear.node, "com.microsoft::MatMulIntegerToFloat", inputs)
            replace(linear.output, out)
            return
        (out,) = add_node(linear.node, "MatMul", [self.activation(linear), self.weight(linear)])
        replace(linear.node.outputs[0], out)

    def activation(self, linear: Linear) -> ir.Value:
        """x, quantized once for all products that read it."""
        x = linear.x
        if x not in self.made:
            self.made[x] = _dequantized(linear.node, self.quantized(x, linear.node, None), x.shape)
        return self.made[x]

    def quantized(self, x: ir.Value, before: ir.Node, known: Range | None) -> list[ir.Value]:
        """uint8 values, scale and zero point, in a range that is known or was calibrated."""
        if x not in self.values:
            scale, zero = (known or self.ranges[x.name or ""]).parameters(self.options.symmetric and known is None)
            parameters = [
                add_initializer(self.graph, f"{x.name}.{what}", np.asarray(number))
                for what, number in (("scale", scale), ("zero", zero))
            ]
            first = next((reader for reader in self.graph if x in reader.inputs), before)
            (values,) = add_node(first, "QuantizeLinear", [x, *parameters])
            values.dtype, values.shape = ir.DataType.UINT8, x.shape
            self.values[x] = [values, *parameters]
        return self.values[x]

    def weight(self, linear: Linear) -> ir.Value:
        if linear.weight_value not in self.made:
            values, scale, zero = self.weights.of(linear)
            self.made[linear.weight_value] = _dequantized(
                linear.node, [values, scale, *([] if zero is None else [zero])], ir.Shape(linear.weight.shape)
            )
        return self.made[linear.weight_value]


def _may_become_gemm(x: ir.Value) -> bool:
    """Of MatMul and Add on a matrix, or on a fixed shape, ONNX Runtime makes a Gemm, whose bias keeps it in float."""
    return x.shape is None or len(x.shape) == 2 or all(isinstance(dim, int) for dim in x.shape)


def _dequantized(before: ir.Node, inputs: Sequence[ir.Value], shape: ir.Shape | None) -> ir.Value:
    """Along the last of two dimensions where there are several scales."""
    (out,) = add_node(before, "DequantizeLinear", inputs, {"axis": ir.AttrInt64("axis", 1)})
    out.dtype, out.shape = ir.DataType.FLOAT, shape
    return out
