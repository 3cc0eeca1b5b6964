"""Heads and neurons are units alike: each owns inputs of the product behind it, and can be zeroed, weighed and proved.

A unit behind a gate g has d(y)/d(g) at g = 1 equal to the sum over its inputs of W * d(y)/d(W) (Michel et al. 2019).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tx_export._slow_path import slow_path
from tx_export.errors import PassError
from tx_export.models.parts.turned import TurnedLinear
from tx_export.passes import Context, Pass

__all__ = [
    "Find",
    "Linear",
    "Numbers",
    "Units",
    "check_options",
    "inputs_axis",
    "kept_columns",
    "kept_rows",
    "least_important",
    "made_by",
    "prove",
    "repeated",
    "rounded",
    "shortfall",
]

_log = logging.getLogger("tx_export")

Feeds = Mapping[str, np.ndarray]
Linear = nn.Linear | TurnedLinear
Numbers = tuple[int, ...]

_PROVED_ON = 3  # batches of text, and other inputs
_ABSOLUTE, _RELATIVE = 1e-5, 3e-6  # what the order of float32 sums may change, of the largest output where that is more


@dataclass(frozen=True, eq=False)
class Units:
    """Those of one module, side by side."""

    name: str
    count: int
    output: Tensor  # [D, count width] or [count width, D], the weight of the product behind them
    values: tuple[Tensor, ...]  # [count width, ...] each: what makes the values that enter that product
    axis: int = 1  # of `output`, along which they lie

    def parted(self, output: Tensor) -> Tensor:
        """What is laid out as the output's weight, by units: [count, width, D] or [count, D, width]."""
        return torch.unflatten(output, self.axis, (self.count, -1)).movedim(self.axis, 0)

    def of_each(self, output: Tensor) -> Tensor:
        """The sum of each unit [count]."""
        return self.parted(output).sum(dim=(1, 2))


Find = Callable[[nn.Module], Sequence[Units]]


def check_options(ratio: float, by_hand: str, importance: str) -> None:
    """ValueError for what no pass over units takes."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is {ratio}; it must be from 0 to 1")
    if not ratio and not by_hand:
        raise ValueError("it takes a ratio, say ratio=0.25, or what to remove by hand")
    if importance not in ("gradient", "norm"):
        raise ValueError(f"importance is {importance!r}; known: gradient, norm")


def rounded(ratio: float, total: int) -> int:
    """How many units a ratio asks for: the nearest whole number, halves up."""
    return math.floor(ratio * total + 0.5)


def shortfall(ratio: float, total: int, removed: int) -> str | None:
    """Why fewer units were removed than a ratio says, if so."""
    asked = rounded(ratio, total)
    if ratio and not asked:
        return f"{ratio} of {total} rounds to none"
    return f"{asked} of {total} were asked for, {removed} removed: a layer keeps one" if removed < asked else None


def least_important(module: nn.Module, find: Find, asked: int, importance: str, item: Pass) -> list[Numbers]:
    """The `asked` units of the least importance, over all modules; one of each module stays.

    Importance is the `gradient` of the outputs on calibration text, or the `norm` of the weights where there is none.
    """
    assert item.context is not None
    if importance == "gradient" and item.context.feeds:
        return _least(_gradients(module, find, item.context), asked)
    if importance == "gradient":
        _log.warning("%s: without text to see importance by, the norm of the weights decides", item.name())
    return _least([_norms(units) for units in find(module)], asked)


def _least(scores: Sequence[Tensor], asked: int) -> list[Numbers]:
    order = sorted(
        (score, place, unit) for place, each in enumerate(scores) for unit, score in enumerate(each.tolist())
    )
    removed: list[list[int]] = [[] for _ in scores]
    for _, place, unit in order:
        if sum(map(len, removed)) == asked:
            break
        if len(removed[place]) + 1 < len(scores[place]):
            removed[place].append(unit)
    return [tuple(sorted(units)) for units in removed]


def _norms(units: Units) -> Tensor:
    """The norm of a unit's part of the output's weight times that of what makes its values: a bound of what it adds.

    In parts of the module's root mean square, so that layers of other scales compare.
    """
    made = torch.stack([tensor.detach().reshape(units.count, -1).square().sum(dim=1) for tensor in units.values])
    norms = (units.of_each(units.output.detach().square()) * made.sum(dim=0)).sqrt()
    return norms / norms.square().mean().sqrt().clamp(min=torch.finfo(norms.dtype).tiny)


def _gradients(module: nn.Module, find: Find, context: Context) -> list[Tensor]:
    """sum over outputs of (dy/dg)^2, estimated by the square of d(sum of s y)/dg with seeded random signs s.

    The squares of the outputs themselves would not do: those of a normalized output have a constant sum.
    """
    copied = copy.deepcopy(module).requires_grad_(False)
    units = find(copied)
    for each in units:
        each.output.requires_grad_(True)
    sums = [torch.zeros(each.count, dtype=torch.float64) for each in units]
    signs = torch.Generator().manual_seed(context.seed)
    for feeds in context.feeds:
        with torch.enable_grad():
            signed = [_signed(tensor, feeds, signs) for tensor in _outputs(copied, feeds) if tensor.requires_grad]
            if not signed:
                raise PassError("no output depends on them in a way that has a gradient; use importance=norm")
            torch.stack(signed).sum().backward()  # type: ignore[no-untyped-call]
        for total, each in zip(sums, units, strict=True):
            if each.output.grad is not None:
                total += each.of_each((each.output.detach() * each.output.grad).double()).square()
                each.output.grad = None
    return sums


def _signed(output: Tensor, feeds: Feeds, signs: torch.Generator) -> Tensor:
    """The sum of an output with random signs, at real positions where it has one entry for each position."""
    sign = torch.randint(0, 2, output.shape, generator=signs).to(output.dtype) * 2 - 1
    for name, mask in feeds.items():
        if name.endswith("mask") and mask.shape == tuple(output.shape[: mask.ndim]) and output.ndim > mask.ndim:
            sign = sign * torch.from_numpy(mask != 0).to(output.dtype)[..., None]
    return (output * sign).sum()


def prove(module: nn.Module, pruned: nn.Module, find: Find, removed: Sequence[Numbers], item: Pass) -> None:
    """PassError unless `pruned` computes what `module` does with the removed units zeroed."""
    assert item.context is not None
    feeds = [*item.context.feeds[:_PROVED_ON], *item.context.probes[:_PROVED_ON]]
    if not feeds:
        raise PassError(f"{item.name()}: no inputs to compare the pruned module with the masked one on")
    masked = _masked(module, find, removed)
    for each in feeds:
        for index, (expected, found) in enumerate(_pairs(masked, pruned, each, item)):
            bound = max(_ABSOLUTE, _RELATIVE * float(expected.abs().max()))
            difference = float((found - expected).abs().max())
            if not difference <= bound:  # NaN is outside
                raise PassError(
                    f"{item.name()}: output {index} of the pruned module is {difference:.3g} away from that of the "
                    f"module with the same units zeroed; allowed is {bound:.3g}"
                )


def _masked(module: nn.Module, find: Find, removed: Sequence[Numbers]) -> nn.Module:
    masked = copy.deepcopy(module)
    for units, numbers in zip(find(masked), removed, strict=True):
        with torch.no_grad():
            units.parted(units.output)[list(numbers)] = 0
    return masked


def _pairs(masked: nn.Module, pruned: nn.Module, feeds: Feeds, item: Pass) -> Iterator[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        expected = _outputs(masked, feeds)
        try:
            found = _outputs(pruned, feeds)
        except Exception as error:  # a user's module may look into what was pruned
            raise PassError(
                f"{item.name()}: the pruned module fails with {type(error).__name__}: {error}; its own code takes the "
                "old sizes for granted"
            ) from error
    yield from ((one.double(), other.double()) for one, other in zip(expected, found, strict=True) if one.numel())


def _outputs(module: nn.Module, feeds: Feeds) -> list[Tensor]:
    with slow_path():
        found: Any = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in feeds.values()))
    return [found] if isinstance(found, Tensor) else list(found)


def repeated(kept: Sequence[int], width: int) -> Tensor:
    """The rows or columns of units with `width` of them each."""
    return (torch.tensor(kept, dtype=torch.int64)[:, None] * width + torch.arange(width)).flatten()


def inputs_axis(linear: Linear) -> int:
    """The axis of a product's weight along which its inputs lie."""
    return 0 if isinstance(linear, TurnedLinear) else 1


def kept_rows(linear: Linear, rows: Tensor) -> None:
    """Leave a product only these outputs."""
    linear.weight = _part(linear.weight, 1 - inputs_axis(linear), rows)
    linear.out_features = len(rows)
    if linear.bias is not None:
        linear.bias = _part(linear.bias, 0, rows)


def kept_columns(linear: Linear, columns: Tensor) -> None:
    """Leave a product only these inputs."""
    linear.weight = _part(linear.weight, inputs_axis(linear), columns)
    linear.in_features = len(columns)


def made_by(linear: Linear) -> tuple[Tensor, ...]:
    """What makes the outputs of a product, [outputs, ...] each."""
    weight = linear.weight if inputs_axis(linear) == 1 else linear.weight.T
    return (weight,) if linear.bias is None else (weight, linear.bias)


def _part(parameter: Tensor, axis: int, index: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().index_select(axis, index), parameter.requires_grad)
