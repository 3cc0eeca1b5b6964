"""Text embedder: encoder, mean over real tokens, unit length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tx_export.models._encoder import EncoderSpec
from tx_export.models.parts.masks import mean_real, pool
from tx_export.spec import Dim, TensorSpec

__all__ = ["Embedder"]


@dataclass(frozen=True)
class Embedder(EncoderSpec):
    """Unit vectors [batch, d_model]; a row without a real token gets the zero vector."""

    @property
    def task(self) -> str:
        return "sentence-embedding"

    def build(self) -> nn.Module:
        return _EmbedderModule(self)

    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("embedding", "float32", (Dim("batch"), self.d_model)),)


class _EmbedderModule(nn.Module):
    def __init__(self, spec: Embedder) -> None:
        super().__init__()
        self.encoder = spec.encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(input_ids, attention_mask)
        mean = pool(x, mean_real(attention_mask, x.dtype))
        # The arithmetic of functional.normalize, without its expanded norm, which costs three operators in the graph.
        out: Tensor = mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return out
