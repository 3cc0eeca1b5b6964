"""The words for graph passes: constants, new nodes, replacement, and the linear layer however it is spelt."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export._graph import Linear, add_initializer, add_node, array_of, linear_at, linear_behind, only_use, replace
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_WEIGHT = np.array([[1, 2, 3], [4, 5, 6]], np.float32)  # [2, 3]: a mix-up of the axes shows in the shape
_CONSTANTS = """float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3, 2] wt = {1, 4, 2, 5, 3, 6},
    float[3] bias = {7, 8, 9}, float[1] single = {7}, float[1, 3] row = {7, 8, 9}, float[2] flat = {1, 2},
    float[1, 2, 3] deep = {1, 2, 3, 4, 5, 6}"""


def graph(body: str, inputs: str = "float[n, 2] x", outputs: str = "float[n, 3] y") -> ir.Model:
    return graph_from_text(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) <{_CONSTANTS}> {{ {body} }}'
    )


def value(model: ir.Model, name: str) -> ir.Value:
    outputs = [output for node in model.graph for output in node.outputs]
    return next(item for item in [*model.graph.inputs, *outputs] if item.name == name)


def product(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type in ("MatMul", "Gemm"))


_LINEAR = {
    "MatMul": ("y = MatMul (x, w)", False),
    "MatMul and bias": ("p = MatMul (x, w) y = Add (p, bias)", True),
    "bias and MatMul": ("p = MatMul (x, w) y = Add (bias, p)", True),
    "turned MatMul": ("t = Transpose <perm = [1, 0]> (wt) p = MatMul (x, t) y = Add (p, bias)", True),
    "turned by default": ("t = Transpose (wt) y = MatMul (x, t)", False),
    "Gemm": ("y = Gemm (x, w, bias)", True),
    "Gemm and bias": ("p = Gemm (x, w) y = Add (p, bias)", True),
    "Gemm with transB": ("y = Gemm <transB = 1> (x, wt, bias)", True),
}


@pytest.mark.parametrize("form", _LINEAR)
def test_a_linear_layer_is_found_however_it_is_spelt(form: str) -> None:
    body, biased = _LINEAR[form]
    model = graph(body)
    found = linear_at(product(model))
    assert isinstance(found, Linear)
    assert np.array_equal(found.weight, _WEIGHT)
    assert found.turned == ("wt" in body)
    assert found.weight_value is model.graph.initializers["wt" if found.turned else "w"]
    assert (found.x.name, found.output.name) == ("x", "y")
    assert (None if found.bias is None else found.bias.tolist()) == ([7, 8, 9] if biased else None)
    behind = linear_behind(model.graph.outputs[0])
    assert isinstance(behind, Linear) and behind.node is found.node
    # The definition is the reference, with small integers that float32 holds exactly.
    x = np.array([[1, -2], [3, 5]], np.float32)
    expected = x @ found.weight + (0 if found.bias is None else found.bias)
    assert np.array_equal(run_graph(model, {"x": x})["y"], expected)


_NOT_LINEAR = {
    "both computed": ("y = MatMul (x, m)", "float[n, 2] x, float[2, 3] m", "both operands are computed"),
    "constant on the left": ("y = MatMul (wt, x)", "float[2, n] x", "the weight is the left operand"),
    "Gemm, constant on the left": ("y = Gemm (wt, x)", "float[2, n] x", "the weight is the left operand"),
    "one dimension": ("y = MatMul (x, flat)", "float[n, 2] x", "the weight has 1 dimensions"),
    "three dimensions": ("y = MatMul (x, deep)", "float[n, 2] x", "the weight has 3 dimensions"),
    "turned the other way": (
        "t = Transpose <perm = [0, 1]> (w) y = MatMul (x, t)", "float[n, 2] x", "both operands are computed"),
    "alpha": ("y = Gemm <alpha = 2.0> (x, w, bias)", "float[n, 2] x", "a Gemm with alpha, beta or transA"),
    "beta": ("y = Gemm <beta = 0.5> (x, w, bias)", "float[n, 2] x", "a Gemm with alpha, beta or transA"),
    "transA": ("y = Gemm <transA = 1> (x, w, bias)", "float[2, n] x", "a Gemm with alpha, beta or transA"),
    "Gemm, row of biases": ("y = Gemm (x, w, row)", "float[n, 2] x", "its bias has the shape [1, 3]"),
    "Gemm, one bias": ("y = Gemm (x, w, single)", "float[n, 2] x", "its bias has the shape [1]"),
    "Gemm, computed bias": ("y = Gemm (x, w, b)", "float[n, 2] x, float[3] b", "its bias is computed"),
}  # fmt: skip


@pytest.mark.parametrize("case", _NOT_LINEAR)
def test_what_is_no_linear_layer_is_told_apart(case: str) -> None:
    body, inputs, reason = _NOT_LINEAR[case]
    assert linear_at(product(graph(body, inputs, "float[a, b] y"))) == reason


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("p = MatMul (x, w) y = Add (p, single)", "float[n, 2] x"),
        ("p = MatMul (x, w) y = Add (p, row)", "float[n, 2] x"),
        ("p = MatMul (x, w) y = Add (p, b)", "float[n, 2] x, float[3] b"),
        ("p = MatMul (x, w) y = Add (p, p)", "float[n, 2] x"),
        ("p = MatMul (x, w) y = Sub (p, bias)", "float[n, 2] x"),
        ("p = MatMul (x, w) y = Add (p, bias) z = Neg (p)", "float[n, 2] x"),
    ],
    ids=["one for all", "two dimensions", "computed", "itself", "subtracted", "the product is read by others"],
)
def test_what_is_added_is_a_bias_only_if_it_is_constant_of_the_right_shape_and_nobody_reads_between(
    body: str, inputs: str
) -> None:
    model = graph(body, inputs)
    found = linear_at(product(model))
    assert isinstance(found, Linear)
    assert found.bias is None and found.output.name == "p"
    assert linear_behind(model.graph.outputs[0]) == "not the output of a linear layer"


def test_a_constant_that_the_caller_may_replace_is_no_constant() -> None:
    model = graph("y = MatMul (x, w)")
    assert array_of(model.graph.initializers["w"]) is not None
    model.graph.inputs.append(model.graph.initializers["w"])
    assert array_of(model.graph.initializers["w"]) is None
    assert array_of(None) is None


def test_a_name_that_stands_for_something_else_gets_a_number_and_an_equal_constant_is_used_again() -> None:
    model = graph("y = MatMul (x, w)")
    one, other = np.array([1], np.int64), np.array([2], np.int64)
    first = add_initializer(model.graph, "axis", one)
    assert add_initializer(model.graph, "axis", one.copy()) is first
    assert add_initializer(model.graph, "axis", other).name == "axis.1"
    assert add_initializer(model.graph, "axis", other).name == "axis.1"
    assert add_initializer(model.graph, "axis", one.astype(np.int32)).name == "axis.2"
    assert add_initializer(model.graph, "y", one).name == "y.1"
    assert add_initializer(model.graph, "x", one).name == "x.1"


@pytest.mark.parametrize("array", [np.array(3.0, np.float32), np.arange(6, dtype=np.int8).reshape(2, 3).T])
def test_a_new_constant_has_the_shape_type_and_values_given(array: Array) -> None:
    model = graph("y = MatMul (x, w)")
    made = add_initializer(model.graph, "new", array)
    read = ir.from_proto(ir.to_proto(model)).graph.initializers["new"]
    for item in (made, read):
        stored = array_of(item)
        assert stored is not None and stored.shape == array.shape and np.array_equal(stored, array)
        assert tuple(item.shape or ()) == array.shape and item.dtype == ir.DataType.from_numpy(array.dtype)


def test_a_value_has_one_user_only_if_one_node_reads_it_and_the_caller_does_not() -> None:
    model = graph("a = Neg (x) b = Neg (x) c = Mul (a, a) y = Add (b, c)", "float[n, 3] x")
    assert only_use(value(model, "x")) is None  # two readers
    assert only_use(value(model, "a")) is model.graph.node(2)  # one reader, twice
    assert only_use(value(model, "b")) is model.graph.node(3)
    assert only_use(value(model, "y")) is None  # an output
    model.graph.outputs.append(value(model, "b"))
    assert only_use(value(model, "b")) is None  # both


def test_a_replaced_output_keeps_its_name_shape_and_other_readers() -> None:
    model = graph("y = Neg (x) z = Abs (y)", "float[n, 3] x", "float[n, 3] y, float[n, 3] z")
    old = model.graph.outputs[0]
    (new,) = add_node(model.graph.node(0), "Relu", [model.graph.inputs[0]])
    replace(old, new)
    assert [output.name for output in model.graph.outputs] == ["y", "z"]
    assert model.graph.outputs[0] is new and not old.uses()
    assert list(new.shape or ()) == list(model.graph.inputs[0].shape or ()) and new.dtype == ir.DataType.FLOAT
    found = run_graph(model, {"x": np.array([[1, -2, 0]], np.float32)})
    assert found["y"].tolist() == found["z"].tolist() == [[1, 0, 0]]


def test_a_new_node_stands_before_the_given_one_and_brings_its_domain() -> None:
    model = graph("y = Neg (x)", "float[n, 3] x")
    neg = model.graph.node(0)
    (gelu,) = add_node(neg, "com.microsoft::Gelu", [model.graph.inputs[0]])
    first, second = add_node(neg, "Split", [gelu], {"axis": ir.AttrInt64("axis", 0)}, outputs=2)
    assert [node.op_type for node in model.graph] == ["Gelu", "Split", "Neg"]
    assert model.opset_imports == {"": 18, "com.microsoft": 1}
    assert first is not second and gelu.producer() is model.graph.node(0)
    assert model.graph.node(1).attributes.get_int("axis") == 0
