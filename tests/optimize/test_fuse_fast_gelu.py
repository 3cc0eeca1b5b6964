"""The tanh form of GELU becomes one operator; everything that only looks like it stays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export.optimize.fuse_fast_gelu import FuseFastGelu
from tx_export.optimize.lower_contrib import LowerContrib
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_INNER = "k = Mul (c, cube) s = Add (x, k) m = Mul (s, root) t = Tanh (m)"
_FORMS = {
    "a power, half x first": f"cube = Pow (x, three) {_INNER} h = Mul (half, x) p = Add (t, one) y = Mul (h, p)",
    "a power, half last": f"cube = Pow (x, three) {_INNER} p = Add (one, t) q = Mul (x, p) y = Mul (q, half)",
    "products": f"r = Mul (x, x) cube = Mul (r, x) {_INNER} p = Add (t, one) q = Mul (half, p) y = Mul (x, q)",
}
_NEAR_MISSES = {
    "another power": _FORMS["products"].replace("cube = Mul (r, x)", "cube = Mul (r, r)"),
    "another root": _FORMS["products"].replace("Mul (s, root)", "Mul (s, half)"),
    "no half": f"cube = Pow (x, three) {_INNER} p = Add (t, one) y = Mul (x, p)",
    "a plain tanh": "y = Tanh (x)",
}


def graph(body: str) -> ir.Model:
    return graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (float[n] y)
        <float root = {{{math.sqrt(2 / math.pi)!r}}}, float c = {{0.044715}}, float one = {{1.0}},
         float half = {{0.5}}, float three = {{3.0}}> {{
            {body}
        }}
        """
    )


def fuse(model: ir.Model) -> Outcome:
    outcome = FuseFastGelu()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def tanh_gelu(x: Array) -> Array:
    """In float64."""
    x = x.astype(np.float64)
    found: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


@pytest.mark.parametrize("form", _FORMS)
def test_every_spelling_becomes_one_operator_within_1e_6_of_the_tanh_form(form: str) -> None:
    model = graph(_FORMS[form])
    outcome = fuse(model)
    assert [node.op_type for node in model.graph] == ["FastGelu"]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    # The named budget of this operator is 1e-6; the exact form is off by 5e-4.
    assert np.abs(run_graph(model, {"x": x})["y"] - tanh_gelu(x)).max() <= 1e-6
    assert not fuse(model).modified


@pytest.mark.parametrize("case", _NEAR_MISSES)
def test_what_only_looks_like_it_stays(case: str) -> None:
    model = graph(_NEAR_MISSES[case])
    before = [node.op_type for node in model.graph]
    outcome = fuse(model)
    assert [node.op_type for node in model.graph] == before
    assert (outcome.modified, outcome.coverage.done) == (False, 0)
    reasons = ["it is not multiplied by x / 2"] if case == "no half" else []
    assert [left.reason for left in outcome.coverage.left] == reasons


def test_lowered_again_it_is_standard_and_the_same_function() -> None:
    model = graph(_FORMS["products"])
    fuse(model)
    LowerContrib()(model)
    assert {node.domain for node in model.graph} == {""}
    x = np.linspace(-6, 6, 401, dtype=np.float32)
    assert np.abs(run_graph(model, {"x": x})["y"] - tanh_gelu(x)).max() <= 1e-6
