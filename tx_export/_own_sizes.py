"""A part that is taken out of a graph reads sizes off its own inputs."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["read_own_sizes"]


def read_own_sizes(graph: ir.Graph) -> None:
    """A Shape of one axis of an input that nothing else reads becomes that of a like axis of one that is computed with.

    The exporter reads a dimension off any input that has it.
    """
    computed = [value for value in graph.inputs if any(node.op_type != "Shape" for node, _ in value.uses())]
    axes = {dim: (value, axis) for value in computed for axis, dim in enumerate(value.shape or ()) if dim != 1}
    for foreign in [value for value in graph.inputs if value not in computed]:
        for node, _ in list(foreign.uses()):
            start = node.attributes.get_int("start", 0)
            assert foreign.shape is not None and node.attributes.get_int("end", len(foreign.shape)) == start + 1
            value, axis = axes[foreign.shape[start]]
            node.replace_input_with(0, value)
            node.attributes["start"], node.attributes["end"] = (
                ir.AttrInt64("start", axis),
                ir.AttrInt64("end", axis + 1),
            )
