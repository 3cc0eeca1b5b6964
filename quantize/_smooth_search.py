"""How far the loud channels of each product are shrunk: s = max(1, largest / median)^strength, in quarter octaves.

largest: of |x| in a channel, over one part of the text; median: over channels. The strength is the one with the least
simulated 8-bit error (w: a scale for each column; x: one for the tensor, as DynamicQuantizeLinear) on the other part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tx_export.passes import Context
from tx_export.quantize._calibration import observe
from tx_export.quantize._smooth_products import Products
from tx_export.quantize._smooth_rounding import rounded_columns, rounded_rows
from tx_export.quantize._smooth_text import MOST_STEPS
from tx_export.quantize._smooth_trial import Trial

__all__ = ["STRENGTHS", "Choice", "scale_of", "search"]

STRENGTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
_STEPS = 4  # to an octave


@dataclass
class Choice:
    """For the products that read one value: quarter octaves [K] by which its channels are shrunk; 0: as they are."""

    products: Products
    steps: np.ndarray
    gain_db: float | None = None  # less error of the products; None: unknown, or no channel is loud


@dataclass(frozen=True)
class _Candidate:
    """One strength for one input, and how it does."""

    strength: float
    steps: np.ndarray
    trial: Trial = field(default_factory=Trial)

    def measure(self, x: np.ndarray, weight: np.ndarray) -> None:
        scale = scale_of(self.steps)
        self.trial.add(rounded_rows(x / scale) @ rounded_columns(weight * scale[:, None]), x @ weight)


def scale_of(steps: np.ndarray) -> np.ndarray:
    """float32 [K], at least 1."""
    return np.exp2(steps / _STEPS).astype(np.float32)


def search(
    model: ir.Model, inputs: Sequence[Products], strengths: Sequence[float], choosing: Context, judging: Context
) -> list[Choice]:
    """The best strength for each input, or none, by the ranges on one part of the text and the errors on the other.

    It is then applied to the ranges of both. The least cosine of a row never gets worse by it.
    """
    values = [each.x for each in inputs]
    largest = [np.zeros(each.channels, np.float32) for each in inputs]
    for batch in observe(model, values, choosing):
        _widen(largest, inputs, batch)
    candidates = [_candidates(each, strengths) for each in largest]
    for batch in observe(model, values, judging):
        _widen(largest, inputs, batch)
        for each, tried in zip(inputs, candidates, strict=True):
            for candidate in tried:
                candidate.measure(batch[each.x.name or ""], each.weight())
    return [_best(*each) for each in zip(inputs, candidates, largest, strict=True)]


def _widen(largest: Sequence[np.ndarray], inputs: Sequence[Products], batch: Mapping[str, np.ndarray]) -> None:
    for known, each in zip(largest, inputs, strict=True):
        np.maximum(known, np.abs(batch[each.x.name or ""]).max(axis=0, initial=0), out=known)


def _candidates(largest: np.ndarray, strengths: Sequence[float]) -> list[_Candidate]:
    """Nothing, and each strength that shrinks something; empty if none does."""
    tried = [_Candidate(strength, _steps(largest, strength)) for strength in (0.0, *strengths)]
    found = [each for each in tried if each.steps.any()]
    return [tried[0], *found] if found else []


def _steps(largest: np.ndarray, strength: float) -> np.ndarray:
    """Quarter octaves; a channel that is always 0 counts for no median."""
    octaves = np.zeros(len(largest))
    if (alive := largest > 0).any():
        octaves[alive] = np.log2(np.maximum(1, largest[alive] / np.median(largest[alive])))
    return np.minimum(np.rint(_STEPS * strength * octaves), MOST_STEPS).astype(np.int64)


def _best(products: Products, tried: Sequence[_Candidate], largest: np.ndarray) -> Choice:
    if not tried:
        return Choice(products, _steps(largest, 0.0))
    plain = tried[0].trial
    best = min((each for each in tried if each.trial.cosine >= plain.cosine), key=lambda each: each.trial.error)
    return Choice(products, _steps(largest, best.strength), best.trial.gain_over(plain))
