"""What a module computes on the way: the hidden states behind its layers, and the weights of its attention.

Layers are those of its longest nn.ModuleList; attention weights are given by attention of ours only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tx_export.models.parts.attention import Attention

__all__ = ["Link", "Watched", "links", "watching"]


@dataclass(frozen=True)
class Watched:
    """Of one call, in order: hidden states [B, T, D] and attention weights [B, H, T, S]."""

    hidden: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Link:
    """A layer of the student, counted from 0, and the layer of the teacher that it learns from; their last sizes."""

    student: int
    teacher: int
    widths: tuple[int, int]


@contextmanager
def watching(module: nn.Module) -> Iterator[Watched]:
    """Inside, what a call of the module computes is added."""
    seen = Watched()
    stacks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    longest = max(stacks, key=len, default=nn.ModuleList())
    hooks = [layer.register_forward_hook(_keep(seen)) for layer in set(longest)]  # a layer may stand there twice
    attentions = [part for part in module.modules() if isinstance(part, Attention)]
    for attention in attentions:
        _record(attention, seen)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for attention in attentions:
            del attention._weights


def _keep(seen: Watched) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            seen.hidden.append(first)

    return keep


def _record(attention: Attention, seen: Watched) -> None:
    whole = attention._weights

    def weights(*given: Any) -> Tensor:
        made = whole(*given)
        seen.weights.append(made)
        return made

    attention._weights = weights  # type: ignore[method-assign, assignment]


def links(student: list[Tensor], teacher: list[Tensor], like: Callable[[Tensor, Tensor], bool]) -> tuple[Link, ...]:
    """Layer m of S learns from layer m T / S of T, counted from 1 (Jiao et al. 2020), where the two are `like`."""
    ours, theirs = len(student), len(teacher)
    pairs = [(m - 1, max(1, round(m * theirs / ours)) - 1) for m in range(1, ours + 1)] if theirs else []
    return tuple(
        Link(s, t, (student[s].shape[-1], teacher[t].shape[-1])) for s, t in pairs if like(student[s], teacher[t])
    )
