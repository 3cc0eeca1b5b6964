"""What is no attention that the operator computes stays as it was, and the reason is told."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from .attention_graphs import CONTEXT, HIDDEN, PRODUCT, SCALED, fuse, graph

_MASKED = SCALED + HIDDEN + "f = Where (hidden, low, d) "
_FILL = _MASKED + CONTEXT
_CONSTANTS = {
    "mix": np.eye(4, dtype=np.float32)[::-1],
    "temperatures": np.ones((4, 1, 1), np.float32),
    "small": np.float32(-1e4),
    "minus": np.float32(-1),
}
_INPUTS = {
    "gates": "float[batch, 4, tokens, tokens]",
    "places": "int64[tokens]",
    "others": "float[others, 1, 1, tokens]",
}

# What is changed in the graph that fuses, and why it then stays.
_REASONS = {
    "softmax over the queries": (
        _FILL.replace("axis = -1", "axis = 2"),
        "its softmax runs over another axis than the last",
    ),
    "softmax over the heads": (
        _FILL.replace("axis = -1", "axis = 1"),
        "its softmax runs over another axis than the last",
    ),
    "heads mixed before the softmax": (
        SCALED + 'f = Einsum <equation = "bhij,hg->bgij"> (d, mix) ' + CONTEXT,
        "Einsum stands between its product and its softmax",
    ),
    "heads mixed behind the softmax": (
        _MASKED + 'w = Softmax (f) x = Einsum <equation = "bhij,hg->bgij"> (w, mix) y = MatMul (x, v)',
        "a product with a constant stands between its weights and the values",
    ),
    "weights that are gated": (
        _MASKED + "w = Softmax (f) x = Mul (w, gates) y = MatMul (x, v)",
        "Mul stands between its weights and the values",
    ),
    "weights that are transposed": (
        _MASKED + "w = Softmax (f) x = Transpose <perm = [0, 1, 3, 2]> (w) y = MatMul (x, v)",
        "Transpose stands between its weights and the values",
    ),
    "weights summed over the queries": (
        _MASKED + 'w = Softmax (f) y = Einsum <equation = "bhij,bhid->bhjd"> (w, v)',
        "its weights are not summed over the keys",
    ),
    "scores that are capped": (
        SCALED + "f = Tanh (d) " + CONTEXT,
        "Tanh stands between its product and its softmax",
    ),
    "scores that are transposed": (
        SCALED + "f = Transpose <perm = [0, 1, 3, 2]> (d) " + CONTEXT,
        "Transpose stands between its product and its softmax",
    ),
    "a scale of each head": (
        PRODUCT + "f = Mul (s, temperatures) " + CONTEXT,
        "its scores are multiplied by something else than one number",
    ),
    "a scale that is computed": (
        PRODUCT + "f = Mul (s, gates) " + CONTEXT,
        "its scores are multiplied by something else than one number",
    ),
    "a scale turned upside down": (
        PRODUCT + "f = Div (two, s) " + CONTEXT,
        "its scores are multiplied by something else than one number",
    ),
    "scores that are subtracted": (SCALED + "f = Sub (gates, d) " + CONTEXT, "its scores are subtracted"),
    "scores that something puts a tensor in": (
        SCALED + HIDDEN + "f = Where (hidden, gates, d) " + CONTEXT,
        "its mask puts something else than one number in",
    ),
    "a fill that hides nothing": (_FILL.replace("low", "two"), "its mask puts in 2, which hides nothing for sure"),
    "a fill whose sign is turned": (
        SCALED + HIDDEN + "g = Where (hidden, low, d) f = Mul (g, minus) " + CONTEXT,
        "its mask puts in 1e+09, which hides nothing for sure",
    ),
    "a small fill beside another mask": (
        SCALED + HIDDEN + "g = Where (hidden, small, d) b = Where (hidden, low, zero) f = Add (g, b) " + CONTEXT,
        "its mask puts in -10000 beside other masks and biases",
    ),
    "a bias on a small fill, which makes empty rows uneven": (
        SCALED + HIDDEN + "g = Where (hidden, small, d) b = Cast <to = 1> (places) f = Add (g, b) " + CONTEXT,
        "its mask puts in -10000 beside other masks and biases",
    ),
    "a mask of a batch that may be another": (
        SCALED + "f = Add (d, others) " + CONTEXT,
        "its scores are broadcast to a larger shape",
    ),
    "scores summed over heads": (
        's = Einsum <equation = "bhid,bhjd->bij"> (q, k) f = Unsqueeze (s, second) ' + CONTEXT,
        "Unsqueeze stands between its product and its softmax",
    ),
    "scores summed over all": (
        's = Einsum <equation = "bhid,bgjc->bhij"> (q, k) f = Mul (s, scale) ' + CONTEXT,
        "its scores are summed over other axes than the channels of a head",
    ),
    "an ellipsis": (
        's = Einsum <equation = "...id,...jd->...ij"> (q, k) f = Mul (s, scale) ' + CONTEXT,
        "its product is an Einsum of the form ...id,...jd->...ij",
    ),
}


@pytest.mark.parametrize("case", _REASONS)
def test_what_differs_from_attention_stays(case: str) -> None:
    body, reason = _REASONS[case]
    stays(graph(body, _CONSTANTS, **_INPUTS), reason)


def stays(model: ir.Model, reason: str) -> None:
    before = [node.op_type for node in model.graph]
    outcome = fuse(model)
    assert [left.reason for left in outcome.coverage.left] == [reason]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [node.op_type for node in model.graph] == before


_OUTPUTS = {
    "weights": ("w", "its weights are an output"),
    "scores": ("d", "its scores are read elsewhere"),
    "the product": ("s", "its scores are read elsewhere"),
}


@pytest.mark.parametrize("output", _OUTPUTS)
def test_what_is_read_elsewhere_must_be_computed_anyhow(output: str) -> None:
    name, reason = _OUTPUTS[output]
    y = f"float[batch, 4, tokens, 6] y, float[batch, 4, tokens, tokens] {name}"
    stays(graph(_FILL, None, y), reason)


def test_weights_that_another_node_reads_are_kept() -> None:
    outputs = "float[batch, 4, tokens, 6] y, float[batch, 4, tokens, tokens] z"
    stays(graph(_FILL + " z = Neg (w)", None, outputs), "its weights are read elsewhere")


_SHAPES = {
    "values of a batch that may be another": (
        "float[batch, 4, tokens, 6]",
        {"v": "float[others, 4, tokens, 6]"},
        "its value has the shape [others, 4, tokens, 6], its scores [batch, 4, tokens, tokens]",
    ),
    "an unknown number of heads": (
        "float[batch, heads, tokens, 6]",
        {name: f"float[batch, heads, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "the number or the size of its heads is unknown",
    ),
    "an unknown size of heads": (
        "float[batch, 4, tokens, 6]",
        {"q": "float[batch, 4, tokens, size]", "k": "float[batch, 4, tokens, size]"},
        "the number or the size of its heads is unknown",
    ),
    "five dimensions": (
        "float[batch, 2, 4, tokens, 6]",
        {name: f"float[batch, 2, 4, tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "its products have 5 dimensions",
    ),
    "no batch": (
        "float[tokens, 6]",
        {name: f"float[tokens, {size}]" for name, size in (("q", 8), ("k", 8), ("v", 6))},
        "its products have 2 dimensions",
    ),
    "keys of another rank": (
        "float[batch, 4, tokens, 6]",
        {"k": "float[4, tokens, 8]"},
        "its query and key have 4 and 3 dimensions",
    ),
    "float64": (
        "double[batch, 4, tokens, 6]",
        {"q": "double[batch, 4, tokens, 8]", "k": "double[batch, 4, tokens, 8]", "v": "double[batch, 4, tokens, 6]"},
        "its query is DOUBLE; the operator takes FLOAT",
    ),
}


@pytest.mark.parametrize("case", _SHAPES)
def test_operands_must_fit_the_operator(case: str) -> None:
    y, inputs, reason = _SHAPES[case]
    rank = inputs.get("k", "float[,,,]").count(",") + 1
    turned = ", ".join(str(axis) for axis in (*range(rank - 2), rank - 1, rank - 2))
    body = f"kt = Transpose <perm = [{turned}]> (k) s = MatMul (q, kt) w = Softmax (s) y = MatMul (w, v)"
    stays(graph(body, None, y, **inputs), reason)


def test_keys_must_have_a_batch() -> None:
    body = 's = Einsum <equation = "bid,jd->bij"> (q, k) w = Softmax (s) y = MatMul (w, v)'
    shapes = {"q": "float[1, tokens, 8]", "k": "float[tokens, 8]", "v": "float[1, tokens, 6]"}
    stays(graph(body, None, "float[1, tokens, 6]", **shapes), "its key is the same for every row of the batch")


_NONE = {
    "a softmax of classes": "s = MatMul (q, classes) w = Softmax (s) y = Identity (w)",
    "weights of no product": "w = Softmax (gates) y = MatMul (w, v)",
    "weights that are averaged": PRODUCT + "w = Softmax (s) y = Neg (w)",
}


@pytest.mark.parametrize("case", _NONE)
def test_other_softmaxes_are_no_candidates(case: str) -> None:
    model = graph(_NONE[case], {"classes": np.ones((8, 6), np.float32)}, "float[a, b, c, d]", **_INPUTS)
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)


def test_attention_in_a_subgraph_stays() -> None:
    inner = _FILL.replace("y = ", "a = ")
    model = graph(
        f"c = IsNaN (one) y = If (c) < then_branch = t () => (float[batch, 4, tokens, 6] a) {{ {inner} }}, "
        "else_branch = e () => (float[batch, 4, tokens, 6] n) { n = Neg (v) } >"
    )
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.of) == (False, 0)
