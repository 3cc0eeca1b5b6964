"""Marian from a Hugging Face checkpoint (Junczys-Dowmunt et al. 2018): BART with positions of sines and cosines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tx_export.models._bart import BartSpec
from tx_export.models.parts.encoder_decoder import TokenEmbedding
from tx_export.models.parts.positions import SinusoidalPositions

__all__ = ["Marian"]


@dataclass(frozen=True)
class Marian(BartSpec):
    """Source and target have one embedding, or one each."""

    vocab_size: int = 58101
    decoder_vocab_size: int | None = None  # of a target with an embedding of its own; None: as the source's
    share_encoder_decoder_embeddings: bool = True

    architecture = "MarianMTModel"
    fixed = {"normalize_embedding": False, "static_position_embeddings": True}  # noqa: RUF012 - not a field
    unused = (*BartSpec.unused, r"(model\.)?(en|de)coder\.embed_positions\.weight")

    @property
    def target_vocab_size(self) -> int:
        own = not self.share_encoder_decoder_embeddings and self.decoder_vocab_size
        return own or self.vocab_size

    def embeddings(self) -> tuple[TokenEmbedding, TokenEmbedding]:
        """See BartSpec."""
        shared, positions = self.share_encoder_decoder_embeddings, _HalvedPositions(self)
        source = nn.Embedding(self.vocab_size, self.d_model)
        target = source if shared else nn.Embedding(self.target_vocab_size, self.d_model)
        return self.embedding(source, positions, None), self.embedding(target, positions, None)


class _HalvedPositions(SinusoidalPositions):
    """The sines of all channels first, then the cosines."""

    def __init__(self, spec: Marian) -> None:
        super().__init__(spec.max_position_embeddings, spec.d_model)
        self.table = torch.cat((self.table[:, 0::2], self.table[:, 1::2]), dim=1)
