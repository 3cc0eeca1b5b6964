"""Biases on the scores of attention, by the distance between query and key; computed once and shared by the layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["AlibiBias", "RelativeBias", "alibi_slopes", "distances", "relative_buckets"]


def distances(positions: Tensor) -> Tensor:
    """Key minus query: positions [B, T] -> int32 [B, T, T]."""
    places = positions.to(torch.int32)
    return places[:, None, :] - places[:, :, None]


def alibi_slopes(num_heads: int) -> Tensor:
    """2^(-8 i / n) for i = 1 .. n, a power of two; other numbers add every second slope of 2 n (Press et al. 2022)."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    between = [2 ** (-4 * i / whole) for i in range(1, 2 * whole + 1, 2)]
    return torch.tensor([*slopes, *between[: num_heads - whole]])


class AlibiBias(nn.Module):
    """-slope |distance|: positions [B, T] -> [B, H, T, T]."""

    slopes: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", -alibi_slopes(num_heads)[:, None, None], persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return distances(positions).abs().to(self.slopes.dtype)[:, None] * self.slopes


def relative_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Half of the buckets for keys behind the query; exact up to a quarter, then by logarithm (Raffel et al. 2020)."""
    half, exact = buckets // 2, buckets // 4
    size = distance.abs()
    scale = math.log(max_distance / exact)
    far = exact + (torch.log(size.float() / exact) / scale * (half - exact)).to(torch.int64)
    return (distance > 0) * half + torch.where(size < exact, size, far.clamp(max=half - 1))


class RelativeBias(nn.Module):
    """One number for each head and bucket of distances: positions [B, T] -> [B, H, T, T]."""

    buckets: Tensor

    def __init__(self, num_heads: int, buckets: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.table = nn.Embedding(buckets, num_heads)
        # All distances beyond max_distance share the last bucket.
        near = torch.arange(-max_distance, max_distance + 1)
        self.register_buffer("buckets", relative_buckets(near, buckets, max_distance), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        by_distance = self.table(self.buckets)  # [2 max_distance + 1, H]
        index = distances(positions).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return nn.functional.embedding(index, by_distance).permute(0, 3, 1, 2)
