"""A bias and the GELU behind it become one operator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export.optimize.fuse_bias_gelu import FuseBiasGelu
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_BODY = "s = Add (x, bias) y = com.microsoft.Gelu (s)"


def bias_graph(body: str = _BODY, outputs: str = "float[n, 3] y", x: str = "float[n, 3] x") -> ir.Model:
    return graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g ({x}) => ({outputs})
        <float[3] bias = {{0.5, -1.0, 2.0}}, float[1] single = {{0.5}}, float[1, 3] row = {{0.5, -1.0, 2.0}}>
        {{ {body} }}
        """
    )


def fuse(model: ir.Model) -> Outcome:
    outcome = FuseBiasGelu()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


_X = np.random.default_rng(0).normal(size=(5, 3), scale=2).astype(np.float32)


@pytest.mark.parametrize("order", ["(x, bias)", "(bias, x)"])
def test_bias_and_gelu_become_one_operator(order: str) -> None:
    model = bias_graph(_BODY.replace("(x, bias)", order))
    outcome = fuse(model)
    assert operators(model) == ["BiasGelu"]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    s = _X.astype(np.float64) + np.array([0.5, -1.0, 2.0])
    expected = s * 0.5 * (1 + np.vectorize(math.erf)(s / math.sqrt(2)))
    # Reference: float64. GELU has slope at most 1.13, the sum rounds by 6e-8 of itself, the operator by 1e-6.
    assert (np.abs(run_graph(model, {"x": _X})["y"] - expected) <= 1e-6 + 1.13 * 6e-8 * np.abs(s)).all()


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model = bias_graph()
    fuse(model)
    expected = run_graph(model, {"x": _X})["y"]
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)
    assert np.array_equal(run_graph(model, {"x": _X})["y"], expected)


_NOT_A_BIAS = "what is added before it is no bias"
_NEAR_MISSES = {
    "one number for all channels": (_BODY.replace("bias", "single"), "float[n, 3] y", "float[n, 3] x", _NOT_A_BIAS),
    "a bias with two dimensions": (_BODY.replace("bias", "row"), "float[n, 3] y", "float[n, 3] x", _NOT_A_BIAS),
    "a computed summand": (
        "z = Neg (x) s = Add (x, z) y = com.microsoft.Gelu (s)",
        "float[n, 3] y",
        "float[n, 3] x",
        _NOT_A_BIAS,
    ),
    "a bias that widens x": (_BODY, "float[n, 3] y", "float[n, 1] x", _NOT_A_BIAS),
    "a width that is not known": (_BODY, "float[n, c] y", "float[n, c] x", _NOT_A_BIAS),
    "the sum is an output": (
        _BODY,
        "float[n, 3] y, float[n, 3] s",
        "float[n, 3] x",
        "the sum before it has other readers",
    ),
    "the sum is read by others": (
        _BODY + " z = Neg (s)",
        "float[n, 3] y, float[n, 3] z",
        "float[n, 3] x",
        "the sum before it has other readers",
    ),
    "nothing is added": (
        "s = Neg (x) y = com.microsoft.Gelu (s)",
        "float[n, 3] y",
        "float[n, 3] x",
        "no addition before it",
    ),
}


@pytest.mark.parametrize("case", _NEAR_MISSES)
def test_what_is_no_bias_stays_and_the_reason_is_told(case: str) -> None:
    body, outputs, declared, reason = _NEAR_MISSES[case]
    model = bias_graph(body, outputs, declared)
    x = _X[:, :1] if "1]" in declared else _X
    before, expected = operators(model), run_graph(model, {"x": x})
    outcome = fuse(model)
    assert operators(model) == before
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("y", reason)]
    found = run_graph(model, {"x": x})
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
