"""Sources, sizes and settings, as `load` reads them."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tx_export.errors import LoadError, PluginError
from tx_export.load import load
from tx_export.spec import EagerModel
from tx_export.testing import tiny_bert_folder, tiny_tokenizer

_TINY = {"vocab_size": "128", "max_length": "32", "d_model": "16", "num_heads": "4", "d_ff": "32", "num_layers": "2"}


def _state(model: EagerModel) -> dict[str, Tensor]:
    return dict(model.module.state_dict())


def _assert_same_weights(first: EagerModel, second: EagerModel) -> None:
    ours, theirs = _state(first), _state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return tiny_bert_folder(tmp_path / "bert", "BertForSequenceClassification")


@pytest.fixture
def weight_file(tmp_path: Path) -> Path:
    """Weights of a tiny built-in classifier, with its fields in the header and its tokenizer beside it."""
    model = load(None, settings=_TINY, weights="random:5")
    fields = dict(model.config)
    file = tmp_path / "mine.safetensors"
    save_file({name: tensor.clone() for name, tensor in _state(model).items()}, file, {"config": json.dumps(fields)})
    (tmp_path / "mine.tokenizer.json").write_text(tiny_tokenizer())
    return file


@pytest.mark.parametrize(
    ("source", "size", "name"), [(None, "small", "small"), ("embedder", "small", "embedder-small")]
)
def test_a_built_in_is_named_by_its_size(source: str | None, size: str, name: str) -> None:
    model = load(source, size=size, settings=_TINY, weights="random")
    assert (model.name, model.padding, model.module.training) == (name, "any", False)
    assert model.config["d_model"] == 16


def test_random_weights_are_the_same_each_time_and_leave_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = (load(None, settings=_TINY, weights="random:3") for _ in range(2))
    other = load(None, settings=_TINY, weights="random:4")
    assert torch.equal(torch.get_rng_state(), before)
    _assert_same_weights(first, second)
    assert first.weights == "random seed 3"
    assert not torch.equal(_state(first)["head.weight"], _state(other)["head.weight"])


def test_settings_that_do_not_fit_give_random_weights_and_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    model = load(None, settings=_TINY)
    assert model.weights == "random seed 0"
    assert "predictions mean nothing" in caplog.text


def test_settings_take_the_types_of_the_fields() -> None:
    settings = _TINY | {"dropout": "0.25", "norm": "pre", "labels": "bad, plain,good", "head_dim": "6"}
    config = load(None, settings=settings, weights="random").config
    assert config["dropout"] == 0.25
    assert config["norm"] == "pre"
    assert config["labels"] == ["bad", "plain", "good"]
    assert config["head_dim"] == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_modle": "16"}, "no setting 'd_modle'; known: vocab_size, max_length, d_model"),
        ({"d_model": "wide"}, "setting d_model is 'wide'; expected a whole number"),
        ({"dropout": "much"}, "setting dropout is 'much'; expected a number"),
        ({"norm": "middle"}, "setting norm is 'middle'; known: post, pre"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(settings: dict[str, str], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load(None, settings=settings)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LoadError, match="d_model 128 does not divide by num_heads 3"):
        load(None, settings={"num_heads": "3"})


def test_an_unknown_size_lists_the_known_ones() -> None:
    with pytest.raises(PluginError, match="no size 'tiny'; known: small, medium, large"):
        load(None, size="tiny")


@pytest.mark.parametrize("tokenizer", ["mine.tokenizer.json", "tokenizer.json"])
def test_a_weight_file_brings_its_fields_and_the_tokenizer_beside_it(tokenizer: str, weight_file: Path) -> None:
    weight_file.with_name("mine.tokenizer.json").rename(weight_file.with_name(tokenizer))
    model = load(None, weights=str(weight_file))
    _assert_same_weights(model, load(None, settings=_TINY, weights="random:5"))
    assert model.weights.startswith("checkpoint ")
    assert model.text is not None
    assert (model.text.max_length, model.text.labels) == (32, ("negative", "positive"))
    assert model.text.tokenizer == tiny_tokenizer()


def test_shipped_weights_are_used_where_they_fit(
    weight_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    shutil.copy(weight_file, shipped / "classifier-small.safetensors")
    shutil.copy(tmp_path / "mine.tokenizer.json", shipped / "classifier-small.tokenizer.json")
    monkeypatch.setattr(importlib.resources, "files", lambda package: shipped)
    model = load(None)
    assert (model.weights, model.config["d_model"], model.text is not None) == ("shipped", 16, True)
    assert load(None, settings={"labels": "no,yes", "dropout": "0"}).weights == "shipped"
    for changed in ({"labels": "a,b,c"}, {"activation": "gelu"}, {"num_layers": "1"}):
        assert load(None, settings=_TINY | changed).weights == "random seed 0"
    # The tokenizer goes with random weights too, and with families that have none of their own.
    assert load("embedder", settings=_TINY).text is not None
    assert load("embedder", settings=_TINY | {"vocab_size": "64"}).text is None


@pytest.mark.parametrize("weights", ["mine.bin", "random:x", "randomly"])
def test_other_weights_are_a_usage_error(weights: str) -> None:
    with pytest.raises(PluginError, match="expected"):
        load(None, weights=weights)


def test_another_task_than_the_familys_is_a_usage_error() -> None:
    with pytest.raises(PluginError, match="classifier has the task text-classification only"):
        load(None, settings=_TINY, weights="random", task="fill-mask")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("clasifier", PluginError, "unknown source 'clasifier'; expected a built-in name .classifier, embedder"),
        ("org/name", LoadError, "nothing is downloaded here; .*hf download org/name"),
        ("bert", PluginError, "bert is a family of checkpoints; give the folder"),
        ("nowhere.py:Net", PluginError, "nowhere.py: no such file"),
        ("no_such_package:Net", PluginError, "no_such_package: importing it raised ModuleNotFoundError"),
    ],
)
def test_a_source_that_is_none_says_what_would_be_one(source: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(source)


def test_a_folder_gives_its_name_and_no_absolute_path(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (load(str(classifier)).name, load(str(classifier)).source) == ("bert", "bert")
    monkeypatch.chdir(classifier.parent)
    assert (load("./bert/").name, load("./bert/").source) == ("bert", "./bert/")
    monkeypatch.chdir(classifier)
    assert load(".").name == "bert"


def test_a_folder_of_another_family_lists_the_known_ones(classifier: Path) -> None:
    _edit_json(classifier / "config.json", model_type="whisper")
    with pytest.raises(LoadError, match=r"model_type is 'whisper'; supported: albert, bart, .*path/to/file.py:NAME"):
        load(str(classifier))


@pytest.mark.parametrize("option", [{"size": "large"}, {"settings": {"d_model": "8"}}, {"inputs": ["x:int64[2]"]}])
def test_an_option_of_another_kind_of_source_is_a_usage_error(option: dict[str, Any], classifier: Path) -> None:
    with pytest.raises(PluginError, match="is for a"):
        load(str(classifier), **option)


def test_a_module_of_sentence_transformers_that_is_not_supported_is_named(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match="the modules are Transformer, Pooling, Dense; supported: Transformer, Pooling"):
        load(str(folder))


def test_two_poolings_at_once_are_refused(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    _edit_json(folder / "1_Pooling" / "config.json", pooling_mode_max_tokens=True)
    with pytest.raises(LoadError, match="pooling is mean and max; supported: one of mean, cls, max"):
        load(str(folder))


def test_another_task_leaves_the_pooling_of_sentence_transformers_out(tmp_path: Path) -> None:
    model = load(str(tiny_bert_folder(tmp_path / "st", pooling=("mean",))), task="feature-extraction")
    assert model.outputs[0].name == "last_hidden_state"


def test_a_default_prompt_of_sentence_transformers_is_refused(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    load(str(folder))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts | {"default_prompt_name": "query"}))
    with pytest.raises(LoadError, match="default_prompt_name is 'query'"):
        load(str(folder))
