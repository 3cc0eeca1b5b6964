"""BART's arithmetic (Lewis et al. 2020), and what Marian changes in it: post-norm, positions counted from the front.

words times their scale + positions [-> norm] -> post-norm layers; logits = x W^T + bias
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._bert_encoder import ACTIVATIONS
from tx_export.models._checkpoint import read_fields, read_task, renamed_module
from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.decoder import swish
from tx_export.models.parts.encoder_decoder import CrossLayer, EncoderDecoder, PostNormCrossLayer, TokenEmbedding
from tx_export.models.parts.layers import FeedForward, PostNormLayer
from tx_export.models.parts.masks import key_mask_without_promise
from tx_export.models.parts.positions import counted_positions
from tx_export.spec import CacheSpec, CheckpointSpec, Dim, TensorSpec

__all__ = ["BartSpec"]

_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
_NAMES: Mapping[str, str] = {
    "shared": "encoder.embedding.words",
    "encoder.embed_tokens": "encoder.embedding.words",
    "encoder.embed_positions": "encoder.embedding.positions.table",
    "encoder.layernorm_embedding": "encoder.embedding.norm",
    **{
        f"encoder.layers.N.self_attn.{name}": f"encoder.layers.N.attention.{ours}"
        for name, ours in _PROJECTIONS.items()
    },
    "encoder.layers.N.self_attn_layer_norm": "encoder.layers.N.attention_norm",
    "encoder.layers.N.fc1": "encoder.layers.N.feed_forward.up",
    "encoder.layers.N.fc2": "encoder.layers.N.feed_forward.down",
    "encoder.layers.N.final_layer_norm": "encoder.layers.N.feed_forward_norm",
    "decoder.embed_tokens": "embedding.words",
    "decoder.embed_positions": "embedding.positions.table",
    "decoder.layernorm_embedding": "embedding.norm",
    **{f"decoder.layers.N.self_attn.{name}": f"layers.N.attention.{ours}" for name, ours in _PROJECTIONS.items()},
    "decoder.layers.N.self_attn_layer_norm": "layers.N.attention_norm",
    **{
        f"decoder.layers.N.encoder_attn.{name}": f"layers.N.cross_attention.{ours}"
        for name, ours in _PROJECTIONS.items()
    },
    "decoder.layers.N.encoder_attn_layer_norm": "layers.N.cross_attention_norm",
    "decoder.layers.N.fc1": "layers.N.feed_forward.up",
    "decoder.layers.N.fc2": "layers.N.feed_forward.down",
    "decoder.layers.N.final_layer_norm": "layers.N.feed_forward_norm",
    "lm_head": "head",
}
_BIAS = "final_logits_bias"
_FIXED = {
    "add_bias_logits": False,
    "add_cross_attention": False,
    "add_final_layer_norm": False,
    "is_decoder": False,
    "is_encoder_decoder": True,
    "normalize_before": False,
}
# What older checkpoints hold beside, and nothing reads.
_UNREAD = re.compile(
    r"(en|de)coder_layerdrop|classif(ier)?_dropout|init_std|output_past|replacing_rate|extra_pos_embeddings"
    r"|student_(en|de)coder_layers|force_bos_token_to_be_generated|max_new_tokens"
)
_ALSO_CALLED = {  # another key of transformers for the same number
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
}


@dataclass(frozen=True)
class BartSpec(CheckpointSpec):
    """The keys and defaults of Hugging Face's BartConfig that change what is computed."""

    vocab_size: int = 50265
    max_position_embeddings: int = 1024
    d_model: int = 1024
    encoder_layers: int = 12
    encoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    decoder_layers: int = 12
    decoder_attention_heads: int = 16
    decoder_ffn_dim: int = 4096
    activation_function: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    scale_embedding: bool = False
    tie_word_embeddings: bool = True  # of the decoder and the head

    architecture: ClassVar[str] = "BartForConditionalGeneration"
    fixed: ClassVar[Mapping[str, object]] = {}
    names = _NAMES
    unused: ClassVar[tuple[str, ...]] = (r"(model\.)?(en|de)coder\.version",)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_position_embeddings", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"):
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        for half in ("encoder", "decoder"):
            layers, heads = getattr(self, f"{half}_layers"), getattr(self, f"{half}_attention_heads")
            if not 1 <= layers <= 1000:
                raise LoadError(f"config.json: {half}_layers is {layers}; it must be in 1 to 1000")
            if heads < 1 or self.d_model % heads:
                raise LoadError(
                    f"config.json: d_model {self.d_model} does not divide by {half}_attention_heads {heads}"
                )
        if self.activation_function not in _ACTIVATIONS:
            raise LoadError(
                f"config.json: activation_function is {self.activation_function!r}; "
                f"supported: {', '.join(_ACTIVATIONS)}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec."""
        read_task(config, task, {cls.architecture: "text2text-generation"}, ("text2text-generation",))
        spec = cls(**read_fields(cls, _without_unread(config), (), {**_FIXED, **cls.fixed}))
        for key, name in _ALSO_CALLED.items():
            if config.get(key) not in (None, getattr(spec, name)):
                raise LoadError(f"config.json: {key} is {config[key]!r}, but {name} is {getattr(spec, name)!r}")
        return spec

    @property
    def task(self) -> str:
        return "text2text-generation"

    @property
    @abc.abstractmethod
    def target_vocab_size(self) -> int:
        """Rows of the decoder's embedding and of the head."""

    @abc.abstractmethod
    def embeddings(self) -> tuple[TokenEmbedding, TokenEmbedding]:
        """Of the encoder and the decoder."""

    def embedding(self, words: nn.Embedding, positions: nn.Module, norm: nn.Module | None) -> TokenEmbedding:
        scale = math.sqrt(self.d_model) if self.scale_embedding else 1.0
        return TokenEmbedding(words, positions, scale, norm, self.dropout)

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        return "head.bias" if name == _BIAS else renamed_module(name.removeprefix("model."), _NAMES)

    def build(self) -> nn.Module:
        """The plain form."""
        source, target = self.embeddings()
        head = _Head(self.d_model, self.target_vocab_size)
        if self.tie_word_embeddings:
            head.weight = target.words.weight
        encoder = _Encoder(source, [self._encoder_layer() for _ in range(self.encoder_layers)])
        layers = [self._decoder_layer() for _ in range(self.decoder_layers)]
        return EncoderDecoder(encoder, target, layers, nn.Identity(), head)

    def _encoder_layer(self) -> PostNormLayer:
        heads = self.encoder_attention_heads
        attention = MultiHeadAttention(self.d_model, heads, self.d_model // heads, self.attention_dropout)
        return PostNormLayer(attention, self._feed_forward(self.encoder_ffn_dim), self.d_model, 1e-5, self.dropout)

    def _decoder_layer(self) -> CrossLayer:
        width, heads, head_dim = (
            self.d_model,
            self.decoder_attention_heads,
            self.d_model // self.decoder_attention_heads,
        )
        return PostNormCrossLayer(
            CausalSelfAttention(width, heads, heads, head_dim, True, True, dropout=self.attention_dropout),
            CrossAttention(width, heads, head_dim, self.attention_dropout),
            self._feed_forward(self.decoder_ffn_dim),
            (nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)),
            self.dropout,
        )

    def _feed_forward(self, width: int) -> FeedForward:
        feed_forward = FeedForward(self.d_model, width, "gelu", self.activation_dropout)
        feed_forward.activation = _ACTIVATIONS[self.activation_function]()  # type: ignore[assignment]
        return feed_forward

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask of the source, and the ids of the target so far."""
        source = (Dim("batch"), Dim("tokens", self.max_position_embeddings))
        return (
            TensorSpec("input_ids", "int64", source, 0, self.vocab_size - 1),
            TensorSpec("attention_mask", "int64", source, 0, 1),
            TensorSpec("decoder_input_ids", "int64", self._target, 0, self.target_vocab_size - 1),
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position of the target."""
        return (TensorSpec("logits", "float32", (*self._target, self.target_vocab_size)),)

    @property
    def _target(self) -> tuple[Dim, Dim]:
        return Dim("batch"), Dim("decoded", self.max_position_embeddings)

    def cache(self) -> CacheSpec:
        heads = self.decoder_attention_heads
        return CacheSpec(self.decoder_layers, heads, self.d_model // heads, self.max_position_embeddings, cross=True)


def _without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _ALSO_CALLED and not _UNREAD.fullmatch(key)}


class _Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {**ACTIVATIONS, "swish": _Swish, "silu": _Swish}


class _Encoder(nn.Module):
    def __init__(self, embedding: TokenEmbedding, layers: list[PostNormLayer]) -> None:
        super().__init__()
        self.embedding, self.layers = embedding, nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids, counted_positions(input_ids))
        mask = key_mask_without_promise(attention_mask)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class _Head(nn.Module):
    """x W^T + bias, with the bias [1, V] of the checkpoints."""

    weight: Tensor

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(1, vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.bias
