"""How much the answer for a row changes when the row is padded, or computed in a batch with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tx_export._grid import Case
from tx_export._measure import answer
from tx_export._reference import Runner
from tx_export.metrics import Difference, Meter
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["Invariance", "Trial", "invariance", "trials"]

Array = NDArray[Any]
Cause = Literal["padding", "batch"]

_ROWS = 2  # of each case


@dataclass(frozen=True, eq=False)
class Trial:
    """A row alone, the same row under another circumstance, and how to find it in those outputs."""

    cause: Cause
    alone: Case
    changed: Case
    find: Callable[[TensorSpec, Array], Array]


@dataclass(frozen=True)
class Invariance:
    """The change over all outputs and trials; None where the model has no such circumstance."""

    padding: Difference | None
    batch: Difference | None

    def to_json(self) -> dict[str, float | None]:
        """The largest change of any number in an output; 0 is none at all."""
        return {
            cause: None if difference is None else difference.to_json()["max_abs"]
            for cause, difference in self.changes().items()
        }

    def changes(self) -> dict[str, Difference | None]:
        return {"padding": self.padding, "batch": self.batch}


def trials(model: EagerModel, cases: Sequence[Case], longest: int) -> tuple[Trial, ...]:
    """Rows of the cases, cut so that they are real throughout: alone against in their batch, and against padded.

    Padding stands on the right, and on the left too where the model promises both; it ends at `longest`.
    """
    found: list[Trial] = []
    mask = next((spec for spec in model.inputs if spec.is_mask and len(spec.dims) == 2), None)
    batch, tokens = _axes(model, mask)
    for case in cases:
        together = Case(case.mask, case.feeds if mask is None else _cut(model, case.feeds, mask, tokens))
        rows = _size(model, together.feeds, batch)
        for row in range(min(rows, _ROWS)):
            alone = Case(case.mask, _take(model, together.feeds, batch, slice(row, row + 1)))
            if rows > 1:
                found.append(Trial("batch", alone, together, _pick(batch, slice(row, row + 1))))
            if tokens:
                found.extend(_padded(model, alone, tokens, longest))
    return tuple(found)


def _padded(model: EagerModel, alone: Case, tokens: str, longest: int) -> Iterator[Trial]:
    length = _size(model, alone.feeds, tokens)
    bounds = [dim.bound for spec in model.inputs for dim in spec.dims if isinstance(dim, Dim) and dim.name == tokens]
    extra = min(longest, 2 * length + 1, *(bound for bound in bounds if bound is not None)) - length
    if extra > 0:
        padded = Case(alone.mask, _pad(model, alone.feeds, tokens, (0, extra)))
        yield Trial("padding", alone, padded, _pick(tokens, slice(0, length)))
    if extra > 0 and model.padding == "any":
        padded = Case(alone.mask, _pad(model, alone.feeds, tokens, (extra, 0)))
        yield Trial("padding", alone, padded, _pick(tokens, slice(extra, None)))


def invariance(step: str, model: EagerModel, runner: Runner, found: Sequence[Trial]) -> Invariance:
    """Run the trials, each case once."""
    cases = dict.fromkeys(case for trial in found for case in (trial.alone, trial.changed))
    answers = {case: answer(step, runner, case, {}) for case in cases}
    meters: dict[str, Meter] = {}
    for trial in found:
        meter = meters.setdefault(trial.cause, Meter())
        for spec in model.outputs:
            alone = np.atleast_1d(answers[trial.alone][spec.name])
            changed = np.atleast_1d(trial.find(spec, answers[trial.changed][spec.name]))
            if alone.shape == changed.shape:  # as many as there are rows: not where values decide
                meter.add(alone, changed, case=str(trial.changed))
    results = {cause: meter.result() for cause, meter in meters.items()}
    return Invariance(results.get("padding"), results.get("batch"))


def _axes(model: EagerModel, mask: TensorSpec | None) -> tuple[str, str]:
    """The names of the dims of rows and of positions, empty where there is none."""
    if mask is not None:
        rows, positions = (dim.name if isinstance(dim, Dim) else "" for dim in mask.dims)
        return rows, positions
    named = any(isinstance(dim, Dim) and dim.name == "batch" for spec in model.inputs for dim in spec.dims)
    return ("batch" if named else ""), ""


def _axis(spec: TensorSpec, name: str) -> int | None:
    names = [dim.name if isinstance(dim, Dim) else "" for dim in spec.dims]
    return names.index(name) if name and name in names else None


def _size(model: EagerModel, feeds: Mapping[str, Array], name: str) -> int:
    sizes = (feeds[spec.name].shape[axis] for spec in model.inputs if (axis := _axis(spec, name)) is not None)
    return next(sizes, 1)


def _take(model: EagerModel, feeds: Mapping[str, Array], name: str, rows: slice) -> dict[str, Array]:
    return {spec.name: _pick(name, rows)(spec, feeds[spec.name]) for spec in model.inputs}


def _pick(name: str, part: slice) -> Callable[[TensorSpec, Array], Array]:
    def pick(spec: TensorSpec, array: Array) -> Array:
        for axis, dim in enumerate(spec.dims):
            if name and isinstance(dim, Dim) and dim.name == name:
                array = array[(slice(None),) * axis + (part,)]
        return array

    return pick


def _cut(model: EagerModel, feeds: Mapping[str, Array], mask: TensorSpec, tokens: str) -> dict[str, Array]:
    """Without padding: every row as long as the shortest."""
    shortest = max(1, int((feeds[mask.name] != 0).sum(axis=1).min()))
    return _take(model, feeds, tokens, slice(0, shortest))


def _pad(model: EagerModel, feeds: Mapping[str, Array], tokens: str, widths: tuple[int, int]) -> dict[str, Array]:
    padded = {}
    for spec in model.inputs:
        axis = _axis(spec, tokens)
        around = [widths if number == axis else (0, 0) for number in range(len(spec.dims))]
        padded[spec.name] = np.pad(feeds[spec.name], around, constant_values=_filler(model, spec))
    return padded


def _filler(model: EagerModel, spec: TensorSpec) -> int:
    if not spec.name.endswith("input_ids"):
        return 0 if spec.low is None or spec.is_mask else max(0, int(spec.low))
    if model.pad_id is not None:
        return model.pad_id
    return model.text.pad_id if model.text is not None else int(spec.low or 0)
