"""How scales and zero points are chosen, whatever the unit of the weights and in however many parts."""

from __future__ import annotations

import numpy as np
import pytest

from tx_export.quantize import _blocks
from tx_export.testing import matmul_model

from .blocks import initializer, quantize, scales, unpacked
from .graphs import normal, uneven

_KINDS = [(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]


@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
def test_the_half_quadratic_method_makes_no_block_worse_and_the_whole_better(bits: int, symmetric: bool) -> None:
    weight = np.random.default_rng(0).standard_t(4, size=(256, 64)).astype(np.float32)  # a few are loud
    errors = {}
    for method in ("round", "hqq"):
        model = matmul_model(weight)
        quantize(model, bits=bits, symmetric=symmetric, method=method)
        squared = (unpacked(model)[0] - weight.T) ** 2
        errors[method] = squared.reshape(64, 8, 32).sum(axis=-1)
    # Both choose by sums in float32.
    assert (errors["hqq"] <= errors["round"] * (1 + 1e-5)).all()
    assert errors["hqq"].sum() < 0.98 * errors["round"].sum()


@pytest.mark.filterwarnings("error")
def test_the_half_quadratic_method_does_not_depend_on_the_unit_of_the_weights() -> None:
    values = []
    for unit in (1.0, 2.0**-20, 2.0**-80, 2.0**100):  # squares of the last two are outside float32
        model = matmul_model(normal(64, 48) * np.float32(unit))
        quantize(model)
        values.append(initializer(model, "weight.int4"))
    assert all(np.array_equal(values[0], other) for other in values[1:])


def test_a_zero_point_for_each_block_is_better_where_signs_differ_in_number() -> None:
    weight, errors = np.abs(normal(64, 48)), {}
    for symmetric in (True, False):
        model = matmul_model(weight)
        quantize(model, symmetric=symmetric, method="round")
        errors[symmetric] = ((unpacked(model)[0].T - weight) ** 2).sum()
    # Half of the levels are lost to the sign that there is not: a step twice as wide, four times the noise.
    assert errors[True] > 3 * errors[False]


def test_a_weight_that_is_quantized_in_parts_is_stored_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stored = uneven(100, 37), []
    for chunk in (1 << 20, 300):
        monkeypatch.setattr(_blocks, "_CHUNK", chunk)
        model = matmul_model(weight)
        quantize(model)
        stored.append([initializer(model, f"weight.{part}") for part in ("int4", "scale", "zero")])
    assert all(np.array_equal(one, other) for one, other in zip(*stored, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_blocks_turn_their_long_side_to_where_weights_reach_higher(bits: int) -> None:
    weight, middle = np.zeros((32, 2), np.float32), 2 ** (bits - 1)
    weight[:3, 0] = middle, 1 - middle, 1  # each a level, with a scale of -1
    weight[:3, 1] = -middle, middle - 1, 1
    model = matmul_model(weight)
    quantize(model, bits=bits, symmetric=True, method="round")
    assert np.array_equal(scales(model)[0].ravel(), [-1, 1])
    assert np.array_equal(unpacked(model)[0].T, weight)


@pytest.mark.parametrize(("name", "has_zero"), [("x", True), ("past.0.key", False)])
def test_zero_points_are_left_out_where_a_graph_has_a_cache_unless_asked_for(name: str, has_zero: bool) -> None:
    for symmetric, expected in ((None, has_zero), (False, True), (True, False)):
        model = matmul_model(normal(64, 48))
        model.graph.inputs[0].name = name
        quantize(model, symmetric=symmetric)
        assert ("weight.zero" in model.graph.initializers) is expected
