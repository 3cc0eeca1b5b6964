"""Encoder-decoder of text to text: post-norm as in the article, source, target and head share one embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tx_export.errors import LoadError
from tx_export.models._encoder import EncoderSpec
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.encoder_decoder import (
    CrossLayer,
    EncoderDecoder,
    PostNormCrossLayer,
    PreNormCrossLayer,
    TokenEmbedding,
)
from tx_export.models.parts.layers import FeedForward
from tx_export.spec import CacheSpec, Dim, GenerationSpec, TensorSpec

__all__ = ["Seq2seq"]

_POSITIONS = ("sinusoidal", "learned")


@dataclass(frozen=True)
class Seq2seq(EncoderSpec):
    """Logits [batch, decoded, vocabulary]; as many layers in the decoder as in the encoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in _POSITIONS:
            raise LoadError(
                f"positions is {self.positions!r}; a decoder behind an encoder has {' or '.join(_POSITIONS)}"
            )

    @property
    def task(self) -> str:
        return "text2text-generation"

    def build(self) -> nn.Module:
        """The plain form."""
        encoder, words = self.encoder(), nn.Embedding(self.vocab_size, self.d_model)
        words.weight = encoder.embedding.weight
        # The encoder's embedding is drawn such that, behind a norm, the logits have unit variance.
        head = nn.Linear(self.d_model, self.vocab_size, bias=False)
        head.weight = encoder.embedding.weight
        embedding = TokenEmbedding(words, encoder.positions, encoder.scale, dropout=self.dropout)
        layers = [self._layer() for _ in range(self.num_layers)]
        return EncoderDecoder(encoder, embedding, layers, nn.Identity() if self.norm == "post" else self._norm(), head)

    def _layer(self) -> CrossLayer:
        heads = (self.num_heads, self._head_dim)
        layer = PostNormCrossLayer if self.norm == "post" else PreNormCrossLayer
        return layer(
            CausalSelfAttention(self.d_model, self.num_heads, *heads, True, True, dropout=self.dropout),
            CrossAttention(self.d_model, *heads, self.dropout),
            FeedForward(self.d_model, self.d_ff, self.activation, self.dropout),
            (self._norm(), self._norm(), self._norm()),
            self.dropout,
        )

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.d_model, eps=self.epsilon)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask of the source, and the ids of the target so far."""
        ids, mask = super().inputs()
        return (ids, mask, TensorSpec("decoder_input_ids", "int64", self._decoded, ids.low, ids.high))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position of the target."""
        return (TensorSpec("logits", "float32", (*self._decoded, self.vocab_size)),)

    @property
    def _decoded(self) -> tuple[Dim, Dim]:
        return Dim("batch"), Dim("decoded", self.max_length)

    def cache(self) -> CacheSpec:
        return CacheSpec(self.num_layers, self.num_heads, self._head_dim, self.max_length, cross=True)

    def generation(self) -> GenerationSpec:
        """Ids of the shipped tokenizers: [PAD] 0, [CLS] 2 and [SEP] 3."""
        return GenerationSpec(eos=(3,), pad=0, start=2)
