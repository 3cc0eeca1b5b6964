"""Artifacts of the families with BERT's arithmetic: verified builds, fused and quantized throughout, and rerankers."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from sentence_transformers import CrossEncoder
from torch import nn

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.metrics import fidelity_bound

from .checkpoints import save, save_tokenizer

_PAIRS = [("the quick fox", "a lazy dog"), ("ab", "cd ef gh ij"), ("what?", "zz top!"), ("a " * 20, "b " * 30)]


_SMALL = re.compile("position_embeddings|token_type_embeddings")


def _operators(artifact: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(artifact / "model.onnx").graph.all_nodes())


@pytest.mark.parametrize(
    ("family", "task", "products"),
    [
        # 2 layers of 4 products; the head; a decoder that is tied to the table of words; the projection
        ("distilbert", "text-classification", 2 * 4 + 2),
        ("roberta", "fill-mask", 2 * 4 + 2),
        ("albert", "fill-mask", 2 * 4 + 2 + 1),
        ("electra", "token-classification", 2 * 4 + 1 + 1),
    ],
)
def test_an_int8_build_is_verified_and_fused_and_quantized_in_every_layer(
    family: str, task: str, products: int, tmp_path: Path
) -> None:
    """`build` itself compares each step with eager: exact steps within fp32's bound, int8 within its budget."""
    reference = save(tmp_path / family, family, task, num_hidden_layers=2)
    artifact = build(BuildOptions(source=str(tmp_path / family), quantize="dynamic_int8", output=tmp_path / "artifact"))
    manifest, operators = runtime.read_manifest(artifact), _operators(artifact)
    assert manifest["fused"] == {"done": 2, "of": 2, "left": []}
    assert manifest["heads_per_layer"] == [4, 4]
    assert operators["QAttention"] == 2
    assert not {"MatMul", "Gemm", "Attention", "MultiHeadAttention", "Softmax"} & set(operators)
    assert not {"Shape", "Reshape", "Expand", "If", "Loop"} & set(operators)
    assert operators["Transpose"] == (task == "fill-mask")  # of the one stored form of a tied weight
    tables = 1  # of words; the others are too small to gain anything
    assert manifest["quantized"]["done"] == products + tables
    assert all(left["name"].startswith("encoder.") for left in manifest["quantized"]["left"])
    # Every matrix is stored once, as 8 bits; the tables of positions and token types are too small to gain anything.
    matrices = [p for name, p in reference.named_parameters() if p.ndim == 2 and not _SMALL.search(name)]
    stored = [value.const_value for value in ir.load(artifact / "model.onnx").graph.initializers.values()]
    in_8_bits = [
        array.size for array in stored if array is not None and array.dtype.bitwidth == 8 and len(array.shape) == 2
    ]
    assert sum(in_8_bits) == sum(parameter.numel() for parameter in matrices)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An XLM-RoBERTa that scores pairs by its logit, as CrossEncoder saves it."""
    folder = tmp_path_factory.mktemp("reranker")
    save(folder / "plain", "xlm-roberta", "text-classification", num_labels=1)
    save_tokenizer(folder / "plain", 1)
    CrossEncoder(str(folder / "plain"), device="cpu", activation_fn=nn.Identity()).save_pretrained(
        str(folder / "reranker")
    )
    return folder / "reranker"


@pytest.fixture(scope="module")
def artifact(reranker: Path) -> Path:
    return build(BuildOptions(source=str(reranker), quantize="none", output=reranker.with_name("artifact")))


def test_a_reranker_gives_the_scores_of_the_cross_encoder(reranker: Path, artifact: Path) -> None:
    reference = CrossEncoder(str(reranker), device="cpu").predict(_PAIRS)
    scores = [row["score"] for row in runtime.Model(artifact)(_PAIRS)]
    assert np.abs(reference).max() > 1  # no probabilities
    assert np.abs(scores - reference).max() <= fidelity_bound(float(np.abs(reference).max()))


def test_a_family_without_token_types_takes_pairs_all_the_same(artifact: Path) -> None:
    manifest = runtime.read_manifest(artifact)
    assert [item["name"] for item in manifest["inputs"]] == ["input_ids", "attention_mask"]
    assert manifest["fused"] == {"done": 3, "of": 3, "left": []}
    swapped = [row["score"] for row in runtime.Model(artifact)([pair[::-1] for pair in _PAIRS])]
    assert not np.allclose(swapped, [row["score"] for row in runtime.Model(artifact)(_PAIRS)])


def _edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("config", "labels", "scores"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "regression"}, 1, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 3, "sigmoid"),
        ({"sentence_transformers": {"version": "5.2.0"}}, 1, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "identity"),
    ],
    ids=str,
)
def test_scores_are_those_that_the_folder_declares(
    config: dict[str, Any], labels: int, scores: str, tmp_path: Path
) -> None:
    save(tmp_path, "roberta", "text-classification", num_labels=labels)
    save_tokenizer(tmp_path, 1)
    _edit_json(tmp_path / "config.json", **config)
    text = load(str(tmp_path)).text
    assert text is not None and text.scores == scores
    if "problem_type" not in config:  # sentence-transformers does not read it
        declared = CrossEncoder(str(tmp_path), device="cpu").activation_fn
        expected = {"sigmoid": nn.Sigmoid, "identity": nn.Identity, "softmax": nn.Identity}  # it has logits there
        assert isinstance(declared, expected[scores])


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "roberta", "text-classification", num_labels=1)
    save_tokenizer(tmp_path, 1)
    _edit_json(tmp_path / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(LoadError, match=r"activation_fn is 'torch.nn.modules.activation.Tanh'; supported: torch\.nn"):
        load(str(tmp_path))
