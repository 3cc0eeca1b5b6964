"""How far apart two arrays are, and how far they may be.

SQNR in dB = 10 log10(sum of reference^2 / sum of (reference - actual)^2)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tx_export.errors import PluginError

__all__ = ["FIDELITY_DB", "Breach", "Budget", "Difference", "Meter", "Place", "fidelity_bound"]

Array = NDArray[Any]

FIDELITY_DB = 90.0  # the least SQNR of an fp32 graph against its own module
_SLICE = 1 << 20  # elements compared at once: 8 MB in float64
_UNIT = ("cosine", "agreement", "accuracy")


def fidelity_bound(largest: float) -> float:
    """The largest difference that another order of fp32 arithmetic explains; `largest` is eager's largest value."""
    return max(1e-4, 3e-6 * largest)


@dataclass(frozen=True)
class Breach:
    """A metric outside its limit."""

    metric: str
    value: float
    limit: float

    def __str__(self) -> str:
        side = "more" if self.metric in ("max_abs", "non_finite") else "less"
        return f"{self.metric} {self.value:.4g} is {side} than {self.limit:.4g}"


@dataclass(frozen=True)
class Budget:
    """Limits on the error; None leaves a metric free. Text form `sqnr_db=20,max_abs=0.1`, or `none`."""

    max_abs: float | None = None  # at most, in the output's unit
    sqnr_db: float | None = None  # at least
    cosine: float | None = None  # at least, of the worst row
    agreement: float | None = None  # at least, the share of rows with the same label or next token
    accuracy: float | None = None  # at least, the share of labelled rows that are right
    invariance_db: float | None = None  # at least, between a row alone and the same row padded or in a batch

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form; PluginError names an unknown key, or a value that no metric can have."""
        if text.strip() == "none":
            return cls()
        known = [option.name for option in dataclasses.fields(cls)]
        given: dict[str, float] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            if key not in known or not equals:
                raise PluginError(f"budget: expected KEY=NUMBER, not {item!r}; known keys: {', '.join(known)}")
            if key in given:
                raise PluginError(f"budget: {key} is given twice")
            given[key] = _parse_limit(key, value)
        if not given:
            raise PluginError(f"budget: empty; expected KEY=NUMBER,... with the keys {', '.join(known)}")
        return cls(**given)

    def __str__(self) -> str:
        limits = [f"{key}={value:g}" for key, value in dataclasses.asdict(self).items() if value is not None]
        return ",".join(limits) or "none"

    def looser(self, other: Budget) -> Budget:
        """What two passes together may cause: of each metric the weaker limit, none where one of them has none."""
        weakest: dict[str, float | None] = {}
        for key, mine in dataclasses.asdict(self).items():
            theirs = getattr(other, key)
            pick = max if key == "max_abs" else min
            weakest[key] = None if mine is None or theirs is None else pick(mine, theirs)
        return Budget(**weakest)

    def breaches(self, difference: Difference) -> list[Breach]:
        """Every metric that is outside, non-finite values first; one that was not measured is not judged."""
        found = [Breach("non_finite", sum(difference.non_finite), 0)] if any(difference.non_finite) else []
        for key in ("max_abs", "sqnr_db", "cosine", "agreement"):
            limit, value = getattr(self, key), getattr(difference, key)
            if limit is not None and value is not None and not (value <= limit if key == "max_abs" else value >= limit):
                found.append(Breach(key, value, limit))
        return found


def _parse_limit(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise PluginError(f"budget: {key} takes a number, not {text!r}") from error
    highest = 1.0 if key in _UNIT else math.inf
    if not (math.isfinite(value) and 0 <= value <= highest):
        allowed = "from 0 to 1" if key in _UNIT else "finite and at least 0"
        raise PluginError(f"budget: {key}={text} is out of range; it must be {allowed}")
    return value


@dataclass(frozen=True)
class Place:
    """One element: the case it is in, its position in the output, and both values."""

    case: str = ""
    position: tuple[int, ...] = ()
    reference: float = 0.0
    actual: float = 0.0

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.position))}]"
        return f"{self.case} at {where}: {self.actual:.6g} instead of {self.reference:.6g}".strip()


@dataclass(frozen=True)
class Difference:
    """How far `actual` is from `reference`; beside a non-finite value on either side no metric looks good."""

    max_abs: float  # inf beside a non-finite value
    sqnr_db: float  # inf where both are equal, -inf beside a non-finite value
    cosine: float | None  # of the worst row; None where a row is one number
    agreement: float | None  # share of rows with the same decision; None where there is no decision
    non_finite: tuple[int, int]  # in the reference, in the actual array
    largest: float  # magnitude in the reference
    worst: Place  # the first non-finite value, else the largest difference

    def to_json(self) -> dict[str, float | int | None]:
        """JSON has no infinity: an infinite number is null."""
        return {
            "max_abs": self.max_abs if math.isfinite(self.max_abs) else None,
            "sqnr_db": self.sqnr_db if math.isfinite(self.sqnr_db) else None,
            "cosine": self.cosine,
            "agreement": self.agreement,
            "non_finite": sum(self.non_finite),
        }


class Meter:
    """Adds up the difference of many arrays, in float64 and slice by slice.

    `decide` turns rows [n, channels] into decisions [n] or [n, k] (say argmax) for the agreement.
    """

    def __init__(self, decide: Callable[[Array], Array] | None = None) -> None:
        self._decide = decide
        self._signal = self._noise = self._largest = 0.0
        self._max_abs, self._worst = -1.0, Place()
        self._cosine = math.inf  # until a row was measured
        self._rows = self._agreeing = 0
        self._non_finite = [0, 0]  # in the reference, in the actual arrays

    def add(self, reference: Array, actual: Array, real: Array | None = None, case: str = "") -> None:
        """Compare arrays [..., channels] of one shape where `real` [...] is true; non-finite values count anywhere."""
        assert reference.shape == actual.shape and reference.ndim > 0
        for start, expected, got, chosen in _slices(reference, actual, real):
            finite = np.isfinite(expected), np.isfinite(got)
            for side in (0, 1):
                self._non_finite[side] += int(np.count_nonzero(~finite[side]))
            both = finite[0] & finite[1]
            if not both.all():
                self._note(math.inf, case, start + int((~both).argmax()), reference, actual)
            self._decisions(expected[chosen], got[chosen], both[chosen])
            compared = chosen & both.all(axis=1)
            if compared.any() and expected.size:
                error, offset = self._measure(expected[compared], got[compared])
                row = int(np.flatnonzero(compared)[offset // expected.shape[1]])
                self._note(error, case, start + row * expected.shape[1] + offset % expected.shape[1], reference, actual)

    def merge(self, other: Meter) -> None:
        """Add what another meter has seen."""
        self._signal, self._noise = self._signal + other._signal, self._noise + other._noise
        self._largest = max(self._largest, other._largest)
        self._rows, self._agreeing = self._rows + other._rows, self._agreeing + other._agreeing
        self._non_finite = [mine + theirs for mine, theirs in zip(self._non_finite, other._non_finite, strict=True)]
        self._cosine = min(self._cosine, other._cosine)
        if other._max_abs > self._max_abs:
            self._max_abs, self._worst = other._max_abs, other._worst

    def result(self) -> Difference:
        """The Difference of everything that was added."""
        broken = any(self._non_finite)
        return Difference(
            max_abs=max(self._max_abs, 0.0),
            sqnr_db=-math.inf if broken else _decibels(self._signal, self._noise),
            cosine=None if self._cosine == math.inf else -1.0 if broken else self._cosine,
            agreement=self._agreeing / self._rows if self._rows else None,
            non_finite=(self._non_finite[0], self._non_finite[1]),
            largest=self._largest,
            worst=self._worst,
        )

    def _decisions(self, expected: Array, got: Array, finite: Array) -> None:
        if self._decide is None or not expected.size:
            return
        same = (self._decide(expected) == self._decide(got)).reshape(len(expected), -1).all(axis=1)
        self._rows, self._agreeing = self._rows + len(same), self._agreeing + int((same & finite.all(axis=1)).sum())

    def _measure(self, expected: Array, got: Array) -> tuple[float, int]:
        """Add finite rows [n, channels]; returns the largest error and its flat index."""
        error = np.abs(expected - got)
        self._signal += float(np.vdot(expected, expected))
        self._noise += float(np.vdot(error, error))
        self._largest = max(self._largest, float(np.abs(expected).max()))
        if expected.shape[1] > 1:
            self._cosine = min(self._cosine, float(_cosines(expected, got).min()))
        return float(error.max()), int(error.argmax())

    def _note(self, error: float, case: str, index: int, reference: Array, actual: Array) -> None:
        if error > self._max_abs:
            position = tuple(int(i) for i in np.unravel_index(index, reference.shape))
            self._max_abs = error
            self._worst = Place(case, position, float(reference[position]), float(actual[position]))


def _slices(reference: Array, actual: Array, real: Array | None) -> Iterator[tuple[int, Array, Array, Array]]:
    """First flat index, both arrays as float64 [n, channels], and which rows are real, for a few rows at a time."""
    if reference.size == 0:
        return
    channels = reference.shape[-1]
    expected, got = reference.reshape(-1, channels), actual.reshape(-1, channels)
    chosen = np.ones(len(expected), dtype=bool) if real is None else np.asarray(real, dtype=bool).reshape(-1)
    step = max(1, _SLICE // channels)
    for start in range(0, len(expected), step):
        rows = slice(start, start + step)
        yield start * channels, expected[rows].astype(np.float64), got[rows].astype(np.float64), chosen[rows]


def _cosines(expected: Array, got: Array) -> Array:
    """Of each row; two zero vectors point the same way, a zero vector and another do not."""
    norms = np.linalg.norm(expected, axis=1), np.linalg.norm(got, axis=1)
    length = norms[0] * norms[1]
    cosines: Array = np.where((norms[0] == 0) & (norms[1] == 0), 1.0, 0.0)
    np.divide(np.einsum("nc,nc->n", expected, got), length, out=cosines, where=length > 0)
    return cosines.clip(-1.0, 1.0)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    measurable = signal > 0 and signal + noise < math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if measurable else -math.inf
