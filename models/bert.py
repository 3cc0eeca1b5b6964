"""BERT from a Hugging Face checkpoint (Devlin et al. 2018): encoder, classifiers, masked words, sentence embeddings.

words + token types + positions 0, 1, 2, ... -> norm -> post-norm layers -> the head of the task
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import LAYER_NAMES, BertSpec
from tx_export.models._tasks import architectures

__all__ = ["Bert"]


@dataclass(frozen=True)
class Bert(BertSpec):
    """The keys and defaults of Hugging Face's BertConfig."""

    architectures = architectures("Bert")
    prefix = "bert"
    names: ClassVar[Mapping[str, str]] = LAYER_NAMES | {
        "pooler.dense": "head.pooler",
        "classifier": "head.classifier",
        "cls.predictions.transform.dense": "head.transform",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.decoder": "head.decoder",
        "cls.predictions": "head.decoder",
    }
    unused = (
        r"(bert\.)?embeddings\.(position_ids|token_type_ids)",
        r"(bert\.)?pooler\..*",
        r"(cls|classifier|qa_outputs)\..*",
    )

    def sizes(self) -> EncoderSizes:
        return self.bert_sizes()
