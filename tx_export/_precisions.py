"""What precision each weight of a graph is stored in, and the products with weights are computed in, from its nodes.

A product of x [.., K] and w [K, N] takes K N multiply-adds for each token. Those of attention itself (queries with
keys, weights with values) grow with the length, hold no weight, and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["Weight", "multiply_adds", "weights"]

# Where the weight stands among the inputs of a node, then its scale and zero point where the node takes them.
_PRODUCTS: dict[str, tuple[int, ...]] = {
    "Attention": (1,),
    "Conv": (1,),
    "Gemm": (1,),
    "MatMul": (1,),
    "MatMulInteger": (1, 3),
    "MatMulIntegerToFloat": (1, 3, 5),
    "MatMulNBits": (1, 2, 3),
    "QAttention": (1, 4, 7),
    "QGemm": (3, 4, 5),
    "QLinearMatMul": (3, 4, 5),
}
_LOOKUPS = {"Gather": (0,), "GatherBlockQuantized": (0, 2, 3)}
_BLOCKS = ("MatMulNBits", "GatherBlockQuantized")
_SAME_VALUES = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")
_INTEGERS = ("INT8", "UINT8", "INT4", "UINT4")


@dataclass(frozen=True)
class Weight:
    """A constant that products or lookups read; `after` are its bytes, with those of its scales and zero points."""

    name: str
    form: str
    elements: int
    after: int
    readers: tuple[str, ...]  # the outputs of those nodes


def weights(graph: ir.Graph) -> list[Weight]:
    """Each once, in the order in which it is first read."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph.all_nodes():
        for value in _read_by(node):
            readers.setdefault(value, []).append(node)
    return [_weight(value, nodes) for value, nodes in readers.items()]


def multiply_adds(graph: ir.Graph) -> dict[str, float]:
    """The share of each precision among products with weights, the largest first."""
    counted: Counter[str] = Counter()
    for node in graph.all_nodes():
        for value in _read_by(node) if node.op_type in _PRODUCTS else ():
            counted[_precision(node, value)] += _elements(value, node)
    whole = counted.total()
    return {precision: count / whole for precision, count in counted.most_common()}


def _read_by(node: ir.Node) -> Iterator[ir.Value]:
    """The constant weights of a product or a lookup; whole numbers are none, nor are scales that are looked up."""
    places = (_PRODUCTS | _LOOKUPS).get(node.op_type, ())[:1] + ((0,) if node.op_type == "MatMul" else ())
    for value in (_constant(node.inputs[place]) for place in places if place < len(node.inputs)):
        shape = () if value is None or value.const_value is None else value.const_value.shape
        is_scale = node.op_type in _LOOKUPS and shape[1:] == (1,)
        if value is not None and _dtype(value) in (*_FLOATS, *_INTEGERS) and len(shape) > 1 and not is_scale:
            yield value


def _constant(value: ir.Value | None) -> ir.Value | None:
    """The initializer behind nodes that move or convert its values, if there is one."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in _SAME_VALUES else None
    return None if value is None or value.is_graph_input() else value


def _weight(value: ir.Value, nodes: list[ir.Node]) -> Weight:
    parts = {value} | {part for node in nodes for part in _scales(value, node)}
    after = sum(part.const_value.nbytes for part in parts if part.const_value is not None)
    form = _form(value, nodes[0])
    name = (value.name or "").removesuffix(f".{form}").removesuffix(".T")
    return Weight(name, form, _elements(value, nodes[0]), after, tuple(node.outputs[0].name or "" for node in nodes))


def _scales(value: ir.Value, node: ir.Node) -> Iterator[ir.Value]:
    """Scales and zero points of a weight: at its reader, at a DequantizeLinear, or looked up beside it."""
    given = [node.inputs[place] for place in (_PRODUCTS | _LOOKUPS)[node.op_type][1:] if place < len(node.inputs)]
    for use in value.uses():
        given += use.node.inputs[1:] if use.node.op_type == "DequantizeLinear" else ()
    if node.op_type == "Gather" and _dtype(value) in _INTEGERS:
        given += [scale for cast in _readers(node, "Cast") for scale in _factors(cast)]
    yield from (constant for constant in map(_constant, given) if constant is not None)


def _readers(node: ir.Node, op_type: str) -> list[ir.Node]:
    return [use.node for use in node.outputs[0].uses() if use.node.op_type == op_type]


def _factors(cast: ir.Node) -> Iterator[ir.Value | None]:
    """The tables of scales whose rows are multiplied with rows that were cast to float."""
    operands = [operand for product in _readers(cast, "Mul") for operand in product.inputs if operand is not None]
    gathers = [gather for gather in (operand.producer() for operand in operands) if gather is not None]
    yield from (gather.inputs[0] for gather in gathers if gather.op_type == "Gather")


def _elements(value: ir.Value, node: ir.Node) -> int:
    if node.op_type == "MatMulNBits":  # whose last block may be filled up
        return node.attributes.get_int("K", 0) * node.attributes.get_int("N", 0)
    assert value.const_value is not None
    pairs = _dtype(value) == "UINT8" and _form(value, node) == "int4"
    return int(value.const_value.size) * (2 if pairs else 1)


def _dtype(value: ir.Value) -> str:
    return "" if value.const_value is None else value.const_value.dtype.name


def _form(value: ir.Value, node: ir.Node) -> str:
    """How the weight is stored."""
    if node.op_type in _BLOCKS and _dtype(value) == "UINT8":
        return f"int{node.attributes.get_int('bits', 4)}"
    assert value.const_value is not None
    return value.const_value.dtype.numpy().name


def _precision(node: ir.Node, value: ir.Value) -> str:
    """What the product is computed in: fewer bits only where the operator takes them, or both operands have them."""
    form = _form(value, node).removeprefix("u")
    sources = [operand.producer() for operand in node.inputs[:2] if operand is not None]
    both = all(source is not None and source.op_type == "DequantizeLinear" for source in sources)
    computed = node.outputs[0].dtype
    return form if both or len(_PRODUCTS[node.op_type]) > 1 or computed is None else computed.numpy().name
