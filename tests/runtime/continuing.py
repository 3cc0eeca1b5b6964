"""A tiny artifact that continues texts, made without torch: each word has one word that follows it likeliest."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from onnx import TensorProto, helper, numpy_helper, save
from tokenizers import models, pre_tokenizers, processors

import tx_export.runtime
import tx_export.runtime_generate
from tx_export.providers.cpu import Cpu

from .artifact import seal

__all__ = ["CHAT", "IDS", "LIMIT", "make_continuing"]

SPECIAL = ("<pad>", "<s>", "</s>", "<user>", "<bot>", "<end>")
WORDS = "the capital of france is paris . hello there you one two three < user >"
IDS = {word: index for index, word in enumerate([*SPECIAL, *WORDS.split(" ")])}
LIMIT = 24
CHAT = {"first": "<s><user> ", "reply": " <end><bot> ", "next": " <end><user> ", "ask": " <end><bot> "}
_FOLLOWS = ["<s> the capital of france is paris . </s>", "<bot> hello there you <end>", "one two three one"]


def _table() -> np.ndarray:
    """Logits [vocabulary, vocabulary] behind each word: 4 for the word that follows, 1 for the one before, else 0."""
    table = np.zeros((len(IDS), len(IDS)), np.float32)
    for line in _FOLLOWS:
        for before, behind in itertools.pairwise(line.split()):
            table[IDS[before], IDS[behind]] = 4
            table[IDS[behind], IDS[before]] = 1
    return table


def _decoder(path: Path) -> None:
    """The cache holds the ids themselves; the logits need the last one only."""
    cache: list[str | int | None] = ["batch", 1, None, 1]
    nodes = [
        helper.make_node("Gather", ["input_ids", "logits_at"], ["last"], axis=1),
        helper.make_node("Gather", ["table", "last"], ["logits"]),
        helper.make_node("Cast", ["input_ids"], ["new"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["new", "axes"], ["read"]),
        helper.make_node("Concat", ["past.0.key", "read"], ["present.0.key"], axis=2),
        helper.make_node("Concat", ["past.0.value", "read"], ["present.0.value"], axis=2),
    ]
    shapes = {"input_ids": ["batch", "tokens"], "attention_mask": ["batch", "total"], "logits_at": ["kept"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "kept", len(IDS)])]
    for kind in ("key", "value"):
        inputs.append(helper.make_tensor_value_info(f"past.0.{kind}", TensorProto.FLOAT, cache))
        outputs.append(helper.make_tensor_value_info(f"present.0.{kind}", TensorProto.FLOAT, cache))
    weights = [numpy_helper.from_array(_table(), "table"), numpy_helper.from_array(np.array([1, 3]), "axes")]
    graph = helper.make_graph(nodes, "continuing", inputs, outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def _tokenizer() -> str:
    """Words between spaces; <s> is put before a text."""
    made = tokenizers.Tokenizer(models.WordLevel(IDS, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", IDS["<s>"])])
    made.add_special_tokens(list(SPECIAL))
    return str(made.to_str())


def make_continuing(folder: Path, **generation: Any) -> Path:
    """Write an artifact; `generation` is put over what its manifest says there."""
    folder.mkdir(parents=True)
    _decoder(folder / "model.onnx")
    (folder / "tokenizer.json").write_text(_tokenizer(), encoding="utf-8")
    for source, name in ((tx_export.runtime, "run.py"), (tx_export.runtime_generate, "generate.py")):
        shutil.copyfile(str(source.__file__), folder / name)
    dims = ["batch", f"tokens<={LIMIT}"]
    cache = {"layers": 1, "heads": 1, "head_dim": 1, "max_length": LIMIT, "cross": False, "shared": False}
    ranges = {"input_ids": [0, len(IDS) - 1], "attention_mask": [0, 1]}
    manifest = {
        "format_version": 1,
        "name": "continuing",
        "task": "text-generation",
        "min_onnxruntime": "1.14.0",
        "inputs": [{"name": name, "dtype": "int64", "dims": dims, "range": ranges[name]} for name in ranges],
        "outputs": [{"name": "logits", "dtype": "float32", "dims": [*dims, len(IDS)]}],
        "text": {"max_length": LIMIT, "pad_id": 0},
        "generation": {"cache": cache, "eos": [IDS["</s>"]], "bos": IDS["<s>"], **generation},
        "session": {"cpu": Cpu().session()},
        "files": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return seal(folder)
