"""Multi-head attention: softmax(scale q k^T + bias) v for each head (Vaswani et al. 2017, section 3.2).

In eager the einops form runs; while exporting, one fused operator a layer is emitted instead. A row without a real key
attends to nothing: its context is zero, in both.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from tx_export.models.parts.masks import KeyMask, visible
from tx_export.models.parts.positions import Rotation

__all__ = ["HIDDEN", "Attention", "MultiHeadAttention", "Ops", "PackedSelfAttention", "emitting", "spelling"]

Ops = Literal["fused", "attention", "plain"]
# What a hidden score becomes: the lowest number of float16, so that it is finite in every precision.
HIDDEN = -65504.0
_ops: ContextVar[Ops] = ContextVar("ops", default="plain")


@contextmanager
def emitting(ops: Ops) -> Iterator[None]:
    """While exporting: `fused` com.microsoft::MultiHeadAttention, `attention` Attention of opset 23, or `plain`."""
    token = _ops.set(ops)
    try:
        yield
    finally:
        _ops.reset(token)


def spelling() -> Ops:
    """How operators are written now: `plain` unless a graph is being made."""
    return _ops.get() if torch.onnx.is_in_onnx_export() else "plain"


class Attention(nn.Module, abc.ABC):
    """Attention of `num_heads` heads of `head_dim` channels, however query, key and value are made.

    Scores are products times `scale`, 1 / sqrt(head_dim) if it is None.
    """

    def __init__(
        self, d_model: int, num_heads: int, head_dim: int, dropout: float, bias: bool, scale: float | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        self.scale = head_dim**-0.5 if scale is None else scale
        self.output = nn.Linear(num_heads * head_dim, d_model, bias)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, causal: bool = False, rotation: Rotation | None = None
    ) -> Tensor:
        """q [B, T, H head_dim], k and v [B, S, H head_dim] -> [B, T, d_model]."""
        ops = spelling()
        if rotation is not None:
            rotate = rotation.fused if ops == "fused" else rotation.plain
            q, k = rotate(q, self.num_heads), rotate(k, self.num_heads)
        if ops == "fused":
            context = self._fused(q, k, v, mask, causal)
        elif ops == "attention":
            context = self._standard(q, k, v, mask, causal)
        else:
            weights = nn.functional.dropout(self._weights(q, k, mask, causal), self.dropout, self.training)
            context = rearrange(weights @ self._heads(v), "b h t d -> b t (h d)")
        out: Tensor = self.output(context)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h d) -> b h t d", h=self.num_heads)

    def _weights(self, q: Tensor, k: Tensor, mask: KeyMask, causal: bool) -> Tensor:
        scores = self._heads(q) @ self._heads(k).transpose(-2, -1) * self.scale
        scores = scores if mask.bias is None else scores + mask.bias
        seen = visible(mask, q.shape[1], causal)  # [B, 1, T or 1, S]
        # Without a visible key all scores are equal, and the even weights are then set to zero.
        weights = scores.masked_fill(~seen, HIDDEN).softmax(dim=-1)
        return weights * seen.any(dim=-1, keepdim=True)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, causal: bool) -> Tensor:
        # Quantized attention has no attribute for the scale, so the usual one goes without saying.
        own = {} if self.scale == self.head_dim**-0.5 else {"scale": self.scale}
        context = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (q, k, v, None, mask.keys) if mask.bias is None else (q, k, v, None, mask.keys, mask.bias),
            {"num_heads": self.num_heads, "unidirectional": int(causal), **own},
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )
        # The operator gives a row without real keys the mean of the padding.
        return context if mask.row_is_real is None else context * mask.row_is_real

    def _standard(self, q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, causal: bool) -> Tensor:
        seen = visible(mask, q.shape[1], causal)
        scores = seen if mask.bias is None else mask.bias.where(seen, mask.bias.new_full((), HIDDEN))
        context, *_ = torch.onnx.ops.attention(
            q,
            k,
            v,
            # The CPU kernel of ONNX Runtime wants the query axis in full.
            scores.expand(-1, -1, q.shape[1], -1),
            q_num_heads=self.num_heads,
            kv_num_heads=self.num_heads,
            scale=self.scale,
        )
        return context if mask.row_is_real is None else context * mask.row_is_real


class MultiHeadAttention(Attention):
    """A product each for query, key and value; the heads need not multiply to d_model."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, dropout, bias, scale)
        self.query = nn.Linear(d_model, num_heads * head_dim, bias)
        self.key = nn.Linear(d_model, num_heads * head_dim, bias)
        self.value = nn.Linear(d_model, num_heads * head_dim, bias)

    def forward(
        self, x: Tensor, memory: Tensor, mask: KeyMask, causal: bool = False, rotation: Rotation | None = None
    ) -> Tensor:
        """x [B, T, d_model] attends to memory [B, S, d_model] where mask [B, S] is real; returns [B, T, d_model].

        `causal` hides keys behind the query, counted from the front (T == S).
        """
        return self.attend(self.query(x), self.key(memory), self.value(memory), mask, causal, rotation)

    def weights(self, x: Tensor, memory: Tensor, mask: KeyMask, causal: bool = False) -> Tensor:
        """The attention weights [B, H, T, S]; each row sums to 1, or to 0 where no key is visible."""
        return self._weights(self.query(x), self.key(memory), mask, causal)


class PackedSelfAttention(Attention):
    """One product for query, key and value, in this order along its output."""

    def __init__(self, d_model: int, num_heads: int, head_dim: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(d_model, num_heads, head_dim, dropout, bias)
        self.qkv = nn.Linear(d_model, 3 * num_heads * head_dim, bias)

    def forward(self, x: Tensor, mask: KeyMask, rotation: Rotation | None = None) -> Tensor:
        """Hidden states [B, T, d_model] in and out."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.attend(q, k, v, mask, rotation=rotation)
