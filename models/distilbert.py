"""DistilBERT (Sanh et al. 2019) from a Hugging Face checkpoint: BERT's layers, without token types and pooler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import BertSpec
from tx_export.models._tasks import architectures

__all__ = ["DistilBert"]


@dataclass(frozen=True)
class DistilBert(BertSpec):
    """The keys and defaults of Hugging Face's DistilBertConfig, under BERT's names."""

    num_hidden_layers: int = 6
    classifier_dropout: float | None = 0.2
    type_vocab_size: int = 0

    architectures = architectures("DistilBert")
    prefix = "distilbert"
    counts = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
    }
    derived = ("type_vocab_size", "layer_norm_eps", "labels", "head", "pooling", "normalize")
    names: ClassVar[Mapping[str, str]] = {
        "embeddings.word_embeddings": "encoder.words",
        "embeddings.position_embeddings": "encoder.positions",
        "embeddings.LayerNorm": "encoder.norm",
        "transformer.layer.N.attention.q_lin": "encoder.layers.N.attention.query",
        "transformer.layer.N.attention.k_lin": "encoder.layers.N.attention.key",
        "transformer.layer.N.attention.v_lin": "encoder.layers.N.attention.value",
        "transformer.layer.N.attention.out_lin": "encoder.layers.N.attention.output",
        "transformer.layer.N.sa_layer_norm": "encoder.layers.N.attention_norm",
        "transformer.layer.N.ffn.lin1": "encoder.layers.N.feed_forward.up",
        "transformer.layer.N.ffn.lin2": "encoder.layers.N.feed_forward.down",
        "transformer.layer.N.output_layer_norm": "encoder.layers.N.feed_forward_norm",
        "pre_classifier": "head.pooler",
        "classifier": "head.classifier",
        "vocab_transform": "head.transform",
        "vocab_layer_norm": "head.norm",
        "vocab_projector": "head.decoder",
    }
    unused = (
        r"(distilbert\.)?embeddings\.position_ids",
        r"(pre_classifier|classifier|qa_outputs|vocab_(transform|layer_norm|projector))\..*",
    )
    text_activation = "relu"

    def sizes(self) -> EncoderSizes:
        return self.bert_sizes()
