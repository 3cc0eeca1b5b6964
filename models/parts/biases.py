"""Biases on the scores of attention, by the distance between query and key; computed once and shared by the layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["AlibiBias", "RelativeBias", "alibi_slopes", "causal_buckets", "distances", "relative_buckets"]


def distances(queries: Tensor, keys: Tensor | None = None) -> Tensor:
    """Key minus query: positions of queries [B, S], and of keys [B, T] if they are others -> int32 [B, S, T]."""
    places = queries.to(torch.int32)
    return (places if keys is None else keys.to(torch.int32))[:, None, :] - places[:, :, None]


def alibi_slopes(num_heads: int) -> Tensor:
    """2^(-8 i / n) for i = 1 .. n, a power of two; other numbers add every second slope of 2 n (Press et al. 2022)."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    between = [2 ** (-4 * i / whole) for i in range(1, 2 * whole + 1, 2)]
    return torch.tensor([*slopes, *between[: num_heads - whole]])


class AlibiBias(nn.Module):
    """-slope |distance|, of the positions that `distances` takes -> [B, H, S, T]."""

    slopes: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", -alibi_slopes(num_heads)[:, None, None], persistent=False)

    def forward(self, queries: Tensor, keys: Tensor | None = None) -> Tensor:
        return distances(queries, keys).abs().to(self.slopes.dtype)[:, None] * self.slopes


def relative_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Half of the buckets for keys behind the query, half for those ahead (Raffel et al. 2020)."""
    half = buckets // 2
    return (distance > 0) * half + _by_size(distance.abs(), half, max_distance)


def causal_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """All buckets for keys behind the query; those ahead share the first."""
    return _by_size((-distance).clamp(min=0), buckets, max_distance)


def _by_size(size: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Exact in the first half of the buckets, then by logarithm."""
    exact = buckets // 2
    scale = math.log(max_distance / exact)
    far = exact + (torch.log(size.float() / exact) / scale * (buckets - exact)).to(torch.int64)
    return torch.where(size < exact, size, far.clamp(max=buckets - 1))


class RelativeBias(nn.Module):
    """One number for each head and bucket, of the positions that `distances` takes -> [B, H, S, T]."""

    buckets: Tensor

    def __init__(
        self,
        num_heads: int,
        buckets: int,
        max_distance: int,
        in_buckets: Callable[[Tensor, int, int], Tensor] = relative_buckets,
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.table = nn.Embedding(buckets, num_heads)
        # All distances beyond max_distance share the last bucket.
        near = torch.arange(-max_distance, max_distance + 1)
        self.register_buffer("buckets", in_buckets(near, buckets, max_distance), persistent=False)

    def forward(self, queries: Tensor, keys: Tensor | None = None) -> Tensor:
        by_distance = self.table(self.buckets)  # [2 max_distance + 1, H]
        index = distances(queries, keys).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return nn.functional.embedding(index, by_distance).permute(0, 3, 1, 2)
