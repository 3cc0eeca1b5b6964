"""`blockwise{method=weighted}`: errors count as their inputs are loud on calibration text."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export.errors import PassError
from tx_export.passes import Context
from tx_export.quantize import _blocks
from tx_export.quantize.blockwise import Blockwise
from tx_export.testing import matmul_model, run_graph

from .blocks import initializer, unpacked
from .graphs import Array, normal

_KINDS = [(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]


def context(*texts: Array) -> Context:
    feeds = tuple({"x": text} for text in texts)
    return Context(nn.Identity(), feeds, lambda copy: lambda given: run_graph(copy, dict(given)))


def quantized(weight: Array, text: Array, **options: Any) -> ir.Model:
    model = matmul_model(weight)
    Blockwise(context=context(text[: len(text) // 2], text[len(text) // 2 :]), **options)(model)
    return model


def loud_text(rows: int = 200) -> Array:
    """Two of 64 inputs are 30 times as loud as the others."""
    text = normal(rows, 64, seed=5)
    text[:, [3, 40]] *= 30
    return text


@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
def test_the_product_s_error_on_the_text_is_less_and_no_block_s_weighted_error_is_more(
    bits: int, symmetric: bool
) -> None:
    weight, text = normal(64, 48), loud_text()
    errors, products = {}, {}
    for method in ("round", "weighted"):
        model = quantized(weight, text, bits=bits, symmetric=symmetric, method=method)
        difference = unpacked(model)[0] - weight.T
        loud = np.square(text, dtype=np.float64).mean(axis=0)
        loud = loud.reshape(2, 32) / loud.reshape(2, 32).mean(axis=1, keepdims=True) + _blocks._QUIET
        errors[method] = (difference.reshape(48, 2, 32) ** 2 * loud).sum(axis=-1)
        products[method] = np.square(text @ difference.T).sum()
    # Both are sums in float32.
    assert (errors["weighted"] <= errors["round"] * (1 + 1e-4)).all()
    # Nearly all of the error is that of two inputs of 64, and a scale of each block can suit one of them.
    assert products["weighted"] < 0.5 * products["round"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_depends_on_no_unit_and_takes_silent_inputs_and_zeros(symmetric: bool) -> None:
    text, values = loud_text(), []
    text[:, :32] = 0  # a whole block that the text leaves silent
    for unit in (1.0, 2.0**-80, 2.0**100):
        weight = normal(64, 48) * np.float32(unit)
        weight[:, 7] = 0
        model = quantized(weight, text, symmetric=symmetric, method="weighted")
        values.append(initializer(model, "weight.int4"))
        assert (unpacked(model)[0][7] == 0).all()
    assert all(np.array_equal(values[0], other) for other in values[1:])


@pytest.mark.parametrize(("name", "expected"), [("past.0.key", "weighted"), ("x", "hqq")])
def test_it_is_the_default_where_a_graph_has_a_cache_and_there_is_text(name: str, expected: str) -> None:
    weight, stored = normal(64, 48), {}
    for method in (None, "weighted", "hqq"):
        model = matmul_model(weight)
        model.graph.inputs[0].name = name
        feeds = ({name: loud_text()},)
        told = Context(nn.Identity(), feeds, lambda copy: lambda given: run_graph(copy, dict(given)))
        Blockwise(context=told, symmetric=True, method=method)(model)
        stored[method] = initializer(model, "weight.int4")
    assert np.array_equal(stored[None], stored[expected])
    assert not np.array_equal(stored["weighted"], stored["hqq"])


def test_without_text_it_is_refused_and_not_the_default() -> None:
    for told in (None, context()):
        with pytest.raises(PassError, match="method=weighted needs calibration text"):
            Blockwise(context=told, method="weighted")(matmul_model(normal(64, 48)))
    model = matmul_model(normal(64, 48))
    model.graph.inputs[0].name = "past.0.key"
    Blockwise(context=context())(model)
    assert len(unpacked(model)) == 1
