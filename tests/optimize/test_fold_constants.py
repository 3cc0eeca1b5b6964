"""Constants are folded once, and tied or shared weights stay stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export._graph import array_of
from tx_export.artifact import write_graph
from tx_export.optimize import fold_constants
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

Array = NDArray[Any]

# Identity, Constant, a computed shape, a weight turned at every run, and the same weight under two names.
_MIXED = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[rows, 6] x) => (float[rows, 4] y)
    <float[1] weight = {0}, float[1] first = {0}, float[1] second = {0}, int64[1] three = {3}> {
        same = Identity (x)
        one = Constant <value = float {1.0}> ()
        two = Add (one, one)
        scaled = Mul (same, two)
        turned = Transpose <perm = [1, 0]> (weight)
        a = MatMul (scaled, turned)
        left = MatMul (a, first)
        right = MatMul (a, second)
        y = Add (left, right)
    }
"""


def set_weight(model: ir.Model, name: str, array: Array) -> None:
    value = model.graph.initializers[name]
    value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    value.dtype = ir.DataType.from_numpy(array.dtype)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mixed() -> ir.Model:
    model = graph_from_text(_MIXED)
    set_weight(model, "weight", normal(4, 6))
    for name in ("first", "second"):
        set_weight(model, name, normal(4, 4, seed=1))
    return model


def fold(model: ir.Model) -> Outcome:
    outcome = FoldConstants()(model)
    assert isinstance(outcome, Outcome)
    return outcome


def operators(model: ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph)


def test_identities_constants_and_turned_weights_are_gone_and_the_rest_computes_the_same() -> None:
    model, x = mixed(), normal(5, 6, seed=2)
    expected = run_graph(model, {"x": x})["y"]
    outcome = fold(model)
    # Two products of one input with equal weights are one product.
    assert operators(model) == ["Add", "MatMul", "MatMul", "Mul"]
    assert outcome.modified
    assert (outcome.coverage.done, outcome.coverage.of) == (5, 9)
    # Reference: the graph before, in the same precision and order; ONNX Runtime may block the products otherwise:
    # two products of 6 and 4 terms, each rounding 6e-8 of sum|a||b|.
    inner = np.abs(2 * x) @ np.abs(normal(4, 6)).T @ np.abs(normal(4, 4, seed=1)) * 2
    assert (np.abs(run_graph(model, {"x": x})["y"] - expected) <= 2 * (6 + 4 + 2) * 6e-8 * inner).all()


def test_a_second_run_changes_nothing_and_the_outputs_are_bit_equal() -> None:
    model, x = mixed(), normal(5, 6, seed=2)
    fold(model)
    expected, stored = run_graph(model, {"x": x})["y"], sorted(model.graph.initializers)
    outcome = fold(model)
    assert (outcome.modified, outcome.coverage.done) == (False, 0)
    assert sorted(model.graph.initializers) == stored
    assert np.array_equal(run_graph(model, {"x": x})["y"], expected)


def test_equal_weights_under_two_names_are_stored_once() -> None:
    model = mixed()
    fold(model)
    shapes = [tuple(value.shape or ()) for value in model.graph.initializers.values()]
    assert shapes.count((4, 4)) == 1


def test_inputs_and_outputs_keep_their_names_when_an_output_is_an_identity_or_a_constant() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x) => (float[3] same, float[3] constant, float[3] y) <float[3] w = {1, 2, 3}> {
            same = Identity (x)
            constant = Add (w, w)
            z = Identity (x)
            y = Add (z, constant)
        }
        """
    )
    fold(model)
    found = run_graph(model, {"x": np.array([1, 1, 1], np.float32)})
    assert {name: array.tolist() for name, array in found.items()} == {
        "same": [1, 1, 1],
        "constant": [2, 4, 6],
        "y": [3, 5, 7],
    }


@pytest.mark.parametrize("output", ["turned", "weight"])
def test_a_turned_weight_that_is_an_output_stays(output: str) -> None:
    model = graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[rows, 6] x) => (float[rows, 4] y, float[a, b] {output}) <float[1] weight = {{0}}> {{
            turned = Transpose <perm = [1, 0]> (weight)
            y = MatMul (x, turned)
        }}
        """
    )
    set_weight(model, "weight", normal(4, 6))
    fold(model)
    found = run_graph(model, {"x": normal(5, 6, seed=2)})
    assert np.array_equal(found[output], normal(4, 6) if output == "weight" else normal(4, 6).T)


@pytest.mark.parametrize("product", ["MatMul", "Gemm"])
def test_a_table_that_is_looked_up_and_multiplied_is_stored_once(product: str, tmp_path: Path) -> None:
    turn = "turned = Transpose <perm = [1, 0]> (table) logits = MatMul (row, turned)"
    once = "logits = Gemm <transB = 1> (row, table)"
    model = graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (int64[n] ids) => (float[n, 300] logits) <float[1] table = {{0}}> {{
            row = Gather (table, ids)
            {turn if product == "MatMul" else once}
        }}
        """
    )
    set_weight(model, "table", normal(300, 32))
    ids = np.array([0, 7, 299])
    expected = run_graph(model, {"ids": ids})["logits"]
    fold(model)
    write_graph(model, tmp_path / "model.onnx")
    table_bytes = 300 * 32 * 4
    # One table and less than 2 kB of structure; two copies would be 76 800 bytes.
    assert table_bytes <= (tmp_path / "model.onnx").stat().st_size <= table_bytes + 2048
    assert np.array_equal(run_graph(ir.load(tmp_path / "model.onnx"), {"ids": ids})["logits"], expected)


_LARGE = {
    "ConstantOfShape": "ones = ConstantOfShape <value = float[1] {1.0}> (shape)",
    "Expand": "ones = Expand (one, shape)",
    "Tile": "ones = Tile (one, shape)",
}


@pytest.mark.parametrize("operator", _LARGE)
def test_a_large_constant_is_computed_at_run_time_and_not_written_into_the_file(operator: str, tmp_path: Path) -> None:
    model = graph_from_text(
        f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[1] x) => (float[a, b] y) <int64[2] shape = {{2000, 1000}}, float[1, 1] one = {{1.0}}> {{
            {_LARGE[operator]}
            y = Mul (ones, x)
        }}
        """
    )
    fold(model)
    write_graph(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 2048  # folded it would be 8 MB
    y = run_graph(model, {"x": np.array([3], np.float32)})["y"]
    assert y.shape == (2000, 1000) and (y == 3).all()


def test_functions_are_written_out_and_the_count_is_never_negative() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18, "mine" : 1]>
        g (float[n] x) => (float[n] y) { y = mine.Three (x) }
        <domain: "mine", opset_import: ["" : 18]> Three (a) => (d) { b = Neg (a) c = Abs (b) d = Neg (c) }
        """
    )
    outcome = fold(model)
    assert operators(model) == ["Abs", "Neg", "Neg"]
    assert (outcome.modified, outcome.coverage.done) == (True, 0)
    assert run_graph(model, {"x": np.array([1, -2], np.float32)})["y"].tolist() == [-1, -2]


def test_a_taken_name_is_not_taken_again() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[rows, 6] x) => (float[rows, 4] y) <float[1] weight = {0}> {
            "weight.T" = Transpose <perm = [1, 0]> (weight)
            z = MatMul (x, "weight.T")
            y = Neg (z)
        }
        """.replace('"weight.T"', "turned")
    )
    set_weight(model, "weight", normal(4, 6))
    model.graph.node(1).outputs[0].name = "weight.T"  # the product has the name that the turned weight would get
    x = normal(5, 6, seed=2)
    expected = run_graph(model, {"x": x})["y"]
    fold(model)
    assert operators(model) == ["MatMul", "Neg"]
    np.testing.assert_allclose(run_graph(model, {"x": x})["y"], expected, rtol=0, atol=6 * 6e-8 * 36)


def test_subgraphs_keep_what_they_read() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[rows, 6] x, bool c) => (float[rows, 4] y) <float[1] weight = {0}> {
            turned = Transpose <perm = [1, 0]> (weight)
            y = If (c) <
                then_branch = t () => (float[rows, 4] a) { a = MatMul (x, turned) },
                else_branch = e () => (float[rows, 4] b) {
                    again = Transpose <perm = [1, 0]> (weight)
                    product = MatMul (x, again)
                    b = Neg (product)
                }
            >
        }
        """
    )
    set_weight(model, "weight", normal(4, 6))
    x = normal(5, 6, seed=2)
    feeds = [{"x": x, "c": np.array(c)} for c in (True, False)]
    expected = [run_graph(model, feed)["y"] for feed in feeds]
    fold(model)
    for feed, before in zip(feeds, expected, strict=True):
        np.testing.assert_allclose(run_graph(model, feed)["y"], before, rtol=0, atol=6 * 6e-8 * 36)


def test_outputs_that_are_equal_keep_their_names_and_their_own_values() -> None:
    body = "t = Neg (x) y = Identity (t) z = Identity (t) w = Identity (y)"
    outputs = "float[n] y, float[n] z, float[n] w"
    model = graph_from_text(f'<ir_version: 8, opset_import: ["" : 18]> g (float[n] x) => ({outputs}) {{ {body} }}')
    FoldConstants()(model)
    x = np.arange(3, dtype=np.float32)
    found = run_graph(model, {"x": x})
    assert set(found) == {"y", "z", "w"}
    assert all((array == -x).all() for array in found.values())
    assert not FoldConstants()(model).modified


def test_a_number_near_zero_is_no_zero() -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (float[n] y) <float tiny = {1e-9}> { safe = Add (x, tiny) y = Div (x, safe) }
        """
    )
    FoldConstants()(model)
    # Reference: by hand; 0 / 1e-9 is 0, and 0 / 0 would be NaN.
    assert np.array_equal(run_graph(model, {"x": np.array([0, 1], np.float32)})["y"], [0, 1])


_PACKED = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[rows, 6] x) => (float[rows, 9] y)
    <float[1] "layer.query.weight" = {0}, float[1] "layer.key.weight" = {0}, float[1] "layer.value.weight" = {0}> {
        half = Constant <value = float {0.5}> ()
        scaled = Mul ("layer.query.weight", half)
        whole = Concat <axis = 0> (scaled, "layer.key.weight", "layer.value.weight")
        turned = Transpose <perm = [1, 0]> (whole)
        y = MatMul (x, turned)
    }
"""
_PARTS = ("query", "key", "value")


def packed() -> tuple[ir.Model, list[Array]]:
    model, parts = graph_from_text(_PACKED), [normal(3, 6, seed=seed) for seed in range(3)]
    for part, array in zip(_PARTS, parts, strict=True):
        set_weight(model, f"layer.{part}.weight", array)
    return model, parts


def test_weights_of_any_size_are_put_together_under_their_common_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "_FOLDED_BYTES", 0)
    model, (query, key, value) = packed()
    FoldConstants()(model)
    (weight,) = (item for name, item in model.graph.initializers.items() if "weight" in name)
    assert weight.name == "layer.qkv.weight.T" and [node.op_type for node in model.graph] == ["MatMul"]
    stored = array_of(weight)
    assert stored is not None and np.array_equal(stored.T, np.concatenate([query * np.float32(0.5), key, value]))


def test_a_large_weight_that_others_read_too_is_not_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "_FOLDED_BYTES", 0)
    model, _ = packed()
    weight = model.graph.initializers["layer.key.weight"]
    shown = ir.Node("", "Identity", [weight])
    model.graph.append(shown)
    shown.outputs[0].name, shown.outputs[0].type, shown.outputs[0].shape = "z", weight.type, weight.shape
    model.graph.outputs.append(shown.outputs[0])
    before = run_graph(model, {"x": normal(5, 6, seed=9)})
    FoldConstants()(model)
    after = run_graph(model, {"x": normal(5, 6, seed=9)})
    assert "layer.key.weight" in model.graph.initializers
    assert "Concat" in {node.op_type for node in model.graph}
    assert all(np.abs(after[name] - before[name]).max() < 1e-6 for name in before)
