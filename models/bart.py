"""BART from a Hugging Face checkpoint (Lewis et al. 2020): learned positions, and a norm behind the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tx_export.models._bart import BartSpec
from tx_export.models.parts.encoder_decoder import TokenEmbedding
from tx_export.models.parts.positions import LearnedPositions

__all__ = ["Bart"]

_OFFSET = 2  # of a position in the table


@dataclass(frozen=True)
class Bart(BartSpec):
    """One embedding for source, target and, if it is tied, the head."""

    fixed = {"normalize_embedding": True, "static_position_embeddings": False}  # noqa: RUF012 - not a field

    @property
    def target_vocab_size(self) -> int:
        return self.vocab_size

    def embeddings(self) -> tuple[TokenEmbedding, TokenEmbedding]:
        """See BartSpec."""
        words = nn.Embedding(self.vocab_size, self.d_model)
        return self._embedding(words), self._embedding(words)

    def _embedding(self, words: nn.Embedding) -> TokenEmbedding:
        positions = _OffsetPositions(self.max_position_embeddings + _OFFSET, self.d_model)
        return self.embedding(words, positions, nn.LayerNorm(self.d_model))


class _OffsetPositions(LearnedPositions):
    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions + _OFFSET)
