"""Products by the value that they read, which has one scale for each channel: (x / s) @ (s w) = x @ w."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of, linear_at
from tx_export.passes import Left
from tx_export.quantize._smooth_fold import apply_edits, fold, is_alone, rescale
from tx_export.quantize._weights import attention_left, candidates, name_of, weight_of

__all__ = ["Products", "products_of", "weight_at"]


@dataclass(frozen=True)
class Products:
    """All that read `x`, in order, and whose weights nothing else reads."""

    x: ir.Value
    nodes: tuple[ir.Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name_of(node) for node in self.nodes)

    @property
    def channels(self) -> int:
        return len(weight_at(self.nodes[0])[0])

    def weight(self) -> np.ndarray:
        """[K, N], side by side."""
        return np.concatenate([weight_at(node)[0] for node in self.nodes], axis=1)

    def folds(self) -> bool:
        """Whether what makes x can divide it, so that it costs nothing at run time."""
        return fold(self.x, self.nodes, np.ones(self.channels, np.float32)) is not None

    def divide(self, scale: np.ndarray) -> None:
        """x / scale into the products, whose weights take the scale [K]."""
        edits = fold(self.x, self.nodes, 1 / scale)
        if edits is None:
            self._multiply(1 / scale)
        else:
            apply_edits(edits)
        self.replace_weight(self.weight() * scale[:, None])

    def replace_weight(self, weight: np.ndarray) -> None:
        """By one like `weight`."""
        start = 0
        for node in self.nodes:
            old, turned = weight_at(node)
            part = weight[:, start : start + old.shape[1]]
            value, start = weight_of(node), start + old.shape[1]
            assert value is not None
            rescale(value, part.T if turned else part)

    def _multiply(self, inverse: np.ndarray) -> None:
        first = self.nodes[0]
        graph = first.graph
        assert isinstance(graph, ir.Graph)
        (divided,) = add_node(first, "Mul", [self.x, add_initializer(graph, f"{self.names[0]}.inverse", inverse)])
        divided.type, divided.shape = self.x.type, self.x.shape
        for node in self.nodes:
            node.replace_input_with(0, divided)


def products_of(graph: ir.Graph, only: str) -> tuple[list[Products], list[Left]]:
    """Those that `only` names, and which of them have to stay as they are."""
    by_input: dict[ir.Value, list[ir.Node]] = {}
    left = []
    for node in candidates(graph, only):
        reason = _left(node)
        if reason is None and (x := node.inputs[0]) is not None:
            by_input.setdefault(x, []).append(node)
        elif node.op_type != "Gather" and reason != "both operands are computed":
            left.append(Left(name_of(node), reason or "it has no input"))
    return [Products(x, tuple(nodes)) for x, nodes in by_input.items()], left


def _left(node: ir.Node) -> str | None:
    if node.op_type == "Attention":
        reason = attention_left(node)
    else:
        found = "no product" if node.op_type == "Gather" else linear_at(node)
        reason = found if isinstance(found, str) else _not_float32(found.weight)
    tied = reason is None and not all(map(is_alone, (node.inputs[1], weight_of(node))))
    return "its weight has other readers" if tied else reason


def _not_float32(weight: np.ndarray) -> str | None:
    return None if weight.dtype == np.float32 else f"its weight is {weight.dtype}, not float32"


def weight_at(node: ir.Node) -> tuple[np.ndarray, bool]:
    """[K, N], and whether it is stored turned."""
    if node.op_type == "Attention":
        weight = array_of(node.inputs[1])
        assert weight is not None
        return weight, False
    linear = linear_at(node)
    assert not isinstance(linear, str)
    return linear.weight, linear.turned
