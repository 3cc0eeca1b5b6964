"""Layers whose products hold their weights as [inputs, outputs], the other way round than torch does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tx_export.models.parts.causal import CausalSelfAttention

__all__ = ["PackedCausalSelfAttention", "TurnedFeedForward", "TurnedLinear"]


class TurnedLinear(nn.Module):
    """x W + b with W [inputs, outputs], as GPT-2's checkpoints hold it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TurnedFeedForward(nn.Module):
    """Position-wise: activation(x W1) W2."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down = TurnedLinear(d_model, d_ff), TurnedLinear(d_ff, d_model)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class PackedCausalSelfAttention(CausalSelfAttention):
    """Query, key and value are one product, in this order along its output."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__(d_model, num_heads, num_heads, d_model // num_heads, dropout=dropout)
        del self.query, self.key, self.value
        self.qkv = TurnedLinear(d_model, 3 * d_model)
        self.output = TurnedLinear(d_model, d_model)  # type: ignore[assignment]

    def _packed(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if scale == 1:
            out: Tensor = self.qkv(x)
            return out
        width = self.num_heads * self.head_dim
        scales = torch.cat([x.new_full((width,), scale), x.new_ones(2 * width)])
        return x @ (self.qkv.weight * scales) + self.qkv.bias * scales
