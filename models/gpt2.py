"""GPT-2 from a Hugging Face checkpoint (Radford et al. 2019): layer norm first, learned positions, a GELU by tanh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from tx_export.errors import LoadError
from tx_export.models._bert_encoder import ACTIVATIONS
from tx_export.models._checkpoint import read_fields, read_task, renamed_module
from tx_export.models.parts.decoder import Decoder, DecoderLayer
from tx_export.models.parts.positions import LearnedPositions
from tx_export.models.parts.turned import PackedCausalSelfAttention, TurnedFeedForward
from tx_export.spec import CacheSpec, CheckpointSpec, Dim, TensorSpec

__all__ = ["Gpt2"]

_NAMES: Mapping[str, str] = {
    "wte": "words",
    "wpe": "positions.table",
    "h.N.ln_1": "layers.N.attention_norm",
    "h.N.attn.c_attn": "layers.N.attention.qkv",
    "h.N.attn.c_proj": "layers.N.attention.output",
    "h.N.ln_2": "layers.N.feed_forward_norm",
    "h.N.mlp.c_fc": "layers.N.feed_forward.up",
    "h.N.mlp.c_proj": "layers.N.feed_forward.down",
    "ln_f": "norm",
    "lm_head": "head",
}
_FIXED = {
    "add_cross_attention": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}


@dataclass(frozen=True)
class Gpt2(CheckpointSpec):
    """The keys and defaults of Hugging Face's GPT2Config that change what is computed."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # 4 n_embd
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None

    names = _NAMES
    padding = "any"  # positions are counted from the first real one
    unused = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_head"):
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.n_layer <= 1000:
            raise LoadError(f"config.json: n_layer is {self.n_layer}; it must be in 0 to 1000")
        if self.n_embd % self.n_head:
            raise LoadError(f"config.json: n_embd {self.n_embd} does not divide by n_head {self.n_head}")
        if self.activation_function not in ACTIVATIONS:
            raise LoadError(
                f"config.json: activation_function is {self.activation_function!r}; supported: {', '.join(ACTIVATIONS)}"
            )
        if not self.layer_norm_epsilon >= 0:
            raise LoadError(f"config.json: layer_norm_epsilon is {self.layer_norm_epsilon}; it must not be negative")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec."""
        read_task(config, task, {"GPT2LMHeadModel": "text-generation"}, ("text-generation",))
        rest = {key: value for key, value in config.items() if key != "n_ctx"}  # what n_positions was called before
        return cls(**read_fields(cls, rest, (), _FIXED))

    @property
    def task(self) -> str:
        return "text-generation"

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        return renamed_module(name.removeprefix("transformer."), _NAMES)

    def build(self) -> nn.Module:
        """The plain form."""
        words = nn.Embedding(self.vocab_size, self.n_embd)
        head = nn.Linear(self.n_embd, self.vocab_size, bias=False)
        if self.tie_word_embeddings:
            head.weight = words.weight
        positions = LearnedPositions(self.n_positions, self.n_embd)
        return Decoder(
            words, positions, [self._layer() for _ in range(self.n_layer)], self._norm(), head, self.embd_pdrop
        )

    def _layer(self) -> DecoderLayer:
        norms = (self._norm(), self._norm())
        attention = PackedCausalSelfAttention(self.n_embd, self.n_head, self.attn_pdrop)
        activation = ACTIVATIONS[self.activation_function]()
        feed_forward = TurnedFeedForward(self.n_embd, self.n_inner or 4 * self.n_embd, activation)
        return DecoderLayer(attention, feed_forward, norms, self.resid_pdrop)

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.n_embd, eps=self.layer_norm_epsilon)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask."""
        dims = (Dim("batch"), Dim("tokens", self.n_positions))
        ids = TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1)
        return (ids, TensorSpec("attention_mask", "int64", dims, 0, 1))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position."""
        return (TensorSpec("logits", "float32", (Dim("batch"), Dim("tokens", self.n_positions), self.vocab_size)),)

    def cache(self) -> CacheSpec:
        return CacheSpec(self.n_layer, self.n_head, self.n_embd // self.n_head, self.n_positions)
