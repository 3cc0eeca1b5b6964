"""BERT from a Hugging Face checkpoint (Devlin et al. 2018): encoder, classifiers, masked words, sentence embeddings.

words + token types + positions 0, 1, 2, ... -> norm -> post-norm layers -> the head of the task
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._checkpoint import read_fields, read_labels, read_task
from tx_export.models._heads import HiddenHead, Pooling, SentenceHead, TextHead, TokenHead, WordHead
from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.layers import FeedForward, PostNormLayer
from tx_export.models.parts.masks import key_mask_without_promise
from tx_export.models.parts.positions import counted_positions
from tx_export.spec import CheckpointSpec, Dim, TensorSpec

__all__ = ["Bert"]

Task = Literal["feature-extraction", "text-classification", "token-classification", "fill-mask", "sentence-embedding"]

_ARCHITECTURES: Mapping[str, Task] = {
    "BertModel": "feature-extraction",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertForMaskedLM": "fill-mask",
}
_TASKS: tuple[Task, ...] = (*_ARCHITECTURES.values(), "sentence-embedding")
_COUNTS = (
    *("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("type_vocab_size", "max_position_embeddings"),
)
_GELU = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_RENAMES = (  # in this order, on the names of a checkpoint
    (r"^bert\.", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "encoder.words."),
    (r"^embeddings\.position_embeddings\.", "encoder.positions."),
    (r"^embeddings\.token_type_embeddings\.", "encoder.token_types."),
    (r"^embeddings\.LayerNorm\.", "encoder.norm."),
    (r"^encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.self\.", ".attention."),
    (r"\.attention\.output\.dense\.", ".attention.output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".feed_forward.up."),
    (r"(\.\d+)\.output\.dense\.", r"\1.feed_forward.down."),
    (r"(\.\d+)\.output\.LayerNorm\.", r"\1.feed_forward_norm."),
    (r"^pooler\.dense\.", "head.pooler."),
    (r"^cls\.predictions\.transform\.dense\.", "head.transform."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.(decoder\.)?", "head.decoder."),
    (r"^classifier\.", "head.classifier."),
)


@dataclass(frozen=True)
class Bert(CheckpointSpec):
    """The keys and defaults of Hugging Face's BertConfig, and what is computed from the encoder."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    problem_type: str | None = None  # single_label_classification, multi_label_classification or regression
    labels: tuple[str, ...] = ()  # of a classifier
    head: Task = "feature-extraction"
    pooling: Pooling = "mean"  # of a sentence embedding, over real tokens; cls is the first of them
    normalize: bool = False  # a sentence embedding, to unit length

    unused: ClassVar[tuple[str, ...]] = (
        r"(bert\.)?embeddings\.(position_ids|token_type_ids)",
        r"(bert\.)?pooler\..*",
        r"cls\..*",
        r"classifier\..*",
    )

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.num_hidden_layers <= 1000:
            raise LoadError(f"config.json: num_hidden_layers is {self.num_hidden_layers}; it must be in 0 to 1000")
        if self.hidden_size % self.num_attention_heads:
            raise LoadError(
                f"config.json: hidden_size {self.hidden_size} does not divide by "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if not self.layer_norm_eps >= 0:
            raise LoadError(f"config.json: layer_norm_eps is {self.layer_norm_eps}; it must not be negative")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise LoadError(
                f"config.json: pad_token_id is {self.pad_token_id}; it must be in 0 to {self.vocab_size - 1}"
            )
        if self.hidden_act not in (*_GELU, "relu"):
            raise LoadError(f"config.json: hidden_act is {self.hidden_act!r}; supported: {', '.join(_GELU)}, relu")
        if self.head.endswith("classification") and not self.labels:
            raise LoadError("config.json: num_labels is 0; a classifier needs at least one label")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec; the task of a sentence-transformers folder is sentence-embedding."""
        derived = ("labels", "head", "pooling", "normalize")
        fields = read_fields(cls, config, derived, {"position_embedding_type": "absolute"})
        head: Task = read_task(config, task or ("sentence-embedding" if pooling else None), _ARCHITECTURES, _TASKS)
        if head == "sentence-embedding":
            if not pooling:
                raise LoadError(
                    "task sentence-embedding needs a sentence-transformers folder (modules.json says how to pool)"
                )
            fields |= {"pooling": pooling[0], "normalize": "normalize" in pooling}
        if head.endswith("classification"):
            fields["labels"] = read_labels(config)
        return cls(**fields, head=head)

    @property
    def task(self) -> str:
        return self.head

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        if name == "cls.predictions.bias" and not self.tie_word_embeddings:
            return name  # an untied decoder has a bias of its own, and this one is unused
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        return name

    def build(self) -> nn.Module:
        """The encoder and the head of the task."""
        return _BertModule(self)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids, mask, and token types where there is more than one."""
        dims = (Dim("batch"), Dim("tokens", self.max_position_embeddings))
        ids = TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1)
        mask = TensorSpec("attention_mask", "int64", dims, 0, 1)
        if self.type_vocab_size == 1:
            return (ids, mask)
        return (ids, mask, TensorSpec("token_type_ids", "int64", dims, 0, self.type_vocab_size - 1))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """One tensor: last_hidden_state, embedding or logits."""
        batch, tokens = Dim("batch"), Dim("tokens", self.max_position_embeddings)
        named: dict[str, tuple[str, tuple[int | Dim, ...]]] = {
            "feature-extraction": ("last_hidden_state", (batch, tokens, self.hidden_size)),
            "text-classification": ("logits", (batch, len(self.labels))),
            "token-classification": ("logits", (batch, tokens, len(self.labels))),
            "fill-mask": ("logits", (batch, tokens, self.vocab_size)),
            "sentence-embedding": ("embedding", (batch, self.hidden_size)),
        }
        name, dims = named[self.head]
        return (TensorSpec(name, "float32", dims),)


def _activation(hidden_act: str) -> nn.GELU | nn.ReLU:
    return nn.ReLU() if hidden_act == "relu" else nn.GELU(approximate=_GELU[hidden_act])


def _layer(spec: Bert) -> PostNormLayer:
    size, heads = spec.hidden_size, spec.num_attention_heads
    feed_forward = FeedForward(size, spec.intermediate_size, "gelu", dropout=0.0)  # BERT drops nothing inside
    feed_forward.activation = _activation(spec.hidden_act)
    attention = MultiHeadAttention(size, heads, size // heads, spec.attention_probs_dropout_prob)
    return PostNormLayer(attention, feed_forward, size, spec.layer_norm_eps, spec.hidden_dropout_prob)


class _Encoder(nn.Module):
    def __init__(self, spec: Bert) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.token_types = nn.Embedding(spec.type_vocab_size, spec.hidden_size)
        self.norm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.dropout = nn.Dropout(spec.hidden_dropout_prob)
        self.layers = nn.ModuleList(_layer(spec) for _ in range(spec.num_hidden_layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Ids, mask and token types [B, T] -> hidden states [B, T, hidden_size]."""
        types = self.token_types.weight[0] if token_type_ids is None else self.token_types(token_type_ids)
        x = self.dropout(self.norm(self.words(input_ids) + types + self.positions(counted_positions(input_ids))))
        mask = key_mask_without_promise(attention_mask)
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = x
        return out


class _BertModule(nn.Module):
    def __init__(self, spec: Bert) -> None:
        super().__init__()
        self.encoder = _Encoder(spec)
        self.head = _head(spec, self.encoder.words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.encoder(input_ids, attention_mask, token_type_ids), attention_mask)
        return out


def _head(spec: Bert, words: nn.Embedding) -> nn.Module:
    """From hidden states [B, T, hidden_size] and attention_mask [B, T] to the output of the task."""
    dropout = spec.hidden_dropout_prob if spec.classifier_dropout is None else spec.classifier_dropout
    match spec.head:
        case "feature-extraction":
            return HiddenHead()
        case "text-classification":
            return TextHead(spec.hidden_size, len(spec.labels), dropout)
        case "token-classification":
            return TokenHead(spec.hidden_size, len(spec.labels), dropout)
        case "fill-mask":
            tied = words if spec.tie_word_embeddings else None
            return WordHead(spec.hidden_size, spec.vocab_size, _activation(spec.hidden_act), spec.layer_norm_eps, tied)
        case "sentence-embedding":
            return SentenceHead(spec.pooling, spec.normalize)
