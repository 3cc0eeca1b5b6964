"""How far values reach on calibration text and probes: reduced inside a copy of the graph, so memory stays constant.

For attention, also how far rounding may move a score: sqrt(sum (q k)^2) is how far single products of it reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer
from tx_export.passes import Context
from tx_export.quantize._prompt import open_prompt

__all__ = ["Ranges", "measured"]

_SQUARED = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}


@dataclass(frozen=True)
class Ranges:
    """By name of a value: its largest size, and the size of the scores that became it."""

    largest: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


def measured(copy: ir.Model, context: Context) -> Ranges:
    """Over all feeds; `copy` is a graph that nobody else needs."""
    graph, found = copy.graph, Ranges()
    floats = [value for value in _values(graph) if value.dtype == ir.DataType.FLOAT]
    nodes = [node for node in graph if node.op_type in _SQUARED or node.op_type == "Softmax"]
    outputs: dict[str, tuple[dict[str, float], str]] = {}
    graph.outputs.clear()
    for value in floats:
        outputs[_reduced(graph, _op(graph, "Abs", value))] = (found.largest, value.name or "")
    for node in nodes:
        scores = node.inputs[0] if node.op_type == "Softmax" else _score_size(graph, node)
        if scores is not None:
            outputs[_reduced(graph, scores)] = (found.scores, node.outputs[0].name or "")
    run = open_prompt(copy, context)
    for feeds in (*context.feeds, *context.probes):
        for name, array in run(feeds).items():
            known, key = outputs[name]
            known[key] = max(known.get(key, 0.0), float(np.nan_to_num(array, nan=np.inf)))
    return found


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from (value for value in node.outputs if value.name)  # one that is left out has none


def _reduced(graph: ir.Graph, value: ir.Value) -> str:
    """A new output of the graph, the largest element; its name."""
    out: ir.Value = _op(graph, "ReduceMax", value, keepdims=0)
    name = f"range.{len(graph.outputs)}"
    out.dtype, out.shape, out.name = ir.DataType.FLOAT, ir.Shape([]), name
    graph.outputs.append(out)
    return name


def _op(graph: ir.Graph, op: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: int | Sequence[int]) -> Any:
    node = ir.node(op, list(inputs), attributes, num_outputs=outputs)
    graph.append(node)
    return node.outputs[0] if outputs == 1 else node.outputs


def _score_size(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """scale sqrt(sum (q k)^2), over each pair of query and key; None where query and key aren't seen."""
    found = _packed(graph, node) if node.domain and node.op_type == "Attention" else _separate(node)
    if found is None:
        return None
    q, k, width = found
    heads = node.attributes.get_int("num_heads", node.attributes.get_int("q_num_heads", 0))
    groups = node.attributes.get_int("kv_num_heads", heads)
    if not heads or not groups:
        return None
    scale = node.attributes.get_float("scale", 0.0) or (width / heads) ** -0.5
    q_shape = add_initializer(graph, "range.q", np.array([0, 0, groups, heads // groups, -1]))
    k_shape = add_initializer(graph, "range.k", np.array([0, 0, groups, 1, -1]))
    q2, k2 = (_op(graph, "Reshape", _op(graph, "Mul", x, x), shape) for x, shape in ((q, q_shape), (k, k_shape)))
    q2 = _op(graph, "Transpose", q2, perm=[0, 2, 3, 1, 4])  # [B, groups, heads / groups, T, head_dim]
    k2 = _op(graph, "Transpose", k2, perm=[0, 2, 3, 4, 1])  # [B, groups, 1, head_dim, S]
    size = _op(graph, "Sqrt", _op(graph, "MatMul", q2, k2))
    scaled: ir.Value = _op(graph, "Mul", size, add_initializer(graph, "range.scale", np.array(scale, np.float32)))
    return scaled


def _separate(node: ir.Node) -> tuple[ir.Value, ir.Value, int] | None:
    """Query and key [B, T, H head_dim], and that width, where both are whole inputs."""
    q, k, bias = (*node.inputs, None, None)[0], (*node.inputs, None)[1], (*node.inputs, None, None)[3]
    added = bias is not None and node.op_type == "MultiHeadAttention"
    if q is None or k is None or added or any(x.shape is None or len(x.shape) != 3 for x in (q, k)):
        return None
    width = q.shape[2] if q.shape is not None else None
    return (q, k, width) if isinstance(width, int) else None


def _packed(graph: ir.Graph, node: ir.Node) -> tuple[ir.Value, ir.Value, int] | None:
    x, weight, bias = node.inputs[:3]
    if weight is None or weight.shape is None or not isinstance(weight.shape[1], int):
        return None
    third = weight.shape[1] // 3
    widths = np.array(node.attributes.get_ints("qkv_hidden_sizes", [third] * 3))
    whole = _op(graph, "MatMul", x, weight)
    whole = whole if bias is None else _op(graph, "Add", whole, bias)
    q, k, _ = _op(graph, "Split", whole, add_initializer(graph, "range.widths", widths), outputs=3, axis=-1)
    return q, k, int(widths[0])
