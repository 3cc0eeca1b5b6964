"""Families with BERT's arithmetic against transformers and sentence-transformers, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor

from tx_export import plugins
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.models._bert_encoder import positions_of_real_ids
from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.spec import CheckpointSpec

from .checkpoints import CLASSES, TASKS, assert_equal, feeds, ours, save, save_tokenizer, theirs

_TEXTS = ["ab", "the quick brown fox", "a b c d e f g h", "zz top!"]


def _pad_id(family: str) -> int:
    return int(transformers.AutoConfig.for_model(family).pad_token_id)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", CLASSES)
def test_every_task_equals_transformers_at_every_shape_and_mask(family: str, task: str, tmp_path: Path) -> None:
    reference = save(tmp_path, family, task)
    model = load(str(tmp_path))
    assert (model.task, model.family, model.padding) == (task, family, "right")
    bound = getattr(model.inputs[0].dims[1], "bound", None)
    assert isinstance(bound, int)
    for batch, tokens in ((1, 1), (2, 2), (5, 17), (1, bound)):
        for kind in ("full", "right", "left", "holed"):
            given = feeds(model, batch, tokens, kind)
            out = ours(model, given)
            assert_equal(out, theirs(reference, given), given["attention_mask"])
            assert tuple(out.shape) == model.outputs[0].shape({"batch": batch, "tokens": tokens})


@pytest.mark.parametrize("family", ["distilbert", "roberta", "albert", "electra"])
def test_a_sentence_embedding_equals_sentence_transformers(family: str, tmp_path: Path) -> None:
    """In a folder that sentence-transformers of today writes."""
    save(tmp_path / "encoder", family, "feature-extraction")
    save_tokenizer(tmp_path / "encoder", _pad_id(family))
    transformer = Transformer(str(tmp_path / "encoder"))
    reference = SentenceTransformer(modules=[transformer, Pooling(48, pooling_mode="mean")], device="cpu")
    reference.save_pretrained(str(tmp_path / "st"))
    model = load(str(tmp_path / "st"))
    assert (model.task, model.outputs[0].name) == ("sentence-embedding", "embedding")
    assert model.text is not None and model.text.pad_id == _pad_id(family)
    given = dict(reference.tokenizer(_TEXTS, padding=True, return_tensors="pt"))
    given["token_type_ids"] = given.get("token_type_ids", torch.zeros_like(given["input_ids"]))
    assert int(given["attention_mask"].min()) == 0
    assert_equal(ours(model, given), reference.encode(_TEXTS, convert_to_tensor=True, show_progress_bar=False))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"hidden_act": "gelu_pytorch_tanh"}),
        ("bert", {"layer_norm_eps": 0.5}),
        ("bert", {"type_vocab_size": 1}),
        ("bert", {"type_vocab_size": 5}),
        ("bert", {"num_attention_heads": 12}),
        ("bert", {"tie_word_embeddings": False}),
        ("distilbert", {"activation": "relu"}),
        ("distilbert", {"tie_word_embeddings": False}),
        ("roberta", {"type_vocab_size": 2}),
        ("roberta", {"pad_token_id": 0}),
        ("roberta", {"pad_token_id": 7}),
        ("roberta", {"hidden_act": "gelu_new"}),  # of the layers: the head keeps gelu
        ("roberta", {"tie_word_embeddings": False}),
        ("albert", {"hidden_act": "gelu"}),
        ("albert", {"embedding_size": 48}),
        ("albert", {"num_hidden_layers": 1}),
        ("albert", {"tie_word_embeddings": False}),
        ("electra", {"embedding_size": 48}),
        ("electra", {"hidden_act": "relu"}),  # of the layers: the head keeps gelu
        ("electra", {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_a_config_key_that_changes_the_arithmetic_is_followed(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    reference = save(tmp_path, family, "fill-mask", **config)
    model = load(str(tmp_path))
    given = feeds(model, 3, 17, "right")
    assert_equal(ours(model, given), theirs(reference, given), given["attention_mask"])


@pytest.mark.parametrize("family", CLASSES)
def test_a_full_config_of_transformers_is_known(family: str) -> None:
    """Every key with its default, and the defaults are those of transformers."""
    config = transformers.AutoConfig.for_model(family)
    full: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    spec = _spec(family)
    assert spec.from_config(full, "fill-mask", ()) == spec.from_config({}, "fill-mask", ())


_PUBLISHED: dict[str, dict[str, Any]] = {  # what the config.json of well-known checkpoints holds beside plain sizes
    "distilbert": {"sinusoidal_pos_embds": False, "tie_weights_": True, "qa_dropout": 0.1, "finetuning_task": "sst-2"},
    "roberta": {"gradient_checkpointing": False, "position_embedding_type": "absolute", "eos_token_id": 2},
    "xlm-roberta": {"output_past": True, "use_cache": True, "_name_or_path": "base", "torch_dtype": "float32"},
    "camembert": {"output_past": True, "layer_norm_eps": 1e-05, "bos_token_id": 5},
    "albert": {
        **{"down_scale_factor": 1, "gap_size": 0, "inner_group_num": 1, "net_structure_type": 0},
        **{"num_hidden_groups": 1, "num_memory_blocks": 0, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    },
    "electra": {
        **{"summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first"},
        **{"summary_use_proj": True, "generator_size": "0.25"},
    },
}


@pytest.mark.parametrize("family", _PUBLISHED)
def test_the_keys_of_published_checkpoints_are_known(family: str) -> None:
    config = {"model_type": family, "architectures": [f"{CLASSES[family]}ForMaskedLM"], **_PUBLISHED[family]}
    assert _spec(family).from_config(config, None, ()).task == "fill-mask"


def _spec(family: str) -> type[CheckpointSpec]:
    found: type[CheckpointSpec] = plugins.find("model", family)
    return found


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("distilbert", "dim", 770, "dim 770 does not divide by n_heads 12"),
        ("distilbert", "n_layers", -1, "n_layers is -1; it must be in 0 to 1000"),
        ("distilbert", "activation", "mish", "activation is 'mish'; supported: gelu, "),
        ("distilbert", "n_heads", "many", "n_heads is 'many'; expected int"),
        ("distilbert", "type_vocab_size", 2, "type_vocab_size is 2, which distilbert does not support"),
        ("roberta", "position_embedding_type", "relative_key", "roberta supports 'absolute' only"),
        ("roberta", "type_vocab_size", 0, "type_vocab_size is 0; it must be at least 1"),
        ("roberta", "pad_token_id", None, "pad_token_id is None; positions are counted from it"),
        ("roberta", "max_position_embeddings", 2, r"pad_token_id is 1; positions .* - 2, which is 0"),
        ("xlm-roberta", "is_decoder", True, "is_decoder is True, which xlm-roberta does not support"),
        ("albert", "num_hidden_groups", 2, "num_hidden_groups is 2; albert supports 1 only"),
        ("albert", "inner_group_num", 2, "inner_group_num is 2; albert supports 1 only"),
        ("albert", "embedding_size", 0, "embedding_size is 0; it must be at least 1"),
        ("electra", "add_cross_attention", True, "add_cross_attention is True"),
        ("electra", "architectures", ["ElectraForMultipleChoice"], "supported: ElectraForMaskedLM, "),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_key_and_value(
    family: str, key: str, value: object, message: str
) -> None:
    config = {"architectures": [f"{CLASSES[family]}Model"], key: value}
    with pytest.raises(LoadError, match=message):
        _spec(family).from_config(config, None, ())


@pytest.mark.parametrize("family", CLASSES)
def test_a_head_that_is_missing_is_named_as_in_the_checkpoint(family: str, tmp_path: Path) -> None:
    reference = save(tmp_path, family, "text-classification")
    names = [name for name in reference.state_dict() if name.startswith("classifier.") and name.endswith("weight")]
    _edit_weights(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n not in names})
    with pytest.raises(LoadError, match="missing") as caught:
        load(str(tmp_path))
    assert names and all(name in str(caught.value) for name in names)
    assert "head." not in str(caught.value)


@pytest.mark.parametrize("family", CLASSES)
def test_old_names_and_what_belongs_to_other_heads_are_no_obstacle(family: str, tmp_path: Path) -> None:
    """gamma and beta, position_ids, and the bare encoder under its classifier's names."""
    reference = save(tmp_path, family, "text-classification")
    prefix = reference.base_model_prefix
    _edit_weights(tmp_path, _made_old)
    others = {f"{prefix}.embeddings.position_ids": torch.arange(40)[None].clone(), "qa_outputs.bias": torch.zeros(2)}
    _edit_weights(tmp_path, lambda tensors: tensors | others)
    model = load(str(tmp_path), task="feature-extraction")
    given = feeds(model, 3, 17, "right")
    assert_equal(ours(model, given), theirs(getattr(reference, prefix), given), given["attention_mask"])


def _made_old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in renamed.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    return tensors


def _edit_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_the_layer_of_albert_is_held_once(tmp_path: Path) -> None:
    """As transformers holds it: no parameter more, and one attention that stands at each of three places."""
    reference = save(tmp_path, "albert", "fill-mask")
    module = load(str(tmp_path)).module
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (module, reference)]
    assert counts[0] == counts[1]
    places = [part for _, part in module.named_modules(remove_duplicate=False) if isinstance(part, MultiHeadAttention)]
    assert (len(places), len(set(places))) == (3, 1)


def test_positions_counted_from_ids_bound_the_tokens_and_skip_padding(tmp_path: Path) -> None:
    """As transformers counts them: the table is read from behind the pad id on, and padding takes no position."""
    reference = save(tmp_path, "roberta", "feature-extraction")
    model = load(str(tmp_path))
    assert (model.pad_id, str(model.inputs[0].dims[1])) == (1, "tokens<=38")  # of 40 rows in the table
    ids = torch.tensor([[5, 6, 1, 7, 8]])
    found = positions_of_real_ids(ids, 1)
    assert torch.equal(found, reference.embeddings.create_position_ids_from_input_ids(ids, 1))
    assert found.tolist() == [[2, 3, 1, 4, 5]]


def test_a_family_that_is_not_known_lists_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    with pytest.raises(LoadError, match=r"path/to/file\.py:NAME, a function that returns it") as caught:
        load(str(tmp_path))
    assert all(family in str(caught.value) for family in CLASSES)
