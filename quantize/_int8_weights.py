"""Weights in 8 bits, a scale for each column, and tables with a scale for each row: w = scale q, q in [-127, 127].

x86 CPUs without VNNI add x[2k] q[2k] + x[2k+1] q[2k+1] in 16 bits, with x in [0, 255]; the sum fits if neither the
positive nor the negative weights of a pair add up to more than 128. A scale of the largest such sum / 127 leaves room
for rounding both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from tx_export._graph import Linear, add_initializer, add_node, array_of, replace
from tx_export.passes import Context, Stored
from tx_export.quantize._weights import check_finite

__all__ = ["Int8Weights", "check_pair_bits", "pair_bits_for"]

_Largest = Callable[[np.ndarray], np.ndarray]


def check_pair_bits(bits: int) -> None:
    """ValueError for what is no option."""
    if bits not in (0, 16, 32):
        raise ValueError(f"pair_bits is {bits}; allowed: 0, 16, 32")


def pair_bits_for(bits: int, context: Context | None) -> int:
    """What the option of a pass becomes where it is left to the instruction set."""
    return 16 if bits == 0 and context is not None and context.isa == "avx2" else bits


class Int8Weights:
    """Stores each weight of a graph once; `made` holds them in order. `pair_bits` hold the sum of two products."""

    def __init__(self, graph: ir.Graph, per_channel: bool, min_elements: int, pair_bits: int = 32) -> None:
        self.graph, self.per_channel, self.min_elements = graph, per_channel, min_elements
        self.largest: _Largest = _largest_pairs if pair_bits == 16 else _largest_weights
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self.made: dict[Stored, None] = {}

    def of(self, linear: Linear) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """8-bit [K, N], scales, zero point; a tied table is stored once, by rows, and turned when the session loads."""
        readers = _readers(linear.weight_value)
        if linear.turned and readers.count("Gather") and len(readers) - readers.count("Gather") == 1:
            rows, scales = self._rows(linear.weight_value, linear.weight.T, self.largest)
            (columns,) = add_node(linear.node, "Transpose", [rows], {"perm": ir.AttrInt64s("perm", [1, 0])})
            (scale,) = add_node(linear.node, "Squeeze", [scales, add_initializer(self.graph, "last", np.array([1]))])
            return columns, scale, None
        return self.stored(linear.weight_value, linear.weight)

    def stored(self, value: ir.Value, weight: np.ndarray) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """8-bit [K, N], scales and zero point of a weight that is stored as it is or turned.

        One that several products read is uint8 around 128: ONNX Runtime, which makes int8 weights exact on CPUs without
        VNNI by that very change, can't make it twice to one weight. Otherwise there is no zero point: passes may make
        one of several that are equal, and then the session doesn't load.
        """
        check_finite(value, weight, 8)
        largest = self.largest(weight)
        quantized, scale = _quantized(weight, largest if self.per_channel else largest.max())
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

    def bias(self, linear: Linear) -> ir.Value | None:
        """float32 [N]."""
        if linear.bias is None:
            return None
        name = (linear.weight_value.name or "weight").removesuffix(".T").removesuffix(".weight")
        return add_initializer(self.graph, f"{name}.bias", linear.bias.astype(np.float32))

    def table(self, node: ir.Node) -> str | None:
        """Let a Gather look up 8-bit rows; the reason why it stays if it does."""
        table = node.inputs[0]
        array = array_of(table)
        assert table is not None and array is not None
        if array.ndim != 2 or array.dtype != np.float32 or node.attributes.get_int("axis", 0) != 0:
            return "not a float table that is looked up by rows"
        if array.size < self.min_elements:
            return f"{array.size} elements, fewer than {self.min_elements}: nothing to gain"
        rows, scales = self._rows(table, array, _largest_weights)
        (row,) = add_node(node, "Gather", [rows, node.inputs[1]])
        (scale,) = add_node(node, "Gather", [scales, node.inputs[1]])
        (row32,) = add_node(node, "Cast", [row], {"to": ir.AttrInt64("to", ir.DataType.FLOAT)})
        (out,) = add_node(node, "Mul", [row32, scale])
        replace(node.outputs[0], out)
        return None

    def _rows(self, table: ir.Value, array: np.ndarray, largest: _Largest) -> tuple[ir.Value, ir.Value]:
        """int8 [rows, D] and scales [rows, 1] of a table, made once however many nodes read it."""
        if table not in self.tables:
            check_finite(table, array, 8)
            columns, scale = _quantized(array.T, largest(array.T))
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


def _largest_weights(weight: np.ndarray) -> np.ndarray:
    """Of each column of [K, N]."""
    largest: np.ndarray = np.abs(weight).max(axis=0)
    return largest


def _largest_pairs(weight: np.ndarray) -> np.ndarray:
    """Of each column the largest sum of the positive, or the negative, weights of a pair."""
    even = np.pad(weight, [(0, len(weight) % 2), (0, 0)])
    sums = [np.maximum(part, 0).reshape(-1, 2, part.shape[1]).sum(axis=1).max(axis=0) for part in (even, -even)]
    largest: np.ndarray = np.maximum(*sums)
    return largest


def _quantized(weight: np.ndarray, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [K, N] and float32 scales, [N] or one; zeros, or what is too near to them for a scale, get scale 1."""
    scale = np.asarray(largest / 127, np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return _rounded(weight / scale), scale


def _rounded(values: np.ndarray) -> np.ndarray:
    """int8 of an array that nobody else needs: it is rounded in place, as tables can have gigabytes."""
    np.clip(np.rint(values, out=values), -127, 127, out=values)
    return values.astype(np.int8)
