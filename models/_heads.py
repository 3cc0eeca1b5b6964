"""Heads that Hugging Face families share: hidden states [B, T, D] and attention_mask [B, T] in, a task's output out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tx_export.models.parts.masks import first_real, last_real, mean_real, pool

__all__ = ["HiddenHead", "Pooling", "SentenceHead", "TextHead", "TokenHead", "WordHead"]

Pooling = Literal["mean", "cls", "last", "max"]


class HiddenHead(nn.Module):
    """The hidden states as they are."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x


class TextHead(nn.Module):
    """Logits [B, labels] from act(W x) at position 0, real or not, as in Hugging Face's; act is tanh unless given."""

    def __init__(self, d_model: int, labels: int, dropout: float, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler = nn.Linear(d_model, d_model)
        self.activation = nn.Tanh() if activation is None else activation
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(d_model, labels)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.dropout(self.activation(self.pooler(x[:, 0]))))
        return out


class TokenHead(nn.Module):
    """Logits [B, T, labels]."""

    def __init__(self, d_model: int, labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(d_model, labels)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.dropout(x))
        return out


class WordHead(nn.Module):
    """Logits [B, T, vocab_size]; `tied` is the embedding that the last product shares, if it shares it.

    `embedding_size` is the width of that product where it isn't d_model.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        activation: nn.Module,
        epsilon: float,
        tied: nn.Embedding | None,
        embedding_size: int | None = None,
    ) -> None:
        super().__init__()
        width = d_model if embedding_size is None else embedding_size
        self.transform = nn.Linear(d_model, width)
        self.activation = activation
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.decoder = nn.Linear(width, vocab_size)
        if tied is not None:
            self.decoder.weight = tied.weight

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.norm(self.activation(self.transform(x))))
        return out


class SentenceHead(nn.Module):
    """An embedding [B, D] pooled over real tokens (cls: the first of them, last: the last); zeros without any."""

    def __init__(self, pooling: Pooling, normalize: bool) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        if self.pooling == "max":
            pooled = _max_real(x, attention_mask)
        else:
            weights = {"mean": mean_real, "cls": first_real, "last": last_real}[self.pooling]
            pooled = pool(x, weights(attention_mask, x.dtype))
        # The arithmetic of functional.normalize, without its expanded norm, which costs three operators in the graph.
        return pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(1e-12) if self.normalize else pooled


def _max_real(x: Tensor, attention_mask: Tensor) -> Tensor:
    real = (attention_mask != 0)[:, :, None]  # [B, T, 1]
    highest = x.masked_fill(~real, torch.finfo(x.dtype).min).amax(dim=1)
    return highest.masked_fill(~real.any(dim=1), 0.0)
