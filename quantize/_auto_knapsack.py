"""One option for each item so that no other choice is both cheaper and less noisy: the frontier of a knapsack.

Items are added one by one, and of all sums only those that nothing dominates are kept (Nemhauser and Ullmann, 1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Option", "Point", "frontier"]

_POINTS = 10_000  # kept of one sum; beyond that the cheapest ones of equal steps in cost


class Option(NamedTuple):
    """What an item costs in one form, and the noise that this form makes."""

    cost: float
    noise: float


class Point(NamedTuple):
    """The sums of one choice; `choice` has the number of an option for each item."""

    cost: float
    noise: float
    choice: tuple[int, ...]


def frontier(items: Sequence[Sequence[Option]], points: int = _POINTS) -> list[Point]:
    """Every choice that nothing dominates, the cheapest first: cost rises and noise falls from each to the next.

    Exact where no sum has more than `points`; else costs are off by at most their range / `points` for each item.
    """
    sums = np.zeros((1, 2))  # [n, cost and noise]
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []  # of each kept sum: the sum before, the option
    for options in items:
        added = np.array(options, dtype=np.float64).reshape(-1, 2)
        every = (sums[:, None] + added).reshape(-1, 2)
        kept = _thinned(every, _undominated(every), points)
        steps.append((kept // len(added), kept % len(added)))
        sums = every[kept]
    return [
        Point(float(cost), float(noise), choice)
        for (cost, noise), choice in zip(sums, _choices(steps, len(sums)), strict=True)
    ]


def _undominated(sums: NDArray[np.float64]) -> NDArray[np.intp]:
    """Their numbers, by rising cost and falling noise."""
    order = np.lexsort((sums[:, 1], sums[:, 0]))
    noise = sums[order, 1]
    least = np.concatenate([[np.inf], np.minimum.accumulate(noise)[:-1]])
    kept: NDArray[np.intp] = order[noise < least]
    return kept


def _thinned(sums: NDArray[np.float64], kept: NDArray[np.intp], points: int) -> NDArray[np.intp]:
    if len(kept) <= points:
        return kept
    cost = sums[kept, 0]
    step = ((cost - cost[0]) / (cost[-1] - cost[0]) * (points - 1)).astype(np.intp)
    last = np.append(np.flatnonzero(np.diff(step)), len(kept) - 1)  # of a step, the one with the least noise
    thinned: NDArray[np.intp] = kept[np.union1d([0], last)]
    return thinned


def _choices(steps: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]], count: int) -> list[tuple[int, ...]]:
    at = np.arange(count)
    columns = []
    for before, option in reversed(steps):
        columns.append(option[at])
        at = before[at]
    if not columns:
        return [()] * count
    return [tuple(int(option) for option in row) for row in np.stack(columns[::-1], axis=1)]
