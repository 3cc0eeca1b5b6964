"""Llama from a Hugging Face checkpoint (Touvron et al. 2023), SmolLM2 and others of its arithmetic too."""

from __future__ import annotations

from dataclasses import dataclass

from tx_export.models._llama import LlamaSpec

__all__ = ["Llama"]


@dataclass(frozen=True)
class Llama(LlamaSpec):
    """The keys and defaults of Hugging Face's LlamaConfig."""
