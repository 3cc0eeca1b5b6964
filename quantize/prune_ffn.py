"""Remove feed-forward neurons: their rows of the product up, and their columns of the product down.

The module that is left computes what the whole one does with these neurons set to zero, which is proved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from tx_export.errors import PassError
from tx_export.passes import Coverage, Left, ModulePass
from tx_export.quantize._neurons import neurons_of, without_neurons
from tx_export.quantize._units import Numbers, Units, check_options, least_important, prove, rounded, shortfall

__all__ = ["PruneFfn"]


@dataclass(frozen=True)
class PruneFfn(ModulePass):
    """A share of all feed-forward neurons, the least important first; one of each layer stays."""

    ratio: float = 0.0  # of all neurons, rounded to the nearest whole number, halves up
    neurons: str = ""  # LAYER:BITS;...: bit n, in hexadecimal, is the removed neuron n; what the ratio leads to
    importance: str = "gradient"  # of the outputs, by calibration text (norm where there is none), or norm of weights

    subject: ClassVar[str] = "pruned_neurons"

    def __post_init__(self) -> None:
        check_options(self.ratio, self.neurons, self.importance)
        _read(self.neurons)

    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        units = neurons_of(module)
        if not units:
            raise PassError(
                "prune_ffn: there is no feed-forward layer of ours and no stock layer of torch; "
                "which weights belong to a neuron of one that is written by hand is not known"
            )
        total = sum(each.count for each in units)
        asked = rounded(self.ratio, total)
        removed = _numbered(_read(self.neurons), units) if self.neurons else self._by_ratio(module, asked)
        pruned = without_neurons(module, {each.name: numbers for each, numbers in zip(units, removed, strict=True)})
        prove(module, pruned, neurons_of, removed, self)
        done = sum(map(len, removed))
        reason = shortfall(self.ratio, total, done)
        text = ";".join(f"{layer}:{_bits(numbers)}" for layer, numbers in enumerate(removed) if numbers)
        repeat = (dataclasses.replace(self, neurons=text),) if text else ()
        left = () if reason is None else (Left("neurons", reason),)
        return pruned, Coverage(done, total, left, repeat=repeat)

    def _by_ratio(self, module: nn.Module, asked: int) -> list[Numbers]:
        return least_important(module, neurons_of, asked, self.importance, self)


def _bits(numbers: Numbers) -> str:
    return f"{sum(1 << number for number in numbers):x}"


def _read(text: str) -> dict[int, int]:
    """`0:3;2:f0` as {0: 3, 2: 240}; ValueError shows the form."""
    found: dict[int, int] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        layer, _, bits = item.partition(":")
        try:
            found[int(layer)] = int(bits, 16)
        except ValueError as error:
            raise ValueError(f"neurons: {item!r} is not LAYER:BITS, with bits in hexadecimal") from error
    return found


def _numbered(bits: Mapping[int, int], units: Sequence[Units]) -> list[Numbers]:
    for layer, mask in bits.items():
        if layer not in range(len(units)) or mask >> units[layer].count:
            raise PassError(f"prune_ffn: layer {layer} has not these neurons; the layers are 0 to {len(units) - 1}")
    return [
        tuple(number for number in range(each.count) if bits.get(layer, 0) >> number & 1)
        for layer, each in enumerate(units)
    ]
