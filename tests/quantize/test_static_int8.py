"""static_int8: the arithmetic of the stored integers, what ONNX Runtime runs, and what a calibration is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from torch import nn

from tx_export.artifact import open_graph
from tx_export.errors import PassError, PluginError
from tx_export.passes import Context, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.static_int8 import StaticInt8

from .graphs import PRODUCTS, Array, graph, normal, operators, run, uneven

_EPSILON = 2.0**-24  # the most that float32 rounds a number by, in parts of it

_DIMS = {2: "n, 64", 3: "n, t, 64"}


def context(*feeds: dict[str, Array]) -> Context:
    return Context(nn.Identity(), feeds, lambda copy: open_graph(copy, Cpu().session(), threads=1))


def quantize(model: ir.Model, *feeds: dict[str, Array], **options: Any) -> Outcome:
    outcome = dataclasses.replace(StaticInt8(**options), context=context(*feeds))(model)
    assert isinstance(outcome, Outcome)
    return outcome


def loaded(model: ir.Model, folder: Path) -> list[str]:
    """The operators that ONNX Runtime makes of a graph with the provider's settings."""
    ir.save(model, folder / "given.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "loaded.onnx")
    options.log_severity_level = 3
    for key, value in Cpu().session()["config"].items():
        options.add_session_config_entry(key, value)
    disabled = Cpu().session()["disabled_optimizers"]
    onnxruntime.InferenceSession(
        folder / "given.onnx", options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    return operators(ir.load(folder / "loaded.onnx"))


def parameters(low: float, high: float, symmetric: bool) -> tuple[np.float32, int]:
    """Of 8 bits over a range with zero in it."""
    if symmetric:
        return np.float32(max(-low, high) / 127), 128
    scale = np.float32((high - low) / 255)
    return scale, round(-low / float(scale))


def integer_product(
    x: Array, weight: Array, bias: Array | None, per_channel: bool, symmetric: bool
) -> tuple[Array, Array]:
    """(q_x - zero) @ q_w times both scales, and how far float32 may be from it; exact integers."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale, zero = parameters(low, high, symmetric)
    q_x = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.int64)
    w_scale = (np.abs(weight).max(axis=0 if per_channel else None) / 127).astype(np.float32)
    q_w = np.rint(weight / w_scale).astype(np.int64)
    product = (q_x - zero) @ q_w * (scale.astype(np.float64) * w_scale)
    added = 0 if bias is None else bias.astype(np.float64)
    # The integer, both scales, their product, the sum: each rounded once.
    bound: Array = 5 * _EPSILON * (np.abs(product) + np.abs(added))
    return product + added, bound


@pytest.mark.parametrize("rank", _DIMS)
@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize(("per_channel", "symmetric"), [(True, False), (False, True)])
def test_answers_are_those_of_the_integers(form: str, rank: int, per_channel: bool, symmetric: bool) -> None:
    body, turned, biased = PRODUCTS[form]
    if rank == 3 and "Gemm" in form:
        return  # takes matrices only
    weight, bias, x = uneven(64, 48), normal(48, seed=1), normal(2, 9, 64, seed=2) + np.float32(0.5)
    x = x if rank == 3 else x[0]
    constants = {"w": np.ascontiguousarray(weight.T) if turned else weight} | ({"bias": bias} if biased else {})
    model = graph(f"float[{_DIMS[rank]}] x", f"float[{_DIMS[rank][:-2]}48] y", constants, body)
    options = {"method": "minmax", "per_channel": per_channel, "symmetric": symmetric}
    outcome = quantize(model, {"x": x}, **options)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    expected, bound = integer_product(x, weight, bias if biased else None, per_channel, symmetric)
    assert (np.abs(run(model, {"x": x})["y"] - expected) <= bound).all()


_GRAPHS = {
    "a product of matrices, its bias behind it": ("n, 16", "p = MatMul (x, w) y = Add (p, b)", 1),
    "a fixed shape, for which there is a Gemm too": ("2, 3, 16", "p = MatMul (x, w) y = Add (p, b)", 1),
    "a residual behind a product": ("n, 16", "p = MatMul (x, w) y = Add (p, x)", 1),
    "three that read one input": (
        "n, t, 16",
        "p = MatMul (x, w) q = MatMul (x, v) r = MatMul (x, u) s = Add (p, q) y = Add (s, r)",
        3,
    ),
    "one weight in two products": ("n, t, 16", "p = MatMul (x, w) r = Relu (p) y = MatMul (r, w)", 2),
    "a product behind a turn": (
        "n, t, 16",
        "a = Transpose <perm = [1, 0, 2]> (x) p = MatMul (a, w) y = Transpose <perm = [1, 0, 2]> (p)",
        1,
    ),
    "a product that is scaled": ("n, t, 16", "p = MatMul (x, w) y = Mul (p, half)", 1),
    "Gelu behind a bias": ("n, t, 16", "p = MatMul (x, w) q = Add (p, b) y = com.microsoft.Gelu (q)", 1),
    "a product that others read": ("n, t, 16", "p = MatMul (x, w) q = Add (p, b) r = Neg (p) y = Mul (q, r)", 1),
}


@pytest.mark.parametrize("case", _GRAPHS)
def test_no_product_is_left_in_float_when_onnxruntime_has_loaded_it(case: str, tmp_path: Path) -> None:
    dims, body, count = _GRAPHS[case]
    weights = {name: normal(16, 16, seed=seed) for seed, name in enumerate("wvu")}
    weights |= {"b": normal(16, seed=5), "half": np.array(0.5, np.float32)}
    weights = {name: array for name, array in weights.items() if f"{name})" in body}
    model = graph(f"float[{dims}] x", f"float[{dims}] y", weights, body)
    x = normal(2, 3, 16, seed=6) if dims.count(",") == 2 else normal(6, 16, seed=6)
    exact = run(model, {"x": x})["y"]
    assert quantize(model, {"x": x}).coverage.done == count
    kinds = Counter(loaded(model, tmp_path))
    assert kinds["MatMulIntegerToFloat"] + kinds["QLinearMatMul"] == count
    assert not {"MatMul", "FusedMatMul", "Gemm", "DequantizeLinear"} & kinds.keys()
    y = run(model, {"x": x})["y"]
    assert 10 * math.log10(np.square(exact).sum() / np.square(y - exact).sum()) > 25  # 8 bits; a wrong scale has none


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rank", _DIMS)
def test_b112_calibrated_products_at_the_top_of_both_ranges_do_not_saturate(rank: int, sign: int) -> None:
    weight = np.full((768, 16), sign, np.float32)
    weight[::2, 8:] *= -1  # half of the columns cancel
    model = graph(
        "float[n, 768] x" if rank == 2 else "float[n, t, 768] x", "float[n, 16] y", {"w": weight}, "y = MatMul (x, w)"
    )
    model.graph.outputs[0].shape = None
    x = np.ones((3, 768) if rank == 2 else (1, 3, 768), np.float32)
    quantize(model, {"x": x}, method="minmax")
    expected, bound = integer_product(x, weight, None, True, False)
    assert (np.abs(run(model, {"x": x})["y"] - expected) <= bound).all()


@pytest.mark.parametrize("constant", [0.0, 3.0, -3.0])
def test_an_input_that_never_changes_gives_its_answer(constant: float) -> None:
    weight, bias, x = normal(16, 8), normal(8, seed=1), np.full((5, 16), constant, np.float32)
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": weight, "b": bias}, "y = Gemm (x, w, b)")
    quantize(model, {"x": x})
    y = run(model, {"x": x})["y"]
    # x is the end of its range or, where a search moved that, 1/128 of it; a weight moves by half a step of its column.
    moved = abs(constant) * (np.abs(weight).sum(axis=0) / 128 + 17 / 16 * 16 * np.abs(weight).max(axis=0) / 254)
    assert (np.abs(y - (x.astype(np.float64) @ weight + bias)) <= moved + 1e-6).all()
    if constant == 0:
        assert (y == bias).all()


def test_what_lies_outside_of_the_text_is_cut_off_at_the_end_of_the_range() -> None:
    weight = normal(16, 8)
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": weight}, "y = MatMul (x, w)")
    quantize(model, {"x": np.array([[-1, 2] * 8], np.float32)}, method="minmax")
    ends, beyond = (run(model, {"x": np.array([row * 8], np.float32)})["y"] for row in ([-1, 2], [-50, 1000]))
    assert np.array_equal(ends, beyond)


def test_a_second_run_and_a_repeat_without_text_give_the_same_graph() -> None:
    def made(item: StaticInt8) -> tuple[bytes, Outcome]:
        weights = {"w": normal(16, 16), "v": normal(16, 4, seed=1), "table": normal(300, 16, seed=3)}
        body = "x = Gather (table, ids) h = MatMul (x, w) r = Relu (h) y = MatMul (r, v)"
        model = graph("int64[n, t] ids", "float[n, t, 4] y", weights, body)
        outcome = item(model)
        assert isinstance(outcome, Outcome)
        return ir.to_proto(model).SerializeToString(), outcome

    given = StaticInt8(context=context({"ids": np.arange(300).reshape(3, 100)}))
    (first, outcome), (second, _) = made(given), made(given)
    (repeat,) = outcome.coverage.repeat
    assert isinstance(repeat, StaticInt8) and repeat.context is None
    read = StaticInt8.parse(str(repeat).removeprefix("static_int8{").removesuffix("}"))
    assert read == repeat and made(read)[0] == first == second
    assert [stored.name for stored in outcome.coverage.stored] == ["w", "v", "table"]
    assert {stored.form for stored in outcome.coverage.stored} == {"int8"}
    assert [stored.after for stored in outcome.coverage.stored] == [16 * 16 + 64, 16 * 4 + 16, 300 * 16 + 1200]


def test_only_the_weights_that_are_asked_for_are_quantized() -> None:
    weights = {"a": normal(16, 16), "b": normal(16, 4, seed=1)}
    model = graph("float[n, t, 16] x", "float[n, t, 4] y", weights, "h = MatMul (x, a) y = MatMul (h, b)")
    outcome = quantize(model, {"x": normal(1, 5, 16, seed=2)}, only="b")
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    assert operators(model) == ["MatMul", "QuantizeLinear", "MatMulIntegerToFloat"]
    assert [stored.name for stored in outcome.coverage.stored] == ["b"]


def test_a_tied_table_is_stored_once_for_rows_and_product(tmp_path: Path) -> None:
    table = normal(300, 16)
    body = "x = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) y = MatMul (x, t)"
    model = graph("int64[n, t] ids", "float[n, t, 300] y", {"table": table}, body)
    ids = np.array([[0, 7, 299]])
    assert quantize(model, {"ids": ids}).coverage.done == 2
    stored = [value for value in model.graph.initializers.values() if value.const_value is not None]
    assert sum(value.const_value.nbytes for value in stored if value.const_value is not None) < 300 * 16 + 300 * 4 + 100
    assert {"MatMulIntegerToFloat", "Gather"} <= set(loaded(model, tmp_path))
    assert "DequantizeLinear" not in loaded(model, tmp_path)
    rows = np.abs(table).max(axis=1, keepdims=True) / 127
    x = np.rint(table / rows) * rows
    y = run(model, {"ids": ids})["y"]
    half = np.abs(x[ids]).max() * 2 / 255 / 2 * (1 + 1 / 64)  # a step of x, and what a search cuts off
    assert (np.abs(y - x[ids] @ x.T) <= half * np.abs(x).sum(axis=1) + 1e-4).all()


def test_nan_on_text_names_the_value() -> None:
    weights = {"w": normal(16, 8), "bad": np.full(16, math.nan, np.float32)}
    model = graph("float[n, 16] x", "float[n, 8] y", weights, "h = Add (x, bad) y = MatMul (h, w)")
    with pytest.raises(PassError, match=r"of h are NaN or infinite"):
        quantize(model, {"x": normal(3, 16)})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b129_calibrated_weights_that_are_not_finite_are_refused_by_name_and_number(value: float) -> None:
    weight = normal(16, 8)
    weight[2, 3] = value
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": weight}, "y = MatMul (x, w)")
    with pytest.raises(PassError, match=r"^w: 1 of 128 weights are NaN or infinite"):
        quantize(model, {"x": normal(3, 16)})


@pytest.mark.parametrize("feeds", [(), None])
def test_without_text_the_error_says_what_to_do(feeds: Sequence[dict[str, Array]] | None) -> None:
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": normal(16, 8)}, "y = MatMul (x, w)")
    with pytest.raises(PassError, match=r"needs (text, and the model takes arrays only|a context with text)"):
        StaticInt8(context=None if feeds is None else context(*feeds)).call(model)


def test_ranges_that_lack_an_activation_are_an_error() -> None:
    model = graph("float[n, 16] x", "float[n, 8] y", {"w": normal(16, 8)}, "y = MatMul (x, w)")
    with pytest.raises(PassError, match=r"^static_int8: ranges has none for x; without ranges they are calibrated"):
        StaticInt8(ranges="z:-1:1").call(model)


def test_b120_a_graph_without_products_needs_no_text_and_is_not_modified() -> None:
    outcome = quantize(graph("float[n] x", "float[n] y", {}, "y = Neg (x)"))
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method=best", "method is 'best'; known: minmax, percentile, entropy, mse"),
        ("attention=fast", "attention is 'fast'; known: float, int8, measured"),
        ("percentile=50", "percentile is 50.0; it must be over 50 and at most 100"),
        ("ranges=x:1", "ranges: 'x:1' is not NAME:LOW:HIGH"),
    ],
)
def test_options_that_are_not_known_are_refused(text: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"^pass static_int8: {message}"):
        StaticInt8.parse(text)
