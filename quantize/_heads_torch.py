"""nn.MultiheadAttention with some of its heads: its heads need not multiply to its width, which torch's own form asks.

Called as torch's, with the same results in eager; the attention is one call of F.scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tx_export.quantize._units import kept_columns, kept_rows, repeated

__all__ = ["KeptTorchHeads", "is_plain", "value_rows"]


def is_plain(layer: nn.MultiheadAttention) -> bool:
    """Whether it has nothing beside its heads: no key and value of its own, no zeros added."""
    return type(layer) is nn.MultiheadAttention and layer.bias_k is None and not layer.add_zero_attn


def value_rows(layer: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Weight, and bias if there is one, of the values: [E, ...] each."""
    return tuple(tensor for tensor in _projections(layer)[2] if tensor is not None)


class KeptTorchHeads(nn.Module):
    """Stands in the place of an nn.MultiheadAttention, with the heads `kept` of it."""

    # What torch's encoder reads before it takes its fast path, which knows no such attention.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, layer: nn.MultiheadAttention, kept: tuple[int, ...]) -> None:
        super().__init__()
        self.kept, self.of = kept, layer.num_heads
        self.embed_dim, self.num_heads, self.head_dim = layer.embed_dim, len(kept), layer.head_dim
        self.batch_first, self.dropout = layer.batch_first, layer.dropout
        rows = repeated(kept, layer.head_dim)
        self.query, self.key, self.value = (_linear(*made) for made in _projections(layer))
        self.output = _linear(layer.out_proj.weight, layer.out_proj.bias)
        for linear in (self.query, self.key, self.value):
            kept_rows(linear, rows)
        kept_columns(self.output, rows)
        self.train(layer.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention documents it; averaged weights are the mean of the heads that are left."""
        if query.ndim == 2:
            padding = None if key_padding_mask is None else key_padding_mask[None]
            q, k, v = query[None], key[None], value[None]
        else:
            padding = key_padding_mask
            q, k, v = (x if self.batch_first else x.transpose(0, 1) for x in (query, key, value))
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        q, k, v = self._heads(self.query(q)), self._heads(self.key(k)), self._heads(self.value(v))
        causal = is_causal and padding is None and not need_weights
        # The hint says what the mask holds, and torch takes its word.
        mask = None if causal else self._mask(padding, attn_mask)
        weights = self._weights(q, k, mask) if need_weights else None
        if weights is None:
            dropout = self.dropout if self.training else 0.0
            context = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        else:
            context = nn.functional.dropout(weights, self.dropout, self.training) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        out: Tensor = self.output(context.transpose(1, 2).flatten(2))
        if query.ndim == 2:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H D] -> [B, H, T, D]."""
        return torch.unflatten(x, 2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, padding: Tensor | None, pairs: Tensor | None) -> Tensor | None:
        """padding [B, S] and pairs [T, S] or [B heads, T, S], bool that hides or float -> [1|B, 1|H, 1|T, S]."""
        masks = []
        if padding is not None:
            masks.append(padding[:, None, None, :])
        if pairs is not None and pairs.ndim == 2:
            masks.append(pairs[None, None])
        elif pairs is not None:
            masks.append(torch.cat([torch.unflatten(pairs, 0, (-1, self.of))[:, i : i + 1] for i in self.kept], dim=1))
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
        added = [_added(mask) for mask in masks]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, T, S]."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(dim=-1)


def _added(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)


def _projections(layer: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight [E, ...] and bias [E] of query, key and value."""
    packed: Tensor | None = layer.in_proj_weight  # None where query, key and value differ in width
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    weights: Sequence[Any] = separate if packed is None else packed.detach().chunk(3)
    biases: Sequence[Any] = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.detach().chunk(3)
    return list(zip(weights, biases, strict=True))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), weight.requires_grad)
    return linear
