"""The frontier holds every choice that nothing dominates; the walk along it finds the cheapest within a budget."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_export.quantize._auto_knapsack import Option, Point, frontier
from tx_export.quantize._auto_search import cheapest_within, excess, margined

# Sixteenths add up exactly, in whatever order.
_AMOUNT = st.integers(0, 40).map(lambda number: number / 16)
_ITEMS = st.lists(st.lists(st.builds(Option, _AMOUNT, _AMOUNT), min_size=1, max_size=4), max_size=5)


def every_sum(items: list[list[Option]]) -> set[tuple[float, float]]:
    chosen = itertools.product(*items)
    return {(sum(each.cost for each in some), sum(each.noise for each in some)) for some in chosen}


@settings(max_examples=200, deadline=None)
@given(_ITEMS)
def test_the_frontier_is_that_of_all_choices(items: list[list[Option]]) -> None:
    sums = every_sum(items)
    best = sorted(
        (cost, noise)
        for cost, noise in sums
        if not any((c <= cost and n < noise) or (c < cost and n <= noise) for c, n in sums)
    )
    points = frontier(items)
    assert [(point.cost, point.noise) for point in points] == best
    for point in points:
        some = [options[number] for options, number in zip(items, point.choice, strict=True)]
        assert (sum(each.cost for each in some), sum(each.noise for each in some)) == point[:2]


@settings(max_examples=100, deadline=None)
@given(_ITEMS, st.integers(2, 8))
def test_a_thinned_frontier_costs_at_most_a_step_more_for_each_item(items: list[list[Option]], points: int) -> None:
    exact, thinned = frontier(items), frontier(items, points)
    step = (exact[-1].cost - exact[0].cost) / (points - 1)
    for point in exact:
        # Whoever is thrown out has a neighbour within a step that is no noisier.
        near = min(other.cost for other in thinned if other.noise <= point.noise)
        assert near <= point.cost + step * len(items) + 1e-9


def line(count: int) -> list[Point]:
    """Costs 0, 1, 2, ...; each step takes 1 dB of noise away."""
    return [Point(float(i), 10 ** (-i / 10), (i,)) for i in range(count)]


@pytest.mark.parametrize("offset", [-5.0, 0.0, 7.5])
def test_the_walk_ends_at_the_cheapest_point_within_however_far_off_the_sum_is(offset: float) -> None:
    measured: list[Point] = []

    def measure(point: Point) -> dict[str, float]:
        measured.append(point)
        return {"sqnr_db": point.cost + offset}

    found, tried = cheapest_within(line(60), {"sqnr_db": 22.2}, measure)
    assert found is not None and found.point.cost == math.ceil(22.2 - offset)
    assert [each.point for each in tried] == measured and len({*measured}) == len(measured) <= 8


@pytest.mark.parametrize(("key", "limit", "cost"), [("cosine", 0.95, 14), ("max_abs", 0.1, 20), ("accuracy", 0.9, 30)])
def test_every_key_of_a_budget_is_met(key: str, limit: float, cost: int) -> None:
    def measure(point: Point) -> dict[str, float]:
        values = {
            "cosine": 1 - point.noise,
            "max_abs": math.sqrt(point.noise),
            "accuracy": 0.9 if point.cost >= 30 else 0.8,
        }
        return {"sqnr_db": point.cost, key: values[key]}

    found, _ = cheapest_within(line(60), {"sqnr_db": 3.0, key: limit}, measure)
    # How accuracy depends on noise is unknown, so the walk halves; it stops a step of 60 before it would be exact.
    assert found is not None and cost <= found.point.cost <= cost + (key == "accuracy")


def test_a_budget_that_no_point_meets_finds_none_and_tells_the_best() -> None:
    found, tried = cheapest_within(line(20), {"sqnr_db": 40.0}, lambda point: {"sqnr_db": point.cost})
    assert found is None and max(each.metrics["sqnr_db"] for each in tried) == 19


def test_a_margin_makes_each_limit_stricter_but_that_of_accuracy() -> None:
    budget = {"sqnr_db": 20.0, "cosine": 0.9, "agreement": 0.9, "max_abs": 0.1, "accuracy": 0.8}
    stricter = margined(budget)
    assert stricter["accuracy"] == 0.8
    assert excess(stricter, budget) == 1.0  # by the accuracy alone
    for key in ("sqnr_db", "cosine", "agreement", "max_abs"):
        assert excess({key: stricter[key]}, budget) < 1 < excess({key: budget[key]}, stricter)
