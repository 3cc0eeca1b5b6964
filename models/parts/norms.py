"""Root mean square norm: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tx_export.models.parts.attention import spelling

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Over the last axis, computed in float32 at least."""

    def __init__(self, d_model: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(d_model)), epsilon

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """`scale` times the norm of x [..., d_model]."""
        weight = self.weight if scale == 1 else self.weight * scale
        if spelling() == "fused":
            return torch.onnx.ops.symbolic(
                "SimplifiedLayerNormalization",
                (x, weight),
                {"axis": -1, "epsilon": self.epsilon, "stash_type": 1},
                dtype=x.dtype,
                shape=x.shape,
            )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * (wide.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype)

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual."""
        if spelling() != "fused":
            return self(x + residual), x + residual
        normed, _, _, added = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::SkipSimplifiedLayerNormalization",
            (x, residual, self.weight),
            {"epsilon": self.epsilon},
            dtypes=[x.dtype] * 4,
            shapes=[x.shape, (*x.shape[:-1], 1), (*x.shape[:-1], 1), x.shape],
            version=1,
        )
        return normed, added
