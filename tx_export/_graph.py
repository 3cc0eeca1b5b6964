"""Words for passes over graphs: constants, new initializers and nodes, and the linear layer however it is spelt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

__all__ = ["Linear", "add_initializer", "add_node", "array_of", "linear_at", "linear_behind", "only_use", "replace"]


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant, None for anything that is computed or fed."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """A new constant, or the equal one of that name; a name that stands for something else gets a number behind it."""
    taken = {output.name for node in graph for output in node.outputs} | {value.name for value in graph.inputs}
    unique, number = name, 0
    while unique in graph.initializers or unique in taken:
        known = array_of(graph.initializers.get(unique))
        if known is not None and known.dtype == array.dtype and np.array_equal(known, array):
            return graph.initializers[unique]
        number += 1
        unique = f"{name}.{number}"
    value = ir.Value(name=unique, const_value=ir.tensor(np.asarray(array, order="C"), name=unique))
    value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    graph.register_initializer(value)
    return value


def add_node(
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr] | None = None,
    outputs: int = 1,
) -> Sequence[ir.Value]:
    """Insert a node; `op` is `domain::Type`, or `Type` of ONNX itself. Returns its outputs."""
    domain, _, op_type = op.rpartition("::")
    node = ir.Node(domain, op_type, inputs, list((attributes or {}).values()), num_outputs=outputs)
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_before(before, node)
    if domain:
        graph.opset_imports.setdefault(domain, 1)
    return node.outputs


def only_use(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value; None if several do, none does, a subgraph, or it is an output of the graph."""
    uses = {use.node for use in value.uses()}
    if len(uses) != 1 or value.is_graph_output():
        return None
    reader = uses.pop()
    return reader if reader.graph is value.graph else None


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let everybody read `new` instead; it takes type and shape, and the name where `old` is an output of the graph."""
    new.type, new.shape = old.type, old.shape
    if old.is_graph_output():
        name, old.name = old.name, f"inner.{old.name}"
        new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


@dataclass(frozen=True)
class Linear:
    """output = x @ weight + bias, with weight [K, N] and bias [N] constant; `node` makes the product."""

    node: ir.Node
    x: ir.Value
    weight: np.ndarray
    bias: np.ndarray | None
    output: ir.Value
    weight_value: ir.Value  # the initializer: weight, or its transpose when `turned`
    turned: bool


def linear_at(node: ir.Node) -> Linear | str:
    """The linear layer whose product this MatMul or Gemm is, or the reason why it is none."""
    if node.op_type == "Gemm":
        return _gemm(node)
    x, weight_value, turned = node.inputs[0], node.inputs[1], False
    assert x is not None and weight_value is not None
    producer = weight_value.producer()
    if producer is not None and producer.op_type == "Transpose" and producer.inputs[0] is not None:
        weight_value, turned = producer.inputs[0], list(producer.attributes.get_ints("perm", [1, 0])) == [1, 0]
    weight = array_of(weight_value)
    if weight is None or not (turned or weight_value is node.inputs[1]):
        return "the weight is the left operand" if array_of(x) is not None else "both operands are computed"
    if weight.ndim != 2:
        return f"the weight has {weight.ndim} dimensions"
    weight = weight.T if turned else weight
    bias, output = _bias_behind(node.outputs[0], weight.shape[1])
    return Linear(node, x, weight, bias, output, weight_value, turned)


def linear_behind(value: ir.Value) -> Linear | str:
    """The linear layer whose output this value is, or the reason why it is none."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        products = [operand.producer() for operand in node.inputs if operand is not None]
        node = next((product for product in products if product is not None), None)
    if node is None or node.op_type not in ("MatMul", "Gemm"):
        return "not the output of a linear layer"
    found = linear_at(node)
    if isinstance(found, Linear) and found.output is not value:
        return "not the output of a linear layer"
    return found


def _bias_behind(product: ir.Value, width: int) -> tuple[np.ndarray | None, ir.Value]:
    add = only_use(product)
    if add is None or add.op_type != "Add" or add.domain:
        return None, product
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    bias = array_of(other)
    if bias is None or bias.shape != (width,):
        return None, product
    return bias, add.outputs[0]


def _gemm(node: ir.Node) -> Linear | str:
    x, weight_value = node.inputs[0], node.inputs[1]
    weight = array_of(weight_value)
    bias_value = node.inputs[2] if len(node.inputs) > 2 else None
    bias = array_of(bias_value)
    attributes = node.attributes
    if x is None or weight is None or weight_value is None:
        return "the weight is the left operand" if array_of(x) is not None else "both operands are computed"
    if bias_value is not None and bias is None:
        return "its bias is computed"
    if (
        attributes.get_float("alpha", 1.0) != 1
        or attributes.get_float("beta", 1.0) != 1
        or attributes.get_int("transA", 0) == 1
    ):
        return "a Gemm with alpha, beta or transA"
    turned = attributes.get_int("transB", 0) == 1
    weight = weight.T if turned else weight
    if bias is not None and bias.shape != (weight.shape[1],):
        return f"its bias has the shape {list(bias.shape)}"
    if bias is None:
        bias, output = _bias_behind(node.outputs[0], weight.shape[1])
        return Linear(node, x, weight, bias, output, weight_value, turned)
    return Linear(node, x, weight, bias, node.outputs[0], weight_value, turned)
