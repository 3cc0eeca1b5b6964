"""Qwen2 from a Hugging Face checkpoint (Yang et al. 2024): Llama with biases of query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tx_export.models._llama import LlamaSpec, read_layered_windows
from tx_export.models.parts.causal import CausalSelfAttention

__all__ = ["Qwen2"]


@dataclass(frozen=True)
class Qwen2(LlamaSpec):
    """The keys and defaults of Hugging Face's Qwen2Config."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    own_keys: ClassVar[tuple[str, ...]] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    @classmethod
    def read_windows(cls, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """By layer_types, or of all layers from max_window_layers on."""
        return read_layered_windows(config, layers)

    def attention(self, window: int | None) -> CausalSelfAttention:
        """Biased, but for the output."""
        heads = (self.num_attention_heads, self.kv_heads, self.width)
        return CausalSelfAttention(
            self.hidden_size, *heads, bias=True, output_bias=False, window=window, dropout=self.attention_dropout
        )
