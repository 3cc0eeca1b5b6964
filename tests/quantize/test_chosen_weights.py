"""The weights that a pass is asked for by `only`, whichever pass it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.errors import PassError
from tx_export.passes import Coverage, GraphPass, Outcome
from tx_export.quantize.blockwise import Blockwise
from tx_export.quantize.dynamic_int8 import DynamicInt8

from .graphs import graph, normal, operators, run

_PASSES: dict[type[GraphPass], dict[str, Any]] = {DynamicInt8: {"min_elements": 0}, Blockwise: {}}
_INTEGER = ("MatMulIntegerToFloat", "QAttention", "MatMulNBits", "GatherBlockQuantized")
_ALREADY = "products have quantized weights already"
_BODY = """
    x = Gather (words.weight, ids)
    a = com.microsoft.Attention <num_heads = 2> (x, layer.1.qkv.weight, layer.1.qkv.bias)
    t = Transpose <perm = [1, 0]> (layer.1.up.weight) b = MatMul (a, t)
    c = MatMul (b, layer.10.up.weight)
    u = Transpose <perm = [1, 0]> (words.weight) y = MatMul (c, u)
"""


def layers() -> ir.Model:
    weights = {
        "words.weight": normal(300, 32),
        "layer.1.qkv.weight": normal(32, 96, seed=1),
        "layer.1.qkv.bias": normal(96, seed=2),
        "layer.1.up.weight": normal(32, 32, seed=3),
        "layer.10.up.weight": normal(32, 32, seed=4),
    }
    plain = {name: name.replace(".", "_") for name in weights}
    body = _BODY
    for name, short in plain.items():
        body = body.replace(name, short)
    inputs, outputs = "int64[b, t] ids", "float[b, t, 300] y"
    model = graph(inputs, outputs, {plain[name]: array for name, array in weights.items()}, body)
    for name, short in plain.items():
        model.graph.initializers[short].name = name
    return model


def changed(model: ir.Model, kind: type[GraphPass], **options: Any) -> Coverage:
    outcome = kind(**_PASSES[kind], **options)(model)
    assert isinstance(outcome, Outcome)
    return outcome.coverage


@pytest.mark.parametrize("kind", _PASSES)
@pytest.mark.parametrize(
    ("only", "stored", "nodes"),
    [
        ("", ["layer.1.qkv", "layer.1.up", "layer.10.up", "words"], 5),
        ("layer.1.up.weight", ["layer.1.up"], 1),
        ("layer.1", ["layer.1.qkv", "layer.1.up"], 2),  # and not layer.10
        ("layer.1.qkv , layer.10.up,", ["layer.1.qkv", "layer.10.up"], 2),
        ("words", ["words"], 2),  # the product and the lookup that read it
    ],
)
def test_only_the_weights_and_modules_that_are_named_are_stored(
    kind: type[GraphPass], only: str, stored: list[str], nodes: int
) -> None:
    model, ids = layers(), {"ids": np.array([[0, 7, 299]])}
    exact = run(model, ids)["y"]
    coverage = changed(model, kind, only=only)
    assert (coverage.done, coverage.of, coverage.left) == (nodes, nodes, ())
    assert sorted({item.name for item in coverage.stored}) == [f"{name}.weight" for name in stored]
    kept = [name for name in model.graph.initializers if name.endswith(".weight")]
    assert sorted(kept) == sorted(
        {name for name in layers().graph.initializers if "weight" in name} - {*(f"{name}.weight" for name in stored)}
    )
    # The named budgets of the passes are 10 and 5 dB of signal over noise; a weight in another's place has none.
    error = run(model, ids)["y"] - exact
    assert (error**2).sum() <= {DynamicInt8: 10**-1, Blockwise: 10**-0.5}[kind] * (exact**2).sum()


@pytest.mark.parametrize("kind", _PASSES)
def test_a_name_that_matches_nothing_is_an_error_with_the_nearest_weights(kind: type[GraphPass]) -> None:
    model = layers()
    with pytest.raises(PassError, match=r"^only: no weight or module is named 'layer\.1\.dwn'; nearest .*layer\.1\.up"):
        changed(model, kind, only="layer.10,layer.1.dwn")
    assert not {*_INTEGER} & {*operators(model)}


def test_a_pass_finds_what_another_one_left_and_nothing_of_what_it_made() -> None:
    for first, second in ((DynamicInt8, Blockwise), (Blockwise, DynamicInt8)):
        model = layers()
        changed(model, first, only="layer.1,words")
        coverage = changed(model, second)
        assert (coverage.done, coverage.of, coverage.left) == (1, 1, ())
        assert [item.name for item in coverage.stored] == ["layer.10.up.weight"]
        again = changed(model, first)
        assert (again.done, again.of, {item.reason.partition(" ")[2] for item in again.left}) == (0, 0, {_ALREADY})


@pytest.mark.parametrize("kind", _PASSES)
def test_what_is_stored_is_told_with_its_bytes(kind: type[GraphPass]) -> None:
    model = layers()
    for item in changed(model, kind).stored:
        before = layers().graph.initializers[item.name].const_value
        parts = [value for name, value in model.graph.initializers.items() if name.startswith(f"{item.name}.")]
        assert before is not None and item.before == before.nbytes
        assert item.after == sum(part.const_value.nbytes for part in parts if part.const_value is not None)
        assert f"{item.name}.{item.form}" in {part.name for part in parts}
