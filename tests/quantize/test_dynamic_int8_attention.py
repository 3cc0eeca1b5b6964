"""Packed attention in 8 bits, and the order of the passes."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.testing import graph_from_text, run_graph

from .graphs import (
    Array,
    activation_scale,
    column_scale,
    graph,
    normal,
    operators,
    quantize,
    rounding_bound,
    run,
)

_MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.int32)


def attention_graph(width: int, inner: int, extra: str = "", more: str = "") -> tuple[ir.Model, Array, Array]:
    weight, bias = normal(width, 3 * inner) * np.float32(0.3 / math.sqrt(width)), normal(3 * inner, seed=1)
    body = f"y = com.microsoft.Attention <num_heads = 3{extra}> (x, w, b, mask{more})"
    inputs = f"float[b, t, {width}] x, int32[b, t] mask, float[1, 3, t, t] scores"
    return graph(inputs, f"float[b, t, {inner}] y", {"w": weight, "b": bias}, body), weight, bias


def attention(packed: Array, mask: Array, causal: bool, scale: float | None = None, bias: Array | float = 0) -> Array:
    """softmax(q k^T scale + bias) v of 3 heads in float64; queries that see no key are NaN."""
    tokens, head_dim = packed.shape[1], packed.shape[2] // 9
    q, k, v = packed.reshape(*packed.shape[:2], 3, 3, head_dim).transpose(2, 0, 3, 1, 4)  # [B, H, T, head_dim] each
    seen = mask[:, None, None, :].astype(bool) & (np.tril(np.ones((tokens, tokens), bool)) if causal else True)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores = np.where(seen, np.exp(q @ k.transpose(0, 1, 3, 2) * scale + bias), 0)
    with np.errstate(invalid="ignore"):
        weights = scores / scores.sum(axis=-1, keepdims=True)
    context: Array = (weights @ v).transpose(0, 2, 1, 3).reshape(*packed.shape[:2], 3 * head_dim)
    return context


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("width", "inner"), [(24, 24), (100, 96)])
@pytest.mark.parametrize("causal", [0, 1])
def test_packed_attention_is_attention_over_the_integer_product(
    width: int, inner: int, per_channel: bool, causal: int
) -> None:
    model, weight, bias = attention_graph(width, inner, f", unidirectional = {causal}")
    outcome = quantize(model, per_channel=per_channel)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    assert operators(model) == ["DynamicQuantizeLinear", "QAttention"]
    x = normal(2, 5, width, seed=2)
    # Reference: NumPy, both operands rounded to whole steps, then everything in float64.
    step, scale = np.float32(activation_scale(x)), column_scale(weight) if per_channel else np.abs(weight).max() / 127
    product = np.rint(x / step).astype(np.int64) @ np.rint(weight / scale).astype(np.int64)
    expected = attention(product * (float(step) * scale.astype(np.float64)) + bias, _MASK, bool(causal))
    y = run(model, {"x": x, "mask": _MASK, "scores": normal(1, 3, 5, 5)})["y"]
    # Values below 5 through about 100 roundings of 6e-8. The plain float product is 0.003 away and more.
    seen = np.isfinite(expected)
    assert np.abs(y - expected)[seen].max() <= 100 * 6e-8 * 5


@pytest.mark.parametrize("per_channel", [True, False])
def test_packed_attention_moves_at_most_by_what_its_products_move(per_channel: bool) -> None:
    model, weight, bias = attention_graph(24, 24)
    feeds = {"x": normal(2, 5, 24, seed=2), "mask": _MASK, "scores": normal(1, 3, 5, 5)}
    x, expected = feeds["x"], run(model, feeds)["y"]
    quantize(model, per_channel=per_channel)
    y = run(model, feeds)["y"]
    scale = column_scale(weight) if per_channel else np.abs(weight).max() / 127
    moved = rounding_bound(x, weight, scale) + 1e-6 * np.abs(bias)
    (q, k, v), (dq, dk, dv) = np.split(np.abs(x @ weight + bias), 3, axis=-1), np.split(moved, 3, axis=-1)
    # A score moves by d at most, so a weight by a factor within exp(+-2 d), and a context by what v moves on top.
    q, k, dq, dk = (part.reshape(2, 5, 3, 8) for part in (q, k, dq, dk))
    score = np.einsum("bthd,bshd->bhts", dq, k + dk) + np.einsum("bthd,bshd->bhts", q, dk)
    d = score.max() / math.sqrt(8)
    assert np.abs(y - expected).max() <= math.expm1(2 * d) * v.max() + dv.max() + 1e-5


@pytest.mark.parametrize(
    ("extra", "more"),
    [
        (", qkv_hidden_sizes = [24, 24, 24]", ""),
        (", scale = 0.5", ""),
        ("", ", , scores"),
        (", scale = 2.0", ", , scores"),
    ],
)
def test_what_the_quantized_operator_cannot_do_is_done_behind_the_integer_product(extra: str, more: str) -> None:
    model, weight, bias = attention_graph(24, 24, extra, more)
    x, scores = normal(2, 5, 24, seed=2), normal(1, 3, 5, 5, seed=4)
    assert quantize(model).coverage.done == 1
    assert operators(model) == ["DynamicQuantizeLinear", "MatMulIntegerToFloat", "Split", "MultiHeadAttention"]
    # Reference and bound as above: NumPy over the product of whole steps.
    step, scale = np.float32(activation_scale(x)), column_scale(weight)
    product = np.rint(x / step).astype(np.int64) @ np.rint(weight / scale).astype(np.int64)
    attend_scale = float(extra.rpartition(" ")[2]) if "scale" in extra else None
    packed = product * (float(step) * scale.astype(np.float64)) + bias
    expected = attention(packed, _MASK, False, attend_scale, scores if more else 0)
    y = run(model, {"x": x, "mask": _MASK, "scores": scores})["y"]
    assert np.abs(y - expected).max() <= 100 * 6e-8 * 5


def test_attention_with_a_past_stays() -> None:
    model, _, _ = attention_graph(24, 24, more=", scores")
    outcome = quantize(model)
    assert [left.reason for left in outcome.coverage.left] == ["it has a past"]
    assert operators(model) == ["Attention"]


def test_the_standard_attention_is_not_taken_for_the_packed_one() -> None:
    model = graph_from_text(
        """
        <ir_version: 10, opset_import: ["" : 23]>
        g (float[b, 2, t, 8] q, float[b, 2, t, 8] k, float[b, 2, t, 8] v) => (float[b, 2, t, 8] y) {
            y = Attention (q, k, v)
        }
        """
    )
    outcome = quantize(model)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, ["Attention"])


def test_b112_packed_attention_at_the_top_of_both_ranges_does_not_saturate() -> None:
    weight = np.ones((768, 72), np.float32)
    model = graph(
        "float[b, t, 768] x, int32[b, t] mask",
        "float[b, t, 24] y",
        {"w": weight, "b": np.zeros(72, np.float32)},
        "y = com.microsoft.Attention <num_heads = 3> (x, w, b, mask)",
    )
    quantize(model)
    y = run(model, {"x": np.ones((1, 3, 768), np.float32), "mask": np.ones((1, 3), np.int32)})["y"]
    # All values are equal, so every context is that value: 768, whatever the weights of attention are.
    assert np.abs(y - 768).max() <= 8 * 6e-8 * 768


def test_equal_rows_of_a_batch_give_equal_rows_bit_for_bit() -> None:
    model, _, _ = attention_graph(24, 24)
    quantize(model)
    x = np.repeat(normal(1, 5, 24, seed=2), 4, axis=0)
    y = run(model, {"x": x, "mask": np.repeat(_MASK[:1], 4, axis=0), "scores": normal(1, 3, 5, 5)})["y"]
    assert all(np.array_equal(row, y[0]) for row in y[1:])


def layer_graph() -> ir.Model:
    """Self-attention of 3 heads and a feed-forward block with the exact GELU, as exports write them."""
    weights: dict[str, Array] = {
        "root": np.array(math.sqrt(2), np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
    }
    for seed, name in enumerate("qkv"):
        weights |= {f"w{name}": normal(24, 24, seed=seed) / np.float32(5), f"b{name}": normal(24, seed=10 + seed)}
    weights |= {"w1": normal(48, 24, seed=5), "w2": normal(24, 48, seed=6)}
    lines = [f"p{name} = MatMul (x, w{name}) {name} = Add (p{name}, b{name})" for name in "qkv"]
    body = (
        " ".join(lines)
        + """
        context = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v, , mask)
        t1 = Transpose <perm = [1, 0]> (w1) h = MatMul (context, t1)
        d = Div (h, root) e = Erf (d) s = Add (e, one) m = Mul (h, s) g = Mul (m, half)
        t2 = Transpose <perm = [1, 0]> (w2) y = MatMul (g, t2)
    """
    )
    return graph("float[b, t, 24] x, int32[b, t] mask", "float[b, t, 24] y", weights, body)


def test_b122_optimizing_before_or_after_quantizing_both_load_within_the_budget() -> None:
    feeds = {"x": normal(2, 5, 24, seed=2), "mask": _MASK}
    expected = run_graph(layer_graph(), feeds)["y"].astype(np.float64)
    optimize = (FoldConstants(), FuseGelu(), PackQkv())
    counts = {}
    for order, passes in {"first": (*optimize, DynamicInt8()), "last": (DynamicInt8(), *optimize)}.items():
        model = layer_graph()
        for item in passes:
            outcome = item(model)
            counts[order, item.name()] = outcome.coverage.done  # type: ignore[attr-defined]
        error = run(model, feeds)["y"] - expected
        # The named budget of the pass is 10 dB of signal over noise.
        assert 10 * math.log10((expected**2).sum() / (error**2).sum()) >= 10
    assert (counts["first", "pack_qkv"], counts["first", "dynamic_int8"]) == (1, 3)
    assert (counts["last", "pack_qkv"], counts["last", "dynamic_int8"]) == (0, 5)
    assert counts["first", "fuse_gelu"] == counts["last", "fuse_gelu"] == 1


def test_b096_optimizing_a_second_time_changes_nothing_and_behind_quantizing_no_answer() -> None:
    feeds = {"x": normal(2, 5, 24, seed=2), "mask": _MASK}
    model, optimize = layer_graph(), (FoldConstants(), FuseGelu(), PackQkv())
    for item in optimize:
        item(model)
    expected = run(model, feeds)["y"]
    assert [item(model).modified for item in optimize] == [False, False, False]
    assert np.array_equal(run(model, feeds)["y"], expected)
    quantize(model)
    expected = run(model, feeds)["y"]
    assert [item(model).modified for item in optimize] == [False, False, False]
    assert np.array_equal(run(model, feeds)["y"], expected)
