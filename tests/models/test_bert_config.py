"""Which keys of a BERT's config.json are followed, pass, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from tx_export.errors import LoadError
from tx_export.models.bert import Bert

_SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "position_embedding_type",
            "relative_key",
            "position_embedding_type is 'relative_key'; bert supports 'absolute'",
        ),
        ("is_decoder", True, "is_decoder is True, which bert does not support"),
        ("add_cross_attention", True, "add_cross_attention is True"),
        ("hidden_act", "mish", "hidden_act is 'mish'; supported: gelu, "),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4}"),
        ("pruned_heads", {"0": [1]}, r"pruned_heads is {'0': \[1\]}"),
        ("window_size", 64, "window_size is 64"),
        ("hidden_size", "wide", "hidden_size is 'wide'; expected int"),
        ("hidden_size", 97, "hidden_size 97 does not divide by num_attention_heads 4"),
        ("vocab_size", 0, "vocab_size is 0; it must be at least 1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; it must be in 0 to 1000"),
        ("layer_norm_eps", float("nan"), "layer_norm_eps is nan; it must not be negative"),
        ("pad_token_id", -1, "pad_token_id is -1; it must be in 0 to 999"),
        ("num_hidden_layers", True, "num_hidden_layers is True; expected int"),
        (
            "architectures",
            ["BertForQuestionAnswering"],
            "architectures is .*BertForQuestionAnswering.*; supported: BertFor",
        ),
        ("id2label", {"0": "a", "2": "b"}, r"id2label has the ids \[0, 2\]; expected 0 to 1"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_key_and_value(key: str, value: object, message: str) -> None:
    config = _SIZES | {"architectures": ["BertForSequenceClassification"], key: value}
    with pytest.raises(LoadError, match=message):
        Bert.from_config(config, None, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_cache", True),
        ("chunk_size_feed_forward", 4),
        ("torch_dtype", "float16"),
        ("is_decoder", False),
        ("x", None),
    ],
)
def test_a_key_that_changes_nothing_passes(key: str, value: object) -> None:
    config = _SIZES | {"architectures": ["BertModel"]}
    assert Bert.from_config(config | {key: value}, None, ()) == Bert.from_config(config, None, ())


def test_what_transformers_writes_into_a_config_is_known() -> None:
    """Every key of a full BertConfig with its default passes, so no plain checkpoint is refused."""
    full: dict[str, Any] = json.loads(transformers.BertConfig().to_json_string(use_diff=False))
    assert Bert.from_config(full, "fill-mask", ()) == Bert(head="fill-mask")


@pytest.mark.parametrize(("task", "pooling"), [("sentence-embedding", ()), ("summarization", ())])
def test_a_task_that_the_checkpoint_cannot_do_is_refused(task: str, pooling: tuple[str, ...]) -> None:
    with pytest.raises(LoadError, match=task):
        Bert.from_config(_SIZES, task, pooling)


def _raises(call: Callable[[], object]) -> str:
    with pytest.raises(LoadError) as caught:
        call()
    return str(caught.value)


def test_labels_are_in_the_order_of_their_ids() -> None:
    config = _SIZES | {"id2label": {"10": "k", **{str(i): chr(97 + i) for i in range(10)}}}
    assert Bert.from_config(config, "text-classification", ()).labels == tuple("abcdefghijk")
    assert Bert.from_config(_SIZES, "text-classification", ()).labels == ("LABEL_0", "LABEL_1")
    assert "num_labels is 3, but id2label has 11" in _raises(
        lambda: Bert.from_config(config | {"num_labels": 3}, "text-classification", ())
    )
