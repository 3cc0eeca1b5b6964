"""Embedding tables in 8 bits, and weights that are read more than once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.artifact import write_graph

from .graphs import (
    activation_scale,
    graph,
    normal,
    operators,
    quantize,
    rounding_bound,
    run,
    uneven,
)


@pytest.mark.parametrize("indices", ["int64[n] ids", "int64[b, t] ids", "int64 ids"])
def test_a_table_has_a_scale_for_each_row(indices: str) -> None:
    table = uneven(16, 300).T.copy()  # rows differ in size up to 100 times
    model = graph(indices, "float y", {"table": table}, "y = Gather (table, ids)")
    model.graph.outputs[0].shape = None
    outcome = quantize(model)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    stored = model.graph.initializers["table.int8"].const_value
    assert stored is not None and stored.numpy().dtype == np.int8 and stored.numpy().min() >= -127
    ids = np.random.default_rng(3).integers(0, 300, size={"[n]": (9,), "[b, t]": (2, 5)}.get(indices[5:-4], ()))
    y = run(model, {"ids": ids})["y"]
    # A row moves by at most half a step of its own, and two roundings of float32.
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    assert y.shape == (*ids.shape, 16)
    assert (np.abs(y - table[ids]) <= (step / 2 * (1 + 1e-5) + 1.2e-7 * np.abs(table))[ids]).all()


def test_small_tables_and_other_lookups_stay_and_the_reason_is_told() -> None:
    weights = {"small": normal(2, 16), "wide": normal(16, 300), "ints": np.arange(5000).reshape(50, 100)}
    body = "a = Gather (small, ids) b = Gather <axis = 1> (wide, ids) c = Gather (ints, ids)"
    model = graph("int64[n] ids", "float[n, 16] a, float[16, n] b, int64[n, 100] c", weights, body)
    outcome = quantize(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 3)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [
        ("small", "32 elements, fewer than 4096: nothing to gain"),
        ("wide", "not a float table that is looked up by rows"),
        ("ints", "not a float table that is looked up by rows"),
    ]
    assert quantize(model, min_elements=0).coverage.done == 1


def test_tables_stay_when_embeddings_are_left_out() -> None:
    model = graph("int64[n] ids", "float[n, 16] y", {"table": normal(300, 16)}, "y = Gather (table, ids)")
    outcome = quantize(model, embeddings=False)
    assert (outcome.modified, outcome.coverage.of, operators(model)) == (False, 0, ["Gather"])


_TIED = {
    "MatMul": "x = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) y = MatMul (x, t)",
    "Gemm": "x = Gather (table, ids) y = Gemm <transB = 1> (x, table)",
}


def size_of(model: ir.Model, folder: Path) -> int:
    write_graph(model, folder / "model.onnx")
    return (folder / "model.onnx").stat().st_size


@pytest.mark.parametrize("form", _TIED)
def test_b117_a_tied_table_is_stored_once(form: str, tmp_path: Path) -> None:
    table = normal(8000, 96)
    model = graph("int64[n] ids", "float[n, 8000] y", {"table": table}, _TIED[form])
    before = size_of(model, tmp_path)
    outcome = quantize(model)
    assert (outcome.coverage.done, outcome.coverage.of) == (2, 2)
    # 8000 * 96 bytes and 8000 scales of 4: 0.26 of the float file; two copies would be 0.51.
    assert size_of(model, tmp_path) <= 0.35 * before
    ids = np.array([0, 7, 7999])
    x = table[ids]
    y = run(model, {"ids": ids})["y"]
    step = np.abs(table).max(axis=1) / 127
    moved = step[ids, None] / 2 + 1.2e-7 * np.abs(x)
    bound = moved @ np.abs(table.T) + rounding_bound(np.abs(x) + moved, table.T, step)
    # The range of x may hold both signs: its step is at most that of the two largest together.
    bound += (activation_scale(x) + step.max() / 255) / 2 * np.abs(table).sum(axis=1)
    assert (np.abs(y - x.astype(np.float64) @ table.T) <= bound).all()


def test_layers_that_share_a_weight_share_the_stored_one() -> None:
    model = graph(
        "float[n, 16] x", "float[n, 16] y", {"w": normal(16, 16)}, "h = MatMul (x, w) r = Relu (h) y = MatMul (r, w)"
    )
    x = {"x": normal(5, 16)}
    exact = run(model, x)["y"]
    assert quantize(model).coverage.done == 2
    # uint8 around 128: the int8 form of a weight with two readers doesn't load with exact products asked for.
    assert sorted(model.graph.initializers) == ["w.scale", "w.uint8", "w.zero"]
    zero = model.graph.initializers["w.zero"].const_value
    assert zero is not None and (zero.numpy() == 128).all()
    # Two products, each a few thousandths off; a zero point that is left out is off by hundreds.
    assert np.abs(run(model, x)["y"] - exact).max() <= 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(
    "body",
    [
        "h = Gemm <transB = 1> (x, w) r = Relu (h) y = Gemm <transB = 1> (r, w)",
        "t = Transpose <perm = [1, 0]> (w) h = MatMul (x, t) r = Relu (h) y = MatMul (r, t)",
        "h = MatMul (x, w) r = Relu (h) y = Gemm <transB = 1> (r, w)",
    ],
)
def test_a_weight_that_is_read_twice_loads_and_is_right_however_it_is_turned(body: str) -> None:
    model = graph("float[n, 16] x", "float[n, 16] y", {"w": normal(16, 16)}, body)
    x = {"x": normal(5, 16)}
    exact = run(model, x)["y"]
    assert quantize(model).coverage.done == 2
    # Two products, each a few thousandths off; a weight that is turned the wrong way is off by all of it.
    assert np.abs(run(model, x)["y"] - exact).max() <= 0.05 * np.abs(exact).max()


def test_weights_that_stand_in_a_data_file_are_quantized_too(tmp_path: Path) -> None:
    table, ids = normal(300, 16), {"ids": np.array([0, 7, 299])}
    model = graph("int64[n] ids", "float[n, 300] y", {"table": table}, _TIED["MatMul"])
    write_graph(model, tmp_path / "float.onnx", inline_bytes=1000)
    read = ir.load(tmp_path / "float.onnx")
    assert quantize(read).coverage.done == quantize(model).coverage.done == 2
    write_graph(read, tmp_path / "int8.onnx", inline_bytes=1000)
    # The same graph, whether its weights were read from a file or made in memory.
    assert np.array_equal(run(ir.load(tmp_path / "int8.onnx"), ids)["y"], run(model, ids)["y"])
    assert (tmp_path / "int8.onnx.data").stat().st_size < 0.35 * (tmp_path / "float.onnx.data").stat().st_size
