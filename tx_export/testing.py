"""Tiny models and graph helpers, for our tests and for users' own passes. Everything is seeded and made here."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from tx_export.models.classifier import Classifier
from tx_export.models.embedder import Embedder
from tx_export.spec import EagerModel, ModelSpec, TensorSpec, TextSpec

__all__ = [
    "eager_model",
    "graph_from_text",
    "matmul_model",
    "run_graph",
    "tiny_bert_folder",
    "tiny_classifier",
    "tiny_embedder",
    "tiny_tokenizer",
]

Architecture = Literal["BertModel", "BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_VOCAB_SIZE, _MAX_LENGTH = 128, 32


def tiny_classifier(seed: int = 0) -> EagerModel:
    """Our classifier: 2 layers, 16 wide, 4 heads, up to 32 tokens, labels negative and positive, with a tokenizer."""
    spec = Classifier(
        vocab_size=_VOCAB_SIZE, max_length=_MAX_LENGTH, d_model=16, num_layers=2, num_heads=4, d_ff=32, dropout=0.0
    )
    text = TextSpec(tiny_tokenizer(_VOCAB_SIZE), _MAX_LENGTH, labels=spec.labels)
    return eager_model(
        _built(spec, seed), spec.inputs(), spec.outputs(), family="classifier", task=spec.task, text=text
    )


def tiny_embedder(seed: int = 0) -> EagerModel:
    """Our embedder: 2 layers, 16 wide, 4 heads, up to 32 tokens, with a tokenizer."""
    spec = Embedder(
        vocab_size=_VOCAB_SIZE, max_length=_MAX_LENGTH, d_model=16, num_layers=2, num_heads=4, d_ff=32, dropout=0.0
    )
    text = TextSpec(tiny_tokenizer(_VOCAB_SIZE), _MAX_LENGTH)
    return eager_model(_built(spec, seed), spec.inputs(), spec.outputs(), family="embedder", task=spec.task, text=text)


def _built(spec: ModelSpec, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return spec.build()


def eager_model(
    module: nn.Module,
    inputs: Sequence[TensorSpec | str],
    outputs: Sequence[TensorSpec | str],
    *,
    family: str = "module",
    task: str = "feature-extraction",
    text: TextSpec | None = None,
    padding: Literal["any", "right"] = "any",
    pad_id: int | None = None,
) -> EagerModel:
    """The reference for a module; tensors may be given in text form, say `input_ids:int64[batch,tokens<=32]{0..99}`."""
    return EagerModel(
        name="tiny",
        source="tiny",
        family=family,
        task=task,
        module=module.eval(),
        inputs=tuple(TensorSpec.parse(item) if isinstance(item, str) else item for item in inputs),
        outputs=tuple(TensorSpec.parse(item) if isinstance(item, str) else item for item in outputs),
        config={},
        weights="random seed 0",
        text=text,
        padding=padding,
        pad_id=pad_id,
    )


def tiny_tokenizer(vocab_size: int = _VOCAB_SIZE) -> str:
    """The text of a tokenizer.json: WordPiece of letters, digits and pairs of letters, at least 83 entries."""
    letters = string.ascii_lowercase
    pieces = [*letters, *string.digits, *(f"##{c}" for c in letters + string.digits), *".,!?'-"]
    pairs = ("".join(pair) for pair in itertools.product(letters, repeat=2))
    longer = itertools.chain.from_iterable((pair, f"##{pair}") for pair in pairs)
    names = list(itertools.islice(itertools.chain(_SPECIAL, pieces, longer), vocab_size))
    assert len(pieces) + len(_SPECIAL) <= vocab_size == len(names)
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    text: str = tokenizer.to_str()
    return text


def tiny_bert_folder(
    folder: Path, architecture: Architecture = "BertModel", pooling: Sequence[str] = (), seed: int = 0
) -> Path:
    """Write a Hugging Face directory of a BERT: 2 layers, 16 wide, 4 heads, up to 32 tokens; 3 labels for a classifier.

    `pooling` makes it a sentence-transformers folder: one of `mean`, `cls`, `max`, then maybe `normalize`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "hidden_act": "gelu",
        "max_position_embeddings": _MAX_LENGTH,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    if "Classification" in architecture:
        config["id2label"] = {"0": "bad", "1": "plain", "2": "good"}
        config["label2id"] = {"bad": 0, "plain": 1, "good": 2}
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", {"model_max_length": _MAX_LENGTH, "pad_token": "[PAD]"})
    (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
    save_file(_bert_weights(architecture, seed), folder / "model.safetensors", {"format": "pt"})
    if pooling:
        _write_sentence_files(folder, pooling)
    return folder


def _write_sentence_files(folder: Path, pooling: Sequence[str]) -> None:
    kinds = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    steps = steps if "normalize" in pooling else steps[:2]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": _MAX_LENGTH, "do_lower_case": False})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": kind == pooling[0] for kind, mode in kinds.items()}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 16} | modes)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _bert_weights(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Under the names of Hugging Face's checkpoints; spread so widely that attention prefers some tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * spread + (1 if name.endswith("LayerNorm.weight") else 0)
        for name, shape, spread in _bert_tensors(architecture)
    }


def _bert_tensors(architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of each."""
    prefix = "" if architecture == "BertModel" else "bert."
    for table, rows in (("word", _VOCAB_SIZE), ("position", _MAX_LENGTH), ("token_type", 2)):
        yield f"{prefix}embeddings.{table}_embeddings.weight", (rows, 16), 1.0
    yield from _norm(f"{prefix}embeddings.LayerNorm")
    for i in range(2):
        layer = f"{prefix}encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{part}", 16, 16)
        yield from _linear(f"{layer}.attention.output.dense", 16, 16)
        yield from _norm(f"{layer}.attention.output.LayerNorm")
        yield from _linear(f"{layer}.intermediate.dense", 32, 16)
        yield from _linear(f"{layer}.output.dense", 16, 32)
        yield from _norm(f"{layer}.output.LayerNorm")
    if architecture in ("BertModel", "BertForSequenceClassification"):
        yield from _linear(f"{prefix}pooler.dense", 16, 16)
    if "Classification" in architecture:
        yield from _linear("classifier", 3, 16)
    if architecture == "BertForMaskedLM":
        yield from _linear("cls.predictions.transform.dense", 16, 16)
        yield from _norm("cls.predictions.transform.LayerNorm")
        yield "cls.predictions.bias", (_VOCAB_SIZE,), 0.1


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{name}.weight", (outputs, inputs), (2 / inputs) ** 0.5
    yield f"{name}.bias", (outputs,), 0.1


def _norm(name: str) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{name}.weight", (16,), 0.1
    yield f"{name}.bias", (16,), 0.1


def matmul_model(weight: NDArray[Any]) -> ir.Model:
    """The graph y = x @ weight: x [rows, K], weight [K, N] as an initializer named `weight`, opset 21."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        matmul (float[rows, {weight.shape[0]}] x) => (float[rows, {weight.shape[1]}] y) <float[1] weight = {{0}}> {{
            y = MatMul(x, weight)
        }}
    """
    model = graph_from_text(text)
    value = model.graph.initializers["weight"]
    value.const_value = ir.tensor(weight.astype(np.float32), name="weight")
    value.shape = ir.Shape(weight.shape)
    return model


def graph_from_text(text: str) -> ir.Model:
    """Read ONNX's text form."""
    return ir.from_onnx_text(text)


def run_graph(model: ir.Model, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs by name of one run on the CPU, with ONNX Runtime's own optimizations."""
    import onnxruntime

    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))
