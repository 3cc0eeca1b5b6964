"""ELECTRA (Clark et al. 2020) from a Hugging Face checkpoint, generator or discriminator: narrower embeddings.

words + token types + positions -> norm -> product where the widths differ -> post-norm layers -> the head of the task
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import LAYER_NAMES, BertSpec
from tx_export.models._tasks import architectures

__all__ = ["Electra"]


@dataclass(frozen=True)
class Electra(BertSpec):
    """The keys and defaults of Hugging Face's ElectraConfig."""

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024

    architectures = architectures("Electra")
    prefix = "electra"
    counts = (*BertSpec.counts, "embedding_size")
    names: ClassVar[Mapping[str, str]] = LAYER_NAMES | {
        "embeddings_project": "encoder.projection",
        "classifier": "head.classifier",  # of tokens
        "classifier.dense": "head.pooler",  # of texts
        "classifier.out_proj": "head.classifier",
        "generator_predictions.dense": "head.transform",
        "generator_predictions.LayerNorm": "head.norm",
        "generator_lm_head": "head.decoder",
    }
    unused = (
        r"(electra\.)?embeddings\.(position_ids|token_type_ids)",
        r"((discriminator|generator)_predictions|generator_lm_head|classifier|qa_outputs)\..*",
    )
    text_activation = "gelu"
    word_activation = "gelu"

    def sizes(self) -> EncoderSizes:
        projected = self.embedding_size != self.hidden_size
        return replace(self.bert_sizes(), embedding_size=self.embedding_size, projected=projected)
