"""The exact GELU becomes one operator; everything that only looks like it stays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_ROOT, _INVERSE = math.sqrt(2), 1 / math.sqrt(2)

# Every order in which exporters write the three factors.
_FORMS = {
    "x (1 + erf) then half": "d = Div (x, root) e = Erf (d) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)",
    "half (1 + erf) then x": "d = Mul (x, inverse) e = Erf (d) p = Add (one, e) m = Mul (half, p) y = Mul (x, m)",
    "half x first": "h = Mul (half, x) d = Div (x, root) e = Erf (d) p = Add (e, one) y = Mul (h, p)",
    "factors swapped": "d = Mul (inverse, x) e = Erf (d) p = Add (e, one) h = Mul (x, half) y = Mul (p, h)",
}


def gelu_graph(body: str, outputs: str = "float[n] y") -> ir.Model:
    return graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => ({outputs})
        <float root = {{{_ROOT!r}}}, float inverse = {{{_INVERSE!r}}}, float one = {{1.0}}, float half = {{0.5}},
         float other = {{1.4}}, float[1,1] wide = {{0.5}}> {{
            {body}
        }}
        """
    )


def fuse(model: ir.Model) -> Outcome:
    outcome = FuseGelu()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def exact_gelu(x: Array) -> Array:
    """In float64, by the error function of the C library."""
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(np.float64)])


@pytest.mark.parametrize("form", _FORMS)
def test_every_spelling_becomes_one_operator_within_1e_6_of_the_exact_form(form: str) -> None:
    model = gelu_graph(_FORMS[form])
    outcome = fuse(model)
    assert operators(model) == ["Gelu"]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    # The named budget of this operator is 1e-6; the tanh form is off by 5e-4.
    assert np.abs(run_graph(model, {"x": x})["y"] - exact_gelu(x)).max() <= 1e-6


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model = gelu_graph(_FORMS["half x first"])
    fuse(model)
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    expected = run_graph(model, {"x": x})["y"]
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)
    assert np.array_equal(run_graph(model, {"x": x})["y"], expected)


def test_an_output_that_others_read_too_keeps_its_name() -> None:
    model = gelu_graph(_FORMS["half x first"] + " z = Neg (y)", "float[n] y, float[n] z")
    assert fuse(model).coverage.done == 1
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    found = run_graph(model, {"x": x})
    assert list(found) == ["y", "z"]
    assert np.array_equal(found["z"], -found["y"])
    assert np.abs(found["y"] - exact_gelu(x)).max() <= 1e-6


_NEAR = "d = Div (x, root) e = Erf (d) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)"
_NEAR_MISSES = {
    "another factor inside": (_NEAR.replace("root", "other"), "float[n] y", "its input is not x / sqrt(2)"),
    "turned quotient": (_NEAR.replace("(x, root)", "(root, x)"), "float[n] y", "its input is not x / sqrt(2)"),
    "another summand": (_NEAR.replace("(e, one)", "(e, half)"), "float[n] y", "1 is not added to it"),
    "another outer factor": (_NEAR.replace("half", "other"), "float[n] y", "it is not multiplied by x / 2"),
    "x twice": (_NEAR.replace("half", "x"), "float[n] y", "it is not multiplied by x / 2"),
    "x and then x / 2": (
        "h = Mul (x, half) " + _NEAR.replace("half)", "h)"),
        "float[n] y",
        "it is not multiplied by x / 2",
    ),
    "another x outside": (
        "q = Neg (x) " + _NEAR.replace("(x, p)", "(q, p)"),
        "float[n] y",
        "it is not multiplied by x / 2",
    ),
    "erf is an output": (_NEAR, "float[n] y, float[n] e", "1 is not added to it"),
    "1 + erf is read by others": (_NEAR + " z = Neg (p)", "float[n] y, float[n] z", "it is not multiplied by x / 2"),
    "the product is an output": (_NEAR, "float[n] y, float[n] m", "it is not multiplied by x / 2"),
    "a factor that raises the rank": (_NEAR.replace("half", "wide"), "float[a, b] y", "it is not multiplied by x / 2"),
}


@pytest.mark.parametrize("case", _NEAR_MISSES)
def test_what_only_looks_like_gelu_stays_and_the_reason_is_told(case: str) -> None:
    body, outputs, reason = _NEAR_MISSES[case]
    model = gelu_graph(body, outputs)
    before, x = operators(model), np.linspace(-3, 3, 11, dtype=np.float32)
    expected = run_graph(model, {"x": x})
    outcome = fuse(model)
    assert operators(model) == before
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("e", reason)]
    found = run_graph(model, {"x": x})
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_tanh_form_is_another_function_and_stays() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (float[n] y)
        <float c = {0.044715}, float k = {0.7978845608}, float one = {1.0}, float half = {0.5}, float three = {3.0}> {
            x3 = Pow (x, three)
            i = Mul (c, x3)
            s = Add (x, i)
            t = Mul (k, s)
            e = Tanh (t)
            p = Add (one, e)
            m = Mul (x, p)
            y = Mul (half, m)
        }
        """
    )
    before = operators(model)
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, before)


def test_subgraphs_are_left_alone() -> None:
    inner = _NEAR.replace("y = ", "a = ")
    model = gelu_graph(
        f"""c = IsNaN (one)
            y = If (c) <
                then_branch = t () => (float[n] a) {{ {inner} }},
                else_branch = f () => (float[n] b) {{ b = Neg (x) }}
            >"""
    )
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, ["IsNaN", "If"])
    assert np.array_equal(run_graph(model, {"x": np.ones(3, np.float32)})["y"], -np.ones(3, np.float32))
