"""A tiny artifact, made without torch: mean of embeddings over real tokens, then one product."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from onnx import TensorProto, helper, numpy_helper, save
from tokenizers import models, normalizers, pre_tokenizers, processors

import tx_export.runtime
from tx_export.providers.cpu import Cpu

__all__ = ["HEAD", "LIMIT", "TABLE", "TYPES", "WORDS", "edit_manifest", "logits", "make_artifact", "seal", "softmax"]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "the", "was", "##s", "i", "x", "##x", "hello"]
WIDTH, LABELS, LIMIT = 8, 2, 16
_random = np.random.default_rng(0)
TABLE = _random.normal(size=(len(WORDS), WIDTH)).astype(np.float32)  # [vocabulary, width]
TYPES = _random.normal(size=(2, WIDTH)).astype(np.float32)
HEAD = _random.normal(size=(WIDTH, LABELS)).astype(np.float32)


def logits(ids: Any, mask: Any, types: Any = 0, head: np.ndarray = HEAD) -> np.ndarray:
    """The reference, in NumPy: [batch, labels]."""
    hidden = (TABLE[np.asarray(ids)] + TYPES[types]).astype(np.float64)  # [batch, tokens, width]
    kept = np.asarray(mask)[..., None]
    with np.errstate(invalid="ignore"):
        return np.asarray((hidden * kept).sum(1) / np.maximum(kept.sum(1), 1) @ head)


def softmax(values: np.ndarray) -> np.ndarray:
    """Along the last axis, as its definition says."""
    return np.asarray(np.exp(values) / np.exp(values).sum(-1, keepdims=True))


def _encoder(path: Path, per_token: bool, head: np.ndarray) -> None:
    """Write the graph; `per_token` leaves the mean out, so that each token has logits [batch, tokens, labels]."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Gather", ["types", "token_type_ids"], ["kinds"]),
        helper.make_node("Add", ["words", "kinds"], ["hidden"]),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["kept"]),
        helper.make_node("Mul", ["hidden", "kept"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "tokens"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["kept", "tokens"], ["total"], keepdims=0),
        helper.make_node("Max", ["total", "one"], ["count"]),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["masked" if per_token else "mean", "head"], ["logits"]),
    ]
    constants = {"table": TABLE, "types": TYPES, "head": head, "last": np.array([-1]), "tokens": np.array([1])}
    constants["one"] = np.array(1, np.float32)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in names]
    shape = ["batch", "tokens", head.shape[1]] if per_token else ["batch", head.shape[1]]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def _tokenizer(special: bool) -> str:
    """A WordPiece tokenizer.json; `special` puts [CLS] and [SEP] around."""
    made = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.enable_truncation(5)  # the runtime is to ignore both
    made.enable_padding(length=7)
    return str(made.to_str())


def make_artifact(
    folder: Path, special: bool = True, per_token: bool = False, head: np.ndarray = HEAD, **changes: Any
) -> Path:
    """Write an artifact; `changes` replace keys of its manifest."""
    folder.mkdir(parents=True)
    _encoder(folder / "model.onnx", per_token, head)
    (folder / "tokenizer.json").write_text(_tokenizer(special), encoding="utf-8")
    ids, mask = np.array([[2, 4, 6, 3], [2, 5, 3, 0]]), np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    answer = (TABLE[ids] + TYPES[0]) * mask[..., None] @ head if per_token else logits(ids, mask, head=head)
    samples = {"input/input_ids": ids, "input/attention_mask": mask, "output/logits": answer.astype(np.float32)}
    np.savez(folder / "samples.npz", allow_pickle=False, **{f"case0/{name}": array for name, array in samples.items()})
    shutil.copyfile(Path(tx_export.runtime.__file__), folder / "run.py")
    manifest = _manifest(per_token, head.shape[1]) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return seal(folder)


def _manifest(per_token: bool, labels: int) -> dict[str, Any]:
    dims = ["batch", f"tokens<={LIMIT}"]
    ranges = {"input_ids": [0, len(WORDS) - 1], "attention_mask": [0, 1], "token_type_ids": [0, 1]}
    return {
        "format_version": 1,
        "name": "tiny",
        "task": "text-classification",
        "min_onnxruntime": "1.14.0",
        "inputs": [{"name": name, "dtype": "int64", "dims": dims, "range": ranges[name]} for name in ranges],
        "outputs": [{"name": "logits", "dtype": "float32", "dims": [*(dims if per_token else dims[:1]), labels]}],
        "text": {"max_length": LIMIT, "pad_id": 0, "labels": ["negative", "positive"], "scores": "softmax"},
        "quantized": {"done": 0, "of": 1, "left": []},
        "session": {"cpu": Cpu().session()},
        "verification": {"self_test": {"max_abs": 1e-5}},
        "verified_on": {"provider": "cpu", "instruction_sets": ["avx2"]},
        "files": {},
    }


def seal(folder: Path) -> Path:
    """Write the size and hash of every file into the manifest."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("manifest.json", "REPORT.md"))
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": hashes[name]} for name in names}
    edit_manifest(folder, lambda manifest: manifest | {"files": files})
    return folder


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace the manifest by what `change` makes of it."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
