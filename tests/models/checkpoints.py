"""Tiny random checkpoints of the Hugging Face families, written by transformers itself, and how to compare with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tx_export.spec import EagerModel
from tx_export.testing import tiny_tokenizer

CLASSES = {  # family -> the start of the names of its classes in transformers
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "albert": "Albert",
    "electra": "Electra",
}
TASKS = {  # task -> the end of their names
    "feature-extraction": "Model",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "fill-mask": "ForMaskedLM",
}
_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "num_labels": 3,
    "attn_implementation": "eager",
}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {"intermediate_size": 96},
    "distilbert": {"hidden_dim": 96},
    **{family: {"intermediate_size": 96, "type_vocab_size": 1} for family in ("roberta", "xlm-roberta", "camembert")},
    **{family: {"intermediate_size": 96, "embedding_size": 24} for family in ("albert", "electra")},
}


def save(folder: Path, family: str, task: str, **config: Any) -> Any:
    """A random model of transformers, saved; its weights are large, so that softmax and activations are not linear."""
    torch.manual_seed(0)
    start = CLASSES[family]
    made = getattr(transformers, f"{start}Config")(**(_SIZES | _OWN[family] | config))
    model = getattr(transformers, f"{start}{TASKS[task]}")(made).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_gain)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, pad_id: int) -> None:
    """A tokenizer whose padding has this id, 0 or 1, where [UNK] has the other."""
    text = json.loads(tiny_tokenizer())
    vocabulary = text["model"]["vocab"]
    vocabulary["[PAD]"], vocabulary["[UNK]"] = pad_id, 1 - pad_id
    for token in text["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    names: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def feeds(model: EagerModel, batch: int, tokens: int, kind: str) -> dict[str, Tensor]:
    """Random ids and token types, and a mask: full, right, left or holed; the first row is real throughout."""
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
    drawn = {
        spec.name: torch.randint(0, int(spec.high or 0) + 1, (batch, tokens), generator=random) for spec in model.inputs
    }
    if model.pad_id is not None:  # positions are counted from ids: padding has the pad id, and no word has it
        words = drawn["input_ids"].where(drawn["input_ids"] != model.pad_id, model.pad_id + 1)
        drawn["input_ids"] = words.where(mask != 0, model.pad_id)
    return drawn | {"attention_mask": mask}


def ours(model: EagerModel, given: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(*(given[spec.name] for spec in model.inputs))
    return out


def theirs(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given)[0]
    return out


def assert_equal(found: Tensor, expected: Tensor, real: Tensor | None = None) -> None:
    """fp32 fidelity: 1e-4, or 3e-6 of the largest value, at real positions; nothing may be non-finite anywhere."""
    assert found.shape == expected.shape
    assert found.isfinite().all()
    if real is not None and found.ndim == 3:
        found, expected = found[real != 0], expected[real != 0]
    assert (found - expected).abs().max() <= max(1e-4, 3e-6 * float(expected.abs().max()))
