"""Language model: a decoder that continues text, with the embedding as its head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tx_export.errors import LoadError
from tx_export.models._encoder import EncoderSpec
from tx_export.models.parts import decoder
from tx_export.models.parts.biases import AlibiBias, RelativeBias, causal_buckets
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.layers import FeedForward, Norm, Positions
from tx_export.models.parts.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
from tx_export.spec import CacheSpec, Dim, GenerationSpec, TensorSpec

__all__ = ["Lm"]

_THETA = 10000.0  # of rotary positions
_BEGIN, _END, _PAD = 2, 3, 0  # [CLS], [SEP] and [PAD] of the tokenizers that we train


@dataclass(frozen=True)
class Lm(EncoderSpec):
    """Logits of the next token at each position; post-norm with sinusoidal positions is the article's decoder."""

    norm: Norm = "pre"
    positions: Positions = "rotary"
    num_kv_heads: int = 0  # 0: as many as query heads
    window: int = 0  # tokens that one sees, its own included; 0: all before it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads < 0 or self.num_heads % self._kv_heads:
            raise LoadError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads, which is {self.num_heads}, or be 0"
            )
        if self.window < 0:
            raise LoadError(f"window is {self.window}; it must be a number of tokens, or 0 for all")
        if self.relative_distance <= self.relative_buckets // 2:
            raise LoadError(
                f"relative_distance is {self.relative_distance}; it must be above half of the "
                f"{self.relative_buckets} relative_buckets"
            )

    @property
    def task(self) -> str:
        return "text-generation"

    @property
    def _kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def build(self) -> nn.Module:
        """The plain form."""
        words = decoder.ScaledEmbedding(self.vocab_size, self.d_model)
        head = nn.Linear(self.d_model, self.vocab_size, bias=False)
        head.weight = words.weight
        kind = decoder.DecoderLayer if self.norm == "pre" else decoder.PostNormDecoderLayer
        layers = [
            kind(self._attention(), self._feed_forward(), (self._norm(), self._norm()), self.dropout)
            for _ in range(self.num_layers)
        ]
        norm = self._norm() if self.norm == "pre" else nn.Identity()
        return decoder.Decoder(words, self._positions(), layers, norm, head, self.dropout)

    def _attention(self) -> CausalSelfAttention:
        return CausalSelfAttention(
            self.d_model,
            self.num_heads,
            self._kv_heads,
            self._head_dim,
            bias=True,
            output_bias=True,
            window=self.window or None,
            dropout=self.dropout,
        )

    def _feed_forward(self) -> FeedForward:
        return FeedForward(self.d_model, self.d_ff, self.activation, self.dropout)

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.d_model, eps=self.epsilon)

    def _positions(self) -> decoder.Positions:
        match self.positions:
            case "rotary":
                return RotaryPositions(self.max_length, self._head_dim, _THETA)
            case "sinusoidal":
                return SinusoidalPositions(self.max_length, self.d_model)
            case "learned":
                return LearnedPositions(self.max_length, self.d_model)
            case "alibi":
                return AlibiBias(self.num_heads)
            case "relative":
                return RelativeBias(self.num_heads, self.relative_buckets, self.relative_distance, causal_buckets)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position."""
        dims = (Dim("batch"), Dim("tokens", self.max_length), self.vocab_size)
        return (TensorSpec("logits", "float32", dims),)

    def cache(self) -> CacheSpec:
        return CacheSpec(self.num_layers, self._kv_heads, self._head_dim, self.max_length)

    def generation(self) -> GenerationSpec:
        return GenerationSpec(eos=(_END,), bos=_BEGIN, pad=_PAD)
