"""ModernBERT against transformers and sentence-transformers, on tiny random checkpoints made from configs."""

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
from torch import Tensor

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.models.modernbert import ModernBert

from .checkpoints import TASKS, assert_equal, feeds, ours, save_tokenizer, theirs

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
_TEXTS = ["ab", "the quick brown fox", "a b c d e f g h", "zz top!"]
_MASKS = ("full", "right", "left", "holed")


def _saved(folder: Path, task: str, attention: str = "eager", **config: Any) -> Any:
    """A random Hugging Face model, saved; its weights are large, so that softmax and GELU are not linear."""
    torch.manual_seed(0)
    made = transformers.ModernBertConfig(**(_SIZES | {"attn_implementation": attention} | config))
    model: Any = getattr(transformers, f"ModernBert{TASKS[task]}")(made)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm.weight" in name))
    model.save_pretrained(folder)
    return model


def _assert_equal(found: Tensor, expected: Tensor, real: Tensor) -> None:
    """Where position 0 is padding without a real token in reach, transformers' own attentions differ."""
    if found.ndim == 2:
        found, expected = found[real[:, 0] != 0], expected[real[:, 0] != 0]
    assert_equal(found, expected, real)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers_at_every_shape_and_mask(task: str, attention: str, tmp_path: Path) -> None:
    reference = _saved(tmp_path, task, attention)
    model = load(str(tmp_path))
    assert (model.task, model.family, model.padding) == (task, "modernbert", "right")
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 64)):
        for kind in _MASKS:
            given = feeds(model, batch, tokens, kind)
            out = ours(model, given)
            _assert_equal(out, theirs(reference, given), given["attention_mask"])
            assert tuple(out.shape) == model.outputs[0].shape({"batch": batch, "tokens": tokens})


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
    reference = _saved(tmp_path, task, **config)
    model = load(str(tmp_path))
    for kind in ("full", "right"):
        given = feeds(model, 4, 17, kind)
        _assert_equal(ours(model, given), theirs(reference, given), given["attention_mask"])


def test_the_keys_of_older_checkpoints_mean_the_same(tmp_path: Path) -> None:
    thetas = {"full_attention": 50.0, "sliding_attention": 4.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    reference = _saved(tmp_path, "feature-extraction", global_attn_every_n_layers=2, rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 4.0}
    unread = {"position_embedding_type": "absolute", "layer_norm_eps": 0.1, "reference_compile": True}
    (tmp_path / "config.json").write_text(json.dumps(config | old | unread))
    model = load(str(tmp_path))
    given = feeds(model, 4, 17, "right")
    _assert_equal(ours(model, given), theirs(reference, given), given["attention_mask"])


def test_padding_without_a_real_token_in_its_window_is_finite_and_disturbs_nobody(tmp_path: Path) -> None:
    _saved(tmp_path, "feature-extraction")
    model = load(str(tmp_path))
    given = feeds(model, 2, 40, "full")
    given["attention_mask"][1, 9:] = 0  # 28 positions see no real token within 3
    out = ours(model, given)
    assert out.isfinite().all()
    alone = ours(model, {name: tensor[1:, :9] for name, tensor in given.items()})
    assert (out[1, :9] - alone[0]).abs().max() <= fidelity_bound(float(alone.abs().max()))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers with a tokenizer and 2 layers, one full and one sliding."""
    folder = tmp_path_factory.mktemp("modernbert")
    _saved(folder / "encoder", "feature-extraction", num_hidden_layers=2, vocab_size=128)
    save_tokenizer(folder / "encoder", 0)
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
    counted = {key: manifest["quantized"][key] for key in ("done", "of", "left")}
    assert counted == {"done": 2 * 4 + 1, "of": 2 * 4 + 1, "left": []}  # and the table of words
    assert manifest["min_onnxruntime"] == "1.22.0"  # a bias that all heads share
    assert (operators["MultiHeadAttention"], operators["RotaryEmbedding"]) == (2, 4)
    assert operators["MatMul"] == 1  # the mean over real tokens
    assert not {"Shape", "Reshape", "Transpose", "Expand", "Softmax"} & set(operators)


def test_a_standard_build_is_verified(tmp_path: Path) -> None:
    _saved(tmp_path / "source", "token-classification", num_hidden_layers=2)
    options = BuildOptions(source=str(tmp_path / "source"), quantize="none", ops="standard", output=tmp_path / "built")
    manifest = runtime.read_manifest(build(options))
    assert set(manifest["domains"]) == {"ai.onnx"}
    assert len(manifest["fused"]["left"]) == 2


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
