"""ModernBERT's predictions: output(norm(act(W x))), of every token or of what is pooled from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from tx_export.models.parts.masks import mean_real, pool

__all__ = ["POOLED", "PredictionHead"]

Pooled = Callable[[Tensor, Tensor], Tensor]

# From hidden states [B, T, D] and attention_mask [B, T]; cls is position 0, real or not, as in Hugging Face's.
POOLED: Mapping[str, Pooled] = {
    "none": lambda x, attention_mask: x,
    "cls": lambda x, attention_mask: x[:, 0],
    "mean": lambda x, attention_mask: pool(x, mean_real(attention_mask, x.dtype)),
}


class PredictionHead(nn.Module):
    """Logits [B, T, labels], or [B, labels] where it pools first."""

    def __init__(self, transform: nn.Module, dropout: float, output: nn.Linear, pooled: Pooled) -> None:
        super().__init__()
        self.transform, self.dropout, self.output, self.pooled = transform, nn.Dropout(dropout), output, pooled

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.output(self.dropout(self.transform(self.pooled(x, attention_mask))))
        return out
