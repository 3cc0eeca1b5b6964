"""How far a runner's answers are from eager's, at the positions that are real."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tx_export._grid import Case
from tx_export._reference import Reference, Runner
from tx_export.errors import BudgetError, LoadError
from tx_export.metrics import Budget, Difference, Meter, fidelity_bound
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["CaseError", "Findings", "OwnRounding", "answer", "decision", "measure"]

Array = NDArray[Any]

_log = logging.getLogger("tx_export")
_DECIDING = ("text-classification", "token-classification", "fill-mask", "text-generation")
_ROUNDINGS = 5
_SMALL = 64  # positions: up to here more of them cost little and tell tensors apart


class CaseError(BudgetError):
    """Outside the error budget whatever it is: a case in which there is no answer to compare."""

    def __init__(self, message: str, case: Case) -> None:
        super().__init__(message)
        self.case = case


@dataclass
class Findings:
    """Differences over some cases: pooled for each output, and what stands out."""

    pooled: dict[str, Meter]
    cases: list[dict[str, Any]] = field(default_factory=list)  # as `compare` prints them
    broken: dict[str, Difference] = field(default_factory=dict)  # of an output: the first case with non-finite values
    beyond: dict[str, Difference] = field(default_factory=dict)  # of an output: the case farthest outside fp32's bound
    each: list[tuple[Case, list[Difference]]] = field(default_factory=list)  # of the outputs in a case

    def outputs(self) -> dict[str, Difference]:
        return {name: meter.result() for name, meter in self.pooled.items()}

    def telling(self, allowed: Budget | None) -> Case:
        """A small case that is outside a budget; with None, about as far outside fp32's bound as any."""
        farthest = max(_farthest(differences) for _, differences in self.each)
        clear = max(farthest / 10, min(farthest, 1.0))

        def shows(differences: Sequence[Difference]) -> bool:
            if allowed is None or _farthest(differences) == farthest:
                return _farthest(differences) >= clear
            return any(allowed.breaches(difference) for difference in differences)

        def cost(item: tuple[Case, Sequence[Difference]]) -> tuple[int, int, float]:
            positions = math.prod(item[0].shape[:2])
            return max(_SMALL, positions), -positions, -_farthest(item[1])

        return min((item for item in self.each if shows(item[1])), key=cost)[0]


def measure(step: str, model: EagerModel, runner: Runner, reference: Reference, cases: Sequence[Case]) -> Findings:
    """Run all cases; the fp32 bound of a case is that of the largest eager value in it."""
    found = Findings({spec.name: Meter(decision(model, spec)) for spec in model.outputs})
    for case in cases:
        expected = reference(case)
        actual = answer(step, runner, case, expected)
        worst, non_finite = 0.0, 0
        found.each.append((case, []))
        for spec in model.outputs:
            meter = _meter(model, spec, case, expected[spec.name], actual[spec.name])
            found.pooled[spec.name].merge(meter)
            difference = meter.result()
            worst, non_finite = max(worst, difference.max_abs), non_finite + sum(difference.non_finite)
            found.each[-1][1].append(difference)
            if any(difference.non_finite):
                found.broken.setdefault(spec.name, difference)
            elif _excess(difference) > max(1.0, _excess(found.beyond.get(spec.name))):
                found.beyond[spec.name] = difference
        found.cases.append(case.to_json() | {"max_abs": None if non_finite else worst, "non_finite": non_finite})
    return found


class OwnRounding:
    """How far eager's float32 is from its float64 in a case: inputs for which that is much ask more than fp32 can."""

    def __init__(self, model: EagerModel, reference: Reference) -> None:
        self._model, self._reference = model, reference
        self._known: dict[Case, dict[str, float]] = {}

    def __call__(self, case: Case) -> Mapping[str, float]:
        """The largest difference of each output at real positions; none where float64 can't be had."""
        if case not in self._known:
            expected, wide = self._reference(case), self._reference.in_float64(case)
            meters = {
                spec.name: _meter(self._model, spec, case, wide[spec.name], expected[spec.name])
                for spec in self._model.outputs
                if wide is not None
            }
            self._known[case] = {name: meter.result().max_abs for name, meter in meters.items()}
        return self._known[case]

    def settle(self, found: Findings) -> None:
        """Leave in `beyond` what is also beyond five times that: eager's rounding, and four times as much again."""
        found.beyond.clear()
        for case, differences in found.each:
            for spec, difference in zip(self._model.outputs, differences, strict=True):
                if _excess(difference) <= max(1.0, _excess(found.beyond.get(spec.name))):
                    continue
                own = self(case).get(spec.name, 0.0)
                if not difference.max_abs <= _ROUNDINGS * own:
                    found.beyond[spec.name] = difference
                else:
                    _log.info(
                        "%s: off by %.3g in %s, where eager's own rounding is %.3g",
                        spec.name,
                        difference.max_abs,
                        case,
                        own,
                    )


def _farthest(differences: Sequence[Difference]) -> float:
    return max(map(_excess, differences), default=0.0)


def _excess(difference: Difference | None) -> float:
    return 0.0 if difference is None else difference.max_abs / fidelity_bound(difference.largest)


def answer(step: str, runner: Runner, case: Case, expected: Mapping[str, Array]) -> dict[str, Array]:
    """What a runner gives; BudgetError names the step and the case where it raises or the shapes are not eager's."""
    try:
        outputs = runner(case.feeds)
    except Exception as error:
        raise CaseError(f"{step}: fails in case {case}: {_first_line(error)}", case) from error
    for name, array in expected.items():
        if name not in outputs:
            raise BudgetError(f"{step}: output {name!r} is missing; there are {', '.join(outputs) or 'none'}")
        if outputs[name].shape != array.shape:
            raise CaseError(
                f"{step}: output {name!r} has shape {list(outputs[name].shape)} in case {case}, "
                f"where eager has {list(array.shape)}",
                case,
            )
    return outputs


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def decision(model: EagerModel, output: TensorSpec) -> Callable[[Array], Array] | None:
    """How rows of logits become labels; None for an output that decides nothing."""
    if output.name != "logits" and model.task not in _DECIDING:
        return None
    if model.text is not None and model.text.scores == "sigmoid":
        return lambda rows: rows > 0
    return None if output.dims[-1:] == (1,) else lambda rows: rows.argmax(axis=-1)


def _meter(model: EagerModel, output: TensorSpec, case: Case, expected: Array, actual: Array) -> Meter:
    real = _real(model, output, case, expected.ndim)
    if expected.ndim < 2 or real.shape[-1] > 1:
        # The last axis counts rows or positions: each number is a row of its own.
        expected, actual, real = expected[..., None], actual[..., None], real[..., None]
    meter = Meter(decision(model, output))
    meter.add(expected, actual, np.broadcast_to(real[..., 0], expected.shape[:-1]), str(case))
    return meter


def _real(model: EagerModel, output: TensorSpec, case: Case, ndim: int) -> Array:
    """Which elements of an output are real: bool, of its rank, 1 along each axis that no mask is about.

    Where padding is promised on the right only (Hugging Face), an empty row has no oracle and is not real.
    """
    real: Array = np.ones((1,) * ndim, dtype=bool)
    names = [dim.name if isinstance(dim, Dim) else "" for dim in output.dims]
    if len(names) != ndim:
        raise LoadError(f"{model.source}: output {output.name!r} has {ndim} dims, but {len(names)} are declared")
    for mask in (spec for spec in model.inputs if spec.is_mask and len(spec.dims) == 2):
        rows, positions = (dim.name if isinstance(dim, Dim) else "" for dim in mask.dims)
        if not rows or rows not in names:
            continue
        given, row_axis = case.feeds[mask.name] != 0, names.index(rows)
        if model.padding == "right":
            real = real & _spread(given.any(axis=1, keepdims=True), row_axis, None, ndim)
        for axis in (axis for axis, name in enumerate(names) if name and name == positions):
            real = real & _spread(given, row_axis, axis, ndim)
    return real


def _spread(mask: Array, row_axis: int, position_axis: int | None, ndim: int) -> Array:
    """A mask [rows, positions] with its axes at the given places of `ndim`."""
    shape = [1] * ndim
    shape[row_axis] = mask.shape[0]
    if position_axis is None:
        return mask.reshape(shape)
    shape[position_axis] = mask.shape[1]
    return (mask if row_axis < position_axis else mask.T).reshape(shape)
