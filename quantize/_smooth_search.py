"""How far the loud channels of each product are shrunk: s = max(1, largest / median)^strength, in quarter octaves.

largest: of |x| in a channel, over one part of the text; median: over channels. The strength is the one with the least
simulated 8-bit error (w: a scale for each column; x: one for the tensor, as DynamicQuantizeLinear) on the other part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export.passes import Context
from tx_export.quantize._calibration import observe
from tx_export.quantize._smooth_products import Products
from tx_export.quantize._smooth_text import MOST_STEPS

__all__ = ["STRENGTHS", "Choice", "halves", "scale_of", "search"]

STRENGTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
_STEPS = 4  # to an octave
_BATCHES = 16  # of text that errors are measured on
_TINY = 1e-12


@dataclass
class Choice:
    """For the products that read one value: quarter octaves [K] by which its channels are shrunk; 0: as they are."""

    products: Products
    steps: np.ndarray
    gain_db: float | None = None  # less error of the products; None: unknown, or no channel is loud


@dataclass
class _Trial:
    """One strength for one input, and what was measured of it."""

    strength: float
    steps: np.ndarray
    error: float = 0.0  # sum over rows of error^2 relative to the row
    cosine: float = 1.0  # least of a row

    def add(self, x: np.ndarray, weight: np.ndarray, exact: np.ndarray) -> None:
        scale = scale_of(self.steps)
        found = _rounded_rows(x / scale) @ _rounded_columns(weight * scale[:, None])
        size = np.einsum("nk,nk->n", exact, exact) + _TINY
        self.error += float((np.square(found - exact).sum(axis=1) / size).sum())
        cosines = np.einsum("nk,nk->n", found, exact) / np.sqrt(size * (np.einsum("nk,nk->n", found, found) + _TINY))
        self.cosine = min(self.cosine, float(cosines.min(initial=1.0)))


def scale_of(steps: np.ndarray) -> np.ndarray:
    """float32 [K], at least 1."""
    return np.exp2(steps / _STEPS).astype(np.float32)


def halves(context: Context) -> tuple[Context, Context]:
    """Text to measure ranges on, and text to measure errors on; one batch has to do for both."""
    feeds = context.feeds
    every = max(2, -(-len(feeds) // _BATCHES))
    ranges = [each for number, each in enumerate(feeds) if number % every != 1]
    return dataclasses.replace(context, feeds=ranges), dataclasses.replace(context, feeds=feeds[1::every] or feeds)


def search(
    model: ir.Model, inputs: Sequence[Products], strengths: Sequence[float], parts: tuple[Context, Context]
) -> list[Choice]:
    """The best strength for each input, or none, by the ranges of one part and the errors on the other.

    It is then applied to the ranges of both. The least cosine of a row never gets worse by it.
    """
    values = [each.x for each in inputs]
    largest = [np.zeros(len(each.weight()), np.float32) for each in inputs]
    for batch in observe(model, values, parts[0]):
        _widen(largest, inputs, batch)
    trials = [_trials(each, strengths) for each in largest]
    for batch in observe(model, values, parts[1]):
        _widen(largest, inputs, batch)
        for each, tried in zip(inputs, trials, strict=True):
            x, weight = batch[each.x.name or ""], each.weight()
            for trial in tried:
                trial.add(x, weight, x @ weight)
    return [_best(*each) for each in zip(inputs, trials, largest, strict=True)]


def _widen(largest: Sequence[np.ndarray], inputs: Sequence[Products], batch: Mapping[str, np.ndarray]) -> None:
    for known, each in zip(largest, inputs, strict=True):
        np.maximum(known, np.abs(batch[each.x.name or ""]).max(axis=0, initial=0), out=known)


def _trials(largest: np.ndarray, strengths: Sequence[float]) -> list[_Trial]:
    """Nothing, and each strength that shrinks something; empty if none does."""
    tried = [_Trial(strength, _steps(largest, strength)) for strength in (0.0, *strengths)]
    found = [trial for trial in tried if trial.steps.any()]
    return [tried[0], *found] if found else []


def _steps(largest: np.ndarray, strength: float) -> np.ndarray:
    """Quarter octaves; a channel that is always 0 counts for no median."""
    octaves = np.zeros(len(largest))
    if (alive := largest > 0).any():
        octaves[alive] = np.log2(np.maximum(1, largest[alive] / np.median(largest[alive])))
    return np.minimum(np.rint(_STEPS * strength * octaves), MOST_STEPS).astype(np.int64)


def _best(products: Products, tried: Sequence[_Trial], largest: np.ndarray) -> Choice:
    if not tried:
        return Choice(products, _steps(largest, 0.0))
    best = min((trial for trial in tried if trial.cosine >= tried[0].cosine), key=lambda trial: trial.error)
    gain = 10 * math.log10((tried[0].error + _TINY) / (best.error + _TINY))
    return Choice(products, _steps(largest, best.strength), gain)


def _rounded_rows(x: np.ndarray) -> np.ndarray:
    low, high = min(float(x.min(initial=0)), 0.0), max(float(x.max(initial=0)), 0.0)
    step = np.float32((high - low) / 255)
    if step == 0:
        return x
    zero = np.rint(-low / step)
    rounded: np.ndarray = (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step
    return rounded


def _rounded_columns(weight: np.ndarray) -> np.ndarray:
    step = np.abs(weight).max(axis=0) / np.float32(127)
    step[step == 0] = 1
    rounded: np.ndarray = np.rint(weight / step) * step
    return rounded
