"""Decoders with Llama's arithmetic: RMS norm first, rotary positions, grouped-query attention, gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import nn

from tx_export.errors import LoadError
from tx_export.models._checkpoint import read_fields, read_task, renamed_module
from tx_export.models._heads import HiddenHead, Pooling, SentenceHead
from tx_export.models._pooled_decoder import LastTokenHead, PooledDecoder
from tx_export.models._rope import ROPE_KEYS, read_rope, rope_scale
from tx_export.models._tasks import output_of, read_head
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.decoder import Decoder, DecoderLayer, GluFeedForward, swish
from tx_export.models.parts.norms import RMSNorm
from tx_export.models.parts.positions import RotaryPositions
from tx_export.spec import CacheSpec, CheckpointSpec, Dim, TensorSpec

__all__ = ["NAMES", "LlamaSpec", "read_layered_windows", "read_window"]

Head = Literal["text-generation", "text-classification", "sentence-embedding", "feature-extraction"]
NAMES: Mapping[str, str] = {
    "model.embed_tokens": "words",
    "model.layers.N.input_layernorm": "layers.N.attention_norm",
    "model.layers.N.self_attn.q_proj": "layers.N.attention.query",
    "model.layers.N.self_attn.k_proj": "layers.N.attention.key",
    "model.layers.N.self_attn.v_proj": "layers.N.attention.value",
    "model.layers.N.self_attn.o_proj": "layers.N.attention.output",
    "model.layers.N.post_attention_layernorm": "layers.N.feed_forward_norm",
    "model.layers.N.mlp.gate_proj": "layers.N.feed_forward.gate",
    "model.layers.N.mlp.up_proj": "layers.N.feed_forward.up",
    "model.layers.N.mlp.down_proj": "layers.N.feed_forward.down",
    "model.norm": "norm",
    "lm_head": "head",
    "score": "head.classifier",
}
_TASKS: tuple[Head, ...] = ("text-generation", "text-classification", "sentence-embedding", "feature-extraction")

_FIXED = {"pretraining_tp": 1}
_READ_HERE = ("rope_theta", "rope_type", "rope_numbers", "windows", "head", "labels", "pooling", "normalize")


@dataclass(frozen=True)
class LlamaSpec(CheckpointSpec):
    """The keys and defaults of Hugging Face's LlamaConfig that change what is computed."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of query, key, value and output
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    pad_token_id: int | None = None
    rope_theta: float = 10_000.0
    rope_type: str = "default"
    rope_numbers: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()  # of each layer, in tokens; 0: it sees all
    head: Head = "text-generation"
    labels: tuple[str, ...] = ()
    pooling: Pooling = "last"
    normalize: bool = False

    architecture: ClassVar[str] = "LlamaForCausalLM"
    own_keys: ClassVar[tuple[str, ...]] = ()  # of config.json, that read_windows reads
    names = NAMES
    padding = "any"  # what comes behind a position changes nothing there, and before it counts by its distance
    unused = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        for name in counts:
            if getattr(self, name) < 1:
                raise LoadError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.num_hidden_layers <= 1000:
            raise LoadError(f"config.json: num_hidden_layers is {self.num_hidden_layers}; it must be in 0 to 1000")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise LoadError(
                f"config.json: hidden_size {self.hidden_size} does not divide by num_attention_heads "
                f"{self.num_attention_heads}; set head_dim"
            )
        if self.width < 2 or self.width % 2:
            raise LoadError(f"config.json: head_dim is {self.width}; rotary positions turn pairs of channels")
        if self.kv_heads < 1 or self.num_attention_heads % self.kv_heads:
            raise LoadError(
                f"config.json: num_attention_heads {self.num_attention_heads} does not divide by num_key_value_heads "
                f"{self.kv_heads}"
            )
        if self.hidden_act != "silu":
            raise LoadError(f"config.json: hidden_act is {self.hidden_act!r}; supported: silu")
        if not self.rms_norm_eps >= 0:
            raise LoadError(f"config.json: rms_norm_eps is {self.rms_norm_eps}; it must not be negative")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """See CheckpointSpec; the keys of transformers 5 and those of older checkpoints are read."""
        named = cls.architecture.removesuffix("ForCausalLM")
        known: Mapping[str, Head] = {
            cls.architecture: "text-generation",
            f"{named}ForSequenceClassification": "text-classification",
            f"{named}Model": "feature-extraction",
        }
        head = read_task(config, task or ("sentence-embedding" if pooling else None), known, _TASKS)
        rest = {key: value for key, value in config.items() if key not in (*ROPE_KEYS, *cls.own_keys)}
        fields = read_fields(cls, rest, _READ_HERE, _FIXED)
        fields |= {"head": head} if head == "text-generation" else read_head(config, head, pooling, {})
        layers = fields.get("num_hidden_layers", cls.num_hidden_layers)
        return cls(**fields, **read_rope(config, cls.rope_theta), windows=cls.read_windows(config, layers))

    @classmethod
    def read_windows(cls, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """The window of each layer; empty where all see all."""
        return ()

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def task(self) -> str:
        return self.head

    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint; one of hidden states alone has no `model.`."""
        return renamed_module(
            name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}", self.names
        )

    def build(self) -> nn.Module:
        """The plain form."""
        words = nn.Embedding(self.vocab_size, self.hidden_size)
        rotary = RotaryPositions(self.max_position_embeddings, self.width, self.rope_theta)
        rotary.scale(rope_scale(self.rope_type, self.rope_numbers, rotary.frequencies))
        windows = self.windows or (0,) * self.num_hidden_layers
        layers = [self.layer(window or None) for window in windows]
        if self.head != "text-generation":
            return PooledDecoder(words, rotary, layers, self.norm(), self._pooled_head())
        head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        if self.tie_word_embeddings:
            head.weight = words.weight
        return Decoder(words, rotary, layers, self.norm(), head)

    def _pooled_head(self) -> nn.Module:
        if self.head == "text-classification":
            return LastTokenHead(self.hidden_size, len(self.labels))
        return SentenceHead(self.pooling, self.normalize) if self.head == "sentence-embedding" else HiddenHead()

    def layer(self, window: int | None) -> DecoderLayer:
        feed_forward = GluFeedForward(self.hidden_size, self.intermediate_size, swish, self.mlp_bias)
        return DecoderLayer(self.attention(window), feed_forward, (self.norm(), self.norm()))

    def attention(self, window: int | None) -> CausalSelfAttention:
        return CausalSelfAttention(
            self.hidden_size,
            self.num_attention_heads,
            self.kv_heads,
            self.width,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            window=window,
            dropout=self.attention_dropout,
        )

    def norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.rms_norm_eps)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Ids and mask."""
        dims = (Dim("batch"), Dim("tokens", self.max_position_embeddings))
        ids = TensorSpec("input_ids", "int64", dims, 0, self.vocab_size - 1)
        return (ids, TensorSpec("attention_mask", "int64", dims, 0, 1))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Logits of the next token at each position, or what the task has."""
        longest = self.max_position_embeddings
        if self.head != "text-generation":
            return (output_of(self.head, longest, self.hidden_size, len(self.labels), self.vocab_size),)
        return (TensorSpec("logits", "float32", (Dim("batch"), Dim("tokens", longest), self.vocab_size)),)

    def cache(self) -> CacheSpec | None:
        """Of what generates."""
        if self.head != "text-generation":
            return None
        return CacheSpec(self.num_hidden_layers, self.kv_heads, self.width, self.max_position_embeddings)


def read_window(config: Mapping[str, Any], default: int) -> int:
    """sliding_window in tokens; 0 where it is null."""
    window = config.get("sliding_window", default)
    if window is None:
        return 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise LoadError(f"config.json: sliding_window is {window!r}; expected a number of tokens, or null")
    return window


def read_layered_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Of the layers that layer_types calls sliding, else of those from max_window_layers on, if there is a window."""
    window = read_window(config, 4096) if config.get("use_sliding_window") else 0
    first, types = config.get("max_window_layers", 28), config.get("layer_types")
    if not isinstance(first, int) or isinstance(first, bool):
        raise LoadError(f"config.json: max_window_layers is {first!r}; expected a number of layers")
    if types is None:
        return tuple(window if index >= first else 0 for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise LoadError(
            f"config.json: layer_types is {types!r}; supported: full_attention, sliding_attention for each of {layers}"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
