"""RoBERTa (Liu et al. 2019): BERT's layers, positions counted from the ids that aren't the pad id, heads of its own.

position = pad_id + (how many ids up to here aren't pad_id); pad_id itself where the id is pad_id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import LAYER_NAMES, BertSpec

__all__ = ["HEAD_NAMES", "RobertaSpec"]

HEAD_NAMES: Mapping[str, str] = {
    "classifier": "head.classifier",  # of tokens
    "classifier.dense": "head.pooler",  # of texts
    "classifier.out_proj": "head.classifier",
    "lm_head.dense": "head.transform",
    "lm_head.layer_norm": "head.norm",
    "lm_head.decoder": "head.decoder",
    "lm_head": "head.decoder",
}


@dataclass(frozen=True)
class RobertaSpec(BertSpec):
    """The keys and defaults of Hugging Face's RobertaConfig, which XLM-RoBERTa and CamemBERT share."""

    pad_token_id: int | None = 1

    prefix = "roberta"
    names: ClassVar[Mapping[str, str]] = {**LAYER_NAMES, **HEAD_NAMES}
    unused = (
        r"(roberta\.)?embeddings\.(position_ids|token_type_ids)",
        r"((roberta\.)?pooler|lm_head|classifier|qa_outputs)\..*",
    )
    counts_real_ids = True
    word_activation = "gelu"

    def sizes(self) -> EncoderSizes:
        return self.bert_sizes()
