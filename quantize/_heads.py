"""The attention layers of a module, in order, and how one is left with some of its heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tx_export.models.parts.attention import Attention, MultiHeadAttention, PackedSelfAttention
from tx_export.models.parts.causal import CausalMask, CausalSelfAttention
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.masks import KeyMask
from tx_export.models.parts.turned import PackedCausalSelfAttention
from tx_export.quantize._heads_torch import KeptTorchHeads, is_plain, value_rows
from tx_export.quantize._units import Linear, Numbers, Units, inputs_axis, kept_columns, kept_rows, made_by, repeated

__all__ = ["attentions", "groups_of", "heads_of", "in_a_group", "refusal", "refusal_of", "without_heads"]

_Ours = Attention | CausalSelfAttention | CrossAttention
Layer = _Ours | nn.MultiheadAttention


def attentions(module: nn.Module) -> dict[str, Layer]:
    """All layers that compute attention, by name; one that stands at several places is there once."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Layer)}


def refusal(layer: Layer) -> str | None:
    """Why no head of a layer can be removed; None where it can."""
    if isinstance(layer, (MultiHeadAttention, PackedSelfAttention)):
        return None if layer.num_heads else "it has no heads"
    if isinstance(layer, (CausalSelfAttention, CrossAttention)):
        return None
    if isinstance(layer, nn.MultiheadAttention):
        return None if is_plain(layer) else "it has more than heads: add_bias_kv, add_zero_attn, or a class of its own"
    return f"heads of {type(layer).__name__} can't be removed one by one"


def refusal_of(layer: Layer, heads: Numbers) -> str | None:
    """Why just these heads of a layer can't be removed; None where they can."""
    if isinstance(layer, (CausalSelfAttention, CrossAttention)) and len(heads) == layer.num_heads:
        return "attention with a cache keeps at least one head"
    size = in_a_group(layer)
    left = [size - sum(head // size == group for head in heads) for group in range(layer.num_heads // size)]
    if len(set(left) - {0}) < 2:
        return None
    return (
        f"each {size} query heads in a row share a key and value head: remove whole groups of {size}, say "
        f"{','.join(map(str, range(size)))}, or as many of each group"
    )


def in_a_group(layer: Layer) -> int:
    """How many query heads read one key and value head."""
    return layer.num_heads // layer.num_kv_heads if isinstance(layer, CausalSelfAttention) else 1


def heads_of(module: nn.Module) -> list[Units]:
    """The heads of each layer from which some can be removed."""
    layers = attentions(module).items()
    return [_units(name, layer, layer.num_heads) for name, layer in layers if refusal(layer) is None]


def groups_of(module: nn.Module) -> list[Units]:
    """What goes at once: a head, or a key and value head with all query heads that read it."""
    layers = attentions(module).items()
    return [
        _units(name, layer, layer.num_heads // in_a_group(layer)) for name, layer in layers if refusal(layer) is None
    ]


def _units(name: str, layer: Layer, count: int) -> Units:
    if isinstance(layer, nn.MultiheadAttention):
        return Units(name, count, layer.out_proj.weight, value_rows(layer))
    value, heads = _value(layer), layer.num_kv_heads if isinstance(layer, CausalSelfAttention) else layer.num_heads
    made = tuple(tensor[-heads * layer.head_dim :] for tensor in made_by(value))
    return Units(name, count, layer.output.weight, made, inputs_axis(layer.output))


def _value(layer: _Ours) -> Linear:
    """The product that makes the values, maybe behind others."""
    value = layer.qkv if isinstance(layer, (PackedSelfAttention, PackedCausalSelfAttention)) else layer.value
    assert isinstance(value, Linear)
    return value


def without_heads(module: nn.Module, removed: Mapping[str, Numbers]) -> nn.Module:
    """A copy in which the named layers lack these heads."""
    copied = copy.deepcopy(module)
    layers = attentions(copied)
    swaps = {layers[name]: _without(layers[name], numbers) for name, numbers in removed.items() if numbers}
    for path, layer in list(copied.named_modules(remove_duplicate=False)):
        if layer in swaps and path:
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, swaps[layer])
    return swaps.get(copied, copied)  # type: ignore[call-overload, no-any-return]


def _without(layer: Layer, numbers: Numbers) -> nn.Module:
    kept = tuple(head for head in range(layer.num_heads) if head not in numbers)
    if isinstance(layer, nn.MultiheadAttention):
        return KeptTorchHeads(layer, kept) if kept else _TorchOutputBias(layer)
    if not kept:
        return _OutputBias(layer.output)
    groups = tuple(dict.fromkeys(head // in_a_group(layer) for head in kept))
    queries, keys = (repeated(numbers, layer.head_dim) for numbers in (kept, groups))
    if isinstance(layer, (PackedSelfAttention, PackedCausalSelfAttention)):
        width = layer.num_heads * layer.head_dim
        kept_rows(_value(layer), torch.cat([queries, keys + width, keys + 2 * width]))
    else:
        assert isinstance(layer, (MultiHeadAttention, CausalSelfAttention, CrossAttention))
        for linear, rows in ((layer.query, queries), (layer.key, keys), (layer.value, keys)):
            kept_rows(linear, rows)
    kept_columns(layer.output, queries)
    layer.num_heads = len(kept)
    if isinstance(layer, CausalSelfAttention):
        layer.num_kv_heads = len(groups)
    layer.register_forward_pre_hook(_BiasOfKept(kept), with_kwargs=True)
    return layer


@dataclass(frozen=True)
class _BiasOfKept:
    """Before forward: of a bias that has an entry for each head, as the layers share it, those of the kept heads."""

    kept: Numbers

    def __call__(
        self, _layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._cut, given)), {name: self._cut(value) for name, value in named.items()}

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, (KeyMask, CausalMask)) or value.bias is None or value.bias.shape[1] == 1:
            return value
        return value._replace(bias=torch.cat([value.bias[:, head : head + 1] for head in self.kept], dim=1))


class _OutputBias(nn.Module):
    """Attention without heads: the bias of its output product, at every position."""

    def __init__(self, output: nn.Linear) -> None:
        super().__init__()
        bias = torch.zeros(output.out_features) if output.bias is None else output.bias
        self.bias = nn.Parameter(bias.detach().clone(), output.weight.requires_grad)

    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        """Called as any attention: x [B, T, d_model] -> [B, T, d_model]."""
        return self.bias.expand(x.shape)


class _TorchOutputBias(nn.Module):
    """The same in the place of an nn.MultiheadAttention."""

    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.batch_first, self.num_heads = layer.batch_first, 0
        self.output = _OutputBias(layer.out_proj)

    def forward(self, query: Tensor, *_others: Any, need_weights: bool = True, **_named: Any) -> tuple[Tensor, None]:
        """There are no weights to return."""
        if need_weights:
            raise RuntimeError("attention without heads has no weights")
        return self.output(query), None
