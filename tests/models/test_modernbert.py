"""ModernBERT against transformers and sentence-transformers, on tiny random checkpoints made from configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.models.modernbert import ModernBert
from tx_export.spec import EagerModel

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 4,  # full, sliding, sliding, full
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "max_position_embeddings": 64,
    "local_attention": 6,  # so that 17 tokens are more than a window
    "pad_token_id": 0,
    "num_labels": 3,
}
_ARCHITECTURES = {
    "feature-extraction": transformers.ModernBertModel,
    "text-classification": transformers.ModernBertForSequenceClassification,
    "token-classification": transformers.ModernBertForTokenClassification,
    "fill-mask": transformers.ModernBertForMaskedLM,
}
_MASKS = ("full", "right", "left", "holed")


def _saved(folder: Path, task: str, attention: str = "eager", **config: Any) -> Any:
    """A random Hugging Face model, saved; its weights are large, so that softmax and GELU are not linear."""
    torch.manual_seed(0)
    made = transformers.ModernBertConfig(**(_SIZES | {"attn_implementation": attention} | config))
    model: Any = _ARCHITECTURES[task](made)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm.weight" in name))
    model.save_pretrained(folder)
    return model


def _feeds(batch: int, tokens: int, kind: str) -> dict[str, Tensor]:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row in range(1, batch):
        padding = min(row * 3, tokens - 1)
        if kind == "right":
            mask[row, tokens - padding :] = 0
        if kind == "left":
            mask[row, :padding] = 0
        if kind == "holed":
            mask[row, 1 : 1 + padding : 2] = 0
    ids = torch.randint(1, 1000, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


def _ours(model: EagerModel, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(*(feeds[spec.name] for spec in model.inputs))
    return out


def _theirs(model: Any, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**feeds)[0]
    return out


def _assert_equal(ours: Tensor, theirs: Tensor, real: Tensor) -> None:
    """fp32 fidelity at real positions; a text's logits are read at position 0, which must be real then."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    kept = real != 0 if ours.ndim == 3 else real[:, 0] != 0
    ours, theirs = ours[kept], theirs[kept]
    assert (ours - theirs).abs().max() <= fidelity_bound(float(theirs.abs().max()))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("task", list(_ARCHITECTURES))
def test_every_task_equals_transformers_at_every_shape_and_mask(task: str, attention: str, tmp_path: Path) -> None:
    theirs = _saved(tmp_path, task, attention)
    ours = load(str(tmp_path))
    assert (ours.task, ours.family, ours.padding) == (task, "modernbert", "right")
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 64)):
        for kind in _MASKS:
            feeds = _feeds(batch, tokens, kind)
            out = _ours(ours, feeds)
            _assert_equal(out, _theirs(theirs, feeds), feeds["attention_mask"])
            assert tuple(out.shape) == ours.outputs[0].shape({"batch": batch, "tokens": tokens})


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("text-classification", {"classifier_pooling": "mean"}),
        ("text-classification", {"classifier_activation": "relu", "classifier_bias": True}),
        ("fill-mask", {"tie_word_embeddings": False}),
        ("fill-mask", {"decoder_bias": False}),
        ("feature-extraction", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
        ("feature-extraction", {"norm_eps": 0.5, "hidden_activation": "gelu_new"}),
        ("feature-extraction", {"local_attention": 9}),
        ("feature-extraction", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("feature-extraction", {"layer_types": ["sliding_attention"] * 4}),
        (
            "feature-extraction",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
                }
            },
        ),
    ],
    ids=str,
)
def test_a_config_key_that_changes_the_arithmetic_is_followed(task: str, config: Any, tmp_path: Path) -> None:
    theirs = _saved(tmp_path, task, **config)
    ours = load(str(tmp_path))
    for kind in ("full", "right"):
        feeds = _feeds(4, 17, kind)
        _assert_equal(_ours(ours, feeds), _theirs(theirs, feeds), feeds["attention_mask"])


def test_the_keys_of_older_checkpoints_mean_the_same(tmp_path: Path) -> None:
    thetas = {"full_attention": 50.0, "sliding_attention": 4.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    theirs = _saved(tmp_path, "feature-extraction", global_attn_every_n_layers=2, rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 4.0}
    unread = {"position_embedding_type": "absolute", "layer_norm_eps": 0.1, "reference_compile": True}
    (tmp_path / "config.json").write_text(json.dumps(config | old | unread))
    feeds = _feeds(4, 17, "right")
    _assert_equal(_ours(load(str(tmp_path)), feeds), _theirs(theirs, feeds), feeds["attention_mask"])


def test_padding_without_a_real_token_in_its_window_is_finite_and_disturbs_nobody(tmp_path: Path) -> None:
    _saved(tmp_path, "feature-extraction")
    ours = load(str(tmp_path))
    feeds = _feeds(2, 40, "full")
    feeds["attention_mask"][1, 9:] = 0  # 28 positions see no real token within 3
    out = _ours(ours, feeds)
    assert out.isfinite().all()
    alone = _ours(ours, {name: tensor[1:, :9] for name, tensor in feeds.items()})
    assert (out[1, :9] - alone[0]).abs().max() <= fidelity_bound(float(alone.abs().max()))


@pytest.mark.parametrize("pooling", [("mean", "normalize"), ("cls",)], ids=str)
def test_a_sentence_embedding_is_pooled_from_the_hidden_states(pooling: tuple[str, ...], tmp_path: Path) -> None:
    theirs = _saved(tmp_path, "feature-extraction")
    _write_sentence_files(tmp_path, pooling)
    ours, feeds = load(str(tmp_path)), _feeds(4, 17, "right")
    assert (ours.task, ours.outputs[0].name) == ("sentence-embedding", "embedding")
    hidden, real = _theirs(theirs, feeds), feeds["attention_mask"][:, :, None]
    expected = hidden[:, 0] if pooling == ("cls",) else (hidden * real).sum(dim=1) / real.sum(dim=1)
    expected = torch.nn.functional.normalize(expected) if "normalize" in pooling else expected
    _assert_equal(_ours(ours, feeds), expected, feeds["attention_mask"])


def _write_sentence_files(folder: Path, pooling: tuple[str, ...]) -> None:
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 1 + len(pooling)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling[0]}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'default'"),
        ("rope_parameters", {"rope_theta": 1e4}, "rope_parameters holds .'rope_theta'.; supported: full_attention and"),
        ("rope_parameters", {"full_attention": {"rope_theta": -1.0}}, "theta of full_attention is -1.0; expected a"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope_scaling is .*modernbert does not support"),
        ("layer_types", ["full_attention"], "supported: full_attention or sliding_attention for each of 4"),
        ("layer_types", ["chunked_attention"] * 4, "layer_types is .'chunked_attention'"),
        ("global_attn_every_n_layers", 0, "global_attn_every_n_layers is 0; it must be at least 1"),
        (
            "position_embedding_type",
            "relative",
            "position_embedding_type is 'relative'; modernbert supports 'absolute'",
        ),
        ("hidden_activation", "mish", "hidden_activation is 'mish'; supported: gelu, "),
        ("classifier_pooling", "max", "classifier_pooling is 'max'; supported: cls, mean"),
        ("hidden_size", 100, "hidden_size 100 does not divide by 2 x num_attention_heads 4"),
        ("local_attention", -2, "local_attention is -2; it must be at least 0"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; it must be in 0 to 1000"),
        ("vocab_size", 0, "vocab_size is 0; it must be at least 1"),
        ("is_decoder", True, "is_decoder is True, which modernbert does not support"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_key_and_value(key: str, value: object, message: str) -> None:
    config = _SIZES | {"architectures": ["ModernBertForSequenceClassification"], key: value}
    with pytest.raises(LoadError, match=message):
        ModernBert.from_config(config, None, ())


def test_what_transformers_writes_into_a_config_is_known() -> None:
    """Every key of a full ModernBertConfig with its default passes, so no plain checkpoint is refused."""
    full: dict[str, Any] = json.loads(transformers.ModernBertConfig().to_json_string(use_diff=False))
    types = tuple("sliding_attention" if index % 3 else "full_attention" for index in range(22))
    assert ModernBert.from_config(full, "fill-mask", ()) == ModernBert(head="fill-mask", layer_types=types)
