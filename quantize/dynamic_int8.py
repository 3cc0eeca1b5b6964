"""8-bit integer products: weights quantized per output channel once, activations per tensor at each run.

w = scale_w q_w with q_w = round(w / scale_w) in [-127, 127]; x by DynamicQuantizeLinear (ONNX); the product is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import Linear, add_initializer, add_node, array_of, linear_at, replace
from tx_export.passes import Coverage, GraphPass, Left, Outcome, Stored
from tx_export.quantize._weights import attention_left, candidates, check_finite, name_of, part_attention

__all__ = ["DynamicInt8"]

_KEPT_ATTRIBUTES = {"num_heads", "unidirectional", "mask_filter_value"}  # those that QAttention has too


@dataclass(frozen=True)
class DynamicInt8(GraphPass):
    """Products of MatMul, Gemm and packed attention, with their biases, and embedding tables (one scale per row)."""

    per_channel: bool = True  # one scale for each output channel; per tensor costs 7 dB on MiniLM
    embeddings: bool = True  # a quarter of the bytes at no measurable error, with a scale for each row
    min_elements: int = 4096  # of a table; smaller ones gain nothing
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all

    budget: ClassVar[str | None] = "sqnr_db=10"

    def call(self, model: ir.Model) -> Outcome:
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
        coverage = Coverage(done, done + len(left), tuple(left), stored=tuple(rewrite.made))
        return Outcome(model, done > 0, coverage, subject="quantized")


class _Rewrite:
    """Rewrites single nodes; each method returns None, or the reason why it left the node as it was."""

    def __init__(self, graph: ir.Graph, options: DynamicInt8) -> None:
        self.graph, self.options = graph, options
        self.activations: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self.made: dict[Stored, None] = {}  # in order, each once

    def __call__(self, node: ir.Node) -> str | None:
        if node.op_type == "Gather":
            return self.table(node)
        return self.attention(node) if node.op_type == "Attention" else self.product(node)

    def product(self, node: ir.Node) -> str | None:
        linear = linear_at(node)
        if isinstance(linear, str):
            return linear
        if linear.weight.dtype != np.float32:
            return f"its weight is {linear.weight.dtype}, not float32"
        weight, scale, zero = self.weight(linear)
        x, x_scale, x_zero = self.activation(node, linear.x)
        bias = None
        if linear.bias is not None:
            bias = add_initializer(self.graph, _named(linear.weight_value, "bias"), linear.bias.astype(np.float32))
        (out,) = add_node(node, "com.microsoft::MatMulIntegerToFloat", [x, weight, x_scale, scale, x_zero, zero, bias])
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
        quantized, scale, zero = self.stored(weight_value, weight)
        x_int8, x_scale, x_zero = self.activation(node, x)
        # A zero point of zeros is left out: passes may make one of several, and then the session doesn't load.
        inputs = [x_int8, quantized, bias_value, x_scale, scale, mask, x_zero, zero]
        (out,) = add_node(node, "com.microsoft::QAttention", inputs, node.attributes)
        replace(node.outputs[0], out)
        return None

    def table(self, node: ir.Node) -> str | None:
        table = node.inputs[0]
        array = array_of(table)
        assert table is not None and array is not None
        if array.ndim != 2 or array.dtype != np.float32 or node.attributes.get_int("axis", 0) != 0:
            return "not a float table that is looked up by rows"
        if array.size < self.options.min_elements:
            return f"{array.size} elements, fewer than {self.options.min_elements}: nothing to gain"
        rows, scales = self.rows(table, array)
        (row,) = add_node(node, "Gather", [rows, node.inputs[1]])
        (scale,) = add_node(node, "Gather", [scales, node.inputs[1]])
        (row32,) = add_node(node, "Cast", [row], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})
        (out,) = add_node(node, "Mul", [row32, scale])
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

    def weight(self, linear: Linear) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """8-bit [K, N], scales, zero point; a tied table is stored once, by rows, and turned when the session loads."""
        readers = _readers(linear.weight_value)
        if linear.turned and readers.count("Gather") and len(readers) - readers.count("Gather") == 1:
            rows, scales = self.rows(linear.weight_value, linear.weight.T)
            (columns,) = add_node(linear.node, "Transpose", [rows], {"perm": ir.AttrInt64s("perm", [1, 0])})
            (scale,) = add_node(linear.node, "Squeeze", [scales, add_initializer(self.graph, "last", np.array([1]))])
            return columns, scale, None
        return self.stored(linear.weight_value, linear.weight)

    def stored(self, value: ir.Value, weight: np.ndarray) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """8-bit [K, N], scales and zero point of a weight that is stored as it is or turned.

        One that several products read is uint8 around 128: ONNX Runtime, which makes int8 weights exact on CPUs without
        VNNI by that very change, can't make it twice to one weight.
        """
        check_finite(value, weight, 8)
        quantized, scale = _per_column(weight) if self.options.per_channel else _per_tensor(weight)
        name, zero = (value.name or "weight").removesuffix(".T"), None
        if len(_readers(value)) > 1:
            quantized = (quantized.astype(np.int16) + 128).astype(np.uint8)
            zero = add_initializer(self.graph, f"{name}.zero", np.full(scale.shape, 128, np.uint8))
        form = str(quantized.dtype)
        after = quantized.nbytes + scale.nbytes + (0 if zero is None else quantized.shape[1])
        self.made[Stored(name, weight.nbytes, after, form)] = None
        return (
            add_initializer(self.graph, f"{name}.{form}", quantized),
            add_initializer(self.graph, f"{name}.scale", scale),
            zero,
        )

    def rows(self, table: ir.Value, array: np.ndarray) -> tuple[ir.Value, ir.Value]:
        """int8 [rows, D] and scales [rows, 1] of a table, made once however many nodes read it."""
        if table not in self.tables:
            check_finite(table, array, 8)
            columns, scale = _per_column(array.T)
            self.made[Stored(table.name or "table", array.nbytes, columns.nbytes + scale.nbytes, "int8")] = None
            self.tables[table] = (
                add_initializer(self.graph, f"{table.name}.int8", columns.T),
                add_initializer(self.graph, f"{table.name}.scale", scale[:, None]),
            )
        return self.tables[table]


def _readers(weight: ir.Value) -> list[str]:
    """The operators that read a weight, as it is or turned."""
    nodes: dict[ir.Node, None] = {}
    for use in weight.uses():
        turned = use.node.outputs[0].uses() if use.node.op_type == "Transpose" else (use,)
        nodes |= {each.node: None for each in turned}
    return [node.op_type for node in nodes]


def _named(weight: ir.Value, what: str) -> str:
    name = (weight.name or "weight").removesuffix(".T")
    return f"{name.removesuffix('.weight')}.{what}" if name.endswith(".weight") else f"{name}.{what}"


def _per_column(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [K, N] and float32 scales [N]; a column of zeros, or too near to it for a scale, gets scale 1."""
    scale = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    scale[scale == 0] = 1
    return _rounded(weight / scale), scale


def _per_tensor(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    quantized, scale = _per_column(weight.reshape(-1, 1))
    return quantized.reshape(weight.shape), scale


def _rounded(values: np.ndarray) -> np.ndarray:
    """int8 of an array that nobody else needs: it is rounded in place, as tables can have gigabytes."""
    np.clip(np.rint(values, out=values), -127, 127, out=values)
    return values.astype(np.int8)
