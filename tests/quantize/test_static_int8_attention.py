"""Attention with 8-bit operands: its answers, what stays in float and why, and a choice by time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.passes import Left, Outcome
from tx_export.quantize import _static_attention
from tx_export.quantize._static_ranges import Range, read
from tx_export.quantize.static_int8 import StaticInt8

from .graphs import Array, graph, normal, operators, run
from .test_static_int8 import context, loaded, quantize

_HEADS, _WIDTH = 2, 16
_PACKED = "a = com.microsoft.Attention <num_heads = 2> (x, w, b, mask) y = MatMul (a, v)"


def weights() -> dict[str, Array]:
    return {"w": normal(_WIDTH, 3 * _WIDTH) / 4, "b": normal(3 * _WIDTH, seed=1) / 4, "v": normal(_WIDTH, 8, seed=2)}


def model(body: str = _PACKED, **more: Array) -> ir.Model:
    given = {name: array for name, array in (weights() | more).items() if name in body}
    return graph(f"float[n, t, {_WIDTH}] x, int32[n, t] mask", "float[n, t, 8] y", given, body)


def feeds(seed: int = 3) -> dict[str, Array]:
    mask = np.ones((3, 7), np.int32)
    mask[1, 4:], mask[2, :5] = 0, 0
    return {"x": normal(3, 7, _WIDTH, seed=seed), "mask": mask}


def rounded(x: Array, low: float, high: float) -> Array:
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    levels: Array = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    return levels * scale


def reference(given: dict[str, Array], ranges: Sequence[Range]) -> Array:
    """float64, with each operand of a product rounded in its range as 8 bits round it: x, mixed values, q, k, v."""
    real = given["mask"] != 0
    parts = {name: array.astype(np.float64) for name, array in weights().items()}
    w, v = (np.rint(part / (scale := np.abs(part).max(axis=0) / 127)) * scale for part in (parts["w"], parts["v"]))
    packed = rounded(given["x"].astype(np.float64), *ranges[0]) @ w + parts["b"]
    q, k, values = (
        rounded(part, *held).reshape(3, 7, _HEADS, -1).transpose(0, 2, 1, 3)
        for part, held in zip(np.split(packed, 3, axis=-1), ranges[2:], strict=True)
    )
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(_WIDTH // _HEADS) + np.where(real, 0, -10000)[:, None, None]
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = (rounded(shares, 0, 1) @ values).transpose(0, 2, 1, 3).reshape(3, 7, _WIDTH)
    found: Array = rounded(mixed, *ranges[1]) @ v
    return found


def test_answers_are_those_of_rounded_operands() -> None:
    given, lowered = feeds(), model()
    coverage = quantize(lowered, given, attention="int8").coverage
    assert {stored.form for stored in coverage.stored} == {"int8"}  # the packed weight has one reader
    (repeat,) = coverage.repeat
    assert coverage.done == 3 and isinstance(repeat, StaticInt8)
    ranges, real = list(read(repeat.ranges).values()), given["mask"] != 0
    expected = reference(given, ranges)
    error = np.abs(run(lowered, given)["y"] - expected)[real]
    # float32 puts a number on the other side of a step now and then; most answers have none of these.
    assert np.median(error) <= 1e-5
    assert error.max() <= (ranges[1].high - ranges[1].low) / 255 * np.abs(weights()["v"]).sum(axis=0).max()
    whole = model()
    quantize(whole, given)
    assert np.median(np.abs(run(whole, given)["y"] - expected)[real]) > 1e-4  # float attention rounds nothing


def test_both_products_are_of_integers_when_onnxruntime_has_loaded_them(tmp_path: Path) -> None:
    lowered = model()
    quantize(lowered, feeds(), attention="int8")
    kinds = Counter(loaded(lowered, tmp_path))
    assert kinds["MatMulIntegerToFloat"] + kinds["QLinearMatMul"] == 4
    assert not {"MatMul", "DequantizeLinear", "MultiHeadAttention"} & kinds.keys()


def test_padding_has_no_part_in_the_ranges_and_none_in_the_answers() -> None:
    lowered, given = model(), feeds()
    quantize(lowered, given, attention="int8")
    loud = {"x": np.where(given["mask"][..., None] != 0, given["x"], 100).astype(np.float32), "mask": given["mask"]}
    again = model()
    quantize(again, loud, attention="int8")
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(lowered).SerializeToString()
    real = given["mask"] != 0
    assert np.array_equal(run(lowered, given)["y"][real], run(lowered, loud)["y"][real])


_BODIES = {
    "it is causal": "a = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b, mask) y = MatMul (a, v)",
    "it has packed operands, a bias or a past": (
        "a = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, b, mask) y = MatMul (a, v)"
    ),
    "it has softcap": "a = com.microsoft.MultiHeadAttention <num_heads = 2, softcap = 1.0> (x, x, x) y = MatMul (a, v)",
    "the width of its operands is not known": (
        "h = Neg (x) a = com.microsoft.MultiHeadAttention <num_heads = 2> (h, h, h) y = MatMul (a, v)"
    ),
}


@pytest.mark.parametrize("reason", _BODIES)
def test_attention_of_another_form_stays_in_float_with_its_reason(reason: str) -> None:
    whole = model(_BODIES[reason])
    ranges = " ".join(f"{name}:-4:4" for name in ("x", "a", *(f"val_{number}" for number in range(9))))
    outcome = StaticInt8(attention="int8", ranges=ranges)(whole)
    assert isinstance(outcome, Outcome) and [left.reason for left in outcome.coverage.left] == [reason]
    assert "MultiHeadAttention" in operators(whole)


@pytest.mark.parametrize(("reason", "attention"), [(None, "int8"), ("it takes 1.20 times as long", "float")])
def test_measured_is_what_pays_and_a_repeat_holds_the_choice(
    reason: str | None, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def times(whole: ir.Model, lowered: ir.Model, given: object) -> str | None:
        seen.extend((operators(whole), operators(lowered)))
        return reason

    monkeypatch.setattr("tx_export.quantize.static_int8.slower", times)
    chosen, expected = model(), model()
    coverage = quantize(chosen, feeds(), attention="measured").coverage
    quantize(expected, feeds(), attention=attention)
    assert ir.to_proto(chosen).SerializeToString() == ir.to_proto(expected).SerializeToString()
    assert ("MultiHeadAttention" in seen[0], "MultiHeadAttention" in seen[1]) == (True, False)
    assert coverage.left == (() if reason is None else (Left("attention", reason),))
    (repeat,) = coverage.repeat
    assert isinstance(repeat, StaticInt8) and repeat.attention == attention
    again = model()
    repeat(again)
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(expected).SerializeToString()


@pytest.mark.parametrize(("int8", "pays"), [([1.0, 2.0], True), ([3.0, 8.0], False)])
def test_attention_in_8_bits_pays_where_it_is_quicker_at_the_lengths_of_the_text(
    int8: list[float], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[object] = []

    def times(forms: object, asked: list[object], provider: str, rows: str) -> dict[str, list[float]]:
        shapes.extend(asked)
        return {"float": [2.0, 4.0, 4.0], "int8": [*int8, 4.0]}

    monkeypatch.setattr(_static_attention, "times", times)
    short, long = ({"x": normal(1, tokens, _WIDTH)} for tokens in (5, 9))
    reason = _static_attention.slower(model(), model(), context(short, short, long))
    assert shapes == [(1, 5), (8, 5), (1, 9)]
    assert (reason is None) == pays
    if reason is not None:  # (3 / 2 + 8 / 4 + 4 / 4) / 3
        assert reason == "stays in float: with 8-bit operands it takes 1.50 times as long, over 1x5, 8x5, 1x9"
