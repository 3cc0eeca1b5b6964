"""What the built-in encoder families share: their configuration, its limits, and the three sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from tx_export.errors import LoadError
from tx_export.models.parts.layers import Activation, Encoder, Norm, Positions
from tx_export.spec import BuiltInSpec, Dim, TensorSpec

__all__ = ["EncoderSpec"]


@dataclass(frozen=True)
class EncoderSpec(BuiltInSpec):
    """Fields of an encoder over token ids; `head_dim` 0 means d_model / num_heads, which must then be exact."""

    vocab_size: int = 8000  # the size of the shipped tokenizer
    max_length: int = 512  # the positions that exist
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 0
    d_ff: int = 512
    dropout: float = 0.1
    activation: Activation = "relu"
    norm: Norm = "post"
    positions: Positions = "sinusoidal"
    relative_buckets: int = 32  # of relative positions: half for each direction
    relative_distance: int = 128  # from here on they share a bucket
    epsilon: float = 1e-6  # of every LayerNorm

    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"d_model": 128, "num_layers": 4, "num_heads": 4, "d_ff": 512, "dropout": 0.1},
        "medium": {"d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "dropout": 0.1},
        "large": {"d_model": 1024, "num_layers": 12, "num_heads": 16, "d_ff": 4096, "dropout": 0.2},
    }
    training_batch: ClassVar[dict[str, int]] = {"small": 32, "medium": 64, "large": 128}

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "d_model", "num_layers", "num_heads", "d_ff"):
            if getattr(self, name) < 1:
                raise LoadError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.head_dim < 0:
            raise LoadError(f"head_dim is {self.head_dim}; it must be at least 0")
        if self.head_dim == 0 and self.d_model % self.num_heads:
            raise LoadError(
                f"d_model {self.d_model} does not divide by num_heads {self.num_heads}; "
                "choose another number of heads, or set head_dim"
            )
        if not 0 <= self.dropout < 1:
            raise LoadError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if not self.epsilon > 0:
            raise LoadError(f"epsilon is {self.epsilon}; it must be above 0")
        for name, kinds in (("activation", Activation), ("norm", Norm), ("positions", Positions)):
            if getattr(self, name) not in get_args(kinds):
                raise LoadError(f"{name} is {getattr(self, name)!r}; known: {', '.join(get_args(kinds))}")

        if self.positions == "rotary" and self._head_dim % 2:
            raise LoadError(
                f"head_dim is {self._head_dim}; rotary positions turn pairs of channels, so it must be even"
            )
        if self.relative_buckets < 4 or self.relative_distance <= self.relative_buckets // 4:
            raise LoadError(
                f"relative_buckets is {self.relative_buckets} and relative_distance {self.relative_distance}; there "
                "must be at least 4 buckets, and the distance be above a quarter of their number"
            )

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    def encoder(self) -> Encoder:
        return Encoder(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self._head_dim,
            d_ff=self.d_ff,
            dropout=self.dropout,
            activation=self.activation,
            norm=self.norm,
            positions=self.positions,
            relative=(self.relative_buckets, self.relative_distance),
            epsilon=self.epsilon,
        )

    def inputs(self) -> tuple[TensorSpec, ...]:
        dims = (Dim("batch"), Dim("tokens", self.max_length))
        return (
            TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1),
            TensorSpec("attention_mask", "int64", dims, 0, 1),
        )
