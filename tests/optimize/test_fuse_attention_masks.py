"""Masks: what hides a key hides it in the operator as well, in every row, also one whose keys are all hidden."""

from __future__ import annotations

import numpy as np
import pytest

from .attention_graphs import (
    CONTEXT,
    HIDDEN,
    LOWEST,
    PRODUCT,
    SCALED,
    assert_equal_everywhere,
    attention_nodes,
    both,
    given,
)

_CAUSAL = "past = Trilu <upper = 0> (square) causal = Equal (past, zero) "
_SQUARE = "size = Shape <start = 2, end = 3> (q) sizes = Concat <axis = 0> (size, size) square = Expand (one, sizes) "
_ADDED = "c = Cast <to = 1> (m4) hiding = Sub (one, c) b = Mul (hiding, low) "


@pytest.mark.parametrize("fill", [-1e4, -65504.0, -1e9, -1e20, LOWEST])
@pytest.mark.parametrize("form", ["Where (hidden, low, d)", "Where (seen, d, low)"])
def test_a_replacing_fill_becomes_a_key_padding_mask_and_empty_rows_stay_even(form: str, fill: float) -> None:
    body = SCALED + HIDDEN + f"seen = Not (hidden) f = {form} " + CONTEXT
    before, after = both(body, {"low": np.float32(fill)})
    (node,) = attention_nodes(after)
    assert given(node) == {"keys"}
    assert_equal_everywhere(before, after)


@pytest.mark.parametrize("fill", [-5.0, -1e4, -1e9, LOWEST])
@pytest.mark.parametrize("form", ["f = Add (d, b)", "f = Add (b, d)", "n = Neg (b) f = Sub (d, n)"])
def test_an_added_fill_stays_the_number_that_is_added(form: str, fill: float) -> None:
    before, after = both(SCALED + HIDDEN + _ADDED + form + " " + CONTEXT, {"low": np.float32(fill)})
    (node,) = attention_nodes(after)
    if "Neg" not in form:
        assert given(node) == {"keys"}
        assert node.attributes.get_float("mask_filter_value") == np.float32(fill)
    assert_equal_everywhere(before, after)


def test_a_mask_may_be_made_of_integers() -> None:
    hiding = "i = Sub (whole, m4) j = Mul (i, thousands) b = Cast <to = 1> (j) "
    before, after = both(
        SCALED + HIDDEN + hiding + "f = Add (d, b) " + CONTEXT,
        {"whole": np.array(1), "thousands": np.array(-10000)},
    )
    assert given(attention_nodes(after)[0]) == {"keys"}
    assert_equal_everywhere(before, after)


def test_a_mask_that_may_hold_more_than_0_and_1_becomes_a_bias() -> None:
    body = (SCALED + HIDDEN + _ADDED + "f = Add (d, b) " + CONTEXT).replace("(mask,", "(kinds,")
    before, after = both(body, {"low": np.float32(-3)}, kinds="int64[batch, tokens]")
    assert given(attention_nodes(after)[0]) == {"bias"}
    assert_equal_everywhere(before, after)


@pytest.mark.parametrize("form", ["f = Where (hidden, inf, d)", "b = Where (hidden, inf, zero) f = Add (d, b)"])
def test_minus_infinity_becomes_the_lowest_float(form: str) -> None:
    before, after = both(SCALED + HIDDEN + form + " " + CONTEXT)
    (node,) = attention_nodes(after)
    assert node.attributes.get_float("mask_filter_value") == np.float32(LOWEST)
    assert all(np.isfinite(value.const_value.numpy()).all() for value in after.graph.initializers.values())  # type: ignore[union-attr]
    assert_equal_everywhere(before, after)


_BIASES = {
    "a causal triangle": _SQUARE + _CAUSAL + "f = Where (causal, inf, d) ",
    "a causal triangle and padding in one mask": (
        _SQUARE + _CAUSAL + HIDDEN + "either = Or (causal, hidden) f = Where (either, low, d) "
    ),
    "a causal triangle, then padding": (
        _SQUARE + _CAUSAL + HIDDEN + "g = Where (causal, low, d) f = Where (hidden, low, g) "
    ),
    "infinity, then the lowest float, both added": (
        _SQUARE
        + _CAUSAL
        + HIDDEN
        + "a = Where (causal, inf, zero) b = Where (hidden, lowest, zero) g = Add (d, a) f = Add (g, b) "
    ),
    "the lowest float, then infinity put in": (
        _SQUARE + _CAUSAL + HIDDEN + "b = Where (hidden, lowest, zero) g = Add (d, b) f = Where (causal, inf, g) "
    ),
    "numbers that differ": (_SQUARE + _CAUSAL + HIDDEN + "g = Where (causal, low, d) f = Where (hidden, inf, g) "),
    "a number put in, then one added": (
        _SQUARE + _CAUSAL + HIDDEN + _ADDED + "g = Where (causal, low, d) f = Add (g, b) "
    ),
    "a relative bias of each head": "f = Add (d, relative) ",
    "a bias that is scaled with the scores": "g = Add (d, relative) f = Div (g, two) ",
    "a relative bias, then padding": HIDDEN + "g = Add (d, relative) f = Where (hidden, lowest, g) ",
    "padding, then a relative bias": HIDDEN + "g = Where (hidden, low, d) f = Add (g, relative) ",
    "padding, then places": HIDDEN + "g = Where (hidden, low, d) b = Cast <to = 1> (places) f = Add (g, b) ",
    "places, then a small number put in": (
        HIDDEN + "b = Cast <to = 1> (places) g = Add (d, b) f = Where (hidden, small, g) "
    ),
    "a slope for each head and key": "slope = Mul (heads, far) f = Add (d, slope) ",
    "a bias of each query": "f = Add (d, query_bias) ",
    "a bias of each key": "f = Add (d, key_bias) ",
    "a bias of scores as given": "f = Add (d, pairs) ",
    "scores of positions, a product as well": "p = MatMul (q, positions) f = Add (d, p) ",
    "the logarithm of a mask": HIDDEN + "c = Cast <to = 1> (m4) b = Log (c) f = Add (d, b) ",
    "the logarithm of a mask, then padding": (
        HIDDEN + "c = Cast <to = 1> (m4) b = Log (c) g = Add (d, b) f = Where (hidden, low, g) "
    ),
    "hidden queries": "m5 = Unsqueeze (mask, outer) none5 = Equal (m5, none) f = Where (none5, low, d) ",
}


@pytest.mark.parametrize("bias", _BIASES)
def test_every_other_mask_becomes_a_bias(bias: str) -> None:
    heads = np.linspace(0.1, 2, 4, dtype=np.float32).reshape(4, 1, 1)
    before, after = both(
        SCALED + _BIASES[bias] + CONTEXT,
        {"heads": heads, "outer": np.array([1, 3]), "small": np.float32(-1e4)},
        relative="float[1, 4, tokens, tokens]",
        far="float[batch, 1, 1, tokens]",
        query_bias="float[tokens, 1]",
        key_bias="float[tokens]",
        places="int64[tokens]",
        positions="float[batch, 4, 8, tokens]",
        pairs="float[tokens, tokens]",
    )
    assert given(attention_nodes(after)[0]) == {"bias"}
    assert_equal_everywhere(before, after)


def test_two_masks_of_keys_that_add_up_become_a_bias() -> None:
    spare = "n4 = Unsqueeze (spare_mask, middle) e = Equal (n4, none) a = Where (e, low, zero) g = Add (d, a) "
    body = SCALED + HIDDEN + spare + "b = Where (hidden, low, zero) f = Add (g, b) " + CONTEXT
    before, after = both(body, {"low": np.float32(-3)}, spare_mask="int64[batch, tokens]")
    assert given(attention_nodes(after)[0]) == {"bias"}
    assert_equal_everywhere(before, after)


def test_scale_behind_a_replacing_fill_is_taken_into_account() -> None:
    body = PRODUCT + HIDDEN + "g = Where (hidden, low, s) f = Div (g, two) " + CONTEXT
    before, after = both(body, {"low": np.float32(-1e20)})
    assert given(attention_nodes(after)[0]) == {"keys"}
    assert_equal_everywhere(before, after)


def test_a_mask_that_was_expanded_is_still_a_mask_of_keys() -> None:
    square = "a = Shape <end = 1> (q) t = Shape <start = 2, end = 3> (q) all = Concat <axis = 0> (a, second, t, t) "
    body = (
        SCALED + HIDDEN + square + "zeros = Expand (zero, all) b = Where (hidden, low, zeros) f = Add (d, b) " + CONTEXT
    )
    before, after = both(body)
    assert given(attention_nodes(after)[0]) == {"keys"}
    assert_equal_everywhere(before, after)
