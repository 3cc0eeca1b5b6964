"""BERT's encoder (Devlin et al. 2018), and what RoBERTa, ALBERT, ELECTRA, DistilBERT and MPNet change in it.

words + token types + positions -> norm [-> product to the width of the layers] -> post-norm layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.biases import RelativeBias
from tx_export.models.parts.layers import FeedForward, PostNormLayer
from tx_export.models.parts.masks import key_mask_without_promise
from tx_export.models.parts.positions import counted_positions

__all__ = ["ACTIVATIONS", "BertEncoder", "EncoderSizes", "positions_of_real_ids"]

ACTIVATIONS: Mapping[str, Callable[[], nn.GELU | nn.ReLU]] = {  # by their names in a config.json
    "gelu": nn.GELU,
    "gelu_python": nn.GELU,
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_fast": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
}


@dataclass(frozen=True)
class EncoderSizes:
    """What a BertEncoder is made from."""

    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    positions: int  # rows of the table
    token_types: int  # 0: the family has none
    epsilon: float
    dropout: float
    attention_dropout: float
    projected: bool = False  # a product between the embeddings and the layers
    shared: bool = False  # one layer runs num_layers times
    pad_id: int | None = None  # positions are counted from the ids that aren't it; None: from all
    relative: tuple[int, int] | None = None  # buckets and largest distance of biases that all layers share


def positions_of_real_ids(input_ids: Tensor, pad_id: int) -> Tensor:
    """RoBERTa's: pad_id + 1, pad_id + 2, ... at ids [B, T] that aren't pad_id, and pad_id where they are."""
    real = (input_ids != pad_id).to(torch.int64)
    return real.cumsum(dim=1) * real + pad_id


class BertEncoder(nn.Module):
    """Ids, mask and token types [B, T] -> hidden states [B, T, hidden_size]."""

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        width = sizes.embedding_size
        self.pad_id = sizes.pad_id
        self.words = nn.Embedding(sizes.vocab_size, width)
        self.positions = nn.Embedding(sizes.positions, width)
        self.token_types = nn.Embedding(sizes.token_types, width) if sizes.token_types else None
        self.norm = nn.LayerNorm(width, eps=sizes.epsilon)
        self.dropout = nn.Dropout(sizes.dropout)
        self.projection = nn.Linear(width, sizes.hidden_size) if sizes.projected else nn.Identity()
        made = [_layer(sizes) for _ in range(min(1, sizes.num_layers) if sizes.shared else sizes.num_layers)]
        self.layers = nn.ModuleList(made * sizes.num_layers if sizes.shared else made)
        self.bias = None if sizes.relative is None else RelativeBias(sizes.num_heads, *sizes.relative)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Tensor:
        x = self.words(input_ids)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_type_ids is None else self.token_types(token_type_ids))
        x = self.projection(self.dropout(self.norm(x + self.positions(self._places(input_ids)))))
        mask = key_mask_without_promise(attention_mask)
        if self.bias is not None:
            mask = mask._replace(bias=self.bias(counted_positions(input_ids[:1])))
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = x
        return out

    def _places(self, input_ids: Tensor) -> Tensor:
        return counted_positions(input_ids) if self.pad_id is None else positions_of_real_ids(input_ids, self.pad_id)


def _layer(sizes: EncoderSizes) -> PostNormLayer:
    width, heads = sizes.hidden_size, sizes.num_heads
    feed_forward = FeedForward(width, sizes.intermediate_size, "gelu", dropout=0.0)  # BERT drops nothing inside
    feed_forward.activation = ACTIVATIONS[sizes.activation]()
    attention = MultiHeadAttention(width, heads, width // heads, sizes.attention_dropout)
    return PostNormLayer(attention, feed_forward, width, sizes.epsilon, sizes.dropout)
