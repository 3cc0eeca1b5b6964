"""Whether a value of a graph is a tensor of eager's: exactly enough, or in another form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tx_export._eager_trace import Moment
from tx_export.metrics import FIDELITY_DB, Budget, Difference, Meter, fidelity_bound

__all__ = ["agreement", "alikeness", "difference"]

Array = NDArray[Any]

_ALIKE = 0.5  # correlation, or share of equal elements, of two forms of one tensor
_CHANCE = 5.0  # standard deviations that chance doesn't reach
_SAME_DB = 60.0  # of the same numbers in another order


def agreement(moment: Moment, array: Array, allowed: Budget | None) -> float | None:
    """SQNR in dB where a value of as many elements is within the budget (None: the bound of fp32), else None."""
    form = _nearest(moment, array)
    level = _decibels(moment.array[moment.real], form[moment.real])
    found = difference(moment, form) if allowed is not None or level >= FIDELITY_DB else None
    if found is None or any(found.non_finite):
        return None
    if allowed is None:
        return level if found.max_abs <= fidelity_bound(found.largest) else None
    return level if not _local(allowed).breaches(found) else None


def _local(allowed: Budget) -> Budget:
    """Of a budget, what has a meaning inside the model too."""
    return Budget(max_abs=allowed.max_abs, sqnr_db=allowed.sqnr_db, cosine=allowed.cosine)


def difference(moment: Moment, array: Array) -> Difference:
    """Of a value in the layout that is nearest, at real positions."""
    meter = Meter()
    meter.add(moment.array[moment.real][None], _nearest(moment, array)[moment.real][None])
    return meter.result()


def alikeness(moment: Moment, array: Array) -> float:
    """From 0 (unlike) to 1, for a value that may be a tensor scaled, permuted, or spoilt in places."""
    expected, actual = moment.array[moment.real], _nearest(moment, array)[moment.real]
    finite = np.isfinite(actual)
    if finite.sum() < 4:
        return 0.0
    if finite.all() and _decibels(np.sort(expected), np.sort(actual)) >= _SAME_DB:
        return 1.0
    near = np.abs(expected - np.where(finite, actual, np.inf)) <= fidelity_bound(float(np.abs(expected).max()))
    counted = (expected != 0) | (actual != 0)
    equal = float(near[counted].mean()) if counted.any() else 0.0
    return max(equal if equal >= _ALIKE else 0.0, _correlation(expected[finite], actual[finite]))


def _correlation(expected: Array, actual: Array) -> float:
    if expected.std() == 0 or actual.std() == 0:
        return 0.0
    level = min(abs(float(np.corrcoef(expected, actual)[0, 1])), 1 - 1e-9)
    by_chance = math.atanh(level) * math.sqrt(expected.size - 3) < _CHANCE  # Fisher's z
    return 0.0 if level < _ALIKE or by_chance else level


def _nearest(moment: Moment, array: Array) -> Array:
    """The value in the shape of the tensor, its axes in the order that comes nearest."""
    if array.shape == moment.array.shape:
        return array
    expected = moment.array[moment.real]
    forms = (form.reshape(moment.array.shape) for form in _layouts(array))
    return max(forms, key=lambda form: _decibels(expected, form[moment.real]))


def _layouts(array: Array) -> Iterator[Array]:
    """As it is, and with two neighbouring axes swapped: tokens with batch, heads or channels."""
    yield array
    for axis in range(min(array.ndim - 1, 3)):
        yield array.swapaxes(axis, axis + 1)


def _decibels(expected: Array, actual: Array) -> float:
    noise = float(np.square(expected - actual, dtype=np.float64).sum())
    signal = float(np.square(expected, dtype=np.float64).sum())
    if not noise > 0:
        return math.inf if noise == 0 else -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf
