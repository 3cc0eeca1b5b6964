"""The words for a model: the tensors it takes and gives, its configuration, and the eager module itself."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from tx_export.errors import LoadError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "BuiltInSpec",
    "CacheSpec",
    "CheckpointSpec",
    "Dim",
    "EagerModel",
    "GenerationSpec",
    "ModelSpec",
    "Scores",
    "TensorSpec",
    "TextSpec",
]

Scores = Literal["softmax", "sigmoid", "identity"]

_TENSOR = re.compile(
    r"(?P<name>[^\s\[\]{}]+):(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?:\{(?P<low>[^}]+?)\.\.(?P<high>[^}]+)\})?"
)
_DIM = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:<=(?P<bound>\d+))?")


@dataclass(frozen=True)
class Dim:
    """A dimension that varies: its name, and the largest size promised (None: no limit). Text form `tokens<=512`."""

    name: str
    bound: int | None = None

    def __str__(self) -> str:
        return self.name if self.bound is None else f"{self.name}<={self.bound}"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: name, NumPy dtype, dims, and the least and largest value allowed (inclusive).

    Text form: `input_ids:int64[batch,tokens<=512]{0..29999}`. An input whose name ends in `mask` holds 0 and 1.
    """

    name: str
    dtype: str
    dims: tuple[int | Dim, ...]
    low: float | None = None
    high: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form; LoadError says what is wrong with it."""
        found = _TENSOR.fullmatch(text.strip())
        if found is None:
            raise LoadError(
                f"input {text!r}: expected NAME:DTYPE[DIM,...]{{LO..HI}}, say input_ids:int64[batch,tokens<=512]"
            )
        try:
            dtype = np.dtype(found["dtype"])
        except (TypeError, ValueError) as error:
            raise LoadError(f"input {found['name']!r}: {found['dtype']!r} is not a NumPy dtype") from error
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise LoadError(f"input {found['name']!r}: {found['dtype']!r} is not a dtype of numbers of at most 64 bits")
        dims = (
            tuple(_parse_dim(found["name"], dim) for dim in found["dims"].split(",")) if found["dims"].strip() else ()
        )
        low, high = _parse_bound(found["name"], found["low"]), _parse_bound(found["name"], found["high"])
        if low is not None and high is not None and low > high:
            raise LoadError(f"input {found['name']!r}: the range {low}..{high} is empty")
        return cls(found["name"], dtype.name, dims, low, high)

    def __str__(self) -> str:
        dims = ",".join(str(dim) for dim in self.dims)
        values = "" if self.low is None or self.high is None else f"{{{self.low}..{self.high}}}"
        return f"{self.name}:{self.dtype}[{dims}]{values}"

    @property
    def is_mask(self) -> bool:
        return self.name.endswith("mask") and (self.low, self.high) in ((None, None), (0, 1))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape when the named dimensions have these sizes."""
        return tuple(sizes[dim.name] if isinstance(dim, Dim) else dim for dim in self.dims)


def _parse_dim(tensor: str, text: str) -> int | Dim:
    text = text.strip()
    found = _DIM.fullmatch(text)
    if found is None and not text.isdecimal():
        raise LoadError(f"input {tensor!r}: dim {text!r} is neither a number, a name nor name<=bound")
    size = int(text) if found is None else int(found["bound"]) if found["bound"] else None
    if size == 0:
        raise LoadError(f"input {tensor!r}: dim {text!r} is empty; it must be at least 1")
    if found is not None:
        return Dim(found["name"], size)
    assert size is not None
    return size


def _parse_bound(tensor: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError as error:
        raise LoadError(f"input {tensor!r}: {text!r} in its range is not a number") from error
    if abs(value) == float("inf"):
        raise LoadError(f"input {tensor!r}: {text!r} in its range is not finite")
    return value


@dataclass(frozen=True)
class TextSpec:
    """How text becomes ids, and scores become labels."""

    tokenizer: str  # the text of a tokenizer.json; its own padding and truncation are ignored
    max_length: int  # in tokens, special tokens included
    pad_id: int = 0
    labels: tuple[str, ...] = ()
    scores: Scores = "softmax"


@dataclass(frozen=True)
class CacheSpec:
    """Keys and values of what a generative model has read, [batch, heads, past, head_dim] each for every layer."""

    layers: int
    heads: int  # of keys and values
    head_dim: int
    max_length: int  # prompt and continuation together
    cross: bool = False  # beside it, of an encoder: cross.N.key and cross.N.value [batch, heads, tokens, head_dim]
    by_layer: tuple[int, ...] = ()  # the heads of each layer, where they differ

    def names(self, what: str) -> tuple[str, ...]:
        """Of the tensors, `what` is past or present."""
        return tuple(f"{what}.{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value"))


@dataclass(frozen=True)
class GenerationSpec:
    """Ids of the tokens with which a continuation begins and ends, and what the checkpoint asks for beside."""

    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    start: int | None = None  # with which a decoder behind an encoder begins
    forced_bos: int | None = None  # behind the start
    forced_eos: int | None = None  # where the limit is reached
    suppressed: tuple[int, ...] = ()  # never chosen
    beams: int = 1
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    early_stopping: bool = False
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    chat: Mapping[str, str] | None = None  # what stands around the messages of a conversation


class ModelSpec(abc.ABC):
    """The configuration of a family: a frozen dataclass whose fields are the configuration keys."""

    @property
    @abc.abstractmethod
    def task(self) -> str:
        """text-classification, sentence-embedding, token-classification, fill-mask or feature-extraction."""

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """A new module; its forward takes the inputs by position and returns one tensor per output."""

    @abc.abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What forward takes, in order."""

    @abc.abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What forward returns, in order."""

    def cache(self) -> CacheSpec | None:
        """Of a model that generates; its module has a cached form."""
        return None

    def generation(self) -> GenerationSpec | None:
        """Of a model that generates, as far as its configuration says."""
        return None


class BuiltInSpec(ModelSpec):
    """A family of ours: made from a size and settings."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]]


class CheckpointSpec(ModelSpec):
    """A Hugging Face family: made from the keys of its config.json."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType({})  # a checkpoint's modules -> ours, N for a layer's number
    unused: ClassVar[tuple[str, ...]] = ()  # regular expressions of checkpoint names that no module wants
    padding: ClassVar[Literal["any", "right"]] = "right"  # the side on which it is promised to change nothing
    counts_real_ids: ClassVar[bool] = False  # positions are counted from the ids that aren't pad_token_id

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...]) -> Self:
        """Read config.json; a key that changes the arithmetic and isn't supported is a LoadError.

        `task` None means what `architectures` says. `pooling` is what a sentence-transformers folder adds on top:
        one of `mean`, `cls`, `max`, then maybe `normalize`; empty without it.
        """

    @abc.abstractmethod
    def renamed(self, name: str) -> str:
        """The name in our module of a tensor's name in the checkpoint."""


@dataclass(frozen=True)
class EagerModel:
    """The reference: a module in eval mode, what it takes and gives, and its tokenizer. No pass touches it."""

    name: str  # of the artifact, unless the user chooses another
    source: str  # as typed if relative, else its last part
    family: str  # the plug-in's name; "module" for a user's own
    task: str
    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    config: Mapping[str, Any]  # JSON values only
    weights: str  # "shipped", "checkpoint <sha256>", "random seed 0"
    text: TextSpec | None = None
    padding: Literal["any", "right"] = "any"  # the side on which padding is promised to change nothing
    cache: CacheSpec | None = None  # of a model that generates: the graph has the cached form of the module
    generation: GenerationSpec | None = None
    pad_id: int | None = None  # put where the mask is 0, and never drawn elsewhere, when positions are counted from ids
