"""Cross-attention of a decoder: queries from the decoder, keys and values from the encoder, made once per source."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from tx_export.models.parts.attention import HIDDEN, spelling
from tx_export.models.parts.causal import Cache
from tx_export.models.parts.masks import KeyMask, visible

__all__ = ["CrossAttention"]


class CrossAttention(nn.Module):
    """softmax(scale q k^T) v for each head, over the real positions of the source; scale None is 1 / sqrt(head_dim)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        self.query = nn.Linear(d_model, num_heads * head_dim, bias)
        self.key = nn.Linear(d_model, num_heads * head_dim, bias)
        self.value = nn.Linear(d_model, num_heads * head_dim, bias)
        self.output = nn.Linear(num_heads * head_dim, d_model, bias)

    def memory(self, encoded: Tensor, row_is_real: Tensor) -> Cache:
        """Keys and values [B, H, T, head_dim] of the encoded source [B, T, d_model].

        Where row_is_real [B, 1, 1] is 0 the values are: whatever the weights, such a row attends to nothing.
        """
        key, value = (self._heads(product(encoded)) for product in (self.key, self.value))
        return Cache(key, value * row_is_real[:, None])

    def forward(self, x: Tensor, memory: Cache, mask: KeyMask) -> Tensor:
        """x [B, S, d_model] attends to the memory where mask [B, T] is real; returns [B, S, d_model]."""
        out: Tensor = self.output(self._context(self.query(x), memory, mask))
        return out

    def weights(self, x: Tensor, memory: Cache, mask: KeyMask) -> Tensor:
        """The attention weights [B, H, S, T]; each row sums to 1, or to 0 where no position is real."""
        return self._weights(self.query(x), memory, mask) * visible(mask, x.shape[1], causal=False)

    def _context(self, q: Tensor, memory: Cache, mask: KeyMask) -> Tensor:
        match spelling():
            case "fused":
                return torch.onnx.ops.symbolic(
                    "com.microsoft::MultiHeadAttention",
                    (q, memory.key, memory.value, None, mask.keys),
                    {"num_heads": self.num_heads, "scale": self.scale},
                    dtype=q.dtype,
                    shape=q.shape,
                    version=1,
                )
            case "attention":
                # The CPU kernel of ONNX Runtime wants the query axis of the mask in full.
                seen = visible(mask, q.shape[1], causal=False).expand(-1, -1, q.shape[1], -1)
                context, *_ = torch.onnx.ops.attention(self._heads(q), memory.key, memory.value, seen, scale=self.scale)
            case "plain":
                weights = self._weights(q, memory, mask)
                context = nn.functional.dropout(weights, self.dropout, self.training) @ memory.value
        out: Tensor = rearrange(context, "b h s d -> b s (h d)")
        return out

    def _weights(self, q: Tensor, memory: Cache, mask: KeyMask) -> Tensor:
        scores = self._heads(q) @ memory.key.transpose(-2, -1) * self.scale
        return scores.masked_fill(~visible(mask, q.shape[1], causal=False), HIDDEN).softmax(dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        if not torch.onnx.is_in_onnx_export():
            return rearrange(x, "b t (h d) -> b h t d", d=self.head_dim)
        # Sizes that are kept are not read: of two halves in one graph, one must not read an input of the other.
        sizes = torch.tensor([0, 0, self.num_heads, self.head_dim])
        split = torch.onnx.ops.symbolic(
            "Reshape", (x, sizes), dtype=x.dtype, shape=(*x.shape[:2], self.num_heads, self.head_dim)
        )
        return split.transpose(1, 2)
