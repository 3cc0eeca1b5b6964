"""Given ONNX files: int8, graph optimisation, external data, untrusted files."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from tx_export import cli, runtime
from tx_export._onnx_output import build_onnx
from tx_export.compiler import BuildOptions
from tx_export.errors import PassError

from .conftest import Once

_SECRET = b"this is nobody's business at all"  # eight floats


def _built(file: Path, output: Path, quantize: str | None = "none", passes: str | None = None) -> Mapping[str, Any]:
    options = BuildOptions(source=str(file), quantize=quantize, passes=passes)
    return build_onnx(options, output, lambda line: None)[1]


def _feeds() -> dict[str, NDArray[Any]]:
    mask = (np.arange(12) < np.array([[12], [5]])).astype(np.int64)
    return {"input_ids": np.random.default_rng(1).integers(1, 1000, (2, 12)), "attention_mask": mask}


def _answers(folder: Path) -> NDArray[Any]:
    return runtime.Model(folder).run_arrays(_feeds())["logits"]


def _cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def _export(checkpoint: Path, folder: Path) -> None:
    """A BERT for classification by TorchScript's exporter, from transformers."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, return_dict=False).eval()
    folder.mkdir()
    names = ["input_ids", "attention_mask"]
    inputs = tuple(torch.ones((2, 7), dtype=torch.int64) for _ in names)
    torch.onnx.export(
        model, inputs, str(folder / "model.onnx"), dynamo=False, opset_version=17, input_names=names,
        output_names=["logits"], dynamic_axes={name: {0: "batch_size", 1: "sequence_length"} for name in names},
    )  # fmt: skip
    shutil.copy(checkpoint / "tokenizer.json", folder)


@pytest.fixture(scope="module")
def unfused(once: Once, hf_checkpoint: Path) -> Path:
    """HF-TINY as torch exports it: a file whose attention nobody fused."""
    return once("hf-exported", lambda folder: _export(hf_checkpoint, folder)) / "model.onnx"


@pytest.fixture(scope="module")
def fused(unfused: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of it."""
    folder = tmp_path_factory.mktemp("onnx") / "fused"
    _built(unfused, folder)
    return folder


@pytest.mark.parametrize("form", ["relative", "inner", "absolute", "link"])
def test_b246_weights_outside_the_folder_are_refused_and_never_read(
    form: str, fused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, folder = tmp_path / "secret.bin", tmp_path / "model"
    secret.write_bytes(_SECRET)
    folder.mkdir()
    location = {"relative": "../secret.bin", "inner": "a/../../secret.bin", "absolute": str(secret)}.get(form, "w.bin")
    if form == "link":
        (folder / "w.bin").symlink_to(secret)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, 8], _SECRET, raw=True)
    set_external_data(weight, location)
    weight.ClearField("raw_data")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 1), ("y", 8)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    file = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), file)
    new = ["-o", str(tmp_path / "new")]
    commands = (
        ["quantize", str(file), *new], ["optimize", str(file), *new], ["build", str(file), *new],
        ["quantize", str(file), "-o", str(tmp_path / "new.onnx")], ["inspect", str(file)],
        ["compare", str(fused), "--source", str(file)], ["bench", str(fused), "--source", str(file)],
    )  # fmt: skip
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 1, command
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]
        assert last.startswith(f"error: {file}: ") and location in last and "refused" in last
        assert _SECRET.decode() not in captured.out + captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "secret.bin"]


def test_b054_a_file_whose_weights_are_missing_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").rename(tmp_path / "renamed.bin")
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "new")])
    assert ended.value.code == 1
    assert "w.bin" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_b057_a_file_that_is_a_link_to_a_blob_is_read(unfused: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    shutil.copy(unfused, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.onnx").symlink_to("../blobs/0123")
    manifest = _built(tmp_path / "snapshot" / "model.onnx", tmp_path / "new")
    assert manifest["fused"]["done"] == 2


def test_b090_b120_counts_of_a_given_file_are_told(unfused: Path, tmp_path: Path) -> None:
    """Every product with a weight: 2 layers of 4 (three are packed into one), the pooler, the classifier."""
    manifest = _built(unfused, tmp_path / "new", "dynamic_int8")
    assert (manifest["fused"]["done"], manifest["fused"]["of"]) == (2, 2)
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "new" / "model.onnx").graph.node)
    assert operators["MatMul"] == operators["Gemm"] == 0
    assert manifest["quantized"]["done"] == manifest["quantized"]["of"] - len(manifest["quantized"]["left"])
    with pytest.raises(PassError, match=r"dynamic_int8 changed nothing"):
        _built(tmp_path / "new" / "model.onnx", tmp_path / "again", "dynamic_int8")


def test_b096_the_second_optimization_changes_nothing_and_the_third_keeps_the_quantized_answers(
    fused: Path, tmp_path: Path
) -> None:
    second, third, fourth = (tmp_path / name for name in ("second", "third", "fourth"))
    again = _built(fused / "model.onnx", second)
    assert again["fused"] == runtime.read_manifest(fused)["fused"]
    assert (_answers(fused) == _answers(second)).all()
    _built(second / "model.onnx", third, "dynamic_int8")
    _built(third / "model.onnx", fourth)
    assert np.abs(_answers(third) - _answers(fourth)).max() <= 1e-5


def test_b122_fusing_may_come_before_quantizing_or_behind_it(unfused: Path, tmp_path: Path) -> None:
    """Reference: the given file. Bound of 8 bits in the cases: cosine 0.99."""
    fused_first = _built(unfused, tmp_path / "fused-first", "dynamic_int8")
    _built(unfused, tmp_path / "int8", None, "dynamic_int8")
    int8_first = _built(tmp_path / "int8" / "model.onnx", tmp_path / "int8-first")
    assert fused_first["fused"]["done"] == int8_first["fused"]["done"] == 2
    (expected,) = ort.InferenceSession(unfused).run(None, _feeds())
    for name in ("fused-first", "int8-first"):
        assert _cosine(_answers(tmp_path / name), expected) >= 0.99
