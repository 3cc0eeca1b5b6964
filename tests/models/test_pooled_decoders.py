"""Decoders that read a text once, as embedders and classifiers, against transformers and rows alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.load import load
from tx_export.spec import EagerModel

from .checkpoints import assert_equal, ours

_SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_hf: Any = transformers  # half of it has no types
_LENGTHS = (12, 4, 9)


def _embedder(folder: Path, pooling: str) -> Any:
    """A sentence-transformers folder over a random Qwen3."""
    torch.manual_seed(0)
    config = _hf.Qwen3Config(**_SIZES, attn_implementation="eager")
    model = _hf.Qwen3Model(config)
    model.eval()
    model.save_pretrained(folder)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 64, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return model


def _rows(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of 12, 4 and 9 tokens, padded on a side."""
    ids = torch.randint(3, 120, (3, 12), generator=torch.Generator().manual_seed(1))
    places = torch.arange(12)
    mask = torch.stack([places < length if side == "right" else places >= 12 - length for length in _LENGTHS])
    return ids * mask, mask.to(torch.int64)


def _alone(model: EagerModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = [row[real != 0][None] for row, real in zip(ids, mask, strict=True)]
    return torch.cat([ours(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}) for row in rows])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens"])
def test_b032_b207_an_embedding_is_that_of_the_text_alone_and_of_transformers(
    pooling: str, side: str, tmp_path: Path
) -> None:
    reference, (ids, mask) = _embedder(tmp_path, pooling), _rows(side)
    model = load(str(tmp_path))
    assert (model.task, model.cache, model.padding) == ("sentence-embedding", None, "any")
    found = ours(model, {"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        hidden = reference(input_ids=ids, attention_mask=mask).last_hidden_state
    last = (mask * torch.arange(1, 13)).argmax(dim=1)
    pooled = hidden[torch.arange(3), last] if pooling == "lasttoken" else (hidden * mask[..., None]).sum(1)
    assert_equal(found, torch.nn.functional.normalize(pooled, dim=-1))
    assert_equal(found, _alone(model, ids, mask))


def test_b207_the_artifact_keeps_it_with_one_operator_for_each_attention(tmp_path: Path) -> None:
    _embedder(tmp_path / "checkpoint", "lasttoken")
    options = BuildOptions(source=str(tmp_path / "checkpoint"), output=tmp_path / "built", quantize="none")
    artifact, model = runtime.Model(build(options)), load(str(tmp_path / "checkpoint"))
    assert artifact.manifest["fused"] == {"done": 2, "of": 2, "left": []}
    for side in ("right", "left"):
        ids, mask = _rows(side)
        found = artifact.run_arrays({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["embedding"]
        assert_equal(torch.from_numpy(found), _alone(model, ids, mask))
    empty = artifact.run_arrays({"input_ids": np.ones((1, 3), int), "attention_mask": np.zeros((1, 3), int)})
    assert not empty["embedding"].any()


def test_a_classifier_reads_the_last_real_token_as_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = _hf.LlamaConfig(**_SIZES, num_labels=3, attn_implementation="eager")
    reference = _hf.LlamaForSequenceClassification(config)
    reference.eval()
    reference.save_pretrained(tmp_path)
    model, (ids, mask) = load(str(tmp_path)), _rows("right")
    assert (model.task, model.config["labels"]) == ("text-classification", ["LABEL_0", "LABEL_1", "LABEL_2"])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask).logits
    assert_equal(ours(model, {"input_ids": ids, "attention_mask": mask}), expected)
