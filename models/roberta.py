"""RoBERTa (Liu et al. 2019) from a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from tx_export.models._roberta import RobertaSpec
from tx_export.models._tasks import architectures

__all__ = ["Roberta"]


@dataclass(frozen=True)
class Roberta(RobertaSpec):
    """The keys and defaults of Hugging Face's RobertaConfig."""

    vocab_size: int = 50265

    architectures = architectures("Roberta")
