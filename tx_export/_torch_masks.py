"""The masks that PyTorch's attention functions take, brought to what fused operators take. Shapes are [B, H, T, S]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["EVERYTHING", "Mask", "mask_of", "padding_and_pairs"]

_LOWEST = torch.finfo(torch.float32).min


class Mask(NamedTuple):
    """What a query may look at; all None: everything."""

    keys: Tensor | None = None  # bool [B, S]: the same keys for all queries and heads
    bias: Tensor | None = None  # float [1|B, 1|H, T, S], added to the scores; finite
    visible: Tensor | None = None  # bool [1|B, 1|H, 1|T, 1]: whether a query sees any key


EVERYTHING = Mask()


class _Part(NamedTuple):
    seen: Tensor  # bool, True where a query may look
    bias: Tensor | None  # finite, added to the scores


def mask_of(mask: Tensor, batch: int, queries: int, keys: int) -> Mask:
    """Of F.scaled_dot_product_attention: bool, True where a query may look, or float, added to the scores."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return _assembled(_part(mask, mask.dtype == torch.bool), batch, queries, keys)


def padding_and_pairs(
    padding: Tensor | None, pairs: Tensor | None, heads: int, batch: int, queries: int, keys: int
) -> Mask:
    """Of nn.MultiheadAttention: padding [B, S] and pairs [T, S] or [B H, T, S]; bool, True hides, or float, added."""
    parts = []
    if padding is not None:
        parts.append(_hiding(padding[:, None, None, :]))
    if pairs is not None:
        parts.append(_hiding(pairs[None, None] if pairs.ndim == 2 else torch.unflatten(pairs, 0, (-1, heads))))
    if not parts:
        return EVERYTHING
    part = parts[0] if len(parts) == 1 else _both(*parts)
    return _assembled(part, batch, queries, keys)


def _hiding(mask: Tensor) -> _Part:
    return _Part(~mask, None) if mask.dtype == torch.bool else _part(mask, False)


def _part(mask: Tensor, is_bool: bool) -> _Part:
    return _Part(mask, None) if is_bool else _Part(mask > -torch.inf, mask.clamp(min=_LOWEST))


def _both(one: _Part, other: _Part) -> _Part:
    biases = [bias for bias in (one.bias, other.bias) if bias is not None]
    bias = (biases[0] + biases[1]).clamp(min=_LOWEST) if len(biases) == 2 else biases[0] if biases else None
    return _Part(one.seen & other.seen, bias)


def _assembled(part: _Part, batch: int, queries: int, keys: int) -> Mask:
    seen, bias = part
    visible = seen.any(dim=-1, keepdim=True)
    if bias is None and _is_constant(seen, 1) and _is_constant(seen, 2):
        return Mask(keys=seen[:, 0, 0].expand(batch, keys), visible=visible[:, :1, :1])
    zero = torch.zeros((), dtype=torch.float32, device=seen.device)
    bias = torch.where(seen, zero if bias is None else bias.to(torch.float32), _LOWEST)
    if _is_constant(bias, 1):
        bias, visible = bias[:, :1], visible[:, :1]
    return Mask(bias=bias.expand(-1, -1, queries, keys), visible=visible)


def _is_constant(tensor: Tensor, axis: int) -> bool:
    """Whether it provably holds the same along an axis: one entry, or one that is read again and again."""
    return statically_known_true(tensor.shape[axis] == 1) or statically_known_true(tensor.stride(axis) == 0)
