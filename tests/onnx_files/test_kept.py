"""Files of any exporter and age are taken: what is in them keeps working, and is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tx_export import runtime
from tx_export.metrics import fidelity_bound

from .graphs import ONE, TWO, B, V, W, X, Y, built, node, plain, value, weight, write

Array = NDArray[Any]


def _if(then: Sequence[onnx.NodeProto], otherwise: Sequence[onnx.NodeProto]) -> tuple[onnx.NodeProto, ...]:
    """y is what a branch makes; both read values of the graph around them."""
    branches = {
        f"{name}_branch": helper.make_graph(nodes, name, [], [value(nodes[-1].output[0], shape=["N", "S", 64])])
        for name, nodes in (("then", then), ("else", otherwise))
    }
    decision = (node("ReduceSum", "x", "s", keepdims=0), node("Greater", "s zero", "c"))
    return (node("MatMul", "x w", "h"), *decision, helper.make_node("If", ["c"], ["y"], **branches))


def _loop() -> tuple[onnx.NodeProto, ...]:
    body = helper.make_graph(
        [node("MatMul", "last w", "m"), node("Tanh", "m", "next"), node("Identity", "go", "on")],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("last")],
        [value("on", TensorProto.BOOL, []), value("next")],
    )
    return (node("MatMul", "x w", "h"), helper.make_node("Loop", ["three", "", "h"], ["y"], body=body))


_ZERO, _THREE = (numpy_helper.from_array(np.array(n, t), name) for name, n, t in (("zero", 0, "f"), ("three", 3, "l")))
_FUNCTION = helper.make_function(
    "mine", "Linear", ["a", "c"], ["o"], [node("MatMul", "a c", "o")], [helper.make_opsetid("", 18)]
)
_CONTRIB = (
    node("MatMul", "x w", "h"),
    node("BiasGelu", "h b", "g", "com.microsoft"),
    node("FusedMatMul", "g vv", "f", "com.microsoft", transB=1),
    node("SkipLayerNormalization", "f x gamma beta", "y", "com.microsoft", epsilon=1e-5),
)
_KEPT: dict[str, tuple[int, dict[str, Any]]] = {  # products that are quantized, and the file
    "opset 7": (2, {"opset": 7, "ir_version": 3, "inputs": [X, *map(value, "b"), value("w", shape=[64, 64])]}),
    "opset 9": (2, {"opset": 9, "ir_version": 4}),
    "the newest opset of onnx": (2, {"opset": onnx.defs.onnx_opset_version(), "ir_version": onnx.IR_VERSION}),
    "an output of unknown shape": (2, {"outputs": [value("y")]}),
    "Constant nodes": (
        2,
        {
            "nodes": [*(helper.make_node("Constant", [], [w.name], value=w) for w in (W, V)), *TWO],
            "weights": [B],
        },
    ),
    "Gemm with transB": (
        1,
        {
            "nodes": [node("Gemm", "x w b", "y", transB=1)],
            "inputs": [value("x", shape=["N", 64])],
            "outputs": [value("y", shape=["N", 96])],
            "weights": [weight("w", 96, 64), weight("b", 96)],
        },
    ),
    "a weight that is transposed": (
        1,
        {
            "nodes": [node("Transpose", "w", "wt", perm=[1, 0]), node("MatMul", "x wt", "y")],
            "outputs": [value("y", shape=["N", "S", 96])],
            "weights": [weight("w", 96, 64)],
        },
    ),
    "one weight for two products": (
        2,
        {"nodes": [node("MatMul", "x w", "h"), node("Tanh", "h", "t"), node("MatMul", "t w", "y")], "weights": [W]},
    ),
    "products in branches": (
        1,
        {
            "nodes": _if([node("MatMul", "x w", "p")], [node("MatMul", "h vv", "q")]),
            "weights": [W, V, _ZERO],
        },
    ),
    "a branch that adds the bias": (
        1,
        {"nodes": _if([node("Identity", "x", "p")], [node("Add", "h b", "q")]), "weights": [W, B, _ZERO]},
    ),
    "a loop": (1, {"nodes": _loop(), "weights": [W, _THREE]}),
    "a function of the file": (
        1,
        {
            "nodes": [node("Linear", "x w", "y", "mine")],
            "weights": [W],
            "functions": [_FUNCTION],
            "domains": [helper.make_opsetid("mine", 1)],
        },
    ),
    "operators of other optimizers": (
        1,
        {
            "nodes": _CONTRIB,
            "weights": [W, B, V, weight("gamma", 64), weight("beta", 64)],
            "domains": [helper.make_opsetid("com.microsoft", 1)],
        },
    ),
    "outputs that are an input and a weight": (
        1,
        {"nodes": ONE, "outputs": [Y, X, value("w", shape=[64, 64])], "weights": [W]},
    ),
    "names that are no identifiers": (
        1,
        {
            "nodes": [node("Gather", "table ids:0", "e"), node("MatMul", "e w", "y:0")],
            "inputs": [value("ids:0", TensorProto.INT32, ["unk__1", "unk__2"])],
            "outputs": [value("y:0", shape=["unk__3", "unk__4", 64])],
            "weights": [weight("table", 50, 64), W],
        },
    ),
}


def _feeds(file: Path) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    values = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).get_inputs()
    shapes = [[dim if isinstance(dim, int) else 3 + axis for axis, dim in enumerate(value.shape)] for value in values]
    return {
        value.name: rng.integers(0, 50, shape).astype(np.int32)
        if "int" in value.type
        else rng.standard_normal(shape).astype(np.float32)
        for value, shape in zip(values, shapes, strict=True)
    }


@pytest.mark.parametrize("name", _KEPT)
def test_a_file_is_quantized_whatever_wrote_it(name: str, tmp_path: Path) -> None:
    """Reference: the file in plain ONNX Runtime. Bound: the budget of dynamic_int8, noise 10 dB below the signal."""
    products, given = _KEPT[name]
    file = write(tmp_path / "model.onnx", **given)
    folder, manifest = built(file, tmp_path / "artifact", "dynamic_int8")
    assert manifest["quantized"]["done"] == products
    feeds = _feeds(file)
    expected, found = plain(file, feeds), runtime.Model(folder).run_arrays(feeds)
    assert list(found) == list(expected)
    for output, array in expected.items():
        noise = np.square(found[output] - array, dtype=np.float64).sum()
        assert noise * 10 <= np.square(array, dtype=np.float64).sum()


@pytest.mark.parametrize("name", ["opset 7", "products in branches", "operators of other optimizers"])
def test_a_file_that_is_only_optimized_keeps_its_answers(name: str, tmp_path: Path) -> None:
    """Reference: the file in plain ONNX Runtime, within what another order of float32 sums explains."""
    file = write(tmp_path / "model.onnx", **_KEPT[name][1])
    folder, _ = built(file, tmp_path / "artifact")
    feeds = _feeds(file)
    expected, found = plain(file, feeds)["y"], runtime.Model(folder).run_arrays(feeds)["y"]
    assert np.abs(found - expected).max() <= fidelity_bound(float(np.abs(expected).max()))
