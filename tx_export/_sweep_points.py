"""The points of a sweep: every ratio of pruning with every quantization; each has a name, which is its folder's."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tx_export._recipe import pipeline_of
from tx_export._recovery import read_recovery
from tx_export.compiler import BuildOptions
from tx_export.runtime import UsageError

__all__ = ["Point", "points_of"]

_COMMA = re.compile(r",(?![^{]*\})")  # not one that stands among the options of a pass
_LONGEST = 100  # characters of a folder's name


@dataclass(frozen=True)
class Point:
    """One build: which shares of the heads and of the feed-forward neurons go, and the passes behind that."""

    prune_heads: float
    prune_ffn: float
    quantize: str  # passes with their options, or none

    @property
    def name(self) -> str:
        """Such as heads0.25-dynamic_int8 or heads0-ffn0.5-blockwise-bits=4."""
        neurons = f"-ffn{self.prune_ffn:g}" if self.prune_ffn else ""
        passes = re.sub(r"[^\w.=+-]+", "-", self.quantize).strip("-")
        return f"heads{self.prune_heads:g}{neurons}-{passes}"[:_LONGEST]

    @property
    def prunes(self) -> bool:
        return self.prune_heads > 0 or self.prune_ffn > 0

    @property
    def is_exact(self) -> bool:
        """Whether nothing is done that costs precision."""
        return not self.prunes and self.quantize == "none"

    def options(self, shared: BuildOptions) -> BuildOptions:
        """What `build` is asked for."""
        passes = [self.quantize] if self.quantize != "none" else []
        if self.prune_ffn:
            passes.insert(0, f"prune_ffn{{ratio={self.prune_ffn}}}")
        heads = str(self.prune_heads) if self.prune_heads else None
        if not self.prunes:  # there is nothing to recover from
            shared = dataclasses.replace(shared, recover=None, steps=None)
        return dataclasses.replace(shared, prune_heads=heads, quantize=" ".join(passes) or "none")


def points_of(prune_heads: str, prune_ffn: str, quantize: str, shared: BuildOptions) -> tuple[Point, ...]:
    """Every combination of the three lists, the last one varying first.

    UsageError for a list that can't be read or a point that stands twice, PluginError for a pass that isn't there,
    LoadError for text that is too little to recover on.
    """
    ratios = [tuple(_ratios(*each)) for each in (("--prune-heads", prune_heads), ("--prune-ffn", prune_ffn))]
    points = tuple(itertools.starmap(Point, itertools.product(*ratios, _items("--quantize", quantize))))
    if (shared.recover, shared.steps) != (None, None) and not any(point.prunes for point in points):
        raise UsageError("--recover: no point is pruned, so there is nothing to recover")
    seen: set[str] = set()
    for point in points:
        asked = point.options(shared)
        pipeline, _ = pipeline_of(asked.provider, asked.ops, asked.quantize, asked.prune_heads, asked.passes)
        read_recovery(asked.recover, asked.steps, pipeline)
        if not seen.isdisjoint(same := {point.name, str(pipeline)}):
            raise UsageError(f"sweep: the point {point.name} is asked for twice")
        seen |= same
    return points


def _items(option: str, text: str) -> list[str]:
    items = [" ".join(item.split()) for item in _COMMA.split(text)]
    if not all(items):
        raise UsageError(f"{option} {text!r}: " + ("an item is empty" if text.strip() else "the list is empty"))
    return items


def _ratios(option: str, text: str) -> Iterator[float]:
    for item in _items(option, text):
        try:
            ratio = float(item)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio <= 1:
            raise UsageError(f"{option}: {item!r} is not a ratio from 0 to 1, say 0,0.25,0.5")
        yield abs(ratio)  # -0.0 is 0
