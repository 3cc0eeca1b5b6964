"""Weights rounded so that their errors cancel: whole steps that the 8-bit pass keeps, and less error on other text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export.artifact import open_graph
from tx_export.errors import PassError, PluginError
from tx_export.passes import Context, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize._smooth_compensation import compensated
from tx_export.quantize.round_weights import RoundWeights

from .graphs import Array, column_scale, graph, normal, operators, quantize, uneven

_K, _N, _RANK = 64, 48, 8
_MIX = normal(_RANK, _K, seed=7)


def correlated(rows: int = 60, seed: int = 20) -> Array:
    """Channels that are mixtures of a few: what one of them adds, others can take away."""
    return normal(rows, _RANK, seed=seed) @ _MIX + normal(rows, _K, seed=seed + 1000) * np.float32(0.05)


def product(weight: Array) -> ir.Model:
    body = "h = Neg (x) y = MatMul (h, w)"
    return graph(f"float[n, {weight.shape[0]}] x", f"float[n, {weight.shape[1]}] y", {"w": weight}, body)


def context(batches: Sequence[Array], **others: Any) -> Context:
    return Context(
        module=nn.Identity(),
        feeds=[{"x": batch} for batch in batches],
        open=lambda model: open_graph(model, Cpu().session(), threads=1),
        **others,
    )


def text(count: int = 10) -> list[Array]:
    return [correlated(seed=seed) for seed in range(30, 30 + count)]


def round_weights(model: ir.Model, given: Context | None, **options: Any) -> Outcome:
    outcome = RoundWeights(**options, context=given)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def initializer(model: ir.Model, name: str) -> Array:
    value = model.graph.initializers[name].const_value
    assert value is not None
    return value.numpy()


def test_the_8_bit_pass_stores_exactly_what_it_chose() -> None:
    weight = uneven(_K, _N)
    model = product(weight)
    assert round_weights(model, context(text())).coverage.done == 1
    assert operators(model) == ["Neg", "MatMul"]
    chosen = initializer(model, "w")
    steps = np.rint(chosen / column_scale(weight))
    # A step is a 127th of the column's largest, before and after, so both passes mean the same whole steps.
    assert (np.abs(steps).max(axis=0) == 127).all()
    quantize(model)
    assert np.array_equal(initializer(model, "w.int8"), steps)
    assert not np.array_equal(steps, np.rint(weight / column_scale(weight)))


def test_the_error_on_other_text_is_far_below_that_of_rounding_to_the_nearest() -> None:
    weight, x = normal(_K, _N), correlated(400, seed=1)
    nearest = np.rint(weight / column_scale(weight)) * column_scale(weight)
    model = product(weight)
    round_weights(model, context(text()))
    # Reference: float64. Only 8 of 64 directions are loud, and 56 are left to put errors into: at least half is gone.
    errors = [np.square(x.astype(np.float64) @ (made - weight)).sum() for made in (nearest, initializer(model, "w"))]
    assert errors[1] < errors[0] / 2


def test_channels_that_have_nothing_in_common_are_left_as_they_are() -> None:
    weight = normal(_K, _N)
    model = product(weight)
    outcome = round_weights(model, context([normal(500, _K, seed=seed) for seed in range(10)]))
    assert not outcome.modified
    (left,) = outcome.coverage.left
    assert left.reason.startswith("doesn't pay: ")
    assert np.array_equal(initializer(model, "w"), weight)


def test_without_correlation_it_is_rounding_to_the_nearest() -> None:
    weight = normal(300, _N)
    found = compensated(weight, np.diag(np.linspace(1, 9, 300)), 0.01)
    assert np.array_equal(np.rint(found / column_scale(weight)), np.rint(weight / column_scale(weight)))


@pytest.mark.parametrize("loud", [0, 1])
def test_the_second_weight_makes_up_for_the_error_of_the_first(loud: int) -> None:
    weight = np.array([[0.3031, 0.52, 1.0], [1.0, 1.0, 0.7043]], np.float32)
    hessian = np.array([[4.0, 3.0], [3.0, 3.5]]) if loud == 0 else np.array([[3.5, 3.0], [3.0, 4.0]])
    steps = column_scale(weight).astype(np.float64)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(2)
    # Reference, by hand: w2 + e1 H12 / H22 is the least of (e1, e2) H (e1, e2)^T over e2; 127 stays at 127.
    first, second = loud, 1 - loud
    whole = np.rint(weight[first] / steps)
    moved = weight[second] + (weight[first] - whole * steps) * damped[0, 1] / damped[second, second]
    pinned = np.abs(weight[second]) == np.abs(weight).max(axis=0)
    expected = np.where(pinned, np.rint(weight[second] / steps), np.clip(np.rint(moved / steps), -127, 127))
    found = np.rint(compensated(weight, hessian, 0.01) / steps)
    assert np.array_equal(found[first], whole) and np.array_equal(found[second], expected)


def test_rows_beyond_a_block_are_made_up_for_too() -> None:
    mix = normal(_RANK, 300, seed=7)
    x = normal(2000, _RANK, seed=1) @ mix + normal(2000, 300, seed=2) * np.float32(0.05)
    weight = normal(300, _N)
    nearest = np.rint(weight / column_scale(weight)) * column_scale(weight)
    found = compensated(weight, (x.T @ x).astype(np.float64), 0.01)
    errors = [np.square(x.astype(np.float64) @ (made - weight)).sum() for made in (nearest, found)]
    assert errors[1] < errors[0] / 4  # more directions are free than with one block of 64


def test_the_same_text_gives_the_same_bytes() -> None:
    first, second = product(normal(_K, _N)), product(normal(_K, _N))
    for model in (first, second):
        round_weights(model, context(text()))
    assert ir.to_proto(first).SerializeToString() == ir.to_proto(second).SerializeToString()


@pytest.mark.parametrize("form", ["<transB = 1>", ""])
def test_products_that_read_one_value_are_each_rounded_in_place(form: str) -> None:
    weights = {"w": normal(_K, _N), "u": normal(_K, 16, seed=1)}
    if form:
        weights["w"] = np.ascontiguousarray(weights["w"].T)
    body = f"h = Neg (x) y = Gemm {form} (h, w) z = MatMul (h, u)"
    model = graph(f"float[n, {_K}] x", f"float[n, {_N}] y, float[n, 16] z", weights, body)
    assert round_weights(model, context(text())).coverage.done == 2
    for name, given in weights.items():
        found = initializer(model, name)
        axis = 1 if form and name == "w" else 0
        steps = np.abs(given).max(axis=axis, keepdims=True) / 127
        assert found.shape == given.shape and not np.array_equal(found, given)
        assert np.abs(found / steps - np.rint(found / steps)).max() < 1e-4


def test_a_weight_that_others_read_too_stays_as_it_is() -> None:
    weight = normal(_K, _K)
    body = "h = Neg (x) y = MatMul (h, w) z = MatMul (y, w)"
    model = graph(f"float[n, {_K}] x", f"float[n, {_K}] z", {"w": weight}, body)
    outcome = round_weights(model, context(text()))
    assert not outcome.modified and np.array_equal(initializer(model, "w"), weight)
    assert {left.reason for left in outcome.coverage.left} == {"its weight has other readers"}


def test_channels_that_are_always_zero_are_rounded_to_the_nearest() -> None:
    outcome = round_weights(product(normal(_K, _N)), context([np.zeros((5, _K), np.float32)] * 5))
    assert [left.reason for left in outcome.coverage.left] == ["doesn't pay: 0.0 dB"]


@pytest.mark.parametrize("key", ["sqnr_db", "cosine"])
def test_nothing_is_rounded_where_the_whole_in_8_bits_gets_worse(key: str) -> None:
    answers = iter([{"sqnr_db": 20.0, "cosine": 0.99}, {"sqnr_db": 20.0, "cosine": 0.99, key: 0.9}])
    model = product(normal(_K, _N))
    outcome = round_weights(model, context(text(), drift=lambda runner, feeds: next(answers)))
    assert not outcome.modified and np.array_equal(initializer(model, "w"), normal(_K, _N))
    (left,) = outcome.coverage.left
    assert left.reason.startswith(f"the whole in 8 bits gets worse: {key} 0.9 instead of ")


def test_what_does_not_fit_into_memory_at_once_is_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": normal(_K, _K), "u": normal(_K, _N, seed=1)}
    body = "h = Neg (x) p = MatMul (h, w) y = MatMul (p, u)"

    def made() -> ir.Model:
        model = graph(f"float[n, {_K}] x", f"float[n, {_N}] y", weights, body)
        assert round_weights(model, context(text())).coverage.done == 2
        return model

    whole = made()
    monkeypatch.setattr("tx_export.quantize.round_weights._HELD_BYTES", 1)
    assert np.array_equal(initializer(made(), "w"), initializer(whole, "w"))


def test_without_text_it_says_what_to_do() -> None:
    with pytest.raises(PassError, match=r"^calibration needs text, and the model takes arrays only; "):
        round_weights(product(normal(_K, _N)), context([]))
    with pytest.raises(PassError, match=r"^weights are rounded by calibration text: run round_weights in a build$"):
        round_weights(product(normal(_K, _N)), None)


def test_values_that_are_not_finite_are_refused() -> None:
    batches = text()
    batches[2][3, 4] = math.nan
    with pytest.raises(PassError, match=rf"^calibration: 1 of {60 * _K} numbers of h are NaN or infinite"):
        round_weights(product(normal(_K, _N)), context(batches))


@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_a_damping_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(PluginError, match=r"^pass round_weights: damping is .*; allowed: above 0, up to 1$"):
        RoundWeights.parse(f"damping={value}")
