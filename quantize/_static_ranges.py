"""Which range of an activation 8 bits stand for: x = scale (q - zero), q in [0, 255], and zero is a level.

minmax       all that was seen
percentile   but for a share of the values at either end
entropy      the least Kullback-Leibler divergence of the values from the levels that they get (as TensorRT)
mse          the least squared error, of rounding and of what is cut off
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from tx_export.quantize._static_histogram import Histogram

__all__ = ["METHODS", "Range", "find", "read", "write"]

METHODS = ("minmax", "percentile", "entropy", "mse")

_SHARES = np.arange(128, 0, -1) / 128  # of the largest value, that the range may be
_ROUNDS = 2  # over the two ends


class Range(NamedTuple):
    """Both are float32, low <= 0 <= high."""

    low: float
    high: float

    def parameters(self, symmetric: bool) -> tuple[np.float32, np.uint8]:
        """Scale and zero point; scale 1 for a range of zeros, or too near to it for a scale."""
        low, high = np.float64(self.low), np.float64(self.high)
        scale = np.float32(max(-low, high) / 127 if symmetric else (high - low) / 255)
        if scale < np.finfo(np.float32).tiny:
            return np.float32(1), np.uint8(128 if symmetric else 0)
        return scale, np.uint8(128 if symmetric else np.clip(np.rint(-low / scale), 0, 255))


def find(histogram: Histogram, method: str, percentile: float, symmetric: bool) -> Range:
    """By one of METHODS."""
    if method == "minmax":
        return Range(histogram.low, histogram.high)
    if method == "percentile":
        return _percentile(histogram, percentile)
    seen = histogram.counts > 0
    cost = functools.partial(_COSTS[method], histogram.centers[seen], histogram.counts[seen].astype(np.float64))
    return _cheapest(histogram, symmetric, lambda candidate: cost(*candidate.parameters(symmetric)))


def _percentile(histogram: Histogram, percentile: float) -> Range:
    """Of the bins that hold the values of that rank, counted from either end, the outer edges."""
    cumulated = histogram.counts.cumsum()
    rank = np.ceil(percentile / 100 * cumulated[-1])
    edges = histogram.centers + histogram.width / 2
    high = edges[np.searchsorted(cumulated, rank)]
    low = edges[np.searchsorted(cumulated, cumulated[-1] - rank, side="right")] - histogram.width
    return _float32(histogram, low, high)


def _float32(histogram: Histogram, low: float, high: float) -> Range:
    """Within what was seen, and with zero."""
    return Range(
        float(np.float32(min(max(low, histogram.low), 0.0))), float(np.float32(max(min(high, histogram.high), 0.0)))
    )


def _cheapest(histogram: Histogram, symmetric: bool, cost: Callable[[Range], float]) -> Range:
    """One end after the other, or both at once around a middle; of equal costs the widest range."""
    best = Range(histogram.low, histogram.high)
    for ends in ((0, 1),) if symmetric else ((1,), (0,)) * _ROUNDS:
        best = min(_narrowed(histogram, best, ends), key=cost)
    return best


def _narrowed(histogram: Histogram, given: Range, ends: tuple[int, ...]) -> Iterator[Range]:
    largest = [histogram.low, histogram.high]
    if len(ends) == 2:
        largest = [-max(-histogram.low, histogram.high), max(-histogram.low, histogram.high)]
    for share in _SHARES:
        low, high = (share * largest[end] if end in ends else given[end] for end in (0, 1))
        yield _float32(histogram, low, high)


def _squared_error(centers: np.ndarray, counts: np.ndarray, scale: np.float32, zero: np.uint8) -> float:
    levels = np.clip(np.rint(centers / float(scale)) + float(zero), 0, 255)
    return float(counts @ ((levels - float(zero)) * float(scale) - centers) ** 2)


def _divergence(centers: np.ndarray, counts: np.ndarray, scale: np.float32, zero: np.uint8) -> float:
    """Of what was seen, with what is cut off in the outermost bins, from the levels spread over the bins they hold."""
    unclipped = np.rint(centers / float(scale)) + float(zero)
    inside = (unclipped >= 0) & (unclipped <= 255)
    if not inside.any():
        return np.inf
    given, levels = counts[inside], unclipped[inside].astype(np.int64)
    spread = (np.bincount(levels, weights=given) / np.maximum(np.bincount(levels), 1))[levels]
    given = given.copy()
    given[0] += counts[unclipped < 0].sum()
    given[-1] += counts[unclipped > 255].sum()
    return float(given @ np.log(given / given.sum() / (spread / spread.sum())) / given.sum())


_COSTS = {"mse": _squared_error, "entropy": _divergence}


def write(ranges: Mapping[str, Range]) -> str:
    """NAME:LOW:HIGH for each, with blanks between; numbers have all digits that float32 has."""
    return " ".join(
        f"{quote(name, safe='/:.;|+*()[]@!$&')}:{_text(low)}:{_text(high)}" for name, (low, high) in ranges.items()
    )


def _text(number: float) -> str:
    """The shortest that is the same float32."""
    return str(np.float32(number))


def read(text: str) -> dict[str, Range]:
    """What `write` wrote; ValueError shows the form."""
    found = {}
    for item in text.split():
        try:
            name, low, high = item.rsplit(":", 2)
            found[unquote(name)] = Range(float(np.float32(low)), float(np.float32(high)))
        except ValueError as error:
            raise ValueError(f"ranges: {item!r} is not NAME:LOW:HIGH") from error
        if not -np.inf < found[unquote(name)].low <= 0 <= found[unquote(name)].high < np.inf:
            raise ValueError(f"ranges: {item!r}: a range is finite and includes 0")
    return found
