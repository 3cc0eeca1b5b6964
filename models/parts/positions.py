"""Positions: tables that are added to embeddings, rotations of query and key, and what is counted as a position.

The running count of real positions makes left padding harmless; biases on scores stand in `biases.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

__all__ = [
    "LearnedPositions",
    "RotaryPositions",
    "Rotation",
    "SinusoidalPositions",
    "counted_positions",
    "running_positions",
    "sinusoidal_table",
]


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
    """A fixed table: positions int64 [B, T] -> [B, T, d_model]."""

    table: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoidal_table(max_length, d_model), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.table)


class LearnedPositions(nn.Module):
    """A trained table: positions int64 [B, T] -> [B, T, d_model]."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_length, d_model)

    def forward(self, positions: Tensor) -> Tensor:
        out: Tensor = self.table(positions)
        return out


class Rotation(NamedTuple):
    """Turns each pair of channels (i, i + head_dim / 2) by its angle at the position (Su et al. 2021)."""

    positions: Tensor  # int64 [B, T]
    frequencies: Tensor  # [head_dim / 2]: an angle is position times frequency
    cos: Tensor  # [max_length, head_dim / 2], of all angles
    sin: Tensor

    def plain(self, x: Tensor, num_heads: int) -> Tensor:
        """[B, T, H head_dim] in and out."""
        angles = self.positions[:, :, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = rearrange(x, "b t (h d) -> b t h d", h=num_heads).chunk(2, dim=-1)
        return rearrange(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), "b t h d -> b t (h d)")

    def fused(self, x: Tensor, num_heads: int) -> Tensor:
        """The same as one operator."""
        return torch.onnx.ops.symbolic(
            "com.microsoft::RotaryEmbedding",
            (x, self.positions, self.cos, self.sin),
            {"num_heads": num_heads},
            dtype=x.dtype,
            shape=x.shape,
            version=1,
        )


class RotaryPositions(nn.Module):
    """Frequencies theta^(-2 i / head_dim), all in float32 as checkpoints were trained."""

    frequencies: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, max_length: int, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(max_length)[:, None] * frequencies
        for name, tensor in (("frequencies", frequencies), ("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, tensor, persistent=False)

    def scale(self, factors: Tensor) -> None:
        """Multiply the frequencies by factors [head_dim / 2]."""
        self.frequencies = self.frequencies * factors
        angles = torch.arange(len(self.cos))[:, None] * self.frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def turn(self, x: Tensor, places: Tensor) -> Tensor:
        """x [B, H, S, head_dim] at the positions int64 [S] of every row, in and out."""
        cos, sin = self.cos[places], self.sin[places]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def forward(self, positions: Tensor) -> Rotation:
        """Of positions int64 [B, T]."""
        return Rotation(positions, self.frequencies, self.cos, self.sin)
