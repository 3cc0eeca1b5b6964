"""Differences against numbers computed by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tx_export import metrics
from tx_export.errors import PluginError
from tx_export.metrics import Budget, Difference, Meter, fidelity_bound

Array = NDArray[Any]


def difference(reference: Array, actual: Array, real: Array | None = None) -> Difference:
    meter = Meter()
    meter.add(np.asarray(reference, np.float32), np.asarray(actual, np.float32), real, "2x17 full mask")
    return meter.result()


def random_pair(seed: int, *shape: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=shape).astype(np.float32)
    return reference, reference + rng.normal(scale=0.1, size=shape).astype(np.float32)


def test_noise_of_a_hundredth_of_the_signal_is_forty_decibels() -> None:
    reference = np.array([[1.0, -1.0], [1.0, 1.0]])
    # Each error is 1/64, exact in float32: 20 log10(64) dB.
    assert difference(reference, reference + 1 / 64).sqnr_db == pytest.approx(20 * math.log10(64), abs=1e-9)


def test_equal_arrays_have_an_infinite_ratio_which_is_null_in_json() -> None:
    found = difference(np.ones((2, 3)), np.ones((2, 3)))
    assert (found.max_abs, found.sqnr_db) == (0.0, math.inf)
    assert found.to_json()["sqnr_db"] is None


def test_signal_of_zero_with_any_noise_fails_every_ratio() -> None:
    assert difference(np.zeros((1, 2)), np.full((1, 2), 1e-9)).sqnr_db == -math.inf


def test_the_largest_difference_is_reported_with_its_case_position_and_values() -> None:
    reference = np.zeros((2, 3, 4))
    actual = reference.copy()
    actual[1, 2, 3], actual[0, 1, 0] = -5.0, 4.0
    found = difference(reference, actual)
    assert found.max_abs == 5.0
    assert str(found.worst) == "2x17 full mask at [1, 2, 3]: -5 instead of 0"


def test_only_real_positions_are_measured() -> None:
    reference = np.ones((1, 3, 2))
    actual = reference.copy()
    actual[0, 2] = 100.0
    assert difference(reference, actual, np.array([[1, 1, 0]])).max_abs == 0.0
    assert difference(reference, actual, np.array([[1, 0, 1]])).max_abs == 99.0


@pytest.mark.parametrize(
    ("reference", "actual", "cosine"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [0.0, 1.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], 0.0),
        ([3.0, 4.0], [6.0, 8.0], 1.0),
        ([1.0, 0.0], [-2.0, 0.0], -1.0),
        ([1.0, 0.0], [1.0, 1.0], math.sqrt(0.5)),
    ],
)
def test_cosine_of_a_row(reference: list[float], actual: list[float], cosine: float) -> None:
    # Float64: a few roundings of 1.1e-16.
    assert difference(np.array([reference]), np.array([actual])).cosine == pytest.approx(cosine, abs=1e-15)


def test_cosine_is_that_of_the_worst_row_and_absent_where_rows_are_single_numbers() -> None:
    found = difference(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert found.cosine == 0.0
    assert difference(np.ones((2, 1)), np.ones((2, 1))).cosine is None


def test_agreement_is_the_share_of_rows_with_the_same_decision() -> None:
    meter = Meter(lambda rows: rows.argmax(axis=-1))
    meter.add(np.array([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]]), np.array([[0.0, 9.0], [1.0, 2.0], [0.0, 1.0]]))
    assert meter.result().agreement == pytest.approx(2 / 3, abs=1e-15)
    assert Meter().result().agreement is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_b259_a_non_finite_value_on_either_side_never_passes(value: float, sides: tuple[int, ...]) -> None:
    pair = [np.ones((2, 3)), np.ones((2, 3))]
    for side in sides:
        pair[side][1, 2] = value
    found = difference(pair[0], pair[1])
    assert found.non_finite == (int(0 in sides), int(1 in sides))
    assert found.worst.position == (1, 2)
    assert (found.max_abs, found.sqnr_db, found.cosine) == (math.inf, -math.inf, -1.0)
    assert str(Budget().breaches(found)[0]).startswith("non_finite")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["non_finite"] == len(sides)


def test_a_non_finite_value_at_padding_counts_too() -> None:
    reference = np.ones((1, 2, 2))
    actual = reference.copy()
    actual[0, 1, 0] = np.nan
    assert difference(reference, actual, np.array([[1, 0]])).non_finite == (0, 1)


def test_slices_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, actual = random_pair(0, 5, 7, 3)
    real = np.random.default_rng(1).random((5, 7)) < 0.7
    whole = difference(reference, actual, real)
    monkeypatch.setattr(metrics, "_SLICE", 6)
    sliced = difference(reference, actual, real)
    assert (sliced.max_abs, sliced.worst, sliced.cosine) == (whole.max_abs, whole.worst, whole.cosine)
    # Sums of 105 positive numbers in another order: at most 105 roundings of 1.1e-16, times 10 / ln 10, for both sums.
    assert sliced.sqnr_db == pytest.approx(whole.sqnr_db, abs=2 * 105 * 1.2e-16 * 4.35)


def test_slices_find_the_same_non_finite_value(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, actual = random_pair(0, 5, 7, 3)
    actual[3, 4, 1] = actual[4, 0, 0] = np.nan
    monkeypatch.setattr(metrics, "_SLICE", 6)
    assert difference(reference, actual).worst.position == (3, 4, 1)


def test_merged_meters_give_what_one_meter_gives() -> None:
    one, first, second = Meter(), Meter(), Meter()
    for seed, part in enumerate((first, second)):
        pair = random_pair(seed, 4, 3)
        one.add(*pair, case=str(seed))
        part.add(*pair, case=str(seed))
    first.merge(second)
    assert first.result() == one.result()


def test_float16_is_measured_without_overflow() -> None:
    reference, actual = np.full((1, 2), 60000, np.float16), np.full((1, 2), -60000, np.float16)
    meter = Meter()
    meter.add(reference, actual)
    assert meter.result().max_abs == 2 * float(np.float16(60000))


def test_the_fidelity_bound_grows_with_values_beyond_thirty_three() -> None:
    assert fidelity_bound(1.0) == 1e-4
    assert fidelity_bound(100.0) == pytest.approx(3e-4, rel=1e-12)


def test_a_budget_reads_what_it_prints() -> None:
    budget = Budget.parse("sqnr_db=20, max_abs=0.1,cosine=0.99,agreement=0.9,accuracy=0.8,invariance_db=15")
    assert budget == Budget(0.1, 20, 0.99, 0.9, 0.8, 15)
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(str(Budget())) == Budget()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snr=20", "expected KEY=NUMBER, not 'snr=20'; known keys: max_abs, sqnr_db, cosine"),
        ("sqnr_db", "expected KEY=NUMBER, not 'sqnr_db'"),
        ("", "empty"),
        ("sqnr_db=high", "sqnr_db takes a number, not 'high'"),
        ("max_abs=nan", "max_abs=nan is out of range; it must be finite and at least 0"),
        ("max_abs=inf", "out of range"),
        ("sqnr_db=-3", "sqnr_db=-3 is out of range; it must be finite and at least 0"),
        ("cosine=1.5", "cosine=1.5 is out of range; it must be from 0 to 1"),
        ("agreement=95", "it must be from 0 to 1"),
        ("sqnr_db=1,sqnr_db=2", "sqnr_db is given twice"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        Budget.parse(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_breach_is_named_with_its_limit() -> None:
    found = difference(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]))
    texts = [str(breach) for breach in Budget.parse("max_abs=0.25,sqnr_db=20,cosine=0.9").breaches(found)]
    assert texts == [
        "max_abs 0.5 is more than 0.25",
        "sqnr_db 3.01 is less than 20",
        "cosine 0.7071 is less than 0.9",
    ]
    assert Budget.parse("max_abs=0.5,sqnr_db=3,cosine=0.7").breaches(found) == []


def test_two_passes_together_may_cause_what_the_weaker_budget_allows() -> None:
    first, second = Budget.parse("sqnr_db=40,max_abs=0.1,cosine=0.9"), Budget.parse("sqnr_db=10,max_abs=0.2")
    assert first.looser(second) == second.looser(first) == Budget.parse("sqnr_db=10,max_abs=0.2")
