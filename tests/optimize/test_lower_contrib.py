"""Operators of com.microsoft are written with standard ones that compute the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export.artifact import open_graph
from tx_export.optimize.lower_contrib import LowerContrib
from tx_export.passes import Outcome
from tx_export.providers.cpu import Cpu
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_PRODUCT = "y = com.microsoft.MatMulIntegerToFloat (q, w, x_scale, w_scale, zero, , bias)"
_WEIGHT = np.array([[127, -127, 3], [-5, 0, 127], [64, 1, -2], [9, 9, 9]], np.int8)
_SCALES, _BIAS = np.array([0.5, 0.25, 2], np.float32), np.array([1, -1, 0.5], np.float32)


def product_graph(body: str = _PRODUCT, outputs: str = "float[b, t, 3] y") -> ir.Model:
    numbers = ", ".join(str(int(value)) for value in _WEIGHT.ravel())
    return graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b, t, 4] x) => ({outputs})
        <int8[4, 3] w = {{{numbers}}}, float[3] w_scale = {{0.5, 0.25, 2.0}}, float[3] bias = {{1.0, -1.0, 0.5}},
         int8[3] w_zero = {{1, 2, -3}}> {{
            q, x_scale, zero = DynamicQuantizeLinear (x)
            {body}
        }}
        """
    )


def gelu_graph() -> ir.Model:
    return graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[n] x) => (float[n] y, float[n] z) { y = com.microsoft.Gelu (x) z = com.microsoft.Gelu (y) }
        """
    )


def lower(model: ir.Model) -> Outcome:
    outcome = LowerContrib()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def quantized(x: Array) -> tuple[Array, np.float32, int]:
    """DynamicQuantizeLinear by its definition (ONNX): the range contains 0, 255 steps."""
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = np.float32((high - low) / np.float32(255))
    zero = int(np.clip(np.rint(-low / scale), 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.int64), scale, zero


@pytest.mark.parametrize("zeros", ["", "w_zero"])
@pytest.mark.parametrize("bias", ["", ", bias"])
def test_an_integer_product_keeps_its_zero_points_scales_and_bias(bias: str, zeros: str) -> None:
    model = product_graph(_PRODUCT.replace("zero, , bias", f"zero, {zeros}{bias}"))
    outcome = lower(model)
    assert {node.domain for node in model.graph} == {""}
    assert "com.microsoft" not in model.opset_imports
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    q, scale, zero = quantized(x)
    weight_zero = np.array([1, 2, -3]) if zeros else 0
    exact = (q - zero) @ (_WEIGHT.astype(np.int64) - weight_zero)
    expected = exact * (float(scale) * _SCALES.astype(np.float64)) + (_BIAS if bias else 0)
    # The integer product is exact; two scales, a product, a cast and a sum round by 6e-8 each.
    bound = 5 * 6e-8 * (np.abs(exact) * float(scale) * _SCALES + np.abs(_BIAS))
    run = open_graph(model, Cpu().session(), threads=1)  # with the settings that keep the product exact on any CPU
    assert (np.abs(run({"x": x})["y"] - expected) <= bound).all()


def test_gelu_becomes_the_exact_form_and_its_constants_are_stored_once() -> None:
    model = gelu_graph()
    outcome = lower(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 2, 2)
    assert operators(model) == ["Mul", "Erf", "Mul", "Add", "Mul"] * 2
    assert sorted(model.graph.initializers) == ["gelu.half", "gelu.root"]
    assert "com.microsoft" not in model.opset_imports
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    found = run_graph(model, {"x": x})
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(np.float64)])
    # The budget of the exact form is 1e-6 on [-6, 6]; the tanh form is off by 5e-4.
    assert np.abs(found["y"] - exact).max() <= 1e-6
    assert list(found) == ["y", "z"]


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model = gelu_graph()
    lower(model)
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    expected = run_graph(model, {"x": x})
    outcome = lower(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)
    found = run_graph(model, {"x": x})
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_what_has_no_standard_form_here_stays_is_named_and_still_loads() -> None:
    model = product_graph(f"{_PRODUCT} z = com.microsoft.BiasGelu (y, bias)", "float[b, t, 3] z")
    outcome = lower(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 2)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("z", "BiasGelu has no standard form here")]
    assert model.opset_imports["com.microsoft"] == 1
    assert run_graph(model, {"x": np.ones((1, 2, 4), np.float32)})["z"].shape == (1, 2, 3)


def test_a_constant_of_the_same_name_is_not_taken_for_ours() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[n] x) => (float[n] y) <float half = {7.0}> { s = Mul (x, half) y = com.microsoft.Gelu (s) }
        """
    )
    model.graph.initializers["half"].name = "gelu.half"
    lower(model)
    x = np.array([0.1, -0.1], np.float32)
    s = 7 * x.astype(np.float64)
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in s])
    assert np.abs(run_graph(model, {"x": x})["y"] - exact).max() <= 1e-6
