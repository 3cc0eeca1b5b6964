"""Sizes of scores and of queries, keys and values, read from the graph's inputs: a size must not keep them alive."""

from __future__ import annotations

import onnx_ir as ir

from tx_export._attention_candidates import comes_from_product
from tx_export._graph import replace
from tx_export.optimize._attention_products import Dims, shape_of
from tx_export.optimize._attention_rows import emit, integers

__all__ = ["free_scores"]


_Sources = dict[str | None, tuple[ir.Value, int]]


def free_scores(graph: ir.Graph) -> int:
    """Replace each Shape of a product, or of what is near behind one, by sizes of inputs; returns how many."""
    sources = _sources(graph)
    done = 0
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Shape" else None
        if value is None or value.is_graph_input() or not (comes_from_product(value) or _is_linear(value)):
            continue
        dims = shape_of(value)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
        if dims and all(isinstance(dim, int) or dim.value in sources for dim in dims):
            replace(node.outputs[0], _sizes(node, dims, sources))
            graph.remove(node, safe=True)
            done += 1
    return done


def _is_linear(value: ir.Value) -> bool:
    """A product with a weight, maybe with its bias."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        node = next((item.producer() for item in node.inputs if item is not None and item.producer()), None)
    return node is not None and node.op_type in ("Gemm", "MatMul")


def _sources(graph: ir.Graph) -> _Sources:
    """An input that has each named dimension, and which of its axes it is."""
    return {
        dim.value: (value, axis)
        for value in graph.inputs
        for axis, dim in enumerate(shape_of(value))
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }


def _sizes(before: ir.Node, dims: Dims, sources: _Sources) -> ir.Value:
    parts = []
    for dim in dims:
        if isinstance(dim, int):
            parts.append(integers(before, dim))
            continue
        value, axis = sources[dim.value]
        window = (ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1))
        parts.append(emit(before, "Shape", [value], [1], *window, dtype=ir.DataType.INT64))
    return emit(before, "Concat", parts, [len(parts)], ir.AttrInt64("axis", 0), dtype=ir.DataType.INT64)
