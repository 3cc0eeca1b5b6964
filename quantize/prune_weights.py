"""Set the smallest weights of each product to zero, anywhere or two of every four (2:4).

The products stay as large as they were: no runtime is faster for it, and a file is smaller only when compressed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tx_export.errors import PassError
from tx_export.passes import Coverage, Left, ModulePass

__all__ = ["PruneWeights"]

_NO_GAIN = "zeros are stored and multiplied as any number: they save nothing at run time, only in a compressed file"


@dataclass(frozen=True)
class PruneWeights(ModulePass):
    """Counts zeros; biases, norms and tables keep theirs."""

    ratio: float = 0.5  # of the weights of each product, rounded to the nearest whole number, halves up
    pattern: str = "unstructured"  # or 2:4, which is a ratio of 0.5

    subject: ClassVar[str] = "pruned_weights"

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}; it must be between 0 and 1")
        if self.pattern not in ("unstructured", "2:4"):
            raise ValueError(f"pattern is {self.pattern!r}; known: unstructured, 2:4")
        if self.pattern == "2:4" and self.ratio != 0.5:
            raise ValueError(f"pattern 2:4 is a ratio of 0.5, not {self.ratio}")

    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        copied = copy.deepcopy(module)
        tables = {layer.weight for layer in copied.modules() if isinstance(layer, nn.Embedding)}
        weights = dict(_weights(copied))
        if not weights:
            raise PassError("prune_weights: there is no nn.Linear and no nn.MultiheadAttention")
        left, done, of = [Left("run time", _NO_GAIN)], 0, 0
        for weight, name in weights.items():
            if weight in tables:
                left.append(Left(name, "it is an embedding table too"))
            elif self.pattern == "2:4" and weight.shape[1] % 4:
                left.append(Left(name, f"its {weight.shape[1]} inputs are no multiple of 4"))
            else:
                self._zero(weight)
                done, of = done + int((weight == 0).sum()), of + weight.numel()
        return copied, Coverage(done, of, tuple(left))

    @torch.no_grad()
    def _zero(self, weight: Tensor) -> None:
        groups = weight.detach().view(-1, 4) if self.pattern == "2:4" else weight.detach().view(1, -1)
        number = int(self.ratio * groups.shape[1] + 0.5)
        smallest = groups.abs().argsort(dim=1, stable=True)[:, :number]
        groups.scatter_(1, smallest, 0.0)


def _weights(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Of products, with their names; a shared one gets one name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(name.rpartition(".")[0])
        if parameter.ndim == 2 and isinstance(owner, (nn.Linear, nn.MultiheadAttention)):
            yield parameter, name
