"""Three products and their attention become one packed attention, for every mask, width and bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_ROLES = ("query", "key", "value")
_MASKS = {
    "full": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "holed": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]],
}


def attention_body(biased: tuple[str, ...] = _ROLES, attributes: str = "", source: str = "x", output: str = "y") -> str:
    lines = []
    for role in _ROLES:
        product = f"{role}_product" if role in biased else role
        lines.append(f"{product} = MatMul ({'x' if role == 'query' else source}, {role}_weight)")
        if role in biased:
            lines.append(f"{role} = Add ({product}, {role}_bias)")
    lines.append(f"{output} = com.microsoft.MultiHeadAttention <num_heads = 3{attributes}> (query, key, value, , mask)")
    return " ".join(lines)


def attention_graph(body: str, width: int, inner: int, outputs: str = "", inputs: str = "") -> ir.Model:
    """Self-attention of 3 heads over x [b, t, width], each of inner / 3 channels."""
    constants = ", ".join(f"float[1] {role}_{part} = {{0}}" for role in _ROLES for part in ("weight", "bias"))
    text = f"""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b, t, {width}] x, int32[b, t] mask{inputs}) => (float[b, t, {inner}] y{outputs})
        <{constants}> {{ {body} }}
    """
    model = graph_from_text(text)
    for number, role in enumerate(_ROLES):
        set_weight(model, f"{role}_weight", normal(width, inner, seed=number) / math.sqrt(width))
        set_weight(model, f"{role}_bias", normal(inner, seed=10 + number))
    return model


def set_weight(model: ir.Model, name: str, array: Array) -> None:
    value = model.graph.initializers[name]
    value.const_value, value.shape = ir.tensor(array.astype(np.float32), name=name), ir.Shape(array.shape)


def normal(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pack(model: ir.Model) -> Outcome:
    outcome = PackQkv()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def reference(x: Array, mask: Array, inner: int, biased: tuple[str, ...] = _ROLES, causal: bool = False) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v in float64; rows [b, t] that see no key are NaN."""
    width, tokens, head_dim = x.shape[-1], x.shape[1], inner // 3
    heads = []
    for number, role in enumerate(_ROLES):
        weight = (normal(width, inner, seed=number) / math.sqrt(width)).astype(np.float32).astype(np.float64)
        bias = normal(inner, seed=10 + number) if role in biased else 0
        heads.append((x @ weight + bias).reshape(*x.shape[:2], 3, head_dim).transpose(0, 2, 1, 3))
    q, k, v = heads
    seen = mask[:, None, None, :].astype(bool) & (np.tril(np.ones((tokens, tokens), bool)) if causal else True)
    scores = np.where(seen, np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(head_dim)), 0)
    with np.errstate(invalid="ignore"):
        weights = scores / scores.sum(axis=-1, keepdims=True)
    context: Array = (weights @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], inner)
    return context


def assert_close(found: Array, expected: Array) -> None:
    # Rounding of float32 (6e-8) in products of up to 100 terms, all of unit size, through a softmax whose scores are
    # below 20 here: 100 + 20 roundings of values below 5. A head or a token that is swapped is off by 0.1 and more.
    seen = np.isfinite(expected)
    assert seen.any() and np.abs(found - expected)[seen].max() <= 120 * 6e-8 * 5


@pytest.mark.parametrize("mask", _MASKS)
@pytest.mark.parametrize(("width", "inner"), [(24, 24), (100, 96), (16, 48)])
def test_packed_attention_honours_every_mask_and_head_size(width: int, inner: int, mask: str) -> None:
    model = attention_graph(attention_body(), width, inner)
    outcome = pack(model)
    assert operators(model) == ["Attention"]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    feeds = {"x": normal(2, 5, width, seed=3), "mask": np.array(_MASKS[mask], np.int32)}
    assert_close(run_graph(model, feeds)["y"], reference(feeds["x"], feeds["mask"], inner))


@pytest.mark.parametrize("mask", _MASKS)
def test_causal_attention_stays_causal(mask: str) -> None:
    model = attention_graph(attention_body(attributes=", unidirectional = 1"), 100, 96)
    assert pack(model).coverage.done == 1
    assert model.graph.node(0).attributes.get_int("unidirectional") == 1
    feeds = {"x": normal(2, 5, 100, seed=3), "mask": np.array(_MASKS[mask], np.int32)}
    assert_close(run_graph(model, feeds)["y"], reference(feeds["x"], feeds["mask"], 96, causal=True))


def test_the_scale_and_the_fill_of_the_mask_are_kept() -> None:
    model = attention_graph(attention_body(attributes=", scale = 0.25, mask_filter_value = -50.0"), 24, 24)
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["holed"], np.int32)}
    expected = run_graph(model, feeds)["y"]
    pack(model)
    assert model.graph.node(0).attributes.get_float("mask_filter_value") == -50
    assert_close(run_graph(model, feeds)["y"], expected)


@pytest.mark.parametrize("biased", [(), ("query",), ("value",), ("query", "value")])
def test_missing_biases_are_zeros(biased: tuple[str, ...]) -> None:
    model = attention_graph(attention_body(biased), 24, 24)
    assert pack(model).coverage.done == 1
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["holed"], np.int32)}
    assert_close(run_graph(model, feeds)["y"], reference(feeds["x"], feeds["mask"], 24, biased))


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model = attention_graph(attention_body(), 24, 24)
    pack(model)
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["left"], np.int32)}
    expected = run_graph(model, feeds)["y"]
    outcome = pack(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)
    assert np.array_equal(run_graph(model, feeds)["y"], expected)


def test_layers_that_share_their_weights_share_the_packed_ones() -> None:
    first, second = attention_body(output="z"), attention_body().replace("(x,", "(z,")
    for role in _ROLES:
        second = second.replace(f"{role} = ", f"{role}2 = ").replace(f"{role}_product", f"{role}_product2")
    second = second.replace("(query, key, value,", "(query2, key2, value2,")
    model = attention_graph(f"{first} {second}", 24, 24)
    assert pack(model).coverage.done == 2
    sizes = sorted(tuple(value.shape or ()) for value in model.graph.initializers.values())
    assert sizes == [(24, 72), (72,)]
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["right"], np.int32)}
    inner = reference(feeds["x"], feeds["mask"], 24)
    assert_close(run_graph(model, feeds)["y"], reference(inner, feeds["mask"], 24))


def test_a_mask_and_biases_may_be_left_out_of_the_operator() -> None:
    model = attention_graph(attention_body().replace("value, , mask)", "value)"), 24, 24)
    assert pack(model).coverage.done == 1
    x = normal(2, 5, 24, seed=3)
    found = run_graph(model, {"x": x, "mask": np.ones((2, 5), np.int32)})["y"]
    assert_close(found, reference(x, np.ones((2, 5)), 24))


def test_a_bias_of_the_scores_goes_along() -> None:
    model = attention_graph(
        attention_body().replace("value, , mask", "value, , mask, scores"), 24, 24, inputs=", float[1, 3, t, t] scores"
    )
    feeds = {
        "x": normal(2, 5, 24, seed=3),
        "mask": np.array(_MASKS["left"], np.int32),
        "scores": normal(1, 3, 5, 5, seed=4),
    }
    expected = run_graph(model, feeds)["y"]
    assert pack(model).coverage.done == 1
    assert operators(model) == ["Attention"]
    assert_close(run_graph(model, feeds)["y"], expected)
    assert np.abs(run_graph(model, feeds | {"scores": 0 * feeds["scores"]})["y"] - expected).max() > 1e-2


def _cut_body(axis: int, parts: tuple[tuple[int, int], ...] = ((0, 24), (24, 48), (48, 72))) -> str:
    """Query, key and value as ranges of one product of 72 columns."""
    cuts = [
        f"start_{i} = Constant <value = int64[1] {{{start}}}> () end_{i} = Constant <value = int64[1] {{{end}}}> () "
        f"{role} = Slice (whole, start_{i}, end_{i}, axis)"
        for i, (role, (start, end)) in enumerate(zip(_ROLES, parts, strict=True))
    ]
    attend = "y = com.microsoft.MultiHeadAttention <num_heads = 3> (query, key, value, , mask)"
    product = "product = MatMul (x, query_weight) whole = Add (product, query_bias)"
    return " ".join([product, f"axis = Constant <value = int64[1] {{{axis}}}> ()", *cuts, attend])


def _shape_whole(model: ir.Model) -> None:
    for value in (value for node in model.graph for value in node.outputs if value.name == "whole"):
        value.shape = ir.Shape(["b", "t", 72])


def test_columns_that_a_split_gives_are_packed() -> None:
    body = (
        "product = MatMul (x, query_weight) whole = Add (product, query_bias) "
        "widths = Constant <value = int64[3] {24, 24, 24}> () query, key, value = Split <axis = -1> (whole, widths) "
        "y = com.microsoft.MultiHeadAttention <num_heads = 3> (query, key, value, , mask)"
    )
    model = attention_graph(body, 24, 72)
    model.graph.outputs[0].shape = ir.Shape(["b", "t", 24])
    _shape_whole(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["holed"], np.int32)}
    expected = run_graph(model, feeds)["y"]
    assert pack(model).coverage.done == 1
    assert operators(model) == ["Attention"]
    assert_close(run_graph(model, feeds)["y"], expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_columns_of_one_product_are_packed_in_any_order(order: tuple[int, ...]) -> None:
    parts = tuple((24 * number, 24 * number + 24) for number in order)
    model = attention_graph(_cut_body(2, parts), 24, 72)
    model.graph.outputs[0].shape = ir.Shape(["b", "t", 24])
    _shape_whole(model)
    FoldConstants()(model)
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["holed"], np.int32)}
    expected = run_graph(model, feeds)["y"]
    assert pack(model).coverage.done == 1
    assert operators(model) == ["Attention"]
    assert_close(run_graph(model, feeds)["y"], expected)


_TWO_SOURCES = attention_body(source="memory")
_TIED = attention_body().replace("MatMul (x, key_weight)", "MatMul (x, turned)")
_NEAR_MISSES = {
    "cross-attention": (
        _TWO_SOURCES,
        "",
        ", float[b, t, 24] memory",
        "query, key and value come from different inputs",
    ),
    "a tied weight": ("turned = Transpose <perm = [1, 0]> (key_weight) " + _TIED, "", "", "a weight is tied"),
    "a weight that is looked up": (
        "looked = Gather (key_weight, mask) " + attention_body(),
        ", float[b, t, 24] looked",
        "",
        "a weight is tied",
    ),
    "a weight that is an output": (attention_body(), ", float[24, 24] key_weight", "", "a weight is tied"),
    "a product that is an output": (attention_body(), ", float[b, t, 24] value", "", "a product has other readers"),
    "a product that is read by others": (
        attention_body() + " z = Neg (key)",
        ", float[b, t, 24] z",
        "",
        "a product has other readers",
    ),
    "a key that is computed otherwise": (
        attention_body().replace("key = Add (key_product, key_bias)", "key = Neg (key_product)"),
        "",
        "",
        "not the output of a linear layer",
    ),
    "a computed bias": (
        attention_body().replace("(key_product, key_bias)", "(key_product, x)"),
        "",
        "",
        "not the output of a linear layer",
    ),
    "a bias for all channels": (
        "one = Constant <value = float[1] {1.0}> () "
        + attention_body().replace("key_product, key_bias", "key_product, one"),
        "",
        "",
        "not the output of a linear layer",
    ),
    "a computed weight": (
        attention_body().replace("key_weight)", "w)"),
        "",
        ", float[24, 24] w",
        "both operands are computed",
    ),
    "biases in the operator": (
        attention_body().replace("value, , mask", "value, packed, mask"),
        "",
        ", float[72] packed",
        "its query, key and value biases stand in the operator",
    ),
    "a past": (
        attention_body().replace("value, , mask", "value, , mask, , keys, values"),
        "",
        ", float[b, 3, p, 8] keys, float[b, 3, p, 8] values",
        "it has a past",
    ),
    "rows of a product": (
        _cut_body(axis=1, parts=((0, 1), (1, 2), (2, 3))),
        "",
        "",
        "not columns of a linear layer",
    ),
    "columns that others read": (
        _cut_body(axis=2) + " z = Neg (whole)",
        ", float[b, t, 72] z",
        "",
        "a product has other readers",
    ),
    "columns of something else": (
        _cut_body(axis=2).replace("Add (product, query_bias)", "Neg (product)"),
        "",
        "",
        "not columns of a linear layer",
    ),
    "keys as outputs": (
        attention_body(output="y, keys, values"),
        ", float[b, 3, t, 8] keys, float[b, 3, t, 8] values",
        "",
        "its keys and values are outputs too",
    ),
}


@pytest.mark.parametrize("case", _NEAR_MISSES)
def test_what_cannot_be_packed_stays_and_the_reason_is_told(case: str) -> None:
    body, outputs, inputs, reason = _NEAR_MISSES[case]
    model = attention_graph(body, 24, 72 if "whole" in body else 24, outputs, inputs)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _shape_whole(model)
    before = operators(model)
    outcome = pack(model)
    assert operators(model) == before
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("y", reason)]


def test_subgraphs_are_left_alone() -> None:
    body = attention_body(output="a")
    model = attention_graph(
        f"""y = If (c) <
                then_branch = t () => (float[b, t, 24] a) {{ {body} }},
                else_branch = e () => (float[b, t, 24] n) {{ n = Neg (x) }}
            >""",
        24,
        24,
        inputs=", bool c",
    )
    feeds = {"x": normal(2, 5, 24, seed=3), "mask": np.array(_MASKS["left"], np.int32), "c": np.array(True)}
    outcome = pack(model)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, ["If"])
    assert_close(run_graph(model, feeds)["y"], reference(feeds["x"], feeds["mask"], 24))
