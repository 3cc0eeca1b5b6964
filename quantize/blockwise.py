"""Weights in blocks of 4 or 8 bits, as com.microsoft::MatMulNBits and GatherBlockQuantized take them.

w = scale (q - zero) with a scale, and a zero point unless symmetric, for each block of `block_size` inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._graph import Linear, add_initializer, add_node, array_of, linear_at, replace
from tx_export._releases import first_release
from tx_export.errors import PassError
from tx_export.passes import Coverage, GraphPass, Left, Outcome, Stored
from tx_export.quantize._block_loudness import loudness
from tx_export.quantize._blocks import METHODS, quantize, stored_bytes
from tx_export.quantize._weights import (
    already,
    attention_left,
    candidates,
    check_finite,
    chosen,
    name_of,
    part_attention,
    weight_of,
)

__all__ = ["Blockwise"]

# ONNX Runtime's kernels take others too, and some releases then return zeros.
_BLOCK_SIZES = (16, 32, 64, 128, 256)
_Blocks = tuple[ir.Value, ir.Value, ir.Value | None]  # values, scales, zero points


@dataclass(frozen=True)
class Blockwise(GraphPass):
    """Products of MatMul, Gemm and packed attention, and embedding tables."""

    bits: int = 4  # 4 or 8
    block_size: int = 32  # 16 to 256; 128 costs 2 to 3.5 dB of the weights and saves a sixth of the bytes
    # Zero points are 1/40 of the bytes and worth 1 dB. They cost no time for texts, and a tenth of it for single
    # tokens: None leaves them out where a graph has a cache.
    symmetric: bool | None = None
    accuracy_level: int = 4  # 4: activations in 8 bits for each block, 5 times faster for a token; 0 and 1: in float32
    # "hqq" is 0.3 dB better than "round"; "weighted" counts errors as their inputs are loud on calibration text, worth
    # 3.6 dB on SmolLM2. None: "weighted" where a graph has a cache and there is text, else "hqq".
    method: str | None = None
    embeddings: bool = True  # tables too, where the target is ONNX Runtime 1.23 or later
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all
    exclude: str = ""  # as `only`, those that stay in float

    @property
    def budget(self) -> str:  # type: ignore[override]
        return "sqnr_db=5" if self.bits == 4 else "sqnr_db=20"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed and (name, getattr(self, name)) != ("method", None):
                known = ", ".join(str(value) for value in allowed)
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {known}")

    def call(self, model: ir.Model) -> Outcome:
        left: list[Left] = []
        done = 0
        has_cache = any(str(value.name).startswith("past") for value in model.graph.inputs)
        symmetric = has_cache if self.symmetric is None else self.symmetric
        nodes = self._candidates(model.graph)
        has_text = self.context is not None and bool(self.context.feeds)
        method = self.method or ("weighted" if has_cache and has_text else "hqq")
        loud = {}
        if method == "weighted":
            if self.context is None or not has_text:
                raise PassError("method=weighted needs calibration text: a build of a model that has a tokenizer")
            loud = loudness(model, nodes, self.context)
        rewrite = _Rewrite(model.graph, self, symmetric, method, loud)
        excluded = chosen("exclude", self.exclude, nodes)
        for node in nodes:
            weight, name = weight_of(node), name_of(node)
            array = array_of(weight) if weight in excluded else None
            reason = rewrite(node) if array is None else f"excluded, {array.nbytes} bytes"
            if reason is None:
                done += 1
            elif reason != "both operands are computed":  # no weight, nothing to quantize
                left.append(Left(name, reason))
        RemoveUnusedNodesPass()(model)
        told = tuple(left) if left or done else already(model.graph)
        coverage = Coverage(done, done + len(left), told, stored=tuple(rewrite.stored))
        return Outcome(model, done > 0, coverage, subject="quantized")

    def _candidates(self, graph: ir.Graph) -> list[ir.Node]:
        """Without embeddings, of the lookups only those of tables that a product reads too."""
        nodes = candidates(graph, self.only)
        shared = {weight_of(node) for node in nodes if node.op_type != "Gather"}
        return [node for node in nodes if self.embeddings or node.op_type != "Gather" or weight_of(node) in shared]


_ALLOWED: dict[str, Sequence[object]] = {
    "bits": (4, 8),
    "block_size": _BLOCK_SIZES,
    "accuracy_level": range(5),
    "method": tuple(METHODS),
}


class _Rewrite:
    """Rewrites single nodes; returns None, or the reason why it left the node as it was."""

    def __init__(
        self, graph: ir.Graph, options: Blockwise, symmetric: bool, method: str, loud: Mapping[ir.Value, np.ndarray]
    ) -> None:
        self.graph, self.options, self.symmetric, self.method, self.loud = graph, options, symmetric, method, loud
        self.made: dict[tuple[ir.Value, bool], _Blocks] = {}
        self.stored: list[Stored] = []

    def __call__(self, node: ir.Node) -> str | None:
        if node.op_type == "Gather":
            return self.table(node)
        return self.attention(node) if node.op_type == "Attention" else self.product(node)

    def attention(self, node: ir.Node) -> str | None:
        weight = array_of(node.inputs[1])
        reason = attention_left(node) or (None if weight is None else self.left(weight.T))
        return reason or self.product(part_attention(node))

    def product(self, node: ir.Node) -> str | None:
        linear = linear_at(node)
        if isinstance(linear, str):
            return linear
        if (reason := self.left(linear.weight.T)) is not None:
            return reason
        k, n = linear.weight.shape
        values, scale, zero = self.blocks(linear.weight_value, linear.weight.T, linear.turned)
        inputs = [linear.x, values, scale, *([] if zero is None else [zero])]
        sizes = {"K": k, "N": n, "accuracy_level": self.options.accuracy_level}
        (out,) = add_node(node, "com.microsoft::MatMulNBits", inputs, self.attributes(sizes))
        self.connect(linear, out)
        return None

    def connect(self, linear: Linear, product: ir.Value) -> None:
        """An Add stays behind the product: ONNX Runtime makes one of them when the session loads."""
        if linear.node.op_type == "Gemm" and linear.output is linear.node.outputs[0] and linear.bias is not None:
            (product,) = add_node(linear.node, "Add", [product, linear.node.inputs[2]])
        replace(linear.node.outputs[0], product)

    def table(self, node: ir.Node) -> str | None:
        table, array = node.inputs[0], array_of(node.inputs[0])
        assert table is not None and array is not None
        if array.ndim != 2 or node.attributes.get_int("axis", 0) != 0:
            return "not a float table that is looked up by rows"
        if not self.options.embeddings:
            return f"embeddings=false: its {array.nbytes} bytes stand beside the blocks of its product"
        if (reason := self.too_new("GatherBlockQuantized") or self.left(array)) is not None:
            return reason
        values, scale, zero = self.blocks(table, array, True)
        whole = add_initializer(self.graph, "rows", np.array([len(array), -1]))
        (rows,) = add_node(node, "Reshape", [values, whole])  # what MatMulNBits reads in blocks, as rows
        inputs = [rows, node.inputs[1], scale, *([] if zero is None else [zero])]
        axes = self.attributes({"gather_axis": 0, "quantize_axis": 1})
        (out,) = add_node(node, "com.microsoft::GatherBlockQuantized", inputs, axes)
        if array.shape[1] % self.options.block_size:
            first, end, last = (
                add_initializer(self.graph, name, np.array([at]))
                for name, at in (("first", 0), (f"width.{array.shape[1]}", array.shape[1]), ("last", -1))
            )
            (out,) = add_node(node, "Slice", [out, first, end, last])
        replace(node.outputs[0], out)
        return None

    def attributes(self, others: dict[str, int]) -> dict[str, ir.Attr]:
        numbers = others | {"bits": self.options.bits, "block_size": self.options.block_size}
        return {name: ir.AttrInt64(name, number) for name, number in numbers.items()}

    def too_new(self, operator: str) -> str | None:
        first = first_release(ir.Node("com.microsoft", operator, []))
        context = self.options.context
        if context is None or context.release is None or context.release >= first:
            return None
        return f"{operator} needs ONNX Runtime {first[0]}.{first[1]}, the target is older"

    def left(self, weight: np.ndarray) -> str | None:
        """Why a weight [N, K] stays as it is."""
        if weight.dtype != np.float32:
            return f"its weight is {weight.dtype}, not float32"
        after = stored_bytes(weight.shape, self.options.bits, self.options.block_size, self.symmetric)
        return f"{weight.nbytes} bytes, would be {after}" if after >= weight.nbytes else None

    def blocks(self, value: ir.Value, weight: np.ndarray, by_rows: bool) -> _Blocks:
        """Blocks [N, blocks, bytes], scales and zero points of a weight [N, K], made once for all who read it."""
        if (value, by_rows) not in self.made:
            bits, symmetric = self.options.bits, self.symmetric
            check_finite(value, weight, bits)
            # Older releases read a table's zero points wrongly where a row has an odd number of them.
            looked_up = any(use.node.op_type == "Gather" for use in value.uses())
            odd = -(-weight.shape[1] // self.options.block_size) % 2 == 1
            symmetric = symmetric or (bits == 4 and looked_up and odd)
            name, form = (value.name or "weight").removesuffix(".T"), f"int{bits}"
            loud = self.loud.get(value)
            loud = loud if loud is not None and len(loud) == weight.shape[1] else None
            blocks = quantize(weight, bits, self.options.block_size, symmetric, self.method, loud)
            self.stored.append(Stored(name, weight.nbytes, blocks.nbytes, form))
            self.made[value, by_rows] = (
                add_initializer(self.graph, f"{name}.{form}", blocks.values),
                add_initializer(self.graph, f"{name}.scale", blocks.scale),
                None if blocks.zero is None else add_initializer(self.graph, f"{name}.zero", blocks.zero),
            )
        return self.made[value, by_rows]
