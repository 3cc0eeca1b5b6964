"""Sizes that are the same at every run, as constants: exporters compute with them what they could have known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tx_export._graph import add_initializer, array_of

__all__ = ["fold_sizes"]


def fold_sizes(graph: ir.Graph) -> None:
    """Put numbers in the place of Gather and Slice of a Shape, where the dimensions that they take are numbers."""
    for node in graph:
        sizes = _taken(node)
        if sizes is not None and sizes.size and not node.outputs[0].is_graph_output():
            name = ".".join(["size", *map(str, sizes.reshape(-1))])
            node.outputs[0].replace_all_uses_with(add_initializer(graph, name, sizes))


def _taken(node: ir.Node) -> NDArray[np.int64] | None:
    """What a node takes of a shape, if it is known."""
    source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node.op_type not in ("Gather", "Slice") or node.domain or source is None or source.op_type != "Shape":
        return None
    value = source.inputs[0]
    given = [array for array in map(array_of, node.inputs[1:]) if array is not None]
    if value is None or value.shape is None or len(given) < len(node.inputs) - 1:
        return None
    dims = list(value.shape)[source.attributes.get_int("start", 0) : source.attributes.get_int("end", None)]
    places = np.arange(len(dims))
    if node.op_type == "Gather":
        places = places[given[0]]
    else:
        start, end, step = (int(array.item()) for array in (*given[:2], given[3] if len(given) > 3 else np.array(1)))
        places = places[start:end:step]
    return _numbers([dims[place] for place in places.reshape(-1)], places.shape)


def _numbers(dims: Sequence[int | ir.SymbolicDim], shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    return np.array(dims, np.int64).reshape(shape) if all(isinstance(dim, int) for dim in dims) else None
