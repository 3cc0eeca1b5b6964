"""Remove attention heads: their rows of query, key and value, and their columns of the output product.

The module that is left computes what the whole one does with the outputs of these heads set to zero, which is proved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tx_export.errors import PassError
from tx_export.passes import Coverage, Left, ModulePass
from tx_export.quantize._heads import (
    attentions,
    groups_of,
    heads_of,
    in_a_group,
    refusal,
    refusal_of,
    without_heads,
)
from tx_export.quantize._units import Numbers, check_options, least_important, prove, rounded, shortfall

__all__ = ["PruneHeads"]


@dataclass(frozen=True)
class PruneHeads(ModulePass):
    """A share of all heads, the least important first, one of each layer stays; or heads by hand, even all of a layer.

    Layers are numbered in the order in which the module holds them, from 0. Where several query heads read one key and
    value head, the share is of these groups; by hand, whole groups or as many heads of each.
    """

    ratio: float = 0.0  # of all heads, rounded to the nearest whole number, halves up
    heads: str = ""  # LAYER:HEAD,...;LAYER:..., instead of those that the ratio leads to
    importance: str = "gradient"  # of the outputs, by calibration text (norm where there is none), or norm of weights

    def __post_init__(self) -> None:
        check_options(self.ratio, self.heads, self.importance)
        _read(self.heads)

    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        layers = attentions(module)
        names = list(layers)
        refused = {name: reason for name, layer in layers.items() if (reason := refusal(layer)) is not None}
        if not layers.keys() - refused.keys():
            raise PassError(f"prune_heads: {_nothing(refused)}")
        units = heads_of(module)
        total = sum(each.count for each in units)
        removed = self._by_hand(module, refused) if self.heads else self._by_ratio(module)
        pruned = without_heads(module, removed)
        prove(module, pruned, heads_of, [removed.get(each.name, ()) for each in units], self)
        done = sum(map(len, removed.values()))
        left = [Left(name, reason) for name, reason in refused.items()]
        groups = sum(len(heads) // in_a_group(layers[name]) for name, heads in removed.items())
        if (reason := shortfall(self.ratio, sum(each.count for each in groups_of(module)), groups)) is not None:
            left.append(Left("heads", reason))
        kept = {
            names.index(each.name): tuple(head for head in range(each.count) if head not in removed.get(each.name, ()))
            for each in units
        }
        text = ";".join(f"{names.index(name)}:{','.join(map(str, heads))}" for name, heads in removed.items() if heads)
        repeat = (dataclasses.replace(self, heads=text),) if text else ()
        return pruned, Coverage(done, total, tuple(left), kept=tuple(sorted(kept.items())), repeat=repeat)

    def _by_ratio(self, module: nn.Module) -> dict[str, Numbers]:
        """The heads of the least important groups; a group is one head in most models."""
        groups, layers = groups_of(module), attentions(module)
        asked = rounded(self.ratio, sum(each.count for each in groups))
        found = least_important(module, groups_of, asked, self.importance, self)
        sizes = [in_a_group(layers[each.name]) for each in groups]
        return {
            each.name: tuple(group * size + head for group in numbers for head in range(size))
            for each, numbers, size in zip(groups, found, sizes, strict=True)
        }

    def _by_hand(self, module: nn.Module, refused: Mapping[str, str]) -> dict[str, Numbers]:
        layers = list(attentions(module).items())
        removed: dict[str, Numbers] = {}
        for number, heads in _read(self.heads).items():
            if number >= len(layers):
                raise PassError(f"prune_heads: layer {number} is not there; the layers are 0 to {len(layers) - 1}")
            name, layer = layers[number]
            if name in refused:
                raise PassError(f"prune_heads: layer {number} ({name}): {refused[name]}")
            if heads[-1] >= layer.num_heads:
                raise PassError(
                    f"prune_heads: layer {number} has no head {heads[-1]}; its heads are 0 to {layer.num_heads - 1}"
                )
            if (reason := refusal_of(layer, heads)) is not None:
                raise PassError(f"prune_heads: layer {number} ({name}): {reason}")
            removed[name] = heads
        return removed


def _nothing(refused: Mapping[str, str]) -> str:
    for name, reason in refused.items():
        return f"no layer can lose heads; {name}: {reason}"
    return (
        "there is no attention of ours and no nn.MultiheadAttention; "
        "which weights belong to a head of attention that is written by hand is not known"
    )


def _read(text: str) -> dict[int, Numbers]:
    """`0:1,3;2:0` as {0: (1, 3), 2: (0,)}; ValueError shows the form."""
    found: dict[int, Numbers] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        layer, _, listed = item.partition(":")
        heads = [head.strip() for head in listed.split(",")]
        if not all(number.isdecimal() for number in (layer.strip(), *heads)):
            raise ValueError(f"heads: {item!r} is not LAYER:HEAD,..., say 0:1,3;2:0")
        if int(layer) in found or len({*heads}) < len(heads):
            raise ValueError(f"heads: {item!r} gives a layer or a head twice")
        found[int(layer)] = tuple(sorted(map(int, heads)))
    return found
