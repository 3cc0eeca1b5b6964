"""What a graph holds on text: references are the same values by NumPy, at the positions that the mask has."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export.artifact import open_graph
from tx_export.errors import PassError
from tx_export.passes import Context
from tx_export.providers.cpu import Cpu
from tx_export.quantize._calibration import observe

from .graphs import Array, graph, normal

_BODY = """e = Gather (table, ids)
    h = Neg (e)
    flat = Reshape (h, shape)
    first = ReduceMax <keepdims = 0> (h, axis)
    scores = Transpose <perm = [0, 2, 1]> (h)
    y = Neg (h)"""
_NAMES = ("h", "flat", "first", "scores", "y")


def model() -> tuple[ir.Model, Array]:
    table = normal(50, 4)
    weights = {"table": table, "shape": np.array([-1, 4]), "axis": np.array([1])}
    inputs = "int64[batch, tokens] ids, int64[batch, tokens] attention_mask"
    return graph(inputs, "float[batch, tokens, 4] y", weights, _BODY), table


def values(given: ir.Model, *names: str) -> list[ir.Value]:
    return [value for node in given.graph for value in node.outputs if value.name in names]


def context(*feeds: dict[str, Array]) -> Context:
    return Context(nn.Identity(), feeds, lambda copy: open_graph(copy, Cpu().session(), threads=1))


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, tokens + 1, size=(rows, 1))
    return {
        "ids": random.integers(0, 50, size=(rows, tokens)),
        "attention_mask": (np.arange(tokens) < lengths).astype(np.int64),
    }


def test_rows_are_those_of_real_positions_where_a_value_is_laid_out_as_the_mask() -> None:
    given, table = model()
    feeds = [batch(3, 5), batch(2, 7, seed=1)]
    found = list(observe(given, values(given, *_NAMES), context(*feeds)))
    assert len(found) == 2 and all(tuple(each) == tuple(sorted(_NAMES)) for each in found)
    for each, fed in zip(found, feeds, strict=True):
        real, h = fed["attention_mask"] != 0, -table[fed["ids"]]
        assert not real.all()
        expected = {"h": h[real], "flat": h[real], "first": h.max(axis=1), "y": -h[real]}
        expected["scores"] = h.transpose(0, 2, 1).reshape(-1, h.shape[1])
        for name, rows in expected.items():
            assert rows.dtype == np.float32 and np.array_equal(each[name], rows), name


def test_the_given_model_stays_as_it_is() -> None:
    given, _ = model()
    before = ir.to_proto(given).SerializeToString()
    for _ in observe(given, values(given, "h", "first"), context(batch(3, 5))):
        pass
    assert ir.to_proto(given).SerializeToString() == before


def test_a_batch_of_long_texts_comes_in_parts_with_the_same_rows() -> None:
    given, table = model()
    feeds = batch(8, 200)
    found = [each["h"] for each in observe(given, values(given, "h"), context(feeds))]
    assert len(found) == 4
    assert np.array_equal(np.concatenate(found), -table[feeds["ids"]][feeds["attention_mask"] != 0])


def test_contrib_operators_are_run_as_they_are() -> None:
    weights = {"w": normal(8, 24), "b": normal(24, seed=1)}
    body = "y = com.microsoft.Attention <num_heads = 2> (x, w, b) z = Neg (y)"
    given = graph("float[n, t, 8] x", "float[n, t, 8] z", weights, body)
    x = normal(2, 3, 8, seed=2)
    (found,) = observe(given, values(given, "y"), context({"x": x}))
    expected = open_graph(given, Cpu().session(), threads=1)({"x": x})["z"]
    assert np.array_equal(found["y"], -expected.reshape(-1, 8))


def test_what_is_fed_is_observed_as_it_is_fed() -> None:
    given = graph("float[n, 4] x", "float[n, 4] y", {}, "y = Neg (x)")
    x = normal(3, 4)
    (found,) = observe(given, [given.graph.inputs[0]], context({"x": x}))
    assert list(found) == ["x"] and np.array_equal(found["x"], x)


def test_without_text_the_error_says_what_to_do() -> None:
    given, _ = model()
    with pytest.raises(
        PassError, match=r"^calibration needs text.*tokenizer\.json, or choose a pass that needs no text"
    ):
        observe(given, values(given, "h"), context())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_named_and_counted(bad: float) -> None:
    given = graph(
        "float[n, 4] x", "float[n, 4] y", {"bad": np.full(4, bad, np.float32)}, "h = Add (x, bad) y = Neg (h)"
    )
    with pytest.raises(PassError, match=r"^calibration: 12 of 12 numbers of h are NaN or infinite"):
        list(observe(given, values(given, "h"), context({"x": normal(3, 4)})))


def test_what_padding_holds_need_not_be_finite() -> None:
    weights = {"table": np.array([[1.0], [math.nan]], np.float32)}
    inputs = "int64[batch, tokens] ids, int64[batch, tokens] attention_mask"
    given = graph(inputs, "float[batch, tokens, 1] y", weights, "h = Gather (table, ids) y = Neg (h)")
    feeds = {"ids": np.array([[0, 1]]), "attention_mask": np.array([[1, 0]])}
    (found,) = observe(given, values(given, "h"), context(feeds))
    assert found["h"].tolist() == [[1.0]]
