"""Encoder layers, post-norm and pre-norm, and the built-in encoder made of them (Vaswani et al. 2017, section 3)."""

from __future__ import annotations

import abc
import math
from typing import Literal

from torch import Tensor, nn

from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.biases import AlibiBias, RelativeBias
from tx_export.models.parts.masks import KeyMask, key_mask
from tx_export.models.parts.positions import (
    LearnedPositions,
    RotaryPositions,
    Rotation,
    SinusoidalPositions,
    running_positions,
)

__all__ = [
    "Activation",
    "Encoder",
    "FeedForward",
    "GatedFeedForward",
    "Norm",
    "Positions",
    "PostNormLayer",
    "PreNormLayer",
]

Activation = Literal["relu", "gelu"]
Norm = Literal["post", "pre"]
Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "relative"]

_THETA = 10000.0  # of rotary positions


class FeedForward(nn.Module):
    """Position-wise: W2 act(W1 x)."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.activation = nn.ReLU() if activation == "relu" else nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return out


class GatedFeedForward(nn.Module):
    """W3 (act(W1 x) * W2 x), with W1 and W2 in one product (Shazeer 2020)."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, dropout: float, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 2 * d_ff, bias), nn.Linear(d_ff, d_model, bias)
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(self.dropout(self.activation(hidden) * gate))
        return out


class _Layer(nn.Module, abc.ABC):
    """What both orders of norm and residual are made of."""

    def __init__(
        self, attention: MultiHeadAttention, feed_forward: nn.Module, d_model: int, epsilon: float, dropout: float
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm = nn.LayerNorm(d_model, eps=epsilon)
        self.feed_forward_norm = nn.LayerNorm(d_model, eps=epsilon)
        self.dropout = nn.Dropout(dropout)

    @abc.abstractmethod
    def forward(self, x: Tensor, mask: KeyMask, rotation: Rotation | None = None) -> Tensor:
        """Hidden states [B, T, d_model] in and out."""


class PostNormLayer(_Layer):
    """x = norm(x + attention(x)); x = norm(x + feed_forward(x))."""

    def forward(self, x: Tensor, mask: KeyMask, rotation: Rotation | None = None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x, mask, rotation=rotation)))
        out: Tensor = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return out


class PreNormLayer(_Layer):
    """x = x + attention(norm(x)); x = x + feed_forward(norm(x))."""

    def forward(self, x: Tensor, mask: KeyMask, rotation: Rotation | None = None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, mask, rotation=rotation))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Encoder(nn.Module):
    """Embeddings times sqrt(d_model), then the layers; a pre-norm encoder ends with a norm.

    Positions are counted over real tokens; they are added to the embeddings, turn query and key, or bias the scores.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        d_ff: int,
        dropout: float,
        activation: Activation,
        norm: Norm,
        positions: Positions,
        relative: tuple[int, int],  # buckets and largest distance of relative positions
        epsilon: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)  # so that the scaled embeddings have unit variance
        self.kind, self.positions = positions, _positions(positions, max_length, d_model, num_heads, head_dim, relative)
        self.scale = math.sqrt(d_model)
        self.dropout = nn.Dropout(dropout)
        layer = PostNormLayer if norm == "post" else PreNormLayer
        self.layers = nn.ModuleList(
            layer(
                MultiHeadAttention(d_model, num_heads, head_dim, dropout),
                FeedForward(d_model, d_ff, activation, dropout),
                d_model,
                epsilon,
                dropout,
            )
            for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(d_model, eps=epsilon) if norm == "pre" else nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> hidden states [B, T, d_model]."""
        x = self.embedding(input_ids) * self.scale
        mask, rotation = key_mask(attention_mask, x.dtype), None
        positions = self.positions(running_positions(attention_mask))
        match self.kind:
            case "rotary":
                rotation = positions
            case "alibi" | "relative":
                mask = mask._replace(bias=positions)
            case _:
                x = x + positions
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask, rotation)
        out: Tensor = self.final_norm(x)
        return out


def _positions(
    kind: Positions, max_length: int, d_model: int, num_heads: int, head_dim: int, relative: tuple[int, int]
) -> nn.Module:
    match kind:
        case "sinusoidal":
            return SinusoidalPositions(max_length, d_model)
        case "learned":
            return LearnedPositions(max_length, d_model)
        case "rotary":
            return RotaryPositions(max_length, head_dim, _THETA)
        case "alibi":
            return AlibiBias(num_heads)
        case "relative":
            return RelativeBias(num_heads, *relative)
