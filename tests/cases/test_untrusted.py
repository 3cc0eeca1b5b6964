"""Untrusted files."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data
from safetensors.torch import load_file

from tx_export import cli
from tx_export.artifact import seal
from tx_export.errors import ArtifactError, LoadError
from tx_export.load import load
from tx_export.runtime import Model, main

from .models import save_hf

_SECRET = b"this is nobody's business"


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "checkpoint", hidden_size=16, intermediate_size=32)


@pytest.mark.parametrize("write", ["pickle", "torch.save", "torch.save, old form"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_b245_a_pickle_that_runs_code_is_refused_and_not_run(
    write: str, name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    content = load_file(folder / "model.safetensors") | {"x": _Touch(marker)}
    (folder / "model.safetensors").unlink()
    if write == "pickle":
        (folder / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / name, _use_new_zipfile_serialization=write == "torch.save")
    if name != "pytorch_model.bin":
        weight_map = dict.fromkeys(content, name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", str(folder), "-o", str(tmp_path / "artifact")])
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and name in last and "model.safetensors" in last
    assert not marker.exists() and not (tmp_path / "artifact").exists()
    pickle.loads(pickle.dumps(_Touch(marker)))
    assert marker.exists()  # so the pickle was a live one


def _graph(path: Path, location: str, offset: int | None = None) -> None:
    """y = w, whose bytes are said to lie in another file."""
    weight = helper.make_tensor("w", TensorProto.UINT8, [len(_SECRET)], _SECRET, raw=True)
    set_external_data(weight, location, offset)
    weight.ClearField("raw_data")
    output = helper.make_tensor_value_info("y", TensorProto.UINT8, [len(_SECRET)])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


@pytest.mark.parametrize("form", ["relative", "inner", "absolute", "link"])
def test_b246_weights_outside_the_folder_are_refused_and_never_read(
    form: str, cls_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By everything that takes an ONNX file or an artifact; commands for other ONNX files come with their issues."""
    secret = tmp_path / "secret.bin"
    secret.write_bytes(_SECRET)
    folder = tmp_path / "artifact"
    folder.mkdir()
    location = {"relative": "../secret.bin", "inner": "a/../../secret.bin", "absolute": str(secret)}.get(form, "w.bin")
    if form == "link":
        (folder / "w.bin").symlink_to(secret)
    _graph(folder / "model.onnx", location)
    output = {"name": "y", "dtype": "uint8", "dims": [len(_SECRET)]}
    manifest = json.loads((cls_artifact / "manifest.json").read_text())
    seal(folder, manifest | {"text": None, "inputs": [], "outputs": [output]})
    with pytest.raises(ArtifactError, match="refused"):
        Model(folder)
    for command in ("inspect", "run", "compare", "bench"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, str(folder), *(["x"] if command == "run" else [])])
        assert ended.value.code in (1, 2)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(folder / "model.onnx"), "--json"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"error: {folder / 'model.onnx'}: ")
    assert location in captured.err.splitlines()[-1]
    assert main(["--self-test"], folder) == 1
    assert _SECRET.decode() not in captured.out + captured.err


@pytest.mark.parametrize("named", ["config", "file", "tokenizer"])
def test_b248_code_of_a_checkpoint_is_never_run(named: str, folder: Path, tmp_path: Path) -> None:
    """The design goes further than the case: there is no flag that allows it."""
    marker = tmp_path / "marker"
    (folder / f"{'modeling' if named != 'tokenizer' else 'tokenization'}_mine.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Mine: pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    if named != "file":
        module = "modeling_mine.Mine" if named == "config" else "tokenization_mine.Mine"
        config["auto_map"] = {"AutoModel" if named == "config" else "AutoTokenizer": module}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"(modeling|tokenization)_mine.py.*a checkpoint's code is never run"):
        load(str(folder))
    assert not marker.exists()


_IMPORTS = {"numpy", "onnxruntime", "tokenizers", *sys.stdlib_module_names}


def test_b251_an_artifact_holds_no_pickle_and_its_program_needs_three_packages_only(cls_artifact: Path) -> None:
    kinds = {".onnx", ".data", ".json", ".npz", ".py", ".txt", ".md"}
    assert {path.suffix for path in cls_artifact.iterdir()} <= kinds
    with zipfile.ZipFile(cls_artifact / "samples.npz") as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                np.lib.format.read_array(file, allow_pickle=False)
    tree = ast.parse((cls_artifact / "run.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= _IMPORTS
        if isinstance(node, ast.ImportFrom):
            assert (node.module or ".").split(".")[0] in _IMPORTS
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.load":
            assert {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords} == {"allow_pickle": "False"}
    blocked = "torch transformers tx_export onnx onnx_ir safetensors click rich"
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked.split()!r})); import runpy; "
    program += (
        f"sys.argv = ['run.py', '--self-test']; runpy.run_path({str(cls_artifact / 'run.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
