"""8-bit products on x86 CPUs without VNNI: what saturates is computed as they do, and what can't is proved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export._saturation import saturated
from tx_export.artifact import open_graph
from tx_export.passes import Context, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.quantize.static_int8 import StaticInt8
from tx_export.runtime import _lacks_vnni
from tx_export.testing import graph_from_text

Array = NDArray[Any]
_HEAD = '<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>'
_PAIRS: dict[str, Any] = {**Cpu().session(), "config": {}}  # what a CPU without VNNI does by itself
_EXACT = Cpu().session()


def filled(signature: str, constants: dict[str, Array], body: str) -> ir.Model:
    kinds = {"int8": "int8", "uint8": "uint8", "float32": "float", "int64": "int64"}
    ones = ", ".join(f"{kinds[array.dtype.name]}[1] {name} = {{1}}" for name, array in constants.items())
    model = graph_from_text(f"{_HEAD} g {signature} <{ones}> {{ {body} }}")
    for name, array in constants.items():
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    return model


def saturating_product(x: Array, w: Array) -> Array:
    """In NumPy: pairs along K stop at the ends of int16, their sum is exact."""
    wide = x.astype(np.int64), w.astype(np.int64)
    if x.shape[-1] % 2:
        wide = np.pad(wide[0], [(0, 0), (0, 1)]), np.pad(wide[1], [(0, 1), (0, 0)])
    x, w = wide
    pairs = x[:, 0::2, None] * w[None, 0::2] + x[:, 1::2, None] * w[None, 1::2]
    found: Array = np.clip(pairs, -32768, 32767).sum(axis=1)
    return found


def drawn(rows: int, inputs: int, outputs: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(rows * inputs + outputs)
    return (
        rng.integers(100, 256, (rows, inputs)).astype(np.uint8),
        rng.integers(-127, 128, (inputs, outputs)).astype(np.int8),
    )


_SIZES = [(1, 2, 1), (1, 385, 130), (2, 3, 5), (5, 33, 47), (17, 96, 192), (40, 768, 65)]


@pytest.mark.parametrize("size", _SIZES)
def test_pairs_saturate_as_in_numpy_bit_by_bit(size: tuple[int, int, int]) -> None:
    x, w = drawn(*size)
    model = filled(f"(uint8[n, {size[1]}] x) => (int32[n, {size[2]}] y)", {"w": w}, "y = MatMulInteger (x, w)")
    expected = saturating_product(x, w)
    assert np.array_equal(open_graph(saturated(model), _EXACT, threads=1)({"x": x})["y"], expected)
    if size[1] > 90:
        assert (expected != x.astype(np.int64) @ w).mean() > 0.9  # the test has power


@pytest.mark.parametrize("size", _SIZES)
def test_a_cpu_without_vnni_computes_just_that(size: tuple[int, int, int]) -> None:
    x, w = drawn(*size)
    model = filled(f"(uint8[n, {size[1]}] x) => (int32[n, {size[2]}] y)", {"w": w}, "y = MatMulInteger (x, w)")
    found = open_graph(model, _PAIRS, threads=1)({"x": x})["y"]
    expected = saturating_product(x, w) if _lacks_vnni() else x.astype(np.int64) @ w
    assert np.array_equal(found, expected)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def int8(model: ir.Model, **options: Any) -> Outcome:
    outcome = DynamicInt8(**options)(model)
    assert isinstance(outcome, Outcome) and outcome.modified
    return outcome


def loud(inputs: int, outputs: int) -> Array:
    """A weight of which most pairs saturate at the top of the range of x."""
    signs = np.where(normal(inputs, outputs) > -0.5, np.float32(0.3), np.float32(-0.3))
    return signs - normal(inputs, outputs, seed=1) / 50


_X = {"x": np.abs(normal(3, 33, seed=2)) + np.float32(1)}  # from 0, so 8-bit values are at the top of their range
_GRAPHS: dict[str, tuple[str, dict[str, Array], str, dict[str, Array]]] = {
    "product": ("(float[n, 33] x) => (float[n, 47] y)", {"w": loud(33, 47)}, "y = MatMul (x, w)", _X),
    "product and bias": (
        "(float[n, 33] x) => (float[n, 47] y)",
        {"w": loud(47, 33), "b": normal(47)},
        "y = Gemm <transB = 1> (x, w, b)",
        _X,
    ),
    "tied table": (
        "(int64[n] ids) => (float[n, 300] y)",
        {"table": np.abs(loud(300, 48)) * np.float32(0.5)},
        "x = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) y = MatMul (x, t)",
        {"ids": np.array([0, 7, 299])},
    ),
    "packed attention": (
        "(float[b, t, 24] x, int32[b, t] mask) => (float[b, t, 24] y)",
        {"w": loud(24, 72) / np.float32(9), "b": normal(72)},
        "y = com.microsoft.Attention <num_heads = 3> (x, w, b, mask)",
        {"x": np.abs(normal(2, 5, 24)) + np.float32(1), "mask": np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.int32)},
    ),
}


@pytest.mark.parametrize("kind", _GRAPHS)
def test_a_graph_that_saturates_is_what_a_cpu_without_vnni_runs(kind: str) -> None:
    signature, constants, body, feeds = _GRAPHS[kind]
    model = filled(signature, constants, body)
    int8(model, pair_bits=32)
    exact = open_graph(model, _EXACT, threads=1)(feeds)["y"]
    emulated = saturated(model)
    found = open_graph(emulated, _EXACT, threads=1)(feeds)["y"]
    largest = np.abs(exact).max()
    assert emulated is not model and np.abs(found - exact).max() > 1e-3 * largest
    # Reference: ONNX Runtime itself where the CPU has no VNNI. Sums of float32 in another order: 1e-5 of the largest.
    here = open_graph(model, _PAIRS, threads=1)(feeds)["y"]
    assert np.abs((found if _lacks_vnni() else exact) - here).max() <= 1e-5 * largest


@pytest.mark.parametrize("kind", _GRAPHS)
@pytest.mark.parametrize("per_channel", [True, False])
def test_with_pairs_of_16_bits_no_product_saturates(kind: str, per_channel: bool) -> None:
    signature, constants, body, feeds = _GRAPHS[kind]
    model = filled(signature, constants, body)
    int8(model, pair_bits=16, per_channel=per_channel)
    assert saturated(model) is model  # proved
    pairs, exact = (open_graph(model, settings, threads=1)(feeds)["y"] for settings in (_PAIRS, _EXACT))
    assert np.abs(pairs - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize(("isa", "proved"), [("avx2", True), ("", False)])
def test_static_int8_takes_scales_of_pairs_too(isa: str, proved: bool) -> None:
    signature, constants, body = "(float[b, t, 33] x) => (float[b, t, 47] y)", {"w": loud(33, 47)}, "y = MatMul (x, w)"
    model, feeds = filled(signature, constants, body), {"x": _X["x"][None]}
    context = Context(None, (), lambda graph: lambda feeds: {}, isa=isa)  # type: ignore[arg-type]
    outcome = StaticInt8(ranges="x:0:4", context=context)(model)
    assert isinstance(outcome, Outcome) and (saturated(model) is model) is proved
    (repeat,) = outcome.coverage.repeat
    assert f"pair_bits={16 if proved else 0}" in str(repeat)
    here, exact = (open_graph(saturated(model), each, threads=1)(feeds)["y"] for each in (_PAIRS, _EXACT))
    if proved:
        assert np.abs(here - exact).max() <= 1e-5 * np.abs(exact).max()


def test_products_between_dequantized_operands_saturate_too() -> None:
    x, w = drawn(5, 33, 47)
    constants = {
        "w": w,
        "s": np.full(47, 0.01, np.float32),
        "xs": np.array(0.5, np.float32),
        "xz": np.array(3, np.uint8),
    }
    body = "a = DequantizeLinear (x, xs, xz) b = DequantizeLinear <axis = 1> (w, s) y = MatMul (a, b)"
    model = filled("(uint8[n, 33] x) => (float[n, 47] y)", constants, body)
    found = open_graph(saturated(model), _EXACT, threads=1)({"x": x})["y"]
    expected = (saturating_product(x, w) - 3 * w.astype(np.int64).sum(axis=0)) * (0.5 * 0.01)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_scales_of_pairs_are_the_least_that_fit_and_cost_less_than_halving_the_range() -> None:
    weight = normal(384, 64)
    model = filled("(float[n, 384] x) => (float[n, 64] y)", {"w": weight}, "y = MatMul (x, w)")
    int8(model, pair_bits=16)
    stored, scale = (model.graph.initializers[name].const_value for name in ("w.int8", "w.scale"))
    assert stored is not None and scale is not None
    pairs = stored.numpy().astype(int).reshape(192, 2, 64)
    reach = np.maximum(np.maximum(pairs, 0).sum(axis=1), np.maximum(-pairs, 0).sum(axis=1)).max(axis=0)
    assert reach.max() <= 128 and reach.min() >= 126  # 255 * 128 = 32640; the two of a pair are rounded
    noise = ((stored.numpy() * scale.numpy() - weight) ** 2).sum()
    step = np.abs(weight).max(axis=0) / 64
    halved = ((np.rint(weight / step) * step - weight) ** 2).sum()
    assert 10 * math.log10(halved / noise) > 2.5


@pytest.mark.parametrize(("isa", "bits"), [("avx2", 16), ("vnni", 32), ("", 32)])
def test_the_instruction_set_decides_and_the_choice_is_told(isa: str, bits: int) -> None:
    signature, constants, body, _ = _GRAPHS["product"]
    model, same = filled(signature, constants, body), filled(signature, constants, body)
    context = Context(None, (), lambda graph: lambda feeds: {}, isa=isa)  # type: ignore[arg-type]
    coverage = int8(model, context=context).coverage
    repeat = coverage.repeat[0] if coverage.repeat else DynamicInt8()
    assert isinstance(repeat, DynamicInt8) and repeat.pair_bits == (16 if isa == "avx2" else 0)
    int8(same, pair_bits=bits)
    for name, value in model.graph.initializers.items():
        other = same.graph.initializers[name].const_value
        assert value.const_value is not None and other is not None
        assert np.array_equal(value.const_value.numpy(), other.numpy())


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="pair_bits is 8; allowed: 0, 16, 32"):
        DynamicInt8(pair_bits=8)
