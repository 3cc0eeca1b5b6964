"""Positions: the running count of real positions looks up a fixed or a learned table; so left padding is harmless."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LearnedPositions", "SinusoidalPositions", "counted_positions", "running_positions", "sinusoidal_table"]


def counted_positions(input_ids: Tensor) -> Tensor:
    """0, 1, 2, ... in every row, whatever the mask: ids [B, T] -> int64 [B, T]; a sum of ones reads no shape."""
    return (input_ids >= 0).to(torch.int64).cumsum(dim=1) - 1


def running_positions(attention_mask: Tensor) -> Tensor:
    """The number of real positions before each: [B, T] -> int64 [B, T], 0 at the first real one and before."""
    return ((attention_mask != 0).to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """sin on even and cos on odd channels of position / 10000^(2 (i // 2) / d_model) (Vaswani et al. 2017, 3.5).

    Returns [length, d_model]; an odd d_model has one cosine channel fewer.
    """
    channel = torch.arange(d_model, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (2 * (channel // 2) / d_model)
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).to(torch.float32)


class SinusoidalPositions(nn.Module):
    """A fixed table; takes attention_mask [B, T] and gives [B, T, d_model]."""

    table: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoidal_table(max_length, d_model), persistent=False)

    def forward(self, attention_mask: Tensor) -> Tensor:
        return nn.functional.embedding(running_positions(attention_mask), self.table)


class LearnedPositions(nn.Module):
    """A trained table; takes attention_mask [B, T] and gives [B, T, d_model]."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_length, d_model)

    def forward(self, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.table(running_positions(attention_mask))
        return out
