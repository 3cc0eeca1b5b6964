"""XLM-RoBERTa (Conneau et al. 2020) from a Hugging Face checkpoint: RoBERTa over a hundred languages."""

from __future__ import annotations

from dataclasses import dataclass

from tx_export.models._roberta import RobertaSpec
from tx_export.models._tasks import architectures

__all__ = ["XLMRoberta"]


@dataclass(frozen=True)
class XLMRoberta(RobertaSpec):
    """The keys and defaults of Hugging Face's XLMRobertaConfig."""

    architectures = architectures("XLMRoberta")
