"""Histograms of values that come in batches, in constant memory.

Bins are [i w, (i + 1) w) with w a power of two that doubles, by merging pairs of bins, when a larger value comes:
floor(x / 2w) = floor(floor(x / w) / 2). So the result is that of all values at once, in whatever batches and order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

__all__ = ["BINS", "Histogram"]

BINS = 8192  # on each side of zero, of which at least half are used: 16 or more for each step of 8 bits
_CHUNK = 1 << 18  # values that are sorted into bins at a time
_LEAST = -149  # the exponent of the least float32


@dataclass
class Histogram:
    """Counts of float32 values in 2 BINS bins around zero, and the least and the largest of them."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(2 * BINS, np.int64))
    exponent: int = _LEAST  # of the width of a bin
    low: float = 0.0  # zero is in every range
    high: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """All elements, which are finite."""
        flat = values.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            self._add(flat[start : start + _CHUNK])

    def _add(self, values: np.ndarray) -> None:
        low, high = float(values.min()), float(values.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        largest = max(-low, high)
        while largest >= math.ldexp(BINS, self.exponent):
            self._merge()
        scaled = np.floor(values.astype(np.float64) / self.width).astype(np.int64) + BINS
        self.counts += np.bincount(scaled, minlength=2 * BINS)

    def _merge(self) -> None:
        pairs = self.counts.reshape(-1, 2).sum(axis=1)  # BINS is even: no pair reaches over zero
        self.counts = np.zeros_like(self.counts)
        self.counts[BINS // 2 : BINS // 2 + BINS] = pairs
        self.exponent += 1

    @property
    def width(self) -> float:
        return math.ldexp(1.0, self.exponent)

    @property
    def centers(self) -> np.ndarray:
        """The middle of each bin, float64."""
        return (np.arange(2 * BINS) - BINS + 0.5) * self.width
