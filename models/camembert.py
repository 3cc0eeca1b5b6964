"""CamemBERT (Martin et al. 2020) from a Hugging Face checkpoint: RoBERTa over French."""

from __future__ import annotations

from dataclasses import dataclass

from tx_export.models._roberta import RobertaSpec
from tx_export.models._tasks import architectures

__all__ = ["Camembert"]


@dataclass(frozen=True)
class Camembert(RobertaSpec):
    """The keys and defaults of Hugging Face's CamembertConfig."""

    architectures = architectures("Camembert")
