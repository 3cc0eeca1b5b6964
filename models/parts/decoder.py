"""Decoder-only Transformers: the plain form, and the form with a cache that is exported.

plain    input_ids, attention_mask [B, T]                                    -> logits [B, T, V]
cached   input_ids [B, S], attention_mask [B, T], logits_at [L], the cache   -> logits [B, L, V], the cache of T
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tx_export.models.parts.attention import spelling
from tx_export.models.parts.biases import AlibiBias, RelativeBias
from tx_export.models.parts.causal import Cache, CausalMask, CausalSelfAttention, causal_mask
from tx_export.models.parts.norms import RMSNorm
from tx_export.models.parts.positions import (
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    running_positions,
)

__all__ = [
    "CachedDecoder",
    "Decoder",
    "DecoderLayer",
    "GluFeedForward",
    "PostNormDecoderLayer",
    "ScaledEmbedding",
    "swish",
]

Norm = nn.LayerNorm | RMSNorm
Positions = RotaryPositions | LearnedPositions | SinusoidalPositions | AlibiBias | RelativeBias


class ScaledEmbedding(nn.Embedding):
    """Rows times sqrt(d_model); they start so small that they then have unit variance, as logits of them have."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__(vocab_size, d_model)
        nn.init.normal_(self.weight, std=d_model**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * math.sqrt(self.embedding_dim)


class GluFeedForward(nn.Module):
    """down(activation(gate x) * up x) (Shazeer 2020); gate and up are one product in the graph."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Callable[[Tensor], Tensor],
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.gate, self.up = nn.Linear(d_model, d_ff, bias), nn.Linear(d_model, d_ff, bias)
        self.down = nn.Linear(d_ff, d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.gate.weight, self.up.weight))
        bias = torch.cat((self.gate.bias, self.up.bias)) if self.gate.bias is not None else None
        gate, up = nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
        out: Tensor = self.down(self.dropout(self.activation(gate) * up))
        return out


def swish(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    if spelling() != "fused":
        return nn.functional.silu(x)
    return torch.onnx.ops.symbolic(
        "com.microsoft::QuickGelu", (x,), {"alpha": 1.0}, dtype=x.dtype, shape=x.shape, version=1
    )


class _Layer(nn.Module, abc.ABC):
    """What both orders of norm and residual are made of."""

    def __init__(
        self, attention: CausalSelfAttention, feed_forward: nn.Module, norms: tuple[Norm, Norm], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = norms
        self.dropout = nn.Dropout(dropout)

    @abc.abstractmethod
    def forward(
        self, x: Tensor, added: Tensor | None, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None
    ) -> tuple[Tensor, Tensor | None, Cache]:
        """x [B, S, d_model], and what is still to be added to it; the same of the next layer, and the cache."""


class DecoderLayer(_Layer):
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x)). What was added last comes beside the sum so far."""

    def forward(
        self, x: Tensor, added: Tensor | None, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None
    ) -> tuple[Tensor, Tensor | None, Cache]:
        normed, x = _normed(self.attention_norm, x, added)
        attended, present = self.attention(normed, mask, rotary, past)
        normed, x = _normed(self.feed_forward_norm, x, self.dropout(attended))
        return x, self.dropout(self.feed_forward(normed)), present


class PostNormDecoderLayer(_Layer):
    """x = norm(x + attention(x)); x = norm(x + feed_forward(x)); nothing is left to be added."""

    def forward(
        self, x: Tensor, added: Tensor | None, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None
    ) -> tuple[Tensor, Tensor | None, Cache]:
        attended, present = self.attention(x, mask, rotary, past)
        x, _ = _normed(self.attention_norm, x, self.dropout(attended))
        x, _ = _normed(self.feed_forward_norm, x, self.dropout(self.feed_forward(x)))
        return x, None, present


def _normed(norm: Norm | nn.Identity, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum."""
    if added is None:
        return norm(x), x
    return norm.after(added, x) if isinstance(norm, RMSNorm) else (norm(x + added), x + added)


class Decoder(nn.Module):
    """The plain form; by `positions` query and key are turned, or they are added to the embeddings or to the scores.

    `head` may share the embedding; the norm behind post-norm layers is an Identity.
    """

    def __init__(
        self,
        words: nn.Embedding,
        positions: Positions,
        layers: Sequence[DecoderLayer | PostNormDecoderLayer],
        norm: Norm | nn.Identity,
        head: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words, self.positions, self.layers = words, positions, nn.ModuleList(layers)
        self.norm, self.head, self.dropout = norm, head, nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, _ = self.hidden(input_ids, attention_mask, [None] * len(self.layers))
        out: Tensor = self.head(x)
        return out

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, past: Sequence[Cache | None]
    ) -> tuple[Tensor, list[Cache]]:
        """Normed hidden states [B, S, d_model], and the cache with the new positions."""
        x: Tensor = self.words(input_ids)
        rotary, mask = None, causal_mask(attention_mask, input_ids, x.dtype)
        match self.positions:
            case RotaryPositions():
                rotary = self.positions
            case AlibiBias() | RelativeBias():
                bias = self.positions(mask.places[:1], mask.keys)  # [1, H, S, T]
                mask = mask._replace(bias=mask.bias + bias)
            case _:
                x = x + self.positions(running_positions(attention_mask).gather(1, mask.places))
        x, added, present = self.dropout(x), None, []
        for layer, cache in zip(self.layers, past, strict=True):
            x, added, grown = layer(x, added, mask, rotary, cache)
            present.append(grown)
        return _normed(self.norm, x, added)[0], present


class CachedDecoder(nn.Module):
    """The cached form over the same parameters, all tensors flat: key and value of each layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        input_ids, attention_mask, logits_at, *past = tensors
        caches = [Cache(key, value) for key, value in zip(past[::2], past[1::2], strict=True)]
        x, present = self.decoder.hidden(input_ids, attention_mask, caches)
        logits = self.decoder.head(x.index_select(1, logits_at))
        return logits, *_flat(present)


def _flat(caches: Sequence[Cache]) -> Iterator[Tensor]:
    for cache in caches:
        yield from cache
