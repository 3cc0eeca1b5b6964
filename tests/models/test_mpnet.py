"""MPNet against transformers and sentence-transformers, on tiny random checkpoints made from configs."""

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
from tx_export.models.mpnet import Mpnet
from tx_export.spec import EagerModel

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 202,  # 200 tokens: beyond the last bucket of distances, which begins at 115
    "num_labels": 3,
}
_ARCHITECTURES = {
    "feature-extraction": transformers.MPNetModel,
    "text-classification": transformers.MPNetForSequenceClassification,
    "token-classification": transformers.MPNetForTokenClassification,
    "fill-mask": transformers.MPNetForMaskedLM,
}
_MASKS = ("full", "right", "left", "holed")


def _saved(folder: Path, task: str, **config: Any) -> Any:
    """A random Hugging Face model, saved; its weights are large, so that softmax, bias and GELU matter."""
    torch.manual_seed(0)
    model: Any = _ARCHITECTURES[task](transformers.MPNetConfig(**(_SIZES | config)))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if "relative" in name else 0.2
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm.weight" in name.lower()))
    model.save_pretrained(folder)
    return model


def _feeds(batch: int, tokens: int, kind: str) -> dict[str, Tensor]:
    """Padding has the pad id, 1, and nothing else has it: positions are counted from the ids."""
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row in range(1, batch):
        padding = min(row * 3, tokens - 1)
        if kind == "right":
            mask[row, tokens - padding :] = 0
        if kind == "left":
            mask[row, :padding] = 0
        if kind == "holed":
            mask[row, 1 : 1 + padding : 2] = 0
    ids = torch.randint(2, 1000, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.where(mask != 0, 1), "attention_mask": mask}


def _ours(model: EagerModel, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(*(feeds[spec.name] for spec in model.inputs))
    return out


def _theirs(model: Any, feeds: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**feeds)[0]
    return out


def _assert_equal(ours: Tensor, theirs: Tensor, real: Tensor) -> None:
    """fp32 fidelity at real positions; nothing may be non-finite anywhere."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    if ours.ndim == 3:
        ours, theirs = ours[real != 0], theirs[real != 0]
    assert (ours - theirs).abs().max() <= fidelity_bound(float(theirs.abs().max()))


@pytest.mark.parametrize("task", list(_ARCHITECTURES))
def test_every_task_equals_transformers_at_every_shape_and_mask(task: str, tmp_path: Path) -> None:
    theirs = _saved(tmp_path, task)
    ours = load(str(tmp_path))
    assert (ours.task, ours.family, ours.padding, ours.pad_id) == (task, "mpnet", "right", 1)
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 200)):
        for kind in _MASKS:
            feeds = _feeds(batch, tokens, kind)
            out = _ours(ours, feeds)
            _assert_equal(out, _theirs(theirs, feeds), feeds["attention_mask"])
            assert tuple(out.shape) == ours.outputs[0].shape({"batch": batch, "tokens": tokens})


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("fill-mask", {"tie_word_embeddings": False}),
        ("fill-mask", {"hidden_act": "relu"}),
        ("feature-extraction", {"hidden_act": "gelu_new", "layer_norm_eps": 0.5}),
        ("feature-extraction", {"num_attention_heads": 12}),
    ],
    ids=str,
)
def test_a_config_key_that_changes_the_arithmetic_is_followed(task: str, config: Any, tmp_path: Path) -> None:
    theirs = _saved(tmp_path, task, **config)
    feeds = _feeds(4, 17, "right")
    _assert_equal(_ours(load(str(tmp_path)), feeds), _theirs(theirs, feeds), feeds["attention_mask"])


def test_a_checkpoint_of_200_positions_takes_198_tokens() -> None:
    spec = Mpnet.from_config(_SIZES | {"max_position_embeddings": 200}, "feature-extraction", ())
    assert str(spec.inputs()[0].dims[1]) == "tokens<=198"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("relative_attention_num_buckets", 64, "relative_attention_num_buckets is 64; mpnet supports 32 only"),
        ("pad_token_id", 0, "pad_token_id is 0; mpnet supports 1 only"),
        ("hidden_act", "mish", "hidden_act is 'mish'; supported: gelu, "),
        ("max_position_embeddings", 2, "positions are counted"),
        ("is_decoder", True, "is_decoder is True, which mpnet does not support"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_key_and_value(key: str, value: object, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Mpnet.from_config(_SIZES | {"architectures": ["MPNetModel"], key: value}, None, ())


def test_what_transformers_writes_into_a_config_is_known() -> None:
    """Every key of a full MPNetConfig with its default passes, so no plain checkpoint is refused."""
    full: dict[str, Any] = json.loads(transformers.MPNetConfig().to_json_string(use_diff=False))
    assert Mpnet.from_config(full, "fill-mask", ()) == Mpnet(head="fill-mask")
