"""Qwen3 from a Hugging Face checkpoint (Yang et al. 2025): Llama with a norm of each head's query and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tx_export.models._llama import NAMES, LlamaSpec, read_layered_windows
from tx_export.models.parts.causal import CausalSelfAttention, NormedCausalSelfAttention

__all__ = ["Qwen3"]


@dataclass(frozen=True)
class Qwen3(LlamaSpec):
    """The keys and defaults of Hugging Face's Qwen3Config."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    own_keys: ClassVar[tuple[str, ...]] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    names: ClassVar[Mapping[str, str]] = {
        **NAMES,
        "model.layers.N.self_attn.q_norm": "layers.N.attention.query_norm",
        "model.layers.N.self_attn.k_norm": "layers.N.attention.key_norm",
    }

    @classmethod
    def read_windows(cls, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """By layer_types, or of all layers from max_window_layers on."""
        return read_layered_windows(config, layers)

    def attention(self, window: int | None) -> CausalSelfAttention:
        """With norms."""
        heads = (self.num_attention_heads, self.kv_heads, self.width)
        return NormedCausalSelfAttention(self.hidden_size, *heads, self.rms_norm_eps, self.attention_bias, window)
