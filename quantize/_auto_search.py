"""Along the frontier to the cheapest choice whose measured whole is within the budget, or to the least noisy one.

Noises add up but for one factor, which each measurement of a whole corrects; where that does not lead on, halving does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tx_export.quantize._auto_knapsack import Point

__all__ = ["DOUBT", "Measured", "cheapest_within", "excess", "margined"]

DOUBT = "doubt_db"  # beside the keys of a budget: by how much sqnr_db may be less on other text
_TRIALS = 8  # of wholes; from there on a step gains little
_GAIN = 0.003  # of the frontier's costs: a smaller gain is not worth a trial
_CLOSER = 0.97  # a step goes a little further than what was measured asks for
_MARGIN_DB = 0.3  # of the budget, so that it holds on other text too
_MARGIN = 0.85  # as a share of what may be lost


@dataclass(frozen=True)
class Measured:
    """A point of the frontier, and what its whole has: the keys of a budget."""

    point: Point
    metrics: Mapping[str, float]


def margined(budget: Mapping[str, float]) -> dict[str, float]:
    """A little stricter, where other text may give other numbers."""
    stricter: dict[str, Callable[[float], float]] = {
        "sqnr_db": lambda limit: limit + _MARGIN_DB,
        "cosine": lambda limit: 1 - _MARGIN * (1 - limit),
        "agreement": lambda limit: 1 - _MARGIN * (1 - limit),
        "max_abs": lambda limit: _MARGIN * limit,
    }
    return {key: stricter[key](limit) if key in stricter else limit for key, limit in budget.items()}


def excess(metrics: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """How many times the noise power must shrink to meet the budget; at most 1 where it is met."""
    ratios = [1e-9]
    for key, limit in budget.items():
        if (value := metrics.get(key)) is None:
            continue
        if key == "sqnr_db":
            ratios.append(10 ** ((limit - value + metrics.get(DOUBT, 0.0)) / 10))
        elif key == "max_abs":
            ratios.append(_ratio(value, limit) ** 2)
        else:
            ratios.append(_ratio(1 - value, 1 - limit))
    return max(ratios)


def _ratio(lost: float, allowed: float) -> float:
    return lost / allowed if allowed > 0 else (1e9 if lost > 0 else 1.0)


def cheapest_within(
    points: Sequence[Point], budget: Mapping[str, float], measure: Callable[[Point], Mapping[str, float]]
) -> tuple[Measured | None, list[Measured]]:
    """The cheapest point found within the budget, None where the least noisy one is outside, and all measured ones.

    `points` get dearer and less noisy.
    """
    tried: list[Measured] = []
    found: Measured | None = None
    low, high = -1, len(points)  # the dearest known to be outside, the cheapest known to be within
    position = _first_below(points, 10 ** (-budget.get("sqnr_db", 0.0) / 10))
    while _is_open(points, low, high) and (found is None or len(tried) < _TRIALS):
        position = position if low < position < high else _halfway(points, low, high)
        now = Measured(points[position], measure(points[position]))
        tried.append(now)
        over = excess(now.metrics, budget)
        if over <= 1:
            high, found = position, now
        else:
            low = position
        position = _first_below(points, now.point.noise / over * _CLOSER)
    return found, tried


def _is_open(points: Sequence[Point], low: int, high: int) -> bool:
    """Whether there is a point between that could gain something."""
    if high - low < 2 or high == len(points):
        return high - low >= 2
    return points[high].cost - points[low + 1].cost > _GAIN * (points[-1].cost - points[0].cost)


def _first_below(points: Sequence[Point], noise: float) -> int:
    return bisect_left(points, -noise, key=lambda point: -point.noise)


def _halfway(points: Sequence[Point], low: int, high: int) -> int:
    """Between them, by cost."""
    first, last = points[low + 1].cost, points[high - 1].cost
    position = bisect_left(points, (first + last) / 2, key=lambda point: point.cost)
    return min(max(position, low + 1), high - 1)
