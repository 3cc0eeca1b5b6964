"""Checkpoints that are damaged, or mean harm: each is refused by the name of its file, and no code in it runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.testing import tiny_bert_folder


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_bert_folder(tmp_path / "bert", "BertForSequenceClassification")


def _edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _index(folder: Path, shards: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


@pytest.mark.parametrize("plain", [True, False], ids=["bare pickle", "torch.save"])
def test_b245_a_pickle_that_runs_code_is_refused_and_not_run(plain: bool, folder: Path, tmp_path: Path) -> None:
    """B245."""
    marker = tmp_path / "marker"
    content = load_file(folder / "model.safetensors") | {"x": _Touch(marker)}
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    if plain:
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)
    with pytest.raises(LoadError, match=r"pytorch_model.bin: refused: .*save the weights as model.safetensors"):
        load(str(folder))
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Touch(marker)))
    assert marker.exists()  # so the pickle was a live one


def test_b245_safetensors_are_read_before_a_pickle_beside_them(folder: Path, tmp_path: Path) -> None:
    """B245."""
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "marker")))
    load(str(folder))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("value", [[1, 2], {"a": 3}, {"state": {"a": torch.ones(1)}}])
def test_a_pickle_of_something_else_is_refused(value: object, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(value, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="expected a dict of tensors"):
        load(str(folder))


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoModel": "modeling_mine.MineModel"},
        {"AutoTokenizer": ["modeling_mine.MineTokenizer", None]},
        {"AutoModel": "org/repo--modeling_mine.MineModel"},
    ],
    ids=str,
)
def test_b248_a_config_that_maps_to_code_is_refused_and_the_code_not_run(
    auto_map: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """B248."""
    marker = tmp_path / "marker"
    (folder / "modeling_mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass MineModel: pass\n")
    _edit_json(folder / "config.json", auto_map=auto_map)
    with pytest.raises(LoadError, match=r"modeling_mine.py; a checkpoint's code is never run"):
        load(str(folder))
    assert not marker.exists()


def test_b248_code_beside_a_plain_config_is_refused(folder: Path) -> None:
    """B248."""
    (folder / "modeling_mine.py").write_text("raise SystemExit\n")
    with pytest.raises(LoadError, match=r"modeling_mine.py: a checkpoint's code is never run"):
        load(str(folder))


def test_b248_a_module_of_a_sentence_transformers_folder_that_is_its_own_code_is_refused(tmp_path: Path) -> None:
    """B248."""
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "custom_pooling.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match=r"custom_pooling.Pooling is code of the checkpoint's own"):
        load(str(folder))


def test_a_model_type_that_names_a_file_is_not_imported(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nBert = 1\n")
    _edit_json(folder / "config.json", model_type=f"{folder / 'mine.py'}:Bert")
    with pytest.raises(LoadError, match="model_type is"):
        load(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file_is_named(keep: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model.safetensors: a damaged or truncated safetensors file"):
        load(str(folder))


def test_a_header_that_claims_to_be_huge_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(LoadError, match="damaged or truncated"):
        load(str(folder))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret.safetensors", "a\\..\\secret.safetensors", "x.pt"]
)
def test_a_shard_outside_the_folder_is_refused(shard: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    _index(folder, {"classifier.weight": shard})
    with pytest.raises(LoadError, match=r"is not a .safetensors or .bin file inside the folder"):
        load(str(folder))


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    _index(folder, {"classifier.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(LoadError, match=r"model-00001-of-00002.safetensors: no such file"):
        load(str(folder))


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"classifier.bias": tensors["classifier.bias"]}, folder / "b.safetensors")
    _index(folder, {"classifier.bias": "b.safetensors", "classifier.weight": "a.safetensors"})
    with pytest.raises(LoadError, match=r"b.safetensors: classifier.bias is in another file too"):
        load(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00"], ids=["empty", "open", "list", "deep", "null"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "sentence_bert_config.json"])
def test_a_json_file_that_is_damaged_is_named(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    with pytest.raises(LoadError, match=name):
        load(str(folder))


def test_a_folder_without_a_config_is_refused_by_that_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config.json, so it is not the folder of a Hugging Face checkpoint"):
        load(str(tmp_path))


@pytest.mark.parametrize("path", ["../bert", "/etc"])
def test_a_path_in_modules_json_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match="leaves the folder"):
        load(str(folder))


def test_a_config_that_lies_about_its_size_allocates_nothing(folder: Path) -> None:
    _edit_json(folder / "config.json", vocab_size=10**12)
    with pytest.raises(
        LoadError, match=r"word_embeddings.weight has shape \[128, 16\], but its config asks for \[1000000000000"
    ):
        load(str(folder))
