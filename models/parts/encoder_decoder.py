"""Encoder-decoder Transformers (Vaswani et al. 2017): an encoder, and a decoder that attends to what it made.

plain    input_ids, attention_mask [B, T], decoder_input_ids [B, S]              -> logits [B, S, V]
cached   the source as above                                                     -> its keys and values for each layer
         with these: the mask of the source [B, T], decoder_input_ids [B, S],
         decoder_attention_mask [B, P + S], logits_at [L], the cache of P        -> logits [B, L, V], the cache of P + S
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tx_export.models.parts.biases import AlibiBias, RelativeBias
from tx_export.models.parts.causal import Cache, CausalMask, CausalSelfAttention, causal_mask
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.masks import KeyMask, key_mask
from tx_export.models.parts.positions import running_positions

__all__ = [
    "CachedEncoderDecoder",
    "CrossLayer",
    "EncoderDecoder",
    "PostNormCrossLayer",
    "PreNormCrossLayer",
    "TokenEmbedding",
]


class TokenEmbedding(nn.Module):
    """norm(scale * words + positions), ids and their positions [B, S] -> [B, S, d_model]."""

    def __init__(
        self,
        words: nn.Embedding,
        positions: nn.Module,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words, self.positions, self.scale = words, positions, scale
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(self.words(ids) * self.scale + self.positions(places)))
        return out


class CrossLayer(nn.Module, abc.ABC):
    """What both orders of norm and residual are made of: self-attention, cross-attention and feed-forward."""

    def __init__(
        self,
        attention: CausalSelfAttention,
        cross_attention: CrossAttention,
        feed_forward: nn.Module,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.feed_forward = attention, cross_attention, feed_forward
        self.attention_norm, self.cross_attention_norm, self.feed_forward_norm = norms
        self.dropout = nn.Dropout(dropout)

    @abc.abstractmethod
    def forward(
        self, x: Tensor, mask: CausalMask, past: Cache | None, memory: Cache, source: KeyMask
    ) -> tuple[Tensor, Cache]:
        """Hidden states [B, S, d_model] in and out, and the cache with the new positions."""


class PostNormCrossLayer(CrossLayer):
    """x = norm(x + f(x)) for self-attention, cross-attention and feed-forward f."""

    def forward(
        self, x: Tensor, mask: CausalMask, past: Cache | None, memory: Cache, source: KeyMask
    ) -> tuple[Tensor, Cache]:
        attended, present = self.attention(x, mask, None, past)
        x = self.attention_norm(x + self.dropout(attended))
        x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory, source)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), present


class PreNormCrossLayer(CrossLayer):
    """x = x + f(norm(x)) for self-attention, cross-attention and feed-forward f."""

    def forward(
        self, x: Tensor, mask: CausalMask, past: Cache | None, memory: Cache, source: KeyMask
    ) -> tuple[Tensor, Cache]:
        attended, present = self.attention(self.attention_norm(x), mask, None, past)
        x = x + self.dropout(attended)
        x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), memory, source))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), present


class EncoderDecoder(nn.Module):
    """The plain form; embeddings and head may share their weights, and all layers share a bias on what is decoded."""

    def __init__(
        self,
        encoder: nn.Module,
        embedding: nn.Module,
        layers: Sequence[CrossLayer],
        norm: nn.Module,
        head: nn.Module,
        bias: AlibiBias | RelativeBias | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.embedding, self.layers = encoder, embedding, nn.ModuleList(layers)
        self.norm, self.head, self.bias = norm, head, bias

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Ids and mask [B, T] of the source, ids [B, S] of the target so far -> logits [B, S, V] of what follows."""
        cross = self.encode(input_ids, attention_mask)
        x, _ = self.decode(decoder_input_ids, None, attention_mask, cross, [None] * len(cross))
        return self.logits(x)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> list[Cache]:
        """Keys and values of the source [B, H, T, head_dim] for each layer of the decoder."""
        encoded: Tensor = self.encoder(input_ids, attention_mask)
        row_is_real = (attention_mask != 0).to(torch.int32).amax(dim=1).to(encoded.dtype)[:, None, None]
        return [layer.cross_attention.memory(encoded, row_is_real) for layer in self._layers()]

    def decode(
        self,
        decoder_input_ids: Tensor,  # [B, S]
        decoder_attention_mask: Tensor | None,  # [B, P + S]; None: all are real
        attention_mask: Tensor,  # [B, T]
        cross: Sequence[Cache],
        past: Sequence[Cache | None],
    ) -> tuple[Tensor, list[Cache]]:
        """Hidden states [B, S, d_model], and the cache with the new positions."""
        real = torch.ones_like(decoder_input_ids) if decoder_attention_mask is None else decoder_attention_mask
        dtype = cross[0].key.dtype
        mask, source, present = causal_mask(real, decoder_input_ids, dtype), key_mask(attention_mask, dtype), []
        if self.bias is not None:
            mask = mask._replace(bias=mask.bias + self.bias(mask.places[:1], mask.keys))
        x: Tensor = self.embedding(decoder_input_ids, running_positions(real).gather(1, mask.places))
        for layer, memory, cache in zip(self._layers(), cross, past, strict=True):
            x, grown = layer(x, mask, cache, memory, source)
            present.append(grown)
        return self.norm(x), present

    def attention_weights(
        self,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None,
        attention_mask: Tensor,
        cross: Sequence[Cache],
        past: Sequence[Cache | None],
    ) -> list[tuple[Tensor, Tensor]]:
        """What `decode` weighs with: for each layer [B, H, S, P + S] of the target and [B, H, S, T] of the source."""
        found: list[Tensor] = []

        def keep(attention: nn.Module, taken: tuple[Any, ...]) -> None:
            assert isinstance(attention, CausalSelfAttention | CrossAttention)
            found.append(attention.weights(*taken))

        parts = [part for layer in self._layers() for part in (layer.attention, layer.cross_attention)]
        hooks = [part.register_forward_pre_hook(keep) for part in parts]
        try:
            self.decode(decoder_input_ids, decoder_attention_mask, attention_mask, cross, past)
        finally:
            for hook in hooks:
                hook.remove()
        return list(zip(found[::2], found[1::2], strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, S, d_model] -> [B, S, V]."""
        out: Tensor = self.head(hidden)
        return out

    def _layers(self) -> Sequence[CrossLayer]:
        return [layer for layer in self.layers if isinstance(layer, CrossLayer)]


class CachedEncoderDecoder(nn.Module):
    """The cached form over the same parameters: two halves in one graph, the decoder's reads nothing of the encoder's.

    Tensors are flat, key and value of each layer: those of the source as the decoder's half takes them, then the cache.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, logits_at, *flat = tensors
        caches = [Cache(key, value) for key, value in zip(flat[::2], flat[1::2], strict=True)]
        cross, past = caches[: len(caches) // 2], caches[len(caches) // 2 :]
        encoded = self.model.encode(input_ids, attention_mask)
        x, present = self.model.decode(decoder_input_ids, decoder_attention_mask, attention_mask, cross, past)
        logits = self.model.logits(x.index_select(1, logits_at))
        return *_flat(encoded), logits, *_flat(present)


def _flat(caches: Sequence[Cache]) -> Iterator[Tensor]:
    for cache in caches:
        yield from cache
