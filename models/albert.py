"""ALBERT (Lan et al. 2020) from a Hugging Face checkpoint: one layer that runs many times, and narrower embeddings.

words + token types + positions -> norm -> product to the width of the layer -> the same post-norm layer, N times
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import BertSpec
from tx_export.models._tasks import architectures

__all__ = ["Albert"]

_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"


@dataclass(frozen=True)
class Albert(BertSpec):
    """The keys and defaults of Hugging Face's AlbertConfig; one group of one layer, as in every published ALBERT."""

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 4096
    num_attention_heads: int = 64
    intermediate_size: int = 16384
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    classifier_dropout: float | None = 0.1

    architectures = architectures("Albert")
    prefix = "albert"
    counts = (*BertSpec.counts, "embedding_size")
    keys: ClassVar[Mapping[str, str]] = {"classifier_dropout": "classifier_dropout_prob"}
    fixed = BertSpec.fixed | {"num_hidden_groups": 1, "inner_group_num": 1, "down_scale_factor": 1}
    names: ClassVar[Mapping[str, str]] = {
        "embeddings.word_embeddings": "encoder.words",
        "embeddings.position_embeddings": "encoder.positions",
        "embeddings.token_type_embeddings": "encoder.token_types",
        "embeddings.LayerNorm": "encoder.norm",
        "encoder.embedding_hidden_mapping_in": "encoder.projection",
        f"{_LAYER}.attention.query": "encoder.layers.0.attention.query",
        f"{_LAYER}.attention.key": "encoder.layers.0.attention.key",
        f"{_LAYER}.attention.value": "encoder.layers.0.attention.value",
        f"{_LAYER}.attention.dense": "encoder.layers.0.attention.output",
        f"{_LAYER}.attention.LayerNorm": "encoder.layers.0.attention_norm",
        f"{_LAYER}.ffn": "encoder.layers.0.feed_forward.up",
        f"{_LAYER}.ffn_output": "encoder.layers.0.feed_forward.down",
        f"{_LAYER}.full_layer_layer_norm": "encoder.layers.0.feed_forward_norm",
        "pooler": "head.pooler",
        "classifier": "head.classifier",
        "predictions.dense": "head.transform",
        "predictions.LayerNorm": "head.norm",
        "predictions.decoder": "head.decoder",
        "predictions": "head.decoder",
    }
    unused = (
        r"(albert\.)?embeddings\.(position_ids|token_type_ids)",
        r"((albert\.)?pooler|predictions|sop_classifier|classifier|qa_outputs)\..*",
    )

    def sizes(self) -> EncoderSizes:
        return replace(self.bert_sizes(), embedding_size=self.embedding_size, projected=True, shared=True)
