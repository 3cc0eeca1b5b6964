"""Masks: which positions are real. `attention_mask` [B, T] holds 1 for real and 0 for padding, anywhere in the row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "KeyMask",
    "first_real",
    "key_mask",
    "key_mask_without_promise",
    "last_real",
    "mean_real",
    "pool",
    "visible",
    "within_reach",
]

# Added to the scores of keys out of reach: what the fused operator adds to those of padding, so far below any score
# that the weight is 0, and finite in every precision, twice too.
_OUT_OF_REACH = -10000.0


class KeyMask(NamedTuple):
    """What attention needs of a mask, computed once for all layers."""

    keys: Tensor  # [B, S] int32, 1 real and 0 padding
    row_is_real: Tensor | None  # [B, 1, 1] float, 0 where a row has no real position; None promises nothing there
    bias: Tensor | None = None  # [B or 1, H or 1, T, S], added to the scores


def key_mask(attention_mask: Tensor, dtype: torch.dtype) -> KeyMask:
    """From attention_mask [B, S] of any integer or bool dtype."""
    keys = (attention_mask != 0).to(torch.int32)
    return KeyMask(keys, keys.amax(dim=1).to(dtype)[:, None, None])


def key_mask_without_promise(attention_mask: Tensor) -> KeyMask:
    """For families whose own code promises nothing for a row without real positions: a product a layer less."""
    return KeyMask((attention_mask != 0).to(torch.int32), None)


def within_reach(mask: KeyMask, distance: Tensor, reach: int, dtype: torch.dtype) -> KeyMask:
    """Hides keys farther away than `reach`: distance [B or 1, T, S] between query and key.

    Padding with no real key within reach sees all real keys: with all hidden, the answer would be a matter of rounding.
    """
    seen = (distance.abs() <= reach)[:, None] & (mask.keys != 0)[:, None, None, :]  # [B, 1, T, S]
    shown = torch.zeros((), dtype=dtype, device=mask.keys.device)
    return mask._replace(bias=shown.where(seen | ~seen.any(dim=-1, keepdim=True), shown + _OUT_OF_REACH))


def visible(mask: KeyMask, queries: int, causal: bool) -> Tensor:
    """Which keys a query may see: bool [B, 1, 1, S], or [B, 1, T, S] when causal."""
    seen = (mask.keys != 0)[:, None, None, :]
    if not causal:
        return seen
    return seen & torch.ones(queries, mask.keys.shape[1], dtype=torch.bool, device=mask.keys.device).tril()


def first_real(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Pooling weights [B, T] that pick the first real position; zeros where there is none."""
    real = (attention_mask != 0).to(torch.int64)
    return ((real.cumsum(dim=1) == 1) & (real == 1)).to(dtype)


def last_real(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Pooling weights [B, T] that pick the last real position; zeros where there is none."""
    counted = (attention_mask != 0).to(torch.int64).cumsum(dim=1)
    return ((counted == counted[:, -1:]) & (attention_mask != 0)).to(dtype)


def mean_real(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Pooling weights [B, T] that average the real positions; zeros where there is none."""
    real = (attention_mask != 0).to(dtype)
    return real / real.sum(dim=1, keepdim=True).clamp(min=1)


def pool(x: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over positions: x [B, T, D], weights [B, T] -> [B, D]."""
    return (weights.unsqueeze(1) @ x).squeeze(1)
