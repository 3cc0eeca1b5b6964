"""Mistral from a Hugging Face checkpoint (Jiang et al. 2023): Llama, in which a query sees a window of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tx_export.models._llama import LlamaSpec, read_window

__all__ = ["Mistral"]


@dataclass(frozen=True)
class Mistral(LlamaSpec):
    """The keys and defaults of Hugging Face's MistralConfig."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072

    architecture: ClassVar[str] = "MistralForCausalLM"
    own_keys: ClassVar[tuple[str, ...]] = ("sliding_window",)

    @classmethod
    def read_windows(cls, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """The same for all layers."""
        return (read_window(config, 4096),) * layers
