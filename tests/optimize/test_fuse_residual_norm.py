"""A residual connection and the norm behind it become one operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export.optimize.fuse_residual_norm import FuseResidualNorm
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

_NORM = "y = LayerNormalization <axis = -1, epsilon = 0.01> (s, gain, shift)"
_POST = f"s = Add (x, skip) {_NORM}"
_OUTPUT = "float[b, t, 4] y"


def norm_graph(
    body: str = _POST, outputs: str = _OUTPUT, sides: str = "float[b, t, 4] x, float[b, t, 4] skip"
) -> ir.Model:
    return graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g ({sides}) => ({outputs})
        <float[4] gain = {{1.0, 2.0, 0.5, -1.0}}, float[4] shift = {{0.0, 1.0, 0.25, 3.0}},
         float[1, 4] row = {{1.0, 2.0, 0.5, -1.0}}> {{ {body} }}
        """
    )


def fuse(model: ir.Model) -> Outcome:
    outcome = FuseResidualNorm()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def feeds() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(2, 3, 4)).astype(np.float32) for name in ("x", "skip")}


def layer_norm(s: Array) -> Array:
    """In float64, with the population variance and epsilon 0.01."""
    mean, variance = s.mean(axis=-1, keepdims=True), s.var(axis=-1, keepdims=True)
    normed: Array = (s - mean) / np.sqrt(variance + 0.01) * [1.0, 2.0, 0.5, -1.0] + [0.0, 1.0, 0.25, 3.0]
    return normed


def assert_is_norm_of_sum(found: dict[str, Array], x: Array, skip: Array) -> None:
    s = x.astype(np.float64) + skip.astype(np.float64)
    # Values below 8 are summed, centred and scaled: about 12 roundings of 6e-8, grown by at most the largest gain, 2,
    # over the least deviation here (above 0.1).
    bound = 12 * 6e-8 * 8 * 2 / 0.1
    assert s.std(axis=-1).min() > 0.1 and np.abs(s).max() < 8
    assert np.abs(found["y"] - layer_norm(s)).max() <= bound


@pytest.mark.parametrize("order", ["(x, skip)", "(skip, x)"])
def test_post_norm_becomes_one_operator_with_the_epsilon_of_the_norm(order: str) -> None:
    model = norm_graph(_POST.replace("(x, skip)", order))
    outcome = fuse(model)
    assert operators(model) == ["SkipLayerNormalization"]
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    assert_is_norm_of_sum(run_graph(model, feeds()), **feeds())


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (f"s = Add (x, skip) {_NORM} z = Neg (s)", f"{_OUTPUT}, float[b, t, 4] z"),
        (f"s = Add (x, skip) z = Neg (s) {_NORM}", f"{_OUTPUT}, float[b, t, 4] z"),
        (f"s = Add (x, skip) {_NORM}", f"{_OUTPUT}, float[b, t, 4] s"),
    ],
    ids=["read behind the norm", "read before the norm", "an output"],
)
def test_pre_norm_hands_the_sum_on(body: str, outputs: str) -> None:
    model = norm_graph(body, outputs)
    assert fuse(model).coverage.done == 1
    assert not {"LayerNormalization", "Add"} & set(operators(model))
    assert operators(model)[0] == "SkipLayerNormalization"  # sorted: readers of the sum stand behind what makes it
    assert model.opset_imports == {"": 18, "com.microsoft": 1}
    found = run_graph(model, feeds())
    assert_is_norm_of_sum(found, **feeds())
    s = feeds()["x"] + feeds()["skip"]
    # One addition of the same two float32 numbers: exact agreement.
    assert np.array_equal(found["s"], s) if "s" in found else np.array_equal(found["z"], -s)


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model = norm_graph()
    fuse(model)
    expected = run_graph(model, feeds())["y"]
    outcome = fuse(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 0)
    assert np.array_equal(run_graph(model, feeds())["y"], expected)


_OTHER_SHAPES = "the two sides of the addition have other shapes than [batch, tokens, channels]"
_NEAR_MISSES = {
    "a side that is broadcast over tokens": (_POST, _OUTPUT, "float[b, t, 4] x, float[b, 1, 4] skip", _OTHER_SHAPES),
    "a side that is broadcast over the batch": (_POST, _OUTPUT, "float[b, t, 4] x, float[t, 4] skip", _OTHER_SHAPES),
    "two sizes that are not known": (_POST, _OUTPUT, "float[b, ?, 4] x, float[b, ?, 4] skip", _OTHER_SHAPES),
    "two dimensions": (_POST, "float[n, 4] y", "float[n, 4] x, float[n, 4] skip", _OTHER_SHAPES),
    "a constant": (
        f"s = Add (x, shift) {_NORM}",
        _OUTPUT,
        "float[b, t, 4] x, float[b, t, 4] skip",
        "what is added before it is a constant",
    ),
    "nothing added": (
        f"s = Neg (x) {_NORM}",
        _OUTPUT,
        "float[b, t, 4] x, float[b, t, 4] skip",
        "no addition before it",
    ),
    "another axis": (
        "s = Add (x, skip) wide = Expand (gain, sizes) y = LayerNormalization <axis = 1> (s, wide)",
        _OUTPUT,
        "float[b, 3, 4] x, float[b, 3, 4] skip, int64[2] sizes",
        "it normalizes other axes than the last",
    ),
    "a gain with two dimensions": (
        "s = Add (x, skip) y = LayerNormalization <axis = -1> (s, row)",
        _OUTPUT,
        "float[b, t, 4] x, float[b, t, 4] skip",
        "its gain or shift is not one number for each channel",
    ),
    "the mean is read": (
        _POST.replace("y = ", "y, mean = "),
        f"{_OUTPUT}, float[b, t, 1] mean",
        "float[b, t, 4] x, float[b, t, 4] skip",
        "its mean is read",
    ),
}


def shaped(sides: str) -> dict[str, Array]:
    found = feeds()
    for broadcast, index in (("[b, 1, 4] skip", np.s_[:, :1]), ("[t, 4] skip", np.s_[0])):
        if broadcast in sides:
            found["skip"] = found["skip"][index]
    if "[n, 4]" in sides:
        found = {name: array[0] for name, array in found.items()}
    return found | ({"sizes": np.array([3, 4])} if "sizes" in sides else {})


@pytest.mark.parametrize("case", _NEAR_MISSES)
def test_what_the_operator_cannot_do_stays_and_the_reason_is_told(case: str) -> None:
    body, outputs, sides, reason = _NEAR_MISSES[case]
    model = norm_graph(body, outputs, sides)
    before, expected = operators(model), run_graph(model, shaped(sides))
    outcome = fuse(model)
    assert operators(model) == before
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("y", reason)]
    found = run_graph(model, shaped(sides))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
