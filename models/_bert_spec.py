"""What the families with BERT's arithmetic share: the keys of their config.json and the limits of each, tasks, names.

A family is a short file that says what it changes: defaults, names of keys and tensors, sizes.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._bert_encoder import ACTIVATIONS, BertEncoder, EncoderSizes
from tx_export.models._checkpoint import read_fields, renamed_module
from tx_export.models._heads import HiddenHead, Pooling, SentenceHead, TextHead, TokenHead, WordHead
from tx_export.models._tasks import Task, output_of, read_head
from tx_export.spec import CheckpointSpec, Dim, TensorSpec

__all__ = ["LAYER_NAMES", "BertSpec"]

LAYER_NAMES: dict[str, str] = {  # of the modules that BERT, RoBERTa and ELECTRA name alike
    "embeddings.word_embeddings": "encoder.words",
    "embeddings.position_embeddings": "encoder.positions",
    "embeddings.token_type_embeddings": "encoder.token_types",
    "embeddings.LayerNorm": "encoder.norm",
    "encoder.layer.N.attention.self.query": "encoder.layers.N.attention.query",
    "encoder.layer.N.attention.self.key": "encoder.layers.N.attention.key",
    "encoder.layer.N.attention.self.value": "encoder.layers.N.attention.value",
    "encoder.layer.N.attention.output.dense": "encoder.layers.N.attention.output",
    "encoder.layer.N.attention.output.LayerNorm": "encoder.layers.N.attention_norm",
    "encoder.layer.N.intermediate.dense": "encoder.layers.N.feed_forward.up",
    "encoder.layer.N.output.dense": "encoder.layers.N.feed_forward.down",
    "encoder.layer.N.output.LayerNorm": "encoder.layers.N.feed_forward_norm",
}


@dataclass(frozen=True)
class BertSpec(CheckpointSpec):
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

    architectures: ClassVar[Mapping[str, Task]]  # the classes of transformers
    prefix: ClassVar[str]  # of the encoder's names in a checkpoint that has a head
    counts: ClassVar[tuple[str, ...]] = (  # fields that are at least 1
        *("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"),
        *("type_vocab_size", "max_position_embeddings"),
    )
    keys: ClassVar[Mapping[str, str]] = {}  # a field -> its key in config.json, where they differ
    derived: ClassVar[tuple[str, ...]] = ("labels", "head", "pooling", "normalize")  # fields that aren't keys
    fixed: ClassVar[dict[str, object]] = {"position_embedding_type": "absolute"}  # keys with one value
    text_activation: ClassVar[str | None] = None  # of a classifier of texts; None: tanh
    word_activation: ClassVar[str | None] = None  # of masked words; None: the one of the layers

    def __post_init__(self) -> None:
        for name in self.counts:
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {self._shown(name)}; it must be at least 1")
        if not 0 <= self.num_hidden_layers <= 1000:
            raise LoadError(f"config.json: {self._shown('num_hidden_layers')}; it must be in 0 to 1000")
        if self.hidden_size % self.num_attention_heads:
            width, heads = (self._shown(name, " ") for name in ("hidden_size", "num_attention_heads"))
            raise LoadError(f"config.json: {width} does not divide by {heads}")
        if not self.layer_norm_eps >= 0:
            raise LoadError(f"config.json: {self._shown('layer_norm_eps')}; it must not be negative")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise LoadError(f"config.json: {self._shown('pad_token_id')}; it must be in 0 to {self.vocab_size - 1}")
        if self.hidden_act not in ACTIVATIONS:
            raise LoadError(f"config.json: {self._shown('hidden_act')}; supported: {', '.join(ACTIVATIONS)}")
        if self.head.endswith("classification") and not self.labels:
            raise LoadError("config.json: num_labels is 0; a classifier needs at least one label")
        if self.counts_real_ids and (self.pad_token_id is None or self.max_tokens < 1):
            raise LoadError(
                f"config.json: {self._shown('pad_token_id')}; positions are counted from it, so it must be "
                f"in 0 to max_position_embeddings - 2, which is {self.max_position_embeddings - 2}"
            )

    def _shown(self, name: str, between: str = " is ") -> str:
        """The key in config.json and its value."""
        value = getattr(self, name)
        return f"{self.keys.get(name, name)}{between}{value!r}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec; the task of a sentence-transformers folder is sentence-embedding."""
        fields = read_fields(cls, config, cls.derived, cls.fixed, cls.keys)
        return cls(**fields, **read_head(config, task, pooling, cls.architectures))

    @abc.abstractmethod
    def sizes(self) -> EncoderSizes:
        """Of the encoder: BERT's, with what the family changes."""

    def bert_sizes(self) -> EncoderSizes:
        """Embeddings as wide as the layers, and a layer of its own for each step."""
        return EncoderSizes(
            vocab_size=self.vocab_size,
            embedding_size=self.hidden_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            activation=self.hidden_act,
            positions=self.max_position_embeddings,
            token_types=self.type_vocab_size,
            epsilon=self.layer_norm_eps,
            dropout=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
            pad_id=self.pad_token_id if self.counts_real_ids else None,
        )

    @property
    def task(self) -> str:
        return self.head

    @property
    def max_tokens(self) -> int:
        """RoBERTa's table of 514 positions holds 512 tokens: it is read from pad_token_id + 1 on."""
        return self.max_position_embeddings - ((self.pad_token_id or 0) + 1 if self.counts_real_ids else 0)

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""
        module = name.rpartition(".")[0]
        if not self.tie_word_embeddings and f"{module}.decoder" in self.names:
            return name  # an untied decoder has a bias of its own, and this one is unused
        return renamed_module(name.removeprefix(f"{self.prefix}."), self.names)

    def build(self) -> nn.Module:
        """The encoder and the head of the task."""
        return _BertModule(self)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids, mask, and token types where there is more than one."""
        dims = (Dim("batch"), Dim("tokens", self.max_tokens))
        ids = TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1)
        mask = TensorSpec("attention_mask", "int64", dims, 0, 1)
        if self.type_vocab_size <= 1:
            return (ids, mask)
        return (ids, mask, TensorSpec("token_type_ids", "int64", dims, 0, self.type_vocab_size - 1))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """One tensor: last_hidden_state, embedding or logits."""
        return (output_of(self.head, self.max_tokens, self.hidden_size, len(self.labels), self.vocab_size),)


class _BertModule(nn.Module):
    def __init__(self, spec: BertSpec) -> None:
        super().__init__()
        self.encoder = BertEncoder(spec.sizes())
        self.head = _head(spec, self.encoder.words)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.encoder(input_ids, attention_mask, token_type_ids), attention_mask)
        return out


def _head(spec: BertSpec, words: nn.Embedding) -> nn.Module:
    """From hidden states [B, T, hidden_size] and attention_mask [B, T] to the output of the task."""
    dropout = spec.hidden_dropout_prob if spec.classifier_dropout is None else spec.classifier_dropout
    match spec.head:
        case "feature-extraction":
            return HiddenHead()
        case "text-classification":
            chosen = None if spec.text_activation is None else ACTIVATIONS[spec.text_activation]()
            return TextHead(spec.hidden_size, len(spec.labels), dropout, chosen)
        case "token-classification":
            return TokenHead(spec.hidden_size, len(spec.labels), dropout)
        case "fill-mask":
            activation = ACTIVATIONS[spec.word_activation or spec.hidden_act]()
            tied, width = words if spec.tie_word_embeddings else None, words.embedding_dim
            return WordHead(spec.hidden_size, spec.vocab_size, activation, spec.layer_norm_eps, tied, width)
        case "sentence-embedding":
            return SentenceHead(spec.pooling, spec.normalize)
