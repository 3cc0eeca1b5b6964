"""Embedding tables in blocks, tables that are a layer's weight too, and packed attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export._releases import least_onnxruntime
from tx_export.passes import Context

from .blocks import arithmetic_bound, quantize, unpacked
from .graphs import Array, graph, normal, operators, run, uneven
from .test_dynamic_int8_attention import attention, attention_graph

_KINDS = [(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]
_TIED = {
    "MatMul": "x = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) y = MatMul (x, t)",
    "Gemm": "x = Gather (table, ids) y = Gemm <transB = 1> (x, table)",
}


def lookup(table: Array, indices: str = "int64[n] ids") -> ir.Model:
    model = graph(indices, "float y", {"table": table}, "y = Gather (table, ids)")
    model.graph.outputs[0].shape = None
    return model


def tied(table: Array, form: str = "MatMul") -> ir.Model:
    rows, width = table.shape
    outputs = f"float[n, {rows}] y, float[n, {width}] x"
    return graph("int64[n] ids", outputs, {"table": table}, _TIED[form])


@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
@pytest.mark.parametrize("width", [64, 96, 33])
def test_rows_of_a_table_move_by_at_most_a_step_of_their_block(bits: int, symmetric: bool, width: int) -> None:
    table = uneven(width, 300).T.copy()  # rows differ in size up to 100 times
    model = lookup(table)
    outcome = quantize(model, bits=bits, symmetric=symmetric, method="round")
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    ids = np.array([0, 7, 7, -1, 299])
    y = run(model, {"ids": ids})["y"]
    # 7 or 127 steps to the largest value of 32 to either side of 0 where symmetric, else 15 or 255 from end to end.
    starts = range(0, width, 32)
    low = np.stack([table[:, i : i + 32].min(1) for i in starts], 1).clip(max=0)
    high = np.stack([table[:, i : i + 32].max(1) for i in starts], 1).clip(min=0)
    steps = np.maximum(high, -low) / (2 ** (bits - 1) - 1) / 2  # half a step
    if not symmetric:  # the zero point is rounded too; 4-bit rows of an odd number of blocks are symmetric
        steps = np.maximum(steps, (high - low) / (2**bits - 1))
    assert y.shape == (5, width)
    assert (np.abs(y - table[ids]) <= np.repeat(steps, 32, axis=1)[ids, :width] * (1 + 1e-5)).all()
    assert np.abs(y - table[ids]).max() > 0 and np.array_equal(y[1], y[2]) and np.array_equal(y[3], y[4])


@pytest.mark.parametrize("indices", ["int64[n] ids", "int64[b, t] ids", "int64 ids", "int32[n] ids"])
def test_indices_of_any_shape_are_looked_up(indices: str) -> None:
    model = lookup(normal(300, 40), indices)
    quantize(model, bits=8)
    kind = np.int32 if "int32" in indices else np.int64
    shape = (2, 5) if "b, t" in indices else (9,) if "[n]" in indices else ()
    ids = np.random.default_rng(3).integers(0, 300, size=shape).astype(kind)
    y = run(model, {"ids": ids})["y"]
    # 8 bits over a range below 10: a step is below 0.04.
    assert y.shape == (*shape, 40) and np.abs(y - normal(300, 40)[ids]).max() < 0.04


def test_tables_ask_for_the_runtime_that_reads_them_and_stay_when_embeddings_are_left_out() -> None:
    model = lookup(normal(300, 64))
    assert quantize(model).modified and least_onnxruntime(model) == "1.23.0"
    for release, done in (((1, 22), 0), ((1, 23), 1), (None, 1)):
        context = Context(nn.Identity(), (), lambda graph: lambda feeds: run(graph, dict(feeds)), release=release)
        outcome = quantize(lookup(normal(300, 64)), context=context)
        assert outcome.coverage.done == done and outcome.coverage.of == 1
        reason = "GatherBlockQuantized needs ONNX Runtime 1.23, the target is older"
        assert [left.reason for left in outcome.coverage.left] == [reason] * (1 - done)
    model = lookup(normal(300, 64))
    outcome = quantize(model, embeddings=False)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, ["Gather"])


def test_small_tables_and_other_lookups_stay_and_the_reason_is_told() -> None:
    weights = {"narrow": normal(50, 3), "wide": normal(16, 300), "ints": np.arange(5000).reshape(50, 100)}
    body = "a = Gather (narrow, ids) b = Gather <axis = 1> (wide, ids) c = Gather (ints, ids)"
    model = graph("int64[n] ids", "float[n, 3] a, float[16, n] b, int64[n, 100] c", weights, body)
    outcome = quantize(model)
    assert not outcome.modified
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [
        ("narrow", "600 bytes, would be 1050"),
        ("wide", "not a float table that is looked up by rows"),
        ("ints", "its weight is int64, not float32"),
    ]


@pytest.mark.parametrize("form", _TIED)
@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
@pytest.mark.parametrize("width", [96, 64, 33])
def test_b117_a_tied_table_is_stored_once_and_means_the_same_to_both(
    form: str, bits: int, symmetric: bool, width: int
) -> None:
    table, ids = normal(800, width), np.array([0, 7, 799])
    model = tied(table, form)
    outcome = quantize(model, bits=bits, symmetric=symmetric, accuracy_level=0)
    assert (outcome.coverage.done, outcome.coverage.of, outcome.coverage.left) == (2, 2, ())
    assert [name for name in model.graph.initializers if "int" in name] == [f"table.int{bits}"]
    # Rows of three blocks have no 4-bit zero points: older releases read them wrongly.
    assert ("table.zero" in model.graph.initializers) == (not symmetric and (bits, width) != (4, 96))
    stored, found = unpacked(model)[0], run(model, {"ids": ids})
    # What is looked up is (q - zero) scale in float32, one rounding.
    assert (np.abs(found["x"] - stored[ids]) <= 1.2e-7 * np.abs(stored[ids])).all()
    x = found["x"].astype(np.float64)
    assert (np.abs(found["y"] - x @ stored.T) <= arithmetic_bound(x, stored.T, None)).all()


def test_b117_a_tied_table_that_is_looked_up_in_float_is_reported_as_stored_twice() -> None:
    model = tied(normal(800, 64))
    outcome = quantize(model, embeddings=False)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 2)
    reason = "embeddings=false: its 204800 bytes stand beside the blocks of its product"
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("table", reason)]
    assert np.array_equal(run(model, {"ids": np.array([5])})["x"], normal(800, 64)[[5]])


def test_a_tied_table_that_is_excluded_stays_as_it_is_for_both() -> None:
    model = tied(normal(800, 64))
    outcome = quantize(model, exclude="table")
    assert not outcome.modified and [left.reason for left in outcome.coverage.left] == ["excluded, 204800 bytes"] * 2


_MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_attends_as_before_with_the_stored_weight(bits: int, causal: bool) -> None:
    model, _, bias = attention_graph(24, 24, f", unidirectional = {int(causal)}")
    outcome = quantize(model, bits=bits, accuracy_level=0)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    assert [name for name in operators(model) if name != "Split"] == ["MatMulNBits", "Add", "MultiHeadAttention"]
    x = normal(2, 5, 24, seed=2)
    y = run(model, {"x": x, "mask": _MASK, "scores": normal(1, 3, 5, 5)})["y"]
    exact = attention(x.astype(np.float64) @ unpacked(model)[0].T + bias, _MASK, causal)
    seen = np.isfinite(exact)
    # Reference: attention in float64 over the stored weight; float32 keeps a softmax over 5 within some 1e-6.
    assert seen.any() and np.abs(y - exact)[seen].max() <= 1e-5


def test_packed_attention_with_a_past_stays_and_one_that_is_excluded_too() -> None:
    outcome = quantize(attention_graph(24, 24, more=", scores")[0])
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("w", "it has a past")]
    outcome = quantize(attention_graph(24, 24)[0], exclude="w")
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("w", "excluded, 6912 bytes")]
