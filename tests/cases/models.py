"""The models that the cases are tried on, seeded: ours as a weight file, BERT as the folder of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from tx_export.compiler import BuildOptions, build
from tx_export.models.classifier import Classifier
from tx_export.testing import tiny_tokenizer

__all__ = ["CLS", "CLS_SETTINGS", "build_from", "build_user", "hf_config", "save_cls", "save_hf", "user"]

Architecture = Literal["BertModel", "BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"]

VOCAB_SIZE = 1000
# As --set takes them.
CLS_SETTINGS = {
    "vocab_size": "1000",
    "d_model": "96",
    "num_heads": "4",
    "num_layers": "2",
    "d_ff": "192",
    "max_length": "128",
    "positions": "learned",
    "activation": "gelu",
    "epsilon": "1e-5",
    "labels": "bad,plain,good",
}
CLS = Classifier(
    vocab_size=VOCAB_SIZE, d_model=96, num_heads=4, num_layers=2, d_ff=192, max_length=128, positions="learned",
    activation="gelu", epsilon=1e-5, labels=("bad", "plain", "good"),
)  # fmt: skip


def save_cls(folder: Path, **changes: Any) -> Path:
    """Write the classifier's weights, with its fields in the header and a tokenizer beside; returns the weight file.

    `changes` replace fields of `CLS`; a vocabulary of another size than 1000 gets no tokenizer.
    """
    fields = dataclasses.asdict(CLS) | changes
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Classifier(**fields).build()
    save_file(dict(module.state_dict()), folder / "model.safetensors", {"config": json.dumps(fields)})
    if fields["vocab_size"] == VOCAB_SIZE:
        (folder / "tokenizer.json").write_text(tiny_tokenizer(VOCAB_SIZE), encoding="utf-8")
    return folder / "model.safetensors"


def hf_config(architecture: Architecture, **changes: Any) -> Any:
    """transformers' configuration of a BERT of the same sizes as `CLS`."""
    from transformers import BertConfig

    labels = {0: "bad", 1: "plain", 2: "good"} if "Classification" in architecture else {0: "LABEL_0", 1: "LABEL_1"}
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.2,  # so wide that attention prefers some tokens
        "architectures": [architecture],
        "id2label": labels,
        "label2id": {name: number for number, name in labels.items()},
    }
    return BertConfig(**(fields | changes))


def save_hf(folder: Path, architecture: Architecture = "BertForSequenceClassification", **changes: Any) -> Path:
    """Write a checkpoint as transformers does, with a tokenizer; `changes` replace keys of its configuration."""
    import transformers

    config = hf_config(architecture, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, architecture)(config)
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text(tiny_tokenizer(VOCAB_SIZE), encoding="utf-8")
    return folder


def build_from(source: Path, output: Path, quantize: str | None = "none", **changes: Any) -> Path:
    """Build from a weight file of `save_cls` or a folder of `save_hf`; `changes` are further options of the build."""
    chosen = {"source": "classifier", "weights": str(source)} if source.is_file() else {"source": str(source)}
    return build(BuildOptions(**chosen, quantize=quantize, output=output, **changes))  # type: ignore[arg-type]


def user(name: str) -> str:
    """The source that is a module of `user_modules.py`."""
    return f"{Path(__file__).with_name('user_modules.py')}:{name}"


def build_user(name: str, output: Path, quantize: str = "none") -> Path:
    """Build a module of `user_modules.py`."""
    return build(BuildOptions(source=user(name), quantize=quantize, output=output))
