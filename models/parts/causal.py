"""Causal self-attention with a cache of keys and values, and fewer key and value heads than query heads.

Query head h reads key and value head h // (H / K) (Ainslie et al. 2023). A position is a place in the cache, padding
counted: rotary angles are relative, so padding on the left changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from tx_export.models.parts.attention import HIDDEN, spelling
from tx_export.models.parts.biases import distances
from tx_export.models.parts.norms import RMSNorm
from tx_export.models.parts.positions import RotaryPositions, counted_positions

__all__ = ["Cache", "CausalMask", "CausalSelfAttention", "NormedCausalSelfAttention", "causal_mask"]

_FUSED = 8  # the fused operator takes heads of a multiple of so many channels
_TURNED_INSIDE = 16  # and turns those of a multiple of so many
_PADDING = -10000.0  # added to the scores of padding, as the fused encoder attention does


_Attributes = dict[str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]]


class Cache(NamedTuple):
    """Of one layer."""

    key: Tensor  # [B, K, P, head_dim], turned already
    value: Tensor  # [B, K, P, head_dim]


class CausalMask(NamedTuple):
    """What causal attention needs of a mask, computed once for all layers."""

    bias: Tensor  # [B, 1 or H, S, T], added to the scores; what is behind the query is hidden besides
    last: Tensor  # int32 [B]: T - 1
    total: Tensor  # int32 []: T
    places: Tensor  # int64 [B, S] of the new tokens in the cache, T - S to T - 1
    keys: Tensor  # int64 [1, T]: 0 to T - 1


def causal_mask(attention_mask: Tensor, input_ids: Tensor, dtype: torch.dtype) -> CausalMask:
    """From attention_mask [B, T], of the cache and the S new tokens, and input_ids [B, S]."""
    # Sums and products with zero instead of sizes: the graph then needs no arithmetic of shapes.
    is_padding = attention_mask[:, None, None, :] == (input_ids * 0)[:, None, :, None]  # [B, 1, S, T]
    bias = torch.where(is_padding, _PADDING, 0.0).to(dtype)
    last = (attention_mask * 0 + 1).to(torch.int32).sum(dim=1, dtype=torch.int32) - 1
    counted = counted_positions(input_ids)
    places = counted + (last[:, None] - counted[:, -1:])
    keys = counted_positions(attention_mask[:1])
    return CausalMask(bias, last, last.amax(dim=0) + 1, places, keys)


class CausalSelfAttention(nn.Module):
    """Heads of `head_dim` channels; a window of W shows a query its own position and the W - 1 before it.

    Scores are products times `scale`, 1 / sqrt(head_dim) if it is None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.dropout = window, dropout
        self.query = nn.Linear(d_model, num_heads * head_dim, bias)
        self.key = nn.Linear(d_model, num_kv_heads * head_dim, bias)
        self.value = nn.Linear(d_model, num_kv_heads * head_dim, bias)
        self.output = nn.Linear(num_heads * head_dim, d_model, output_bias)

    def forward(
        self, x: Tensor, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        """x [B, S, d_model] behind the P positions of the cache; returns [B, S, d_model] and the cache of P + S."""
        if spelling() == "fused" and past is not None and self.head_dim % _FUSED == 0:
            context, present = self._fused(x, mask, rotary, past)
        else:
            weights, v, present = self._weighed(x, mask, rotary, past)
            weights = nn.functional.dropout(weights, self.dropout, self.training)
            context = rearrange(weights @ v, "b h s d -> b s (h d)")
        out: Tensor = self.output(context)
        return out, present

    def _packed(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` times query, key and value, as one product [B, S, (H + 2 K) head_dim]; the graph holds one weight."""
        parts = (self.query, self.key, self.value)
        scales = (scale, 1.0, 1.0)
        weight = _scaled([part.weight for part in parts], scales)
        bias = _scaled([part.bias for part in parts], scales) if self.query.bias is not None else None
        return nn.functional.linear(x, weight, bias)

    def weights(self, x: Tensor, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None) -> Tensor:
        """The attention weights [B, H, S, P + S] of what forward takes; each row sums to 1."""
        return self._weighed(x, mask, rotary, past)[0]

    def _weighed(
        self, x: Tensor, mask: CausalMask, rotary: RotaryPositions | None, past: Cache | None
    ) -> tuple[Tensor, Tensor, Cache]:
        """The attention weights, and the values [B, H, P + S, head_dim] that they weigh; then the longer cache."""
        q, k, v = (rearrange(part, "b s (h d) -> b h s d", d=self.head_dim) for part in self._split(x))
        if rotary is not None:
            q, k = rotary.turn(q, mask.places[0]), rotary.turn(k, mask.places[0])
        (k, v), present = _joined(past, Cache(k, v), mask)
        groups = self.num_heads // self.num_kv_heads
        k, v = (repeat(part, "b k t d -> b (k g) t d", g=groups) for part in (k, v))
        scores = q @ k.transpose(-2, -1) * self.scale + mask.bias
        distance = distances(mask.places[:1], mask.keys)[:, None]
        hidden = distance > 0 if self.window is None else (distance > 0) | (distance <= -self.window)
        return scores.masked_fill(hidden, HIDDEN).softmax(dim=-1), v, present

    def _split(self, x: Tensor, scale: float = 1.0) -> Sequence[Tensor]:
        """`scale` times query, key and value [B, S, ...]."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return torch.split(self._packed(x, scale), [count * self.head_dim for count in counts], dim=-1)

    def _for_operator(self, x: Tensor) -> Sequence[Tensor | None]:
        """As the fused operator takes them, packed in the place of the query, which is scaled already."""
        return (self._packed(x, self.scale), None, None)

    def _fused(self, x: Tensor, mask: CausalMask, rotary: RotaryPositions | None, past: Cache) -> tuple[Tensor, Cache]:
        batch, tokens, _ = x.shape
        grown = (batch, self.num_kv_heads, past.key.shape[2] + tokens, self.head_dim)
        # The weights hold the scale: products without one read the cache as it lies where there is a single query.
        attributes: _Attributes = {"num_heads": self.num_heads, "kv_num_heads": self.num_kv_heads, "scale": 1.0}
        tables: tuple[Tensor | None, ...] = (None, None)
        if rotary is None or self.head_dim % _TURNED_INSIDE == 0:
            qkv = self._for_operator(x)
            if rotary is not None:
                tables, attributes["do_rotary"] = (rotary.cos, rotary.sin), 1
        else:
            q, k, v = self._split(x, self.scale)
            turn = rotary(mask.places).fused
            qkv = (turn(q, self.num_heads), turn(k, self.num_kv_heads), v)
        if self.window is not None:
            attributes["local_window_size"] = self.window
        context, key, value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*qkv, past.key, past.value, mask.last, mask.total, *tables, None, mask.bias),
            attributes,
            dtypes=[x.dtype] * 3,
            shapes=[(batch, tokens, self.num_heads * self.head_dim), grown, grown],
            version=1,
        )
        return context, Cache(key, value)


def _scaled(parts: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """The parts as one; nothing is multiplied by 1, which would leave a node to fold."""
    return torch.cat([part if scale == 1 else part * scale for part, scale in zip(parts, scales, strict=True)])


def _joined(past: Cache | None, new: Cache, mask: CausalMask) -> tuple[Cache, Cache]:
    """The keys and values of all T positions, and the cache that holds them.

    In a graph a cache may have room behind its positions; it keeps its size then, as that of the fused operator does.
    """
    if past is None:
        return new, new
    joined = Cache(*(torch.cat(pair, dim=2) for pair in zip(past, new, strict=True)))
    if not torch.onnx.is_in_onnx_export():
        return joined, joined
    room = past.key.shape[2]
    held = torch.arange(torch.sym_max(room, mask.keys.shape[1]))  # type: ignore[no-untyped-call]
    return _picked(joined, mask.keys[0], mask, room), _picked(joined, held, mask, room)


def _picked(joined: Cache, places: Tensor, mask: CausalMask, room: int) -> Cache:
    """What stands at the places in the cache; the new tokens are joined behind its room."""
    start = mask.places[0, 0]
    is_new = (places >= start) & (places <= mask.last[0])
    index = torch.where(is_new, places - start + room, places)
    return Cache(*(part.index_select(2, index) for part in joined))


class NormedCausalSelfAttention(CausalSelfAttention):
    """Each head's query and key are normed before they are turned."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        epsilon: float,
        bias: bool,
        window: int | None,
    ) -> None:
        super().__init__(d_model, num_heads, num_kv_heads, head_dim, bias, bias, window)
        self.query_norm, self.key_norm = RMSNorm(head_dim, epsilon), RMSNorm(head_dim, epsilon)

    def _split(self, x: Tensor, scale: float = 1.0) -> Sequence[Tensor]:
        q, k, v = super()._split(x)  # a norm has no scale of what it reads
        return (self._normed(self.query_norm, q, scale), self._normed(self.key_norm, k), v)

    def _for_operator(self, x: Tensor) -> Sequence[Tensor | None]:
        return self._split(x, self.scale)

    def _normed(self, norm: RMSNorm, x: Tensor, scale: float = 1.0) -> Tensor:
        heads = rearrange(x, "b s (h d) -> b s h d", d=self.head_dim)
        flat: Tensor = rearrange(norm(heads, scale), "b s h d -> b s (h d)")
        return flat
