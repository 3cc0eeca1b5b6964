"""Each spelling of softmax attention becomes one operator that computes the same in every row, under every mask."""

from __future__ import annotations

import numpy as np
import pytest

from .attention_graphs import CONTEXT, HIDDEN, PRODUCT, SCALED, assert_equal_everywhere, both, fuse, graph

_FILL = SCALED + HIDDEN + "f = Where (hidden, low, d) " + CONTEXT
_SCALES = {
    "multiplied": "d = Mul (s, scale)",
    "multiplied from the left": "d = Mul (scale, s)",
    "divided": "d = Div (s, two)",
    "divided twice": "a = Div (s, two) d = Mul (a, scale)",
    "negative": "d = Mul (s, minus)",
    "left as it is": "d = Identity (s)",
}


@pytest.mark.parametrize("scale", _SCALES)
def test_scores_keep_their_scale(scale: str) -> None:
    body = PRODUCT + _SCALES[scale] + " " + HIDDEN + "f = Where (hidden, low, d) " + CONTEXT
    assert_equal_everywhere(*both(body, {"minus": np.float32(-0.5)}))


_SCALED_OPERANDS = {
    "query": ("qs = Mul (q, scale) kt = Transpose <perm = [0, 1, 3, 2]> (k) d = MatMul (qs, kt) ", 0),
    "key": ("ks = Div (k, two) kt = Transpose <perm = [0, 1, 3, 2]> (ks) d = MatMul (q, kt) ", 0),
    "both": (
        "qs = Mul (q, scale) kt = Transpose <perm = [0, 1, 3, 2]> (k) ks = Mul (kt, two) d = MatMul (qs, ks) ",
        0,
    ),
    "query, before its heads were split": (
        "qs = Mul (x, scale) qr = Reshape (qs, split) qt = Transpose <perm = [0, 2, 1, 3]> (qr) "
        "kt = Transpose <perm = [0, 1, 3, 2]> (k) d = MatMul (qt, kt) ",
        0,
    ),
    "by channel, which is no scale": (
        "qs = Mul (q, gains) kt = Transpose <perm = [0, 1, 3, 2]> (k) d = MatMul (qs, kt) ",
        1,
    ),
}


@pytest.mark.parametrize("operand", _SCALED_OPERANDS)
def test_a_scale_of_query_and_key_goes_into_the_operator(operand: str) -> None:
    body, products = _SCALED_OPERANDS[operand]
    constants = {"gains": np.linspace(-1, 1, 8, dtype=np.float32), "split": np.array([0, 0, 4, 8])}
    body += HIDDEN + "f = Where (hidden, low, d) " + CONTEXT
    before, after = both(body, constants, x="float[batch, tokens, 32]")
    assert [node.op_type for node in after.graph].count("Mul") == products
    assert_equal_everywhere(before, after)


def test_queries_and_keys_may_differ_in_number() -> None:
    before, after = both(
        _FILL,
        k="float[batch, 4, keys, 8]",
        v="float[batch, 4, keys, 6]",
        mask="int64[batch, keys]",
    )
    assert_equal_everywhere(before, after)


def test_who_asks_for_the_size_of_the_scores_does_not_keep_them() -> None:
    body = SCALED + HIDDEN + "size = Shape (d) wide = Expand (low, size) f = Where (hidden, wide, d) " + CONTEXT
    before, after = both(body)
    assert "MatMul" not in {node.op_type for node in after.graph}
    assert_equal_everywhere(before, after)


_EINSUMS = {
    "heads first": ("bhid,bhjd->bhij", "b h i j, b h j d -> b h i d", {}),
    "heads third": (
        "bihd,bjhd->bhij",
        "bhij,bjhd->bihd",
        {"q": "tokens, 4, 8", "k": "tokens, 4, 8", "v": "tokens, 4, 6"},
    ),
    "operands swapped": ("bhid,bhjd->bhji", "bhij,bhjd->bhid", {"swap": "yes"}),
    "one key head": ("bhid,bjd->bhij", "bhij,bjd->bhid", {"k": "tokens, 8", "v": "tokens, 6"}),
}


@pytest.mark.parametrize("form", _EINSUMS)
def test_einsum_in_any_order_of_axes(form: str) -> None:
    scores, context, shapes = _EINSUMS[form]
    operands = "k, q" if shapes.pop("swap", "") else "q, k"
    y = "float[batch, tokens, 4, 6]" if context.endswith("bihd") else "float[batch, 4, tokens, 6]"
    body = (
        f's = Einsum <equation = "{scores}"> ({operands}) d = Mul (s, scale) {HIDDEN} f = Where (hidden, low, d) '
        f'w = Softmax <axis = 3> (f) y = Einsum <equation = "{context}"> (w, v)'
    )
    assert_equal_everywhere(*both(body, None, y, **{name: f"float[batch, {dims}]" for name, dims in shapes.items()}))


def test_one_key_head_for_all_is_repeated() -> None:
    before, after = both(_FILL, k="float[batch, 1, tokens, 8]", v="float[batch, 1, tokens, 6]")
    assert_equal_everywhere(before, after)


_FLAT_HIDDEN = "m3 = Unsqueeze (rows_mask, second) hidden = Equal (m3, none) "
_FLATS = {
    "heads in the batch": (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) d = Mul (s, scale) "
        + _FLAT_HIDDEN
        + "f = Where (hidden, low, d) "
        + CONTEXT,
        "float[rows, tokens, 6]",
        {name: f"float[rows, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "int64[rows, tokens]",
    ),
    "heads in the batch, with a bias of each": (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) d = Mul (s, scale) f = Add (d, far) " + CONTEXT,
        "float[rows, tokens, 6]",
        {name: f"float[rows, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))}
        | {"far": "float[rows, 1, tokens]"},
        "int64[rows, tokens]",
    ),
    "heads in the batch, with a bias for all": (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) d = Mul (s, scale) f = Add (d, pairs) " + CONTEXT,
        "float[rows, tokens, 6]",
        {name: f"float[rows, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))}
        | {"pairs": "float[1, tokens, tokens]"},
        "int64[rows, tokens]",
    ),
    "one head": (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) d = Mul (s, scale) "
        + _FLAT_HIDDEN
        + "f = Where (hidden, low, d) "
        + CONTEXT,
        "float[batch, tokens, 6]",
        {name: f"float[batch, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "int64[batch, tokens]",
    ),
    "one head, with a bias": (
        "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) d = Mul (s, scale) f = Add (d, pairs) " + CONTEXT,
        "float[batch, tokens, 6]",
        {name: f"float[batch, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6), ("pairs", "tokens"))},
        "int64[batch, tokens]",
    ),
    "one head, axes in another order": (
        "qt = Transpose <perm = [1, 0, 2]> (q) kt = Transpose <perm = [1, 2, 0]> (k) "
        "vt = Transpose <perm = [1, 0, 2]> (v) s = MatMul (qt, kt) f = Mul (s, scale) "
        "w = Softmax (f) y = MatMul (w, vt)",
        "float[batch, tokens, 6]",
        {name: f"float[tokens, batch, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "int64[batch, tokens]",
    ),
}


@pytest.mark.parametrize("layout", _FLATS)
def test_three_dimensional_products(layout: str) -> None:
    body, y, inputs, mask = _FLATS[layout]
    before, after = both(body, None, y, rows_mask=mask, **inputs)
    assert_equal_everywhere(before, after)


def test_two_layers_share_what_is_computed_of_their_mask() -> None:
    second = CONTEXT.replace("w", "w2").replace("y", "z").replace("(f)", "(f2)")
    body = _FILL + " " + "s2 = MatMul (q2, kt) d2 = Mul (s2, scale) f2 = Where (hidden, low, d2) " + second
    model = graph("q2 = Mul (q, two) " + body, None, "float[batch, 4, tokens, 6] y, float[batch, 4, tokens, 6] z")
    before = model.clone()
    assert fuse(model).coverage.done == 2
    assert [node.op_type for node in model.graph].count("Equal") == 2  # the graph's own, and one for both layers
    assert_equal_everywhere(before, model)


def test_values_may_be_computed_behind_the_softmax() -> None:
    body = _FILL.replace("y = MatMul (w, v)", "v2 = Mul (v, two) y = MatMul (w, v2)")
    before, after = both(body)
    place = {node: at for at, node in enumerate(after.graph)}  # ONNX wants every value before its readers
    assert all(place[source] < place[node] for node in after.graph for source in node.predecessors())
    assert_equal_everywhere(before, after)


def test_a_second_run_changes_nothing() -> None:
    _, after = both(_FILL)
    nodes = [node.op_type for node in after.graph]
    outcome = fuse(after)
    assert (outcome.modified, outcome.coverage.of) == (False, 0)
    assert [node.op_type for node in after.graph] == nodes
