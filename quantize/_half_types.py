"""What a half precision holds, and which nodes of a graph compute in float32 and could compute in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

__all__ = ["BFLOAT16", "FLOAT16", "Half", "computes", "fill_in_types", "has_form"]

_CONTRIB = {
    "Attention", "BiasGelu", "EmbedLayerNormalization", "FastGelu", "FusedMatMul", "GatherBlockQuantized", "Gelu",
    "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "QuickGelu", "RotaryEmbedding",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
_CONCRETE = {f"tensor({name.lower()})": ir.DataType[name] for name in ("BOOL", "INT64", "UINT8")}


@dataclass(frozen=True)
class Half:
    """A half precision: rounding moves a number by at most `epsilon` of it."""

    name: str
    dtype: ir.DataType
    largest: float
    smallest: float  # with all bits of its mantissa
    epsilon: float
    score_noise: float  # that attention takes; a score that moves by x multiplies a weight by e^x


FLOAT16 = Half("float16", ir.DataType.FLOAT16, 65504.0, 2.0**-14, 2.0**-11, score_noise=0.1)
BFLOAT16 = Half("bfloat16", ir.DataType.BFLOAT16, 2.0**127 * (2 - 2.0**-7), 2.0**-126, 2.0**-8, score_noise=0.8)


def computes(node: ir.Node) -> bool:
    """Whether a float32 value goes in or out."""
    return any(value is not None and value.dtype == ir.DataType.FLOAT for value in (*node.inputs, *node.outputs))


def fill_in_types(graph: ir.Graph) -> None:
    """Types of values that passes have left open, as far as they follow from the operands or the operator."""
    for node in graph:
        for index, value in enumerate(node.outputs):
            made = _made(node, index) if value.dtype is None else None
            if made is not None:
                value.type = ir.TensorType(made)


def _made(node: ir.Node, index: int) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    operands = [value for value in node.inputs if value is not None and value.dtype is not None]
    schema = _schema(node)
    if schema is None:
        return operands[0].dtype if operands else None
    made = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
    if made in _CONCRETE:
        return _CONCRETE[made]
    types = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(node.inputs))]
    pairs = zip(types, node.inputs, strict=True)
    return next((value.dtype for formal, value in pairs if formal == made and value is not None), None)


def _schema(node: ir.Node) -> Any:
    """Of an operator of ONNX itself, else None."""
    assert node.graph is not None
    try:
        return None if node.domain else onnx.defs.get_schema(node.op_type, node.graph.opset_imports[""], "")
    except onnx.defs.SchemaError:
        return None


def has_form(node: ir.Node, half: Half) -> bool:
    """Whether the operator is defined on the half type wherever it has float32 here."""
    if node.op_type == "SimplifiedLayerNormalization":  # ONNX Runtime's own, in ONNX's domain
        return True
    if node.domain:
        return node.domain == "com.microsoft" and node.op_type in _CONTRIB
    schema = _schema(node)
    if schema is None:
        return False
    allowed = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    types = [*_paired(schema.inputs, node.inputs), *_paired(schema.outputs, node.outputs)]
    return all(f"tensor({half.name})" in allowed.get(formal, ()) for formal in types)


def _paired(formals: Sequence[Any], values: Sequence[ir.Value | None]) -> Iterator[str]:
    """The name of the type of each float32 operand; the last formal operand stands for all that follow."""
    for index, value in enumerate(values):
        if value is not None and value.dtype == ir.DataType.FLOAT:
            yield formals[min(index, len(formals) - 1)].type_str
