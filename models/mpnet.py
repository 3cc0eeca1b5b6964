"""MPNet from a Hugging Face checkpoint (Song et al. 2020): RoBERTa's positions, and a bias by distance on all scores.

bias[h, q, k] = table[bucket(k - q), h], one table for all layers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from tx_export.models._bert_encoder import EncoderSizes
from tx_export.models._bert_spec import LAYER_NAMES, BertSpec
from tx_export.models._roberta import HEAD_NAMES
from tx_export.models._tasks import architectures

__all__ = ["Mpnet"]

_BUCKETS, _MAX_DISTANCE, _PAD_ID = 32, 128, 1  # fixed in Hugging Face's code, whatever the config says
_LAYER = "encoder.layer.N.attention"


@dataclass(frozen=True)
class Mpnet(BertSpec):
    """The keys and defaults of Hugging Face's MPNetConfig."""

    vocab_size: int = 30527
    type_vocab_size: int = 0  # it has no token types
    pad_token_id: int | None = _PAD_ID

    architectures = architectures("MPNet")
    prefix = "mpnet"
    counts = tuple(name for name in BertSpec.counts if name != "type_vocab_size")
    fixed: ClassVar[dict[str, object]] = {"relative_attention_num_buckets": _BUCKETS, "pad_token_id": _PAD_ID}
    derived = (*BertSpec.derived, "type_vocab_size")
    names: ClassVar[Mapping[str, str]] = LAYER_NAMES | {
        f"{_LAYER}.attn.q": "encoder.layers.N.attention.query",
        f"{_LAYER}.attn.k": "encoder.layers.N.attention.key",
        f"{_LAYER}.attn.v": "encoder.layers.N.attention.value",
        f"{_LAYER}.attn.o": "encoder.layers.N.attention.output",
        f"{_LAYER}.LayerNorm": "encoder.layers.N.attention_norm",
        "encoder.relative_attention_bias": "encoder.bias.table",
        **HEAD_NAMES,
    }
    unused = (r"(mpnet\.)?embeddings\.position_ids", r"((mpnet\.)?pooler|lm_head|classifier)\..*")
    counts_real_ids = True
    word_activation = "gelu"

    def sizes(self) -> EncoderSizes:
        return replace(self.bert_sizes(), relative=(_BUCKETS, _MAX_DISTANCE))
