"""From what was measured of each product to a choice for all: by knapsack, checked as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tx_export.errors import BudgetError
from tx_export.quantize._auto_candidates import Candidate
from tx_export.quantize._auto_knapsack import Option, Point, frontier
from tx_export.quantize._auto_noise import noise_of
from tx_export.quantize._auto_report import Row
from tx_export.quantize._auto_search import DOUBT, Measured, cheapest_within, excess, margined

__all__ = ["Decision", "Limits", "choose", "quicker"]

_BYTES = 0.1  # of about equally fast choices the smaller one: all bytes are worth a tenth of the time
_DRAWN = 200  # points of the frontier

Choice = Sequence[Candidate]


@dataclass(frozen=True)
class Limits:
    """What is asked for; 0 and an empty budget are no limit."""

    budget: Mapping[str, float]
    share: float = 0.0  # of the time in fp32
    nbytes: float = 0.0
    other_bytes: int = 0  # that no choice changes

    @property
    def weights(self) -> tuple[float, float]:
        """Of time and of bytes, both as shares of fp32, in the cost."""
        if self.share and self.nbytes:
            return 1.0, 1.0
        return (0.0, 1.0) if self.nbytes else (1.0, _BYTES)


@dataclass(frozen=True)
class Decision:
    """A candidate for each product, what the whole has with them, and the frontier that they were chosen from."""

    chosen: Choice
    factor: float  # by which the noise of a whole differs from the sum of the single ones
    rows: tuple[Row, ...]


def quicker(candidates: Choice) -> list[Candidate]:
    """fp32, and what is quicker at these lengths; all where nothing was timed."""
    exact = candidates[0]
    return [exact, *(each for each in candidates[1:] if not any(exact.ms) or sum(each.ms) < sum(exact.ms))]


def choose(candidates: Sequence[Choice], limits: Limits, measure: Callable[[Choice], Mapping[str, float]]) -> Decision:
    """Without limits on time and bytes the cheapest choice within the budget, else the least noisy one within them.

    BudgetError names the best that was reached.
    """
    space = _Space(candidates, limits)
    points = frontier(space.options())
    found: Measured | None
    if limits.share or limits.nbytes:
        found, tried = space.least_noisy(points, measure)
    else:
        lowering = [point for point in points if any(point.choice)]
        found, tried = cheapest_within(lowering, margined(limits.budget), lambda point: measure(space.at(point)))
        found = found or _barely_within(limits.budget, tried)
        if found is None:
            raise BudgetError(_too_far(limits.budget, tried))
    noise = found.point.noise
    factor = noise_of(found.metrics) / noise if noise else 1.0
    return Decision(space.at(found.point), factor, space.rows(points, tried, found, factor))


class _Space:
    """All choices: one candidate for each product."""

    def __init__(self, candidates: Sequence[Choice], limits: Limits) -> None:
        self.candidates, self.limits = candidates, limits
        self.total_ms = [sum(each) for each in zip(*(forms[0].ms for forms in candidates), strict=True)]
        self.total_bytes = sum(forms[0].nbytes for forms in candidates)

    def share(self, candidate: Candidate) -> float:
        """Of the time that all products take in fp32, each length counting as much as the others."""
        shares = [ms / total for ms, total in zip(candidate.ms, self.total_ms, strict=True) if total > 0]
        return sum(shares) / len(shares) if shares else 0.0

    def options(self) -> list[list[Option]]:
        time, size = self.limits.weights
        return [
            [Option(time * self.share(each) + size * each.nbytes / self.total_bytes, each.noise) for each in forms]
            for forms in self.candidates
        ]

    def at(self, point: Point) -> list[Candidate]:
        return [forms[number] for forms, number in zip(self.candidates, point.choice, strict=True)]

    def nbytes(self, point: Point) -> int:
        return self.limits.other_bytes + sum(each.nbytes for each in self.at(point))

    def time(self, point: Point) -> float:
        return sum(self.share(each) for each in self.at(point))

    def least_noisy(
        self, points: Sequence[Point], measure: Callable[[Choice], Mapping[str, float]]
    ) -> tuple[Measured, list[Measured]]:
        limits = self.limits
        quick = [point for point in points if not limits.share or self.time(point) <= limits.share]
        if not quick:
            least = min(map(self.time, points))
            raise BudgetError(f"auto: latency={limits.share:g} is out of reach; the fastest choice takes {least:.3f}")
        within = [point for point in quick if not limits.nbytes or self.nbytes(point) <= limits.nbytes]
        if not within:
            least = min(map(self.nbytes, quick)) / 1e6
            raise BudgetError(
                f"auto: size_mb={limits.nbytes / 1e6:g} is out of reach; the smallest choice takes {least:.2f} MB"
            )
        found = Measured(within[-1], measure(self.at(within[-1])))
        if excess(found.metrics, limits.budget) > 1:
            raise BudgetError(_too_far(limits.budget, [found]))
        return found, [found]

    def rows(
        self, points: Sequence[Point], tried: Sequence[Measured], found: Measured, factor: float
    ) -> tuple[Row, ...]:
        measured = {each.point: each.metrics["sqnr_db"] for each in tried}
        some = {points[i] for i in range(0, len(points), max(1, len(points) // _DRAWN))} | measured.keys()
        rows = []
        for point in sorted(some):
            expected = -10 * math.log10(point.noise * factor) if point.noise else math.inf
            rows.append(
                Row(
                    share=self.time(point) if any(self.total_ms) else None,
                    sqnr_db=measured.get(point, expected),
                    nbytes=self.nbytes(point),
                    forms=tuple(each.form.name for each in self.at(point)),
                    is_measured=point in measured,
                    is_chosen=point is found.point,
                )
            )
        return tuple(rows)


def _barely_within(budget: Mapping[str, float], tried: Sequence[Measured]) -> Measured | None:
    """The one with the most room, where none has room for other text."""
    room = {excess({**each.metrics, DOUBT: 0.0}, budget): each for each in tried}
    return room[min(room)] if room and min(room) <= 1 else None


def _too_far(budget: Mapping[str, float], tried: Sequence[Measured]) -> str:
    asked = ", ".join(f"{key}={limit:g}" for key, limit in budget.items())
    if not tried:
        return f"auto: {asked}: no product has a form that is faster here than fp32"
    best = min(tried, key=lambda each: excess(each.metrics, budget))
    reached = ", ".join(f"{key}={best.metrics[key]:.4g}" for key in budget if key in best.metrics)
    return f"auto: no choice has {asked} with a small margin and is faster than fp32; the best has {reached}"
