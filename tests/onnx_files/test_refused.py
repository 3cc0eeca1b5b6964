"""Files that are no reference, or leave nothing to do, are refused before any work, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tx_export.errors import LoadError, PassError, PluginError, TxExportError
from tx_export.load import load

from .graphs import ONE, TWO, B, V, W, X, Y, built, node, value, weight, write

_HALF, _TRUE = (
    numpy_helper.from_array(np.array(0.5, np.float32), "half"),
    numpy_helper.from_array(np.array(True), "true"),
)
_S = {"s": value("s", TensorProto.STRING, ["N"]), "so": value("so", TensorProto.STRING, ["N"])}
_SEQUENCE = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "random numbers": (
        "'y' differs when the file is run again",
        {"nodes": [node("RandomNormalLike", "x", "r"), node("Add", "x r", "z"), node("MatMul", "z w", "y")]},
    ),
    "dropout in training mode": (
        "'y' differs when the file is run again",
        {"nodes": [node("Dropout", "x half true", "z"), node("MatMul", "z w", "y")], "weights": [W, _HALF, _TRUE]},
    ),
    "not finite": (
        "'y' has values that are not finite.*--input",
        {"nodes": [node("Log", "x", "z"), node("MatMul", "z w", "y")], "weights": [W]},
    ),
    "a custom operator": (
        "acme:Magic",
        {"nodes": [node("Magic", "x", "y", "acme")], "weights": [], "domains": [helper.make_opsetid("acme", 1)]},
    ),
    "strings": (
        r"input 's' is tensor\(string\)",
        {"nodes": [*ONE, node("Identity", "s", "so")], "inputs": [X, _S["s"]], "outputs": [Y, _S["so"]]},
    ),
    "a sequence": (
        r"output 'y' is seq\(tensor\(float\)\)",
        {"nodes": [node("SequenceConstruct", "x x", "y")], "outputs": [_SEQUENCE], "weights": []},
    ),
    "two outputs of one name": ("two outputs are named 'y'", {"nodes": ONE, "outputs": [Y, Y], "weights": [W]}),
    "no inputs": ("it has no inputs", {"nodes": [node("MatMul", "w w", "y")], "inputs": [], "weights": [W]}),
    "an unknown rank": ("input 'x' has no shape; give it with --input", {"inputs": [value("x")]}),
    "sizes that differ": (
        r"can't be run with x \[.*\].*--input 'NAME:DTYPE",
        {"nodes": [node("Reshape", "x shape", "z"), node("MatMul", "z w", "y")],
         "weights": [W, numpy_helper.from_array(np.array([7, 1, 64]), "shape")]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_a_file_that_nothing_can_be_compared_with_is_refused(name: str, tmp_path: Path) -> None:
    message, given = _REFUSED[name]
    file = write(tmp_path / "model.onnx", **given)
    with pytest.raises(TxExportError, match=f"model.onnx: .*{message}"):
        load(str(file))


@pytest.mark.parametrize("form", ["text", "cut short", "empty"])
def test_what_is_no_onnx_file_is_refused(form: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.onnx")
    content = file.read_bytes()
    file.write_bytes({"text": b"hello\n", "cut short": content[:-200], "empty": b""}[form])
    with pytest.raises(TxExportError, match=r"model.onnx: not an ONNX file that can be read"):
        load(str(file))


def _quantized_dynamically(file: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(write(file.with_name("float.onnx")), file, weight_type=QuantType.QInt8)
    return file


def _quantized_by_pairs(file: Path) -> Path:
    integers = numpy_helper.from_array(np.eye(64, dtype=np.int8), "q")
    scale, zero = (
        numpy_helper.from_array(np.array(0.02, np.float32), "s"),
        numpy_helper.from_array(np.array(0, np.int8), "z"),
    )
    nodes = [node("DequantizeLinear", "q s z", "w"), *ONE]
    return write(file, nodes, weights=[integers, scale, zero])


@pytest.mark.parametrize("make", [_quantized_dynamically, _quantized_by_pairs])
def test_a_file_that_is_quantized_already_is_told_so_and_can_still_be_optimized(make: Any, tmp_path: Path) -> None:
    file = make(tmp_path / "model.onnx")
    found = "2 DynamicQuantizeLinear, 2 MatMulInteger" if make is _quantized_dynamically else "1 DequantizeLinear"
    with pytest.raises(PassError, match=f"nothing to quantize; it is quantized already: {found}"):
        built(file, tmp_path / "artifact", "dynamic_int8")
    before = sorted(each.op_type for each in onnx.load(file).graph.node)
    folder, manifest = built(file, tmp_path / "artifact")
    assert sorted(each.op_type for each in onnx.load(folder / "model.onnx").graph.node) == before
    assert manifest["verification"]["overall"]["outputs"]["y"]["max_abs"] == 0


def test_a_file_without_products_has_nothing_to_quantize(tmp_path: Path) -> None:
    file = write(tmp_path / "model.onnx", [node("Tanh", "x", "y")], weights=[])
    with pytest.raises(PassError, match=r"model.onnx: no product in it has a weight of its own, so there is nothing"):
        built(file, tmp_path / "artifact", "dynamic_int8")
    assert not (tmp_path / "artifact").exists()


def test_weights_of_another_precision_are_left_with_the_reason(tmp_path: Path) -> None:
    x, y = (value(name, TensorProto.FLOAT16, ["N", "S", 64]) for name in "xy")
    weights = [weight(each.name, *each.dims, dtype=np.float16) for each in (W, B, V)]
    file = write(tmp_path / "model.onnx", TWO, [x], [y], weights)
    with pytest.raises(PassError, match=r"dynamic_int8 changed nothing .*w: its weight is float16, not float32"):
        built(file, tmp_path / "artifact", "dynamic_int8")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("z:float32[batch,S,64]", "it has no input 'z'; there are x"),
        ("x:float64[batch,S,64]", "input 'x' is float32 with 3 dimensions in the file"),
        ("x:float32[batch,64]", "input 'x' is float32 with 3 dimensions in the file"),
    ],
)
def test_inputs_by_hand_must_be_those_of_the_file(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        load(str(write(tmp_path / "model.onnx")), inputs=[given])


def test_options_for_other_sources_are_refused(tmp_path: Path) -> None:
    file = str(write(tmp_path / "model.onnx"))
    with pytest.raises(PluginError, match=r"model.onnx has its own weights"):
        load(file, weights="random")
    with pytest.raises(PluginError, match=r"--size is for a built-in model; .*model.onnx is none"):
        load(file, size="large")
    with pytest.raises(PluginError, match="--tokenizer is for an ONNX file; classifier is none"):
        load(None, tokenizer="tokenizer.json")
    with pytest.raises(LoadError, match=r"expected a file that is named tokenizer.json"):
        load(file, tokenizer=str(tmp_path / "other.json"))
