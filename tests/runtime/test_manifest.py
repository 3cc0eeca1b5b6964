"""An artifact is opened only when it is whole, unchanged and within its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save
from onnx.external_data_helper import set_external_data

from tx_export.runtime import ArtifactError, Model, main, read_manifest

from .artifact import edit_manifest, make_artifact, seal


def test_a_whole_artifact_gives_its_manifest(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    assert read_manifest(folder) == json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "samples.npz", "run.py"])
def test_a_flipped_byte_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    path = make_artifact(tmp_path / "a") / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"{name}: damaged or changed"):
        read_manifest(tmp_path / "a")


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "a") / "model.onnx"
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    with pytest.raises(
        ArtifactError, match=rf"model.onnx: has {len(data) - 7} bytes where the manifest says {len(data)}"
    ):
        Model(tmp_path / "a")


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (make_artifact(tmp_path / "a") / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name}: missing"):
        Model(tmp_path / "a")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere: no such folder"):
        read_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2; this program reads 1"),
        ({"inputs": None}, "key 'inputs' is missing or not a list"),
        ({"inputs": [{"name": "x", "dtype": "int64", "dims": ["a b"]}]}, "an input or output can't be read"),
        ({"inputs": [{"name": "x", "dtype": "int64", "dims": ["n"]}]}, "takes text, but has no input_ids"),
        ({"text": {"labels": []}}, "key 'text' has no max_length from 1 up"),
        ({"text": {"max_length": 0}}, "key 'text' has no max_length from 1 up"),
        ({"text": {"max_length": 8, "labels": "ab"}}, "key 'labels' is missing or not a list"),
        ({"session": {}}, "key 'session' has no settings"),
        ({"session": {"cpu": 5}}, "key 'session' has no settings"),
        ({"session": {"cpu": {}}}, "key 'provider' is missing or not a str"),
        ({"session": {"cpu": {"provider": "x", "config": 5}}}, "key 'config' is missing or not a dict"),
        ({"outputs": []}, "has no outputs"),
        ({"text": {"max_length": 8, "labels": [1]}}, "a label is not a str"),
        ({"quantized": 3}, "key 'quantized' is missing or not a dict"),
        ({"outputs": [{"name": "x", "dtype": "int64", "dims": [2], "range": ["a", 1]}]}, "an input or output can't"),
        ({"files": {"manifest.txt": {}}}, "lists no file model.onnx"),
        ({"files": {"model.onnx": 1, "tokenizer.json": 1}}, "has no bytes and sha256 for model.onnx"),
    ],
)
def test_a_manifest_that_lacks_something_says_what(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda manifest: manifest | change)
    with pytest.raises(ArtifactError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"format_version": NaN}', "[" * 100_000, "\udcff"])
def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_artifact(tmp_path / "a")
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match=r"manifest\.json: "):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "C:secret.bin", "..\\secret.bin"]
)
def test_a_file_outside_the_folder_is_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"secret")
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda manifest: manifest | {"files": manifest["files"] | {name: {"bytes": 6, "sha256": ""}}})
    with pytest.raises(ArtifactError, match="lies outside the artifact; refused"):
        read_manifest(folder)


def test_a_link_that_leaves_the_folder_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    (folder / "tokenizer.json").rename(folder / "other.json")
    (folder / "tokenizer.json").symlink_to("other.json")
    assert read_manifest(folder)["name"] == "tiny"
    (folder / "other.json").rename(tmp_path / "outside.json")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ArtifactError, match=r"'tokenizer\.json' lies outside the artifact"):
        read_manifest(folder)


def _external_model(path: Path, location: str, inside_if: bool = False) -> None:
    """A graph whose one weight lies in another file; maybe the graph is the branch of an If."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2], np.zeros(2, np.float32).tobytes(), raw=True)
    set_external_data(weight, location)
    weight.ClearField("raw_data")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    inner = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "inner", [], [output], [weight])
    choice = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    graph = helper.make_graph([branch], "outer", [], [output], [choice]) if inside_if else inner
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


@pytest.mark.parametrize("inside_if", [False, True])
@pytest.mark.parametrize("location", ["../secret.bin", "unlisted.bin", "/etc/hostname"])
def test_weights_in_a_file_that_is_not_the_artifacts_are_refused(
    tmp_path: Path, location: str, inside_if: bool
) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(8))
    folder = make_artifact(tmp_path / "a", text=None, inputs=[])
    _external_model(folder / "model.onnx", location, inside_if)
    seal(folder)
    with pytest.raises(ArtifactError, match=rf"model\.onnx: its weights are in '{location}'"):
        Model(folder)


def test_weights_in_a_listed_file_are_used(tmp_path: Path) -> None:
    output = {"name": "y", "dtype": "float32", "dims": [2]}
    folder = make_artifact(tmp_path / "a", text=None, inputs=[], outputs=[output])
    _external_model(folder / "model.onnx", "model.onnx.data")
    (folder / "model.onnx.data").write_bytes(np.array([3, 4], np.float32).tobytes())
    assert Model(seal(folder)).run_arrays({})["y"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "damage", [b"", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x3a\x05ab", b"not onnx"]
)
def test_a_file_that_is_not_onnx_is_refused_even_when_the_manifest_vouches_for_it(
    tmp_path: Path, damage: bytes
) -> None:
    folder = make_artifact(tmp_path / "a")
    (folder / "model.onnx").write_bytes(damage)
    with pytest.raises(ArtifactError, match=r"model\.onnx: "):
        Model(seal(folder))


def test_a_tokenizer_that_can_not_be_loaded_is_named(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: the tokenizer can't be loaded"):
        Model(seal(folder))


def test_the_program_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (make_artifact(tmp_path / "a") / "tokenizer.json").unlink()
    assert main(["good"], tmp_path / "a") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "tokenizer.json" in error


_NAN = float("nan")
_INPUT = {"name": "input_ids", "dtype": "int64", "dims": ["batch", "tokens<=16"]}
_TAMPERED: dict[str, tuple[dict[str, Any], str]] = {
    "a later version": ({"format_version": 2}, "format_version is 2; this program reads 1; update"),
    "an earlier version": ({"format_version": 0}, "format_version is 0; this program reads 1$"),
    "a version that is true": ({"format_version": True}, "format_version is True"),
    "a version that is a float": ({"format_version": 1.0}, "format_version is 1.0"),
    "a number that is none": ({"opset": _NAN}, "manifest.json: can't be read: NaN is no number of JSON"),
    "no version of a runtime": ({"min_onnxruntime": "new"}, "key 'min_onnxruntime' is 'new', not X.Y.Z"),
    "a name that is a number": ({"name": 3}, "key 'name' is missing or not a str"),
    "domains in a list": ({"domains": []}, "key 'domains' is missing or not a dict"),
    "an opset in words": ({"opset": "18"}, "key 'opset' is missing or not a int"),
    "an input twice": ({"inputs": [_INPUT, _INPUT]}, "key 'inputs' has one name twice"),
    "an input of objects": ({"inputs": [_INPUT | {"dtype": "object"}]}, "key 'inputs'.*dtype object holds no numbers"),
    "an input of nothing known": ({"inputs": [_INPUT | {"dtype": "thing"}]}, "key 'inputs'"),
    "an input without a name": ({"inputs": [_INPUT | {"name": ""}]}, "key 'inputs'.*name ''"),
    "a name in a list": ({"inputs": [_INPUT | {"name": ["x"]}]}, "key 'inputs'.*name"),
    "a dim below 0": ({"inputs": [_INPUT | {"dims": [-1, 2]}]}, "key 'inputs'.*dim -1"),
    "a dim that is true": ({"inputs": [_INPUT | {"dims": [True, 2]}]}, "key 'inputs'.*dim True"),
    "a dim of a dim": ({"outputs": [_INPUT | {"dims": [[2]]}]}, r"key 'outputs'.*dim \[2\]"),
    "dims that are a number": ({"outputs": [_INPUT | {"dims": 2}]}, "key 'outputs'"),
    "a range upside down": ({"inputs": [_INPUT | {"range": [9, 0]}]}, "key 'inputs'.*range 9, 0"),
    "a range of truths": ({"inputs": [_INPUT | {"range": [False, True]}]}, "key 'inputs'.*range"),
    "half a range": ({"inputs": [_INPUT | {"range": [1]}]}, "key 'inputs'"),
    "an input that is a word": ({"inputs": ["input_ids"]}, "key 'inputs'"),
    "a limit that is true": ({"text": {"max_length": True}}, "key 'text' has no max_length from 1 up"),
    "scores of another kind": ({"text": {"max_length": 8, "scores": "best"}}, "key 'scores' is 'best'"),
    "a pad id in words": ({"text": {"max_length": 8, "pad_id": "0"}}, "key 'pad_id' is missing or not a int"),
    "an arena in words": ({"session": {"cpu": {"provider": "x", "arena": "yes"}}}, "key 'arena'"),
    "batches of half a token": ({"session": {"cpu": {"provider": "x", "batch_tokens": 0.5}}}, "key 'batch_tokens'"),
    "optimizers by number": (
        {"session": {"cpu": {"provider": "x", "disabled_optimizers": [1]}}},
        "disabled_optimizers",
    ),
    "an environment that is not ONNX Runtime's": (
        {"session": {"cpu": {"provider": "x", "environment": {"LD_PRELOAD": "1"}}}},
        "key 'environment' sets LD_PRELOAD",
    ),
    "an environment that is no switch": (
        {"session": {"cpu": {"provider": "x", "environment": {"ORT_X": "/tmp/file"}}}},
        "allowed: ORT_... to '0' or '1'",
    ),
    "an option that holds a dict": (
        {"session": {"cpu": {"provider": "x", "run_config": {"a": {}}}}},
        "key 'run_config' sets a to a dict",
    ),
    "an option that names a file": (
        {"session": {"cpu": {"provider": "x", "config": {"ep.context_file_path": "/tmp/x"}}}},
        "key 'config' sets ep.context_file_path; an artifact's settings name no files; refused",
    ),
    "limits of the self-test in words": (
        {"verification": {"self_test": {"sqnr_db": "low"}}},
        "key 'self_test' has a limit sqnr_db that is not a number",
    ),
    "instruction sets by number": ({"verified_on": {"instruction_sets": [1]}}, "key 'instruction_sets'"),
}


@pytest.mark.parametrize("kind", _TAMPERED)
def test_a_value_of_a_manifest_that_was_tampered_with_is_refused_by_its_key(kind: str, tmp_path: Path) -> None:
    change, message = _TAMPERED[kind]
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda manifest: manifest | change)
    with pytest.raises(ArtifactError, match=message):
        Model(folder)


_NO_FILES: dict[str, str] = {
    "a zero byte": "a\0b",
    "half a character": "\ud800",
    "too long": "a" * 5000,
    "the folder itself": ".",
    "nothing": "",
    "a folder": "inner",
    "a circle of links": "circle",
}


@pytest.mark.parametrize("kind", _NO_FILES)
def test_a_name_in_a_manifest_that_is_no_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    (folder / "inner").mkdir()
    (folder / "circle").symlink_to("circle")
    listed = {_NO_FILES[kind]: {"bytes": 0, "sha256": ""}}
    edit_manifest(folder, lambda manifest: manifest | {"files": manifest["files"] | listed})
    with pytest.raises(ArtifactError, match=r"can't be looked for|lies outside the artifact|inner: missing"):
        read_manifest(folder)
