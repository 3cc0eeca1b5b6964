"""Half precision as every provider rounds it, in float32 nodes that the CPU has: each result passes a pair of casts.

The CPU provider itself computes neighbouring float16 nodes in float32, which hides what overflows between them, and
it has no bfloat16 arithmetic.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["emulated"]

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def emulated(model: ir.Model) -> ir.Model:
    """A copy in which each half value is rounded where it is made; its inputs and outputs are all float32."""
    copy = model.clone()
    graph = copy.graph
    for value in (*graph.initializers.values(), *graph.inputs):
        if value.dtype in _HALF:
            _widen(value)
    for node in list(graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
                wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
                node.attributes[name] = ir.AttrTensor(name, wide)
        for value in node.outputs:
            if value.dtype in _HALF:
                _round(value, value.dtype)
    return copy


def _widen(value: ir.Value) -> None:
    value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object: the copy shares those of the original
    if value.const_value is not None:
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)


def _round(value: ir.Value, half: ir.DataType) -> None:
    node = value.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    narrow = None if node.op_type == "Cast" else ir.node("Cast", [value], {"to": int(half)})
    wide = ir.node("Cast", [value if narrow is None else narrow.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    out = wide.outputs[0]
    out.type, out.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    name = value.name
    ir.convenience.replace_all_uses_with(value, out, replace_graph_outputs=True)
    (wide if narrow is None else narrow).replace_input_with(0, value)
    if narrow is not None:
        narrow.outputs[0].type, narrow.outputs[0].shape = ir.TensorType(half), value.shape
        value.type = ir.TensorType(ir.DataType.FLOAT)
    node.graph.insert_after(node, [wide] if narrow is None else [narrow, wide])
    if out.is_graph_output():
        value.name, out.name = f"{name}.rounded", name
