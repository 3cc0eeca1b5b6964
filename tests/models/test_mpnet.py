"""MPNet against transformers and sentence-transformers, on tiny random checkpoints made from configs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.models.mpnet import Mpnet

from .checkpoints import TASKS, assert_equal, feeds, ours, save_tokenizer, theirs

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 202,  # 200 tokens: beyond the last bucket of distances, which begins at 115
    "num_labels": 3,
}
_TEXTS = ["ab", "the quick brown fox", "a b c d e f g h", "zz top!"]
_MASKS = ("full", "right", "left", "holed")


def _saved(folder: Path, task: str, **config: Any) -> Any:
    """A random Hugging Face model, saved; its weights are large, so that softmax, bias and GELU matter."""
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"MPNet{TASKS[task]}")(transformers.MPNetConfig(**(_SIZES | config)))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if "relative" in name else 0.2
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm.weight" in name.lower()))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers_at_every_shape_and_mask(task: str, tmp_path: Path) -> None:
    reference = _saved(tmp_path, task)
    model = load(str(tmp_path))
    assert (model.task, model.family, model.padding, model.pad_id) == (task, "mpnet", "right", 1)
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 200)):
        for kind in _MASKS:
            given = feeds(model, batch, tokens, kind)
            out = ours(model, given)
            assert_equal(out, theirs(reference, given), given["attention_mask"])
            assert tuple(out.shape) == model.outputs[0].shape({"batch": batch, "tokens": tokens})


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
    reference = _saved(tmp_path, task, **config)
    model = load(str(tmp_path))
    given = feeds(model, 4, 17, "right")
    assert_equal(ours(model, given), theirs(reference, given), given["attention_mask"])


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers with a tokenizer."""
    folder = tmp_path_factory.mktemp("mpnet")
    _saved(folder / "encoder", "feature-extraction", vocab_size=128)
    save_tokenizer(folder / "encoder", 1)
    pooling = Pooling(96, pooling_mode="mean")
    SentenceTransformer(modules=[Transformer(str(folder / "encoder")), pooling, Normalize()], device="cpu").save(
        str(folder / "st")
    )
    return folder / "st"


def test_an_int8_build_of_sentence_embeddings_is_verified_and_fused_in_every_layer(
    sentences: Path, tmp_path: Path
) -> None:
    """`build` itself compares each step with eager: exact steps within fp32's bound, int8 within its budget."""
    reference = SentenceTransformer(str(sentences), device="cpu")
    model, given = load(str(sentences)), dict(reference.tokenizer(_TEXTS, padding=True, return_tensors="pt"))
    expected = reference.encode(_TEXTS, convert_to_tensor=True, show_progress_bar=False)
    assert_equal(ours(model, given), expected)
    artifact = build(BuildOptions(source=str(sentences), quantize="dynamic_int8", output=tmp_path / "artifact"))
    manifest = runtime.read_manifest(artifact)
    operators = Counter(node.op_type for node in ir.load(artifact / "model.onnx").graph.all_nodes())
    assert manifest["fused"] == {"done": 2, "of": 2, "left": []}
    assert manifest["heads_per_layer"] == [4, 4]
    assert manifest["quantized"]["done"] == 2 * 4 + 2  # and the tables of words and positions
    assert operators["MultiHeadAttention"] == 2
    assert (operators["MatMul"], operators["Transpose"]) == (1, 1)  # the mean over real tokens; the bias, once
    assert not {"Shape", "Reshape", "Expand", "Softmax"} & set(operators)


def test_a_standard_build_is_verified(tmp_path: Path) -> None:
    _saved(tmp_path / "source", "token-classification", num_hidden_layers=1)
    options = BuildOptions(source=str(tmp_path / "source"), quantize="none", ops="standard", output=tmp_path / "built")
    manifest = runtime.read_manifest(build(options))
    assert set(manifest["domains"]) == {"ai.onnx"}
    assert len(manifest["fused"]["left"]) == 1


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
