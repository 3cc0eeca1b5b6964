"""8-bit products: the error is what rounding explains, all is counted, and nothing saturates."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.errors import PassError
from tx_export.testing import matmul_model

from .graphs import (
    PRODUCTS,
    Array,
    column_scale,
    graph,
    normal,
    operators,
    quantize,
    rounding_bound,
    run,
    uneven,
)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("per_channel", [True, False])
def test_the_error_is_at_most_what_rounding_explains(form: str, per_channel: bool) -> None:
    body, turned, biased = PRODUCTS[form]
    weight, bias, x = uneven(64, 48), normal(48, seed=1), normal(9, 64, seed=2)
    constants = {"w": np.ascontiguousarray(weight.T) if turned else weight} | ({"bias": bias} if biased else {})
    model = graph("float[n, 64] x", "float[n, 48] y", constants, body)
    outcome = quantize(model, per_channel=per_channel)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    assert outcome.subject == "quantized"
    assert [name for name in operators(model) if "Q" in name or "Mat" in name] == [
        "DynamicQuantizeLinear",
        "MatMulIntegerToFloat",
    ]
    scale = column_scale(weight) if per_channel else np.abs(weight).max() / 127
    exact = x.astype(np.float64) @ weight.astype(np.float64) + (bias if biased else 0)
    bound = rounding_bound(x, weight, scale) + (1e-6 * np.abs(bias) if biased else 0)
    assert (np.abs(run(model, {"x": x})["y"] - exact) <= bound).all()


def test_stored_weights_have_a_scale_for_each_column_and_never_the_value_minus_128() -> None:
    weight = uneven(64, 48)
    weight[3, 5] = -np.abs(weight[:, 5]).max() * 2
    weight[:, 6], weight[3, 6] = 0, -2.6e-43  # its scale is rounded down to the least float32, 186 steps below it
    model = matmul_model(weight)
    quantize(model)
    stored = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
    assert sorted(stored) == ["weight.int8", "weight.scale"]
    assert stored["weight.int8"].dtype == np.int8 and stored["weight.int8"].min() == -127
    assert stored["weight.scale"].shape == (48,) and stored["weight.scale"].dtype == np.float32
    # Reference: half a step of the column is the farthest that a rounded weight can be.
    back = stored["weight.int8"] * stored["weight.scale"].astype(np.float64)
    moved = np.abs(back - weight) <= column_scale(weight) / 2 * (1 + 1e-5)
    assert np.delete(moved, 6, axis=1).all()


@pytest.mark.parametrize("per_channel", [True, False])
def test_b127_a_column_of_zeros_has_a_finite_scale_and_gives_exactly_its_bias(per_channel: bool) -> None:
    weight, bias = normal(16, 8), normal(8, seed=1)
    weight[:, 3] = 0
    weight[:, 4] = 1e-44  # so near to zero that a 127th of it is none
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": weight, "bias": bias}, "y = Gemm (x, w, bias)")
    quantize(model, per_channel=per_channel)
    scale = model.graph.initializers["w.scale"].const_value
    assert scale is not None and np.isfinite(scale.numpy()).all() and (scale.numpy() > 0).all()
    y = run(model, {"x": normal(5, 16, seed=2)})["y"]
    assert (y[:, 3:5] == bias[3:5]).all()


def test_b127_a_weight_of_zeros_only_gives_exactly_its_bias() -> None:
    bias = normal(8, seed=1)
    body = "y = Gemm (x, w, bias)"
    for per_channel in (True, False):
        model = graph("float[n, 16] x", "float[n, 8] y", {"w": np.zeros((16, 8), np.float32), "bias": bias}, body)
        quantize(model, per_channel=per_channel)
        assert (run(model, {"x": normal(5, 16, seed=2)})["y"] == bias).all()


def test_b113_scales_for_each_column_beat_one_for_all_where_a_column_is_loud() -> None:
    weight, x = normal(64, 32), normal(200, 64, seed=2)
    weight[:, 7] *= 50
    exact = np.delete(x.astype(np.float64) @ weight, 7, axis=1)
    ratios = {}
    for per_channel in (True, False):
        model = matmul_model(weight)
        quantize(model, per_channel=per_channel)
        error = np.delete(run(model, {"x": x})["y"], 7, axis=1) - exact
        ratios[per_channel] = 10 * math.log10((exact**2).sum() / (error**2).sum())
    # One scale for all has steps 50 times larger: 34 dB more noise from the weights; the activations hide some of it.
    assert ratios[True] > 30 and ratios[False] < ratios[True] - 10


def test_b119_two_linear_layers_on_a_matrix_are_both_quantized_and_counted() -> None:
    first, second, biases = normal(37, 96), normal(5, 37, seed=1), (normal(37, seed=2), normal(5, seed=3))
    model = graph(
        "float[n, 96] x",
        "float[n, 5] y",
        {"w": first, "v": second, "b": biases[0], "c": biases[1]},
        "h = Gemm <transB = 1> (x, w, b) r = Relu (h) y = Gemm <transB = 1> (r, v, c)",
    )
    outcome = quantize(model)
    assert (outcome.coverage.done, outcome.coverage.of, outcome.coverage.left) == (2, 2, ())
    assert operators(model).count("MatMulIntegerToFloat") == 2
    x = normal(7, 96, seed=4)
    h = x.astype(np.float64) @ first.T + biases[0]
    moved = rounding_bound(x, first.T, column_scale(first.T)) + 1e-6 * np.abs(biases[0])
    r = np.maximum(h, 0)
    # The second layer sees an input that moved by `moved`, and rounds what it sees; its own step grows with it.
    seen = r + moved
    inner = moved @ np.abs(second.T.astype(np.float64))
    bound = inner + rounding_bound(seen, second.T, column_scale(second.T)) + 1e-6 * np.abs(biases[1])
    assert (np.abs(run(model, {"x": x})["y"] - (r @ second.T + biases[1])) <= bound).all()


def test_products_that_read_one_input_share_its_quantization() -> None:
    weights = {"w": normal(16, 8), "v": normal(16, 4, seed=1)}
    body = "z = Neg (x) a = MatMul (z, w) n = Neg (z) b = MatMul (z, v)"
    model = graph("float[n, 16] x", "float[n, 8] a, float[n, 4] b, float[n, 16] n", weights, body)
    quantize(model)
    assert operators(model).count("DynamicQuantizeLinear") == 1
    x = normal(5, 16, seed=2)
    found = run(model, {"x": x})
    assert list(found) == ["a", "b", "n"]
    for name, weight in (("a", weights["w"]), ("b", weights["v"])):
        exact = -x.astype(np.float64) @ weight
        assert (np.abs(found[name] - exact) <= rounding_bound(-x, weight, column_scale(weight))).all()


def test_b096_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    weights = {"w": normal(16, 8), "table": normal(300, 16)}
    model = graph("int64[n] ids", "float[n, 8] y", weights, "x = Gather (table, ids) y = MatMul (x, w)")
    assert quantize(model).coverage.done == 2
    feeds = {"ids": np.array([0, 7, 299])}
    expected, stored = run(model, feeds)["y"], sorted(model.graph.initializers)
    outcome = quantize(model)
    assert (outcome.modified, outcome.coverage.done) == (False, 0)
    assert sorted(model.graph.initializers) == stored
    assert np.array_equal(run(model, feeds)["y"], expected)


def test_b120_a_graph_without_products_is_not_modified() -> None:
    outcome = quantize(graph("float[n] x", "float[n] y", {}, "y = Neg (x)"))
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)


_LEFT: dict[str, tuple[str, dict[str, Array], str, str]] = {
    "one dimension": ("y = MatMul (x, w)", {"w": normal(16)}, "float[n, 16] x", "the weight has 1 dimensions"),
    "three dimensions": ("y = MatMul (x, w)", {"w": normal(2, 16, 8)}, "float[n, 16] x", "the weight has 3 dimensions"),
    "constant on the left": (
        "y = MatMul (w, x)",
        {"w": normal(8, 16)},
        "float[16, n] x",
        "the weight is the left operand",
    ),
    "alpha": (
        "y = Gemm <alpha = 2.0> (x, w)",
        {"w": normal(16, 8)},
        "float[n, 16] x",
        "a Gemm with alpha, beta or transA",
    ),
    "transA": (
        "y = Gemm <transA = 1> (x, w)",
        {"w": normal(16, 8)},
        "float[16, n] x",
        "a Gemm with alpha, beta or transA",
    ),
    "a row of biases": (
        "y = Gemm (x, w, b)",
        {"w": normal(16, 8), "b": normal(1, 8)},
        "float[n, 16] x",
        "its bias has the shape [1, 8]",
    ),
    "whole numbers": (
        "y = MatMul (x, w)",
        {"w": np.ones((4, 4), np.int64)},
        "int64[n, 4] x",
        "its weight is int64, not float32",
    ),
}


@pytest.mark.parametrize("case", _LEFT)
def test_what_cannot_be_quantized_stays_is_counted_and_the_reason_is_told(case: str) -> None:
    body, weights, inputs, reason = _LEFT[case]
    kind = "int64" if inputs.startswith("int64") else "float"
    model = graph(inputs, f"{kind}[a, b] y" if case != "one dimension" else "float[a] y", weights, body)
    if case == "three dimensions":
        model.graph.outputs[0].shape = ir.Shape([2, "n", 8])
    before = operators(model)
    outcome = quantize(model)
    assert operators(model) == before
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    name = "y" if case == "constant on the left" else "w"  # where there is no weight, the output's
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [(name, reason)]


def test_products_without_a_weight_are_not_counted() -> None:
    model = graph("float[n, 16] x, float[16, n] z", "float[n, n] y", {}, "y = MatMul (x, z)")
    outcome = quantize(model)
    assert (outcome.modified, outcome.coverage.of, outcome.coverage.left) == (False, 0, ())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["w", "table"])
def test_b129_weights_that_are_not_finite_are_refused_by_name_and_number(where: str, value: float) -> None:
    weights = {"w": normal(16, 8), "table": normal(300, 16)}
    weights[where][2, 3] = weights[where][5, 3] = value
    model = graph("int64[n] ids", "float[n, 8] y", weights, "x = Gather (table, ids) y = MatMul (x, w)")
    with pytest.raises(PassError, match=rf"^{where}: 2 of {weights[where].size} weights are NaN or infinite"):
        quantize(model)


@pytest.mark.parametrize("sign", [1, -1])
def test_b112_products_at_the_top_of_both_ranges_do_not_saturate(sign: int) -> None:
    weight = np.full((768, 16), sign, np.float32)
    weight[::2, 8:] *= -1  # half of the columns cancel
    model = matmul_model(weight)
    quantize(model)
    y = run(model, {"x": np.ones((3, 768), np.float32)})["y"]
    # Reference: NumPy integers. Two scales and their product round by 6e-8 each.
    exact = np.full((3, 768), 255) @ (127 * weight.astype(np.int64)) / (255 * 127)
    assert np.abs(y - exact).max() <= 4 * 6e-8 * 768


def test_subgraphs_are_left_alone() -> None:
    weight, x = normal(16, 8), normal(5, 16, seed=2)
    model = graph(
        "float[n, 16] x, bool c",
        "float[n, 8] y, float[n, 8] z",
        {"w": weight},
        """z = MatMul (x, w)
           y = If (c) <
               then_branch = t () => (float[n, 8] a) { a = MatMul (x, w) },
               else_branch = e () => (float[n, 8] b) { p = MatMul (x, w) b = Neg (p) }
           >""",
    )
    expected = run(model, {"x": x, "c": np.array(False)})
    outcome = quantize(model)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    found = run(model, {"x": x, "c": np.array(False)})
    assert np.array_equal(found["y"], expected["y"])
    assert (np.abs(found["z"] - expected["z"]) <= rounding_bound(x, weight, column_scale(weight))).all()
