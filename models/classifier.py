"""Text classifier: encoder, first real token, linear head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tx_export.models._encoder import EncoderSpec
from tx_export.models.parts.masks import first_real, pool
from tx_export.spec import Dim, TensorSpec

__all__ = ["Classifier"]


@dataclass(frozen=True)
class Classifier(EncoderSpec):
    """Logits [batch, labels] from the first real token; a row without one gets the head's bias."""

    labels: tuple[str, ...] = ("negative", "positive")

    @property
    def task(self) -> str:
        return "text-classification"

    def build(self) -> nn.Module:
        return _ClassifierModule(self)

    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "float32", (Dim("batch"), len(self.labels))),)


class _ClassifierModule(nn.Module):
    def __init__(self, spec: Classifier) -> None:
        super().__init__()
        self.encoder = spec.encoder()
        self.dropout = nn.Dropout(spec.dropout)
        self.head = nn.Linear(spec.d_model, len(spec.labels))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(input_ids, attention_mask)
        out: Tensor = self.head(self.dropout(pool(x, first_real(attention_mask, x.dtype))))
        return out
