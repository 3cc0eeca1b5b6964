"""bfloat16: refused for CPUs, and emulated there for builds for other providers.

References: NumPy with ml_dtypes' bfloat16, which rounds a number by at most 2^-8 of it, and the float32 build.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export._emulation import emulated
from tx_export.errors import PassError, PluginError
from tx_export.passes import Context, Outcome
from tx_export.quantize.bfloat16 import Bfloat16
from tx_export.testing import matmul_model

from .graphs import Array, graph, normal, operators, run

_BFLOAT16 = ir.DataType.BFLOAT16.numpy()


def narrow(model: ir.Model, provider: str = "cuda") -> Outcome:
    context = Context(nn.Identity(), (), lambda copy: lambda feeds: run(copy, dict(feeds)), provider=provider)
    outcome = dataclasses.replace(Bfloat16(), context=context)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def rounded(array: Array) -> Array:
    return array.astype(_BFLOAT16).astype(np.float32)


def test_b105_the_cpu_has_no_bfloat16_arithmetic_and_that_is_said_before_anything_is_changed() -> None:
    model = matmul_model(normal(8, 4))
    with pytest.raises(PassError, match=r"^bfloat16: .* no bfloat16 arithmetic.*--provider cuda.*float16"):
        narrow(model, provider="cpu")
    assert operators(model) == ["MatMul"] and model.graph.initializers["weight"].dtype == ir.DataType.FLOAT


def test_emulation_gives_the_bits_of_bfloat16() -> None:
    """Operands of 4 bits: sums of their products are exact in float32, so only the roundings of bfloat16 are left."""
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((64, 16), (20, 64)))
    x[:, 0] += 1 / 1024  # lost when x is rounded
    model = graph("float[n, 64] x", "float[n, 16] y", {"w": weight}, "a = MatMul (x, w) y = Neg (a)")
    assert narrow(model).coverage.done == 2
    assert str(model.graph.initializers["w"].dtype) == "BFLOAT16" and operators(model) == [
        "Cast",
        "MatMul",
        "Neg",
        "Cast",
    ]
    expected = -rounded(rounded(x) @ weight)
    assert np.array_equal(run(emulated(model), {"x": x})["y"], expected)
    assert not np.array_equal(expected, -(x @ weight))


def test_what_float16_cannot_hold_bfloat16_can() -> None:
    weights = {"w": normal(4, 4), "c": np.array([1e9], np.float32), "d": np.array([1e-12], np.float32)}
    body = "a = MatMul (x, w) b = Mul (a, c) y = Mul (b, d)"
    outcome = narrow(graph("float[n, 4] x", "float[n, 4] y", weights, body))
    assert outcome.coverage.done == outcome.coverage.of == 3
    assert [left.name for left in outcome.coverage.left] == ["verification"]


def test_the_lowest_float32_would_become_infinite_and_stays() -> None:
    weights = {"w": normal(4, 4), "c": np.array([np.finfo(np.float32).min], np.float32)}
    outcome = narrow(graph("float[n, 4] x", "float[n, 4] y", weights, "a = MatMul (x, w) y = Max (a, c)"))
    left = outcome.coverage.left[0]
    assert (left.name, left.reason) == ("y", "its constant c reaches 3.403e+38, over 3.39e+38")


def test_inputs_and_outputs_of_bfloat16_are_refused_as_numpy_has_none() -> None:
    with pytest.raises(PluginError, match=r"bfloat16: keep_io=false: NumPy has no bfloat16"):
        Bfloat16.parse("keep_io=false")
