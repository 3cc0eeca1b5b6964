"""T5 from a Hugging Face checkpoint (Raffel et al. 2020), and the gated T5 1.1 and Flan-T5.

RMS norm first, no biases in products, scores unscaled, and a bias on them by distance that all layers of a half share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._checkpoint import read_fields, read_task, renamed_module
from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.biases import RelativeBias, causal_buckets, relative_buckets
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.decoder import GluFeedForward
from tx_export.models.parts.encoder_decoder import EncoderDecoder, PreNormCrossLayer
from tx_export.models.parts.layers import PreNormLayer
from tx_export.models.parts.masks import key_mask_without_promise
from tx_export.models.parts.norms import RMSNorm
from tx_export.models.parts.positions import counted_positions
from tx_export.spec import CacheSpec, CheckpointSpec, Dim, GenerationSpec, TensorSpec

__all__ = ["T5"]

_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
_FEED_FORWARD = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def _names(half: str, ours: str, parts: tuple[str, ...]) -> dict[str, str]:
    """The checkpoint's modules of one half -> ours; `parts` are those of a layer, in order."""
    theirs = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "feed_forward": "DenseReluDense"}
    names = {
        f"{half}.final_layer_norm": f"{ours}norm",
        f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias": f"{ours}bias.table",
    }
    for index, part in enumerate(parts):
        place, inside = f"{half}.block.N.layer.{index}", f"{ours}layers.N.{part}"
        products = _FEED_FORWARD if part == "feed_forward" else _PROJECTIONS
        names[f"{place}.layer_norm"] = f"{inside}_norm"
        names |= {f"{place}.{theirs[part]}.{name}": f"{inside}.{called}" for name, called in products.items()}
    return names


_NAMES: Mapping[str, str] = {
    "shared": "encoder.words",
    "encoder.embed_tokens": "encoder.words",
    "decoder.embed_tokens": "embedding.words",
    "lm_head": "head",
    **_names("encoder", "encoder.", ("attention", "feed_forward")),
    **_names("decoder", "", ("attention", "cross_attention", "feed_forward")),
}
_FIXED = {"is_encoder_decoder": True, "is_decoder": False}
_UNREAD = ("classifier_dropout", "dense_act_fn", "initializer_factor", "is_gated_act", "output_past")


@dataclass(frozen=True)
class T5(CheckpointSpec):
    """The keys and defaults of Hugging Face's T5Config that change what is computed."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64  # channels of a head
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None  # None: num_layers
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None  # None: where the embeddings are tied
    n_positions: int = 512  # tokens promised: distances have no end
    pad_token_id: int | None = 0

    names = _NAMES
    unused = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "n_positions"):
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        for name, layers in (("num_layers", self.num_layers), ("num_decoder_layers", self.decoder_layers)):
            if not 1 <= layers <= 1000:
                raise LoadError(f"config.json: {name} is {layers}; it must be in 1 to 1000")
        if self.feed_forward_proj not in ("relu", "gated-gelu"):
            raise LoadError(
                f"config.json: feed_forward_proj is {self.feed_forward_proj!r}; supported: relu, gated-gelu"
            )
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or distance <= buckets // 2:
            raise LoadError(
                f"config.json: relative_attention_num_buckets is {buckets} and relative_attention_max_distance "
                f"{distance}; there must be at least 4 buckets, and the distance be above half of their number"
            )
        if not self.layer_norm_epsilon >= 0:
            raise LoadError(f"config.json: layer_norm_epsilon is {self.layer_norm_epsilon}; it must not be negative")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec."""
        tasks = dict.fromkeys(("T5ForConditionalGeneration", "T5WithLMHeadModel"), "text2text-generation")
        read_task(config, task, tasks, ("text2text-generation",))
        rest = {key: value for key, value in config.items() if key not in _UNREAD}
        return cls(**read_fields(cls, rest, (), _FIXED))

    @property
    def task(self) -> str:
        return "text2text-generation"

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        return renamed_module(name, _NAMES)

    def build(self) -> nn.Module:
        """The plain form."""
        words = nn.Embedding(self.vocab_size, self.d_model)
        head = (_ScaledHead if self._is_scaled else nn.Linear)(self.d_model, self.vocab_size, bias=False)
        if self.tie_word_embeddings:
            head.weight = words.weight
        layers = [self._decoder_layer() for _ in range(self.decoder_layers)]
        bias, encoder = self._bias(causal_buckets), self._encoder(words)
        return EncoderDecoder(encoder, _Words(words, self.dropout_rate), layers, self._norm(), head, bias)

    @property
    def _is_scaled(self) -> bool:
        return self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs

    def _encoder(self, words: nn.Embedding) -> nn.Module:
        layers = [self._encoder_layer() for _ in range(self.num_layers)]
        return _Encoder(words, layers, self._norm(), self._bias(relative_buckets), self.dropout_rate)

    def _encoder_layer(self) -> PreNormLayer:
        attention = MultiHeadAttention(
            self.d_model, self.num_heads, self.d_kv, self.dropout_rate, bias=False, scale=1.0
        )
        layer = PreNormLayer(attention, self._feed_forward(), self.d_model, self.layer_norm_epsilon, self.dropout_rate)
        layer.attention_norm, layer.feed_forward_norm = self._norm(), self._norm()  # type: ignore[assignment]
        return layer

    def _decoder_layer(self) -> PreNormCrossLayer:
        heads, dropout = self.num_heads, self.dropout_rate
        return PreNormCrossLayer(
            CausalSelfAttention(self.d_model, heads, heads, self.d_kv, dropout=dropout, scale=1.0),
            CrossAttention(self.d_model, heads, self.d_kv, dropout, bias=False, scale=1.0),
            self._feed_forward(),
            (self._norm(), self._norm(), self._norm()),
            dropout,
        )

    def _feed_forward(self) -> nn.Module:
        if self.feed_forward_proj == "relu":
            return _FeedForward(self.d_model, self.d_ff, self.dropout_rate)
        return GluFeedForward(self.d_model, self.d_ff, nn.GELU(approximate="tanh"), dropout=self.dropout_rate)

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.d_model, self.layer_norm_epsilon)

    def _bias(self, in_buckets: Callable[[Tensor, int, int], Tensor]) -> RelativeBias:
        sizes = self.relative_attention_num_buckets, self.relative_attention_max_distance
        return RelativeBias(self.num_heads, *sizes, in_buckets)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask of the source, and the ids of the target so far."""
        source, last = (Dim("batch"), Dim("tokens", self.n_positions)), self.vocab_size - 1
        return (
            TensorSpec("input_ids", "int64", source, 0, last),
            TensorSpec("attention_mask", "int64", source, 0, 1),
            TensorSpec("decoder_input_ids", "int64", self._target, 0, last),
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position of the target."""
        return (TensorSpec("logits", "float32", (*self._target, self.vocab_size)),)

    @property
    def _target(self) -> tuple[Dim, Dim]:
        return Dim("batch"), Dim("decoded", self.n_positions)

    def cache(self) -> CacheSpec:
        return CacheSpec(self.decoder_layers, self.num_heads, self.d_kv, self.n_positions, cross=True)

    def generation(self) -> GenerationSpec:
        """A target begins with padding."""
        return GenerationSpec(start=self.pad_token_id, pad=self.pad_token_id)


class _Words(nn.Module):
    """Ids [B, S] -> [B, S, d_model], wherever they stand."""

    def __init__(self, words: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.words, self.dropout = words, nn.Dropout(dropout)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.words(ids))
        return out


class _Encoder(nn.Module):
    def __init__(
        self, words: nn.Embedding, layers: list[PreNormLayer], norm: RMSNorm, bias: RelativeBias, dropout: float
    ) -> None:
        super().__init__()
        self.words, self.layers, self.norm, self.bias = words, nn.ModuleList(layers), norm, bias
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.words(input_ids))
        bias = self.bias(counted_positions(input_ids[:1]))  # [1, H, T, T]
        mask = key_mask_without_promise(attention_mask)._replace(bias=bias)
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.dropout(self.norm(x))
        return out


class _FeedForward(nn.Module):
    """W2 relu(W1 x)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(self.up(x).relu()))
        return out


class _ScaledHead(nn.Linear):
    """Of x / sqrt(d_model)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.in_features**-0.5)
