"""What a change does to products, and to the whole model in 8 bits, on text that the change was not made from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export import plugins
from tx_export.passes import Context
from tx_export.quantize._prompt import open_prompt

__all__ = ["Trial", "parts", "worse"]

_BATCHES = 16  # of text to judge on
_TINY = 1e-12


@dataclass
class Trial:
    """How far products are from exact ones."""

    error: float = 0.0  # sum over rows of error^2 relative to the row
    cosine: float = 1.0  # least of a row

    def add(self, found: np.ndarray, exact: np.ndarray) -> None:
        """Rows [n, channels]."""
        size, length = (np.square(rows).sum(axis=1) + _TINY for rows in (exact, found))
        self.error += float((np.square(found - exact).sum(axis=1) / size).sum())
        cosines = (found * exact).sum(axis=1) / np.sqrt(size * length)
        self.cosine = min(self.cosine, float(cosines.min(initial=1.0)))

    def gain_over(self, other: Trial) -> float:
        """In dB."""
        return 10 * math.log10((other.error + _TINY) / (self.error + _TINY))


def parts(context: Context, every: int) -> tuple[Context, Context]:
    """Text to choose by, and one of `every` batches, or fewer, to judge on; a single batch does for both."""
    feeds = context.feeds
    every = max(every, -(-len(feeds) // _BATCHES))
    choosing = [each for number, each in enumerate(feeds) if number % every != 1]
    return dataclasses.replace(context, feeds=choosing), dataclasses.replace(context, feeds=feeds[1::every] or feeds)


def worse(before: ir.Model, after: ir.Model, context: Context) -> str | None:
    """What is worse of `after`, None if nothing is; both become 8-bit graphs."""
    if context.drift is None:
        return None
    old, new = (_drift(model, context) for model in (before, after))
    for key in ("sqnr_db", "cosine"):
        if key in old and new[key] < old[key]:
            return f"the whole in 8 bits gets worse: {key} {new[key]:.4g} instead of {old[key]:.4g}"
    return None


def _drift(model: ir.Model, context: Context) -> Mapping[str, float]:
    plugins.find("pass", "dynamic_int8")()(model)
    assert context.drift is not None
    return context.drift(open_prompt(model, context), context.feeds)
