"""The result of one check, and sentences that say what failed: the output, the metric, the case and the position."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tx_export._accuracy import Accuracy
from tx_export._grid import Case
from tx_export._invariance import Invariance
from tx_export._measure import Findings
from tx_export.metrics import FIDELITY_DB, Budget, Difference, fidelity_bound

__all__ = [
    "FIDELITY",
    "Verdict",
    "beyond",
    "broken",
    "changed",
    "drifted",
    "inaccurate",
    "noisy",
    "unsteady",
    "varies",
    "with_grid",
]

FIDELITY = Budget(max_abs=fidelity_bound(0), sqnr_db=FIDELITY_DB)

_CAUSES = {"padding": "it is padded", "batch": "it has mates in its batch"}


@dataclass(frozen=True)
class Verdict:
    """What one check found; it passed where there are no failures."""

    step: str
    kind: str  # fidelity or drift
    budget: Budget
    outputs: Mapping[str, Difference]
    invariance: Invariance
    cases: Sequence[Mapping[str, Any]]  # of the grid
    failures: tuple[str, ...]
    telling: Case | None = None  # a small case that shows the first failure
    accuracy: Accuracy | None = None

    @property
    def failure(self) -> str | None:
        """The first failure, with the step's name in front."""
        return f"{self.step}: {self.failures[0]}" if self.failures else None

    def to_json(self) -> dict[str, Any]:
        """The record of a pass in the manifest's `verification`."""
        record = {
            "pass": self.step,
            "kind": self.kind,
            "budget": str(self.budget),
            "outputs": {name: difference.to_json() for name, difference in self.outputs.items()},
            "invariance": self.invariance.to_json(),
        }
        return record if self.accuracy is None else record | {"accuracy": self.accuracy.to_json()}


def with_grid(drift: Findings, found: Findings) -> dict[str, Difference]:
    """The drift over text, with the non-finite values of the grid counted in."""
    outputs = drift.outputs()
    for name in found.broken:
        if not any(outputs[name].non_finite):
            outputs[name] = dataclasses.replace(outputs[name], non_finite=found.outputs()[name].non_finite)
    return outputs


def broken(found: Findings) -> Iterator[str]:
    """Non-finite values, wherever they are."""
    for name, difference in found.broken.items():
        eager, here = found.outputs()[name].non_finite
        counts = f"eager {eager}, here {here}"
        yield f"output {name!r} has non-finite values ({counts}), the first in case {difference.worst}"


def beyond(found: Findings) -> Iterator[str]:
    """Outside the bound of fp32 in a case."""
    for name, difference in found.beyond.items():
        limit = fidelity_bound(difference.largest)
        yield f"output {name!r} is off by {difference.max_abs:.4g}, more than {limit:.4g}, in case {difference.worst}"


def noisy(found: Findings) -> Iterator[str]:
    """Below the SQNR of fp32 over all cases."""
    for name, difference in found.outputs().items():
        if not difference.sqnr_db >= FIDELITY_DB:
            level = f"sqnr_db {difference.sqnr_db:.4g} is less than {FIDELITY_DB:g}"
            yield f"output {name!r}: {level}, worst in case {difference.worst}"


def drifted(found: Findings, allowed: Budget) -> Iterator[str]:
    """Outside the budget."""
    for name, difference in found.outputs().items():
        for breach in allowed.breaches(difference):
            yield f"output {name!r}: {breach}, worst in case {difference.worst}"


def varies(change: Difference | None) -> bool:
    """Whether a row's answer changes by more than fp32 in another order explains."""
    return change is not None and not change.max_abs <= fidelity_bound(change.largest)


def changed(change: Invariance, promised: Collection[str]) -> Iterator[str]:
    """A row's answer depends on padding or on its mates, although it must not."""
    for cause, difference in change.changes().items():
        if difference is not None and cause in promised and varies(difference):
            limit = f"more than {fidelity_bound(difference.largest):.4g}"
            amount = f"the answer for a row changes by {difference.max_abs:.4g} when {_CAUSES[cause]}"
            yield f"{amount}, {limit}, in case {difference.worst}"


def unsteady(change: Invariance, allowed: Budget) -> Iterator[str]:
    """Outside `invariance_db`."""
    for cause, difference in change.changes().items():
        limit = allowed.invariance_db
        if difference is not None and limit is not None and not difference.sqnr_db >= limit:
            level = f"invariance_db {difference.sqnr_db:.4g} is less than {limit:g}"
            yield f"{level} for a row when {_CAUSES[cause]}, worst in case {difference.worst}"


def inaccurate(accuracy: Accuracy | None, allowed: Budget) -> Iterator[str]:
    """Outside `accuracy`."""
    if accuracy is not None and allowed.accuracy is not None and not accuracy.artifact >= allowed.accuracy:
        level = f"accuracy {accuracy.artifact:.4g} is less than {allowed.accuracy:.4g}"
        yield f"{level}; eager has {accuracy.eager:.4g}"
