"""ModernBERT from a Hugging Face checkpoint (Warner et al. 2024): encoder, classifiers, masked words, embeddings.

Rotary positions with a theta for each kind of layer: most attend to a window of `local_attention` tokens, some to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._bert_encoder import ACTIVATIONS
from tx_export.models._checkpoint import read_fields, renamed_module
from tx_export.models._heads import HiddenHead, Pooling, SentenceHead
from tx_export.models._modernbert_config import FULL, SLIDING, read_layer_types, read_theta, without_own_keys
from tx_export.models._modernbert_head import POOLED, PredictionHead
from tx_export.models._tasks import Task, architectures, output_of, read_head
from tx_export.models.parts.attention import PackedSelfAttention
from tx_export.models.parts.biases import distances
from tx_export.models.parts.layers import GatedFeedForward
from tx_export.models.parts.masks import KeyMask, key_mask_without_promise, within_reach
from tx_export.models.parts.positions import RotaryPositions, Rotation, counted_positions
from tx_export.spec import CheckpointSpec, Dim, TensorSpec

__all__ = ["ModernBert"]

_COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
_NAMES: Mapping[str, str] = {
    "embeddings.tok_embeddings": "encoder.words",
    "embeddings.norm": "encoder.norm",
    "layers.N.attn_norm": "encoder.layers.N.attention_norm",
    "layers.N.attn.Wqkv": "encoder.layers.N.attention.qkv",
    "layers.N.attn.Wo": "encoder.layers.N.attention.output",
    "layers.N.mlp_norm": "encoder.layers.N.feed_forward_norm",
    "layers.N.mlp.Wi": "encoder.layers.N.feed_forward.up",
    "layers.N.mlp.Wo": "encoder.layers.N.feed_forward.down",
    "final_norm": "encoder.final_norm",
    "head.dense": "head.transform.0",
    "head.norm": "head.transform.2",
}


@dataclass(frozen=True)
class ModernBert(CheckpointSpec):
    """The keys and defaults of Hugging Face's ModernBertConfig, and what is computed from the encoder."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pad_token_id: int | None = 50283
    attention_bias: bool = False
    attention_dropout: float = 0.0
    local_attention: int = 128  # the window's width, the token itself not counted
    embedding_dropout: float = 0.0
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    decoder_bias: bool = True
    classifier_pooling: str = "cls"
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    tie_word_embeddings: bool = True
    problem_type: str | None = None  # single_label_classification, multi_label_classification or regression
    layer_types: tuple[str, ...] = ()  # full_attention or sliding_attention, for each layer
    full_theta: float = 160_000.0
    sliding_theta: float = 10_000.0
    labels: tuple[str, ...] = ()  # of a classifier
    head: Task = "feature-extraction"
    pooling: Pooling = "mean"  # of a sentence embedding, over real tokens; cls is the first of them
    normalize: bool = False  # a sentence embedding, to unit length

    names = _NAMES
    unused = (r"(head|classifier|decoder)\..*", r".*\.rotary_emb\..*")

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if self.local_attention < 0:
            raise LoadError(f"config.json: local_attention is {self.local_attention}; it must be at least 0")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise LoadError(
                f"config.json: hidden_size {self.hidden_size} does not divide by 2 x num_attention_heads "
                f"{self.num_attention_heads}; rotary positions turn pairs of channels"
            )
        if not self.norm_eps >= 0:
            raise LoadError(f"config.json: norm_eps is {self.norm_eps}; it must not be negative")
        for name in ("hidden_activation", "classifier_activation"):
            if getattr(self, name) not in ACTIVATIONS:
                raise LoadError(f"config.json: {name} is {getattr(self, name)!r}; supported: {', '.join(ACTIVATIONS)}")
        if self.classifier_pooling not in ("cls", "mean"):
            raise LoadError(f"config.json: classifier_pooling is {self.classifier_pooling!r}; supported: cls, mean")
        if self.head.endswith("classification") and not self.labels:
            raise LoadError("config.json: num_labels is 0; a classifier needs at least one label")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec; the keys of transformers 5 and those of older checkpoints are read."""
        derived = ("layer_types", "full_theta", "sliding_theta", "labels", "head", "pooling", "normalize")
        fields = read_fields(cls, without_own_keys(config), derived, {"position_embedding_type": "absolute"})
        layers = fields.get("num_hidden_layers", cls.num_hidden_layers)
        if not 0 <= layers <= 1000:
            raise LoadError(f"config.json: num_hidden_layers is {layers}; it must be in 0 to 1000")
        return cls(
            **fields,
            **read_head(config, task, pooling, architectures("ModernBert")),
            layer_types=read_layer_types(config, layers),
            full_theta=read_theta(config, FULL, cls.full_theta),
            sliding_theta=read_theta(config, SLIDING, cls.sliding_theta),
        )

    @property
    def task(self) -> str:
        return self.head

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        output = "decoder" if self.head == "fill-mask" else "classifier"
        return renamed_module(name.removeprefix("model."), {**_NAMES, output: "head.output"})

    def build(self) -> nn.Module:
        """The encoder and the head of the task."""
        return _ModernBertModule(self)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask."""
        dims = (Dim("batch"), Dim("tokens", self.max_position_embeddings))
        ids = TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1)
        return (ids, TensorSpec("attention_mask", "int64", dims, 0, 1))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """One tensor: last_hidden_state, embedding or logits."""
        tokens = self.max_position_embeddings
        return (output_of(self.head, tokens, self.hidden_size, len(self.labels), self.vocab_size),)


def _norm(spec: ModernBert) -> nn.LayerNorm:
    return nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps, bias=spec.norm_bias)


class _Layer(nn.Module):
    def __init__(self, spec: ModernBert, index: int) -> None:
        super().__init__()
        size, heads = spec.hidden_size, spec.num_attention_heads
        self.attention_norm = _norm(spec) if index > 0 else nn.Identity()  # the embeddings are normed already
        self.attention = PackedSelfAttention(size, heads, size // heads, spec.attention_dropout, spec.attention_bias)
        self.dropout = nn.Dropout(spec.attention_dropout)
        self.feed_forward_norm = _norm(spec)
        activation = ACTIVATIONS[spec.hidden_activation]()
        self.feed_forward = GatedFeedForward(size, spec.intermediate_size, activation, spec.mlp_dropout, spec.mlp_bias)

    def forward(self, x: Tensor, mask: KeyMask, rotation: Rotation) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, rotation))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class _Encoder(nn.Module):
    def __init__(self, spec: ModernBert) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.norm = _norm(spec)
        self.dropout = nn.Dropout(spec.embedding_dropout)
        head_dim = spec.hidden_size // spec.num_attention_heads
        self.full_rotary = RotaryPositions(spec.max_position_embeddings, head_dim, spec.full_theta)
        self.sliding_rotary = RotaryPositions(spec.max_position_embeddings, head_dim, spec.sliding_theta)
        self.reach = spec.local_attention // 2
        self.kinds = spec.layer_types
        self.layers = nn.ModuleList(_Layer(spec, index) for index in range(spec.num_hidden_layers))
        self.final_norm = _norm(spec)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> hidden states [B, T, hidden_size]."""
        x = self.dropout(self.norm(self.words(input_ids)))
        mask, positions = key_mask_without_promise(attention_mask), counted_positions(input_ids)
        near = within_reach(mask, distances(positions[:1]), self.reach, x.dtype)
        seen = {FULL: (mask, self.full_rotary(positions)), SLIDING: (near, self.sliding_rotary(positions))}
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = layer(x, *seen[kind])
        out: Tensor = self.final_norm(x)
        return out


class _ModernBertModule(nn.Module):
    def __init__(self, spec: ModernBert) -> None:
        super().__init__()
        self.encoder = _Encoder(spec)
        self.head = _head(spec, self.encoder.words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(input_ids, attention_mask), attention_mask)
        return out


def _head(spec: ModernBert, words: nn.Embedding) -> nn.Module:
    """From hidden states [B, T, hidden_size] and attention_mask [B, T] to the output of the task."""
    if spec.head == "feature-extraction":
        return HiddenHead()
    if spec.head == "sentence-embedding":
        return SentenceHead(spec.pooling, spec.normalize)
    if spec.head == "fill-mask":
        output = nn.Linear(spec.hidden_size, spec.vocab_size, spec.decoder_bias)
        output.weight = words.weight if spec.tie_word_embeddings else output.weight
    else:
        output = nn.Linear(spec.hidden_size, len(spec.labels))
    dense = nn.Linear(spec.hidden_size, spec.hidden_size, spec.classifier_bias)
    transform = nn.Sequential(dense, ACTIVATIONS[spec.classifier_activation](), _norm(spec))
    pooled = "none" if spec.head != "text-classification" else spec.classifier_pooling
    return PredictionHead(transform, spec.classifier_dropout, output, POOLED[pooled])
