"""float16: what becomes half and what stays, each weight once, and how far rounding moves an answer.

References: NumPy in float64 on the float32 graph's numbers. float16 rounds a number by at most 2^-11 of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export._emulation import emulated
from tx_export.errors import PassError
from tx_export.passes import Context, Coverage, Left, Outcome, Stored
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.quantize.float16 import Float16
from tx_export.testing import matmul_model

from .graphs import Array, graph, normal, operators, run

_EPSILON = 2.0**-11


def halve(model: ir.Model, *feeds: dict[str, Array], **options: Any) -> Coverage:
    """In place; with feeds, their ranges are heeded."""
    context = Context(nn.Identity(), feeds, lambda copy: lambda each: run(copy, dict(each)), provider="cuda")
    outcome = dataclasses.replace(Float16(**options), context=context)(model)
    assert isinstance(outcome, Outcome)
    assert outcome.modified == (outcome.coverage.done > 0) and outcome.subject == "quantized"
    left = outcome.coverage.left
    if outcome.modified:
        left, note = left[:-1], left[-1]
        assert note == Left(
            "verification", "on a CPU, in float32 with every result rounded to float16 as cuda rounds it"
        )
    return dataclasses.replace(outcome.coverage, left=left)


def repeated(coverage: Coverage) -> Float16:
    """The pass with the options that make the same choice without ranges."""
    (again,) = coverage.repeat
    assert isinstance(again, Float16)
    return again


def dtypes(model: ir.Model) -> dict[str, str]:
    constants = model.graph.initializers.items()
    return {name: str(value.const_value.dtype) for name, value in constants if value.const_value is not None}


def reasons(coverage: Coverage) -> dict[str, str]:
    return {left.name: left.reason for left in coverage.left}


def test_a_product_moves_by_no_more_than_the_rounding_of_its_operands_and_its_result() -> None:
    weight, x = normal(64, 48), normal(20, 64, seed=1)
    model = matmul_model(weight)
    assert halve(model) == Coverage(
        1, 1, repeat=(Float16(keep="none"),), stored=(Stored("weight", 12288, 6144, "float16"),)
    )
    assert dtypes(model) == {"weight": "FLOAT16"} and operators(model) == ["Cast", "MatMul", "Cast"]
    assert [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)] == [ir.DataType.FLOAT] * 2
    exact = x.astype(np.float64) @ weight
    # Two operands and the result are rounded, each by 2^-11 of it at most; 1 + 1e-3 for products of those.
    bound = (2 * _EPSILON * np.abs(x) @ np.abs(weight) + _EPSILON * np.abs(exact)) * (1 + 1e-3)
    for each in (model, emulated(model)):
        assert (np.abs(run(each, {"x": x})["y"] - exact) <= bound).all()


def test_emulation_rounds_where_the_cpu_does_not() -> None:
    """100 x 100 x 100 leaves float16's range on the way: the CPU provider, which computes on in float32, hides it."""
    weight = np.eye(4, dtype=np.float32) * 100
    body = "a = MatMul (x, w) b = MatMul (a, w) y = Mul (b, s)"
    model = graph("float[n, 4] x", "float[n, 4] y", {"w": weight, "s": np.array([1e-3], np.float32)}, body)
    halve(model)
    feeds = {"x": np.full((2, 4), 100, np.float32)}
    assert np.isfinite(run(model, feeds)["y"]).all()
    assert np.isinf(run(emulated(model), feeds)["y"]).all()
    assert model.graph.initializers["w"].dtype == ir.DataType.FLOAT16  # emulation works on a copy


def test_values_out_of_range_on_text_stay_in_float32_with_their_size_as_the_reason() -> None:
    weights = {"w": np.eye(4, dtype=np.float32) * 100, "s": np.array([1e-3], np.float32)}
    body = "a = MatMul (x, w) b = MatMul (a, w) y = Mul (b, s)"
    model = graph("float[n, 4] x", "float[n, 4] y", weights, body)
    x = np.full((2, 4), 100, np.float32)
    coverage = halve(model, {"x": x})
    assert reasons(coverage) == {"b": "b reaches 1e+06", "y": "b reaches 1e+06"} and coverage.done == 1
    again = graph("float[n, 4] x", "float[n, 4] y", weights, body)
    repeated(coverage)(again)
    assert dtypes(again) == dtypes(model) and operators(again) == operators(model)
    # 100, 1e4 and 1e6 are whole numbers of few bits; only the factor is rounded, and y is float32.
    for each in (model, emulated(model)):
        assert np.abs(run(each, {"x": x})["y"] - 1000).max() <= 1000 * _EPSILON


def test_values_too_small_for_float16_stay() -> None:
    model = graph("float[n, 4] x", "float[n, 4] y", {"w": np.eye(4, dtype=np.float32)}, "a = Neg (x) y = MatMul (a, w)")
    coverage = halve(model, {"x": np.full((2, 4), 1e-6, np.float32)})
    assert coverage.done == 0 and reasons(coverage)["a"] == "a reaches no more than 1e-06"


@pytest.mark.parametrize(
    ("constant", "reason"),
    [
        (1e5, "its constant c reaches 1e+05, over 6.55e+04"),
        (1e-12, "its constant c (up to 1e-12) loses 100% when it is rounded"),
        (1e-6, "its constant c (up to 1e-06) loses 1% when it is rounded"),
    ],
)
def test_a_constant_that_float16_cannot_hold_keeps_its_reader(constant: float, reason: str) -> None:
    weights = {"w": normal(4, 4), "c": np.array([constant], np.float32)}
    model = graph("float[n, 4] x", "float[n, 4] y", weights, "a = MatMul (x, w) y = Add (a, c)")
    assert reasons(halve(model)) == {"y": reason}
    assert dtypes(model) == {"w": "FLOAT16", "c": "FLOAT"}


def test_a_least_divisor_that_is_0_in_float16_keeps_the_quotient_too() -> None:
    """Reference: 0 / 1e-12 is 0."""
    weights = {"w": normal(4, 4), "c": np.array([1e-12], np.float32), "shape": np.array([1, 4])}
    body = """a = MatMul (x, w) n = ReduceL2 <keepdims = 1> (a) g = Max (n, c) d = Expand (g, shape)
        q = Div (a, d) y = MatMul (q, w)"""
    model = graph("float[1, 4] x", "float[1, 4] y", weights, body)
    told = reasons(halve(model))
    assert sorted(told) == ["d", "g", "n", "q"] and told["q"] == "it divides by what g keeps from 0"
    for each in (model, emulated(model)):
        assert (run(each, {"x": np.zeros((1, 4), np.float32)})["y"] == 0).all()


def test_a_weight_of_half_and_float32_readers_is_stored_once() -> None:
    weights = {"w": normal(4, 4), "c": np.array([1e-12], np.float32)}
    body = "a = MatMul (x, w) b = Mul (w, c) y = Add (a, b)"
    model = graph("float[4, 4] x", "float[4, 4] y", weights, body)
    assert list(reasons(halve(model))) == ["b"]
    assert dtypes(model) == {"w": "FLOAT16", "c": "FLOAT"}
    x = normal(4, 4, seed=1)
    exact = x.astype(np.float64) @ weights["w"] + weights["w"] * 1e-12
    bound = 4 * _EPSILON * (np.abs(x) @ np.abs(weights["w"]) + np.abs(exact))
    assert (np.abs(run(model, {"x": x})["y"] - exact) <= bound).all()


def test_a_tied_table_is_half_for_rows_and_for_the_product() -> None:
    table = normal(300, 16)
    body = "x = Gather (t, ids) z = Tanh (x) u = Transpose (t) y = MatMul (z, u)"
    model = graph("int64[n] ids", "float[n, 300] y", {"t": table}, body)
    assert halve(model) == Coverage(4, 4, repeat=(Float16(keep="none"),), stored=(Stored("t", 19200, 9600, "float16"),))
    assert dtypes(model) == {"t": "FLOAT16"} and operators(model)[-1] == "Cast"
    rows = table.astype(np.float16).astype(np.float64)
    exact = np.tanh(rows[[3, 7]]) @ rows.T
    # The table is compared as it is stored; tanh and the product are rounded.
    bound = 2 * _EPSILON * (np.abs(np.tanh(rows[[3, 7]])) @ np.abs(rows.T) + np.abs(exact))
    assert (np.abs(run(emulated(model), {"ids": np.array([3, 7])})["y"] - exact) <= bound).all()


def test_graphs_in_control_flow_stay_and_read_float32() -> None:
    weight, x = normal(16, 8), normal(5, 16, seed=2)
    model = graph(
        "float[n, 16] x, bool c",
        "float[n, 8] y, float[n, 8] z",
        {"w": weight},
        """z = MatMul (x, w)
           y = If (c) <
               then_branch = t () => (float[n, 8] a) { a = MatMul (x, w) },
               else_branch = e () => (float[n, 8] b) { b = Neg (z) }
           >""",
    )
    coverage = halve(model)
    assert coverage.done == 1 and reasons(coverage) == {"y": "it holds a graph of its own"}
    for condition in (True, False):
        found = run(model, {"x": x, "c": np.array(condition)})
        exact = x.astype(np.float64) @ weight
        bound = 3.1 * _EPSILON * (np.abs(x) @ np.abs(weight))
        assert (np.abs(found["z"] - exact) <= bound).all()
        assert (np.abs(found["y"] - (exact if condition else -exact)) <= bound).all()


def test_inputs_and_outputs_are_half_where_that_is_asked() -> None:
    model = matmul_model(normal(8, 4))
    halve(model, keep_io=False)
    assert operators(model) == ["MatMul"]
    assert [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)] == [ir.DataType.FLOAT16] * 2
    x = normal(3, 8, seed=1).astype(np.float16)
    assert run(model, {"x": x})["y"].dtype == np.float16


def test_behind_an_8_bit_pass_it_is_refused() -> None:
    model = matmul_model(normal(64, 64))
    DynamicInt8()(model)
    with pytest.raises(PassError, match=r"^float16: the graph has DynamicQuantizeLinear.*choose one of the two"):
        Float16()(model)


def test_a_graph_without_weights_in_reach_is_left_alone() -> None:
    model = graph("float[n] x", "float[n] y", {}, "y = Exp (x)")
    coverage = halve(model)
    assert coverage.done == 0 and reasons(coverage) == {"y": "Exp needs more bits"} and operators(model) == ["Exp"]


def test_a_node_to_keep_that_is_not_there_is_named() -> None:
    with pytest.raises(PassError, match=r"^float16: keep lists nothing, which no node of float32 makes"):
        Float16(keep="y|nothing")(matmul_model(normal(4, 4)))


def test_a_second_run_changes_nothing() -> None:
    model = graph("float[n, 4] x", "float[n, 4] y", {"w": normal(4, 4)}, "a = MatMul (x, w) y = Exp (a)")
    assert halve(model).done == 1
    before = operators(model)
    assert halve(model).done == 0 and operators(model) == before


@pytest.mark.parametrize("fill", [-1e9, -3.4e38, -math.inf])
def test_b004_a_fill_hides_and_leaves_no_trace(fill: float) -> None:
    """Reference: the softmax over what is left; a row hidden as a whole is even where the fill is finite."""
    x, m, exact, moved = _hidden(3 if math.isfinite(fill) else 2)
    body = "s = MatMul (x, w) h = Where (m, s, f) y = Softmax (h)"
    weights = {"w": normal(4, 6), "f": np.array([fill], np.float32)}
    model = graph("float[n, 4] x, bool[n, 6] m", "float[n, 6] y", weights, body)
    halve(model, {"x": x[:2], "m": m[:2]})
    assert math.isinf(fill) or largest_constant(model) <= 65504
    for each in (model, emulated(model)):
        found = run(each, {"x": x, "m": m})["y"]
        assert (found[:2][~m[:2]] == 0).all() and np.abs(found - exact).max() <= moved


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_b004_a_fill_that_is_added_hides_too_and_one_that_absorbs_scores_stays_float32(fill: float) -> None:
    """Reference: the softmax over what is left; -1e9 also makes a row even that is hidden as a whole."""
    absorbs = fill < -1e8
    x, m, exact, moved = _hidden(3 if absorbs else 2)
    body = """s = MatMul (x, w) r = Cast <to = 1> (m) p = Sub (one, r) b = Mul (p, f) t = Add (b, b) h = Add (s, t)
        y = Softmax (h)"""
    weights = {"w": normal(4, 6), "f": np.array([fill], np.float32), "one": np.array([1], np.float32)}
    model = graph("float[n, 4] x, bool[n, 6] m", "float[n, 6] y", weights, body)
    told = reasons(halve(model, {"x": x[:2], "m": m[:2]}))
    assert sorted(told) == (["b", "h", "t", "y"] if absorbs else [])
    assert absorbs or largest_constant(model) <= 4096
    for each in (model, emulated(model)):
        found = run(each, {"x": x, "m": m})["y"]
        assert (found[:2][~m[:2]] == 0).all() and np.abs(found - exact).max() <= moved


def _hidden(rows: int) -> tuple[Array, Array, Array, float]:
    """x [rows, 4], a mask [rows, 6], the softmax of x @ normal(4, 6) where it is true, and how far that may move."""
    x, m = normal(rows, 4, seed=1), np.array([[True] * 6, [True, False] * 3, [False] * 6][:rows])
    scores = x.astype(np.float64) @ normal(4, 6)
    exact = np.exp(np.where(m, scores, -np.inf))
    exact[2:] = 1
    # A score moves by d <= 3.1 * 2^-11 sum|x w|, so a weight by a factor of e^2d at most, and is rounded.
    moved = 3.1 * _EPSILON * float((np.abs(x) @ np.abs(normal(4, 6))).max())
    return x, m, exact / exact.sum(axis=1, keepdims=True), math.expm1(2 * moved) + 2 * _EPSILON


def largest_constant(model: ir.Model) -> float:
    constants = [value.const_value.numpy() for value in model.graph.initializers.values() if value.const_value]
    return max(float(np.abs(array).max()) for array in constants)


def test_a_large_number_that_does_more_than_hide_keeps_its_readers() -> None:
    weights = {"w": normal(4, 6), "f": np.array([-1e9], np.float32)}
    body = "s = MatMul (x, w) h = Where (m, s, f) y = ReduceMax <keepdims = 0> (h)"
    model = graph("float[n, 4] x, bool[n, 6] m", "float y", weights, body)
    assert reasons(halve(model))["h"].startswith("its constant f reaches 1e+09")


def test_b109_products_of_query_and_key_out_of_range_keep_attention_and_what_it_is_computed_from() -> None:
    weights = {name: normal(8, 8, seed=seed) for seed, name in enumerate("qkvo")}
    weights["o"] *= 0.1
    body = """a = MatMul (x, q) b = MatMul (x, k) c = MatMul (x, v)
        h = com.microsoft.MultiHeadAttention <num_heads = 2> (a, b, c) y = MatMul (h, o)"""
    x = 40 * normal(2, 5, 8, seed=9)
    model = graph("float[n, t, 8] x", "float[n, t, 8] y", weights, body)
    for value in (output for node in model.graph for output in node.outputs):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", "t", 8])
    exact = run(model, {"x": x})["y"]
    coverage = halve(model, {"x": x})
    told = reasons(coverage)
    assert sorted(told) == ["a", "b", "c", "h"]
    assert told["h"].startswith("its scores are of the size") and told["a"].startswith("h is computed from it")
    assert np.abs(run(emulated(model), {"x": x})["y"] - exact).max() <= 1e-2 * np.abs(exact).max()
