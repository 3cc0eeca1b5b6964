"""Decoders that read a text once: embedders, classifiers and hidden states, without a cache."""

from __future__ import annotations

from torch import Tensor, nn

from tx_export.models.parts.causal import Cache, CausalSelfAttention
from tx_export.models.parts.decoder import Decoder, DecoderLayer
from tx_export.models.parts.masks import last_real, pool

__all__ = ["LastTokenHead", "PooledDecoder"]


class LastTokenHead(nn.Module):
    """Logits [B, labels] from the last real token; zeros for a row without one."""

    def __init__(self, d_model: int, labels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(d_model, labels, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.classifier(pool(x, last_real(attention_mask, x.dtype)))
        return out


class PooledDecoder(Decoder):
    """`head` takes hidden states [B, T, d_model] and attention_mask [B, T]."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        # The fused operator wants a cache: one that holds nothing.
        nothing = self.words.weight.new_zeros(()).expand(input_ids.shape[0], 0)  # [B, 0]
        past = [_empty(nothing, layer.attention) for layer in self.layers if isinstance(layer, DecoderLayer)]
        x, _ = self.hidden(input_ids, attention_mask, past)
        out: Tensor = self.head(x, attention_mask)
        return out


def _empty(nothing: Tensor, attention: CausalSelfAttention) -> Cache:
    empty = nothing[:, None, :, None].expand(-1, attention.num_kv_heads, -1, attention.head_dim)
    return Cache(empty, empty)
