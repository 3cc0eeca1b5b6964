"""Compare a graph, or an artifact, with eager.

    fidelity   does the graph compute what the module that it was exported from computes: on the grid, in fp32 bounds
    drift      how far is it from the untouched eager model: one number per output and metric, pooled over text

A non-finite value fails both, wherever it is and on whichever side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tx_export._accuracy import Accuracy, check_accuracy, check_labels, read_rows
from tx_export._blame import blame
from tx_export._continuations import divergence
from tx_export._grid import Case, grid
from tx_export._invariance import Invariance, invariance, trials
from tx_export._judging_text import Split, default_lines, split_lines, text_feeds
from tx_export._measure import CaseError, OwnRounding, decision, measure
from tx_export._reference import Reference, Runner, eager_runner
from tx_export._verdict import (
    FIDELITY,
    Verdict,
    beyond,
    broken,
    changed,
    drifted,
    inaccurate,
    noisy,
    unsteady,
    varies,
    with_grid,
)
from tx_export.errors import BudgetError, PluginError
from tx_export.metrics import Budget
from tx_export.spec import EagerModel

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

__all__ = [
    "LONGEST",
    "Accuracy",
    "Case",
    "Comparison",
    "Judge",
    "Runner",
    "Split",
    "Step",
    "Verdict",
    "check_accuracy",
    "compare",
    "default_lines",
    "eager_runner",
    "grid",
    "read_rows",
    "split_lines",
    "text_feeds",
]

LONGEST = 1024  # tokens, unless more were asked for by hand


@dataclass(frozen=True)
class Step:
    """A stage of an artifact's making that can be run; without a budget it is held to fidelity."""

    name: str
    runner: Runner
    budget: Budget | None = None
    exported: nn.Module | None = None  # None: the model's own
    graph: ir.Model | None = None  # what the runner runs, to find the module to blame in


class Judge:
    """Checks every step of one build against eager, whose answers it keeps.

    `lines` are judged on (None: the judging part of ours), `override` replaces the budgets of all passes, `labelled`
    holds (label, text), and no case is longer than `longest` tokens.
    """

    def __init__(
        self,
        model: EagerModel,
        lines: Sequence[str] | None = None,
        override: Budget | None = None,
        labelled: Sequence[tuple[str, str]] = (),
        longest: int = LONGEST,
    ) -> None:
        if override is not None:
            _check_measurable(model, override, labelled)
        if labelled:
            check_labels(model, labelled)
        judged = split_lines(default_lines()).judging if lines is None else lines
        self._model, self._override, self._labelled = model, override, labelled
        self._caused: Budget | None = None  # what the lossy passes so far may cause together
        self._grid = grid(model, longest)
        self._text = () if model.text is None else tuple(Case("text", feeds) for feeds in text_feeds(model, judged))
        self._trials = trials(model, _mates(self._grid, self._text), longest)
        self._references: dict[nn.Module, Reference] = {}
        self._roundings: dict[nn.Module, OwnRounding] = {}
        self._kept: dict[nn.Module, frozenset[str]] = {}
        self._verdicts: list[Verdict] = []

    def check_exact(self, step: str, runner: Runner, exported: nn.Module | None = None) -> dict[str, Any]:
        """Fidelity to the module that the graph was exported from (None: the model's own); BudgetError outside."""
        return self.check(Step(step, runner, exported=exported))

    def check_lossy(self, step: str, runner: Runner, budget: Budget) -> dict[str, Any]:
        """Drift from the untouched model, within the budgets of the lossy passes so far; BudgetError outside."""
        return self.check(Step(step, runner, budget))

    def check(self, step: Step) -> dict[str, Any]:
        """Either of the two; the BudgetError names the module that differs first where the step brings its graph."""
        verdict = self.judge(step)
        if verdict.failure is not None:
            raise BudgetError(self.explain(step, verdict.failure, verdict.telling))
        self._verdicts.append(verdict)
        return verdict.to_json()

    def judge(self, step: Step) -> Verdict:
        """The verdict on a step, which may be a failure; BudgetError where its runner fails."""
        try:
            return self._fidelity(step) if step.budget is None else self._drift(step, step.budget)
        except CaseError as error:
            raise BudgetError(self.explain(step, str(error), error.case)) from error

    def explain(self, step: Step, failure: str, case: Case | None) -> str:
        """A failure, and the module to blame for it if that can be told from a case that shows it."""
        if step.graph is None or case is None:
            return failure
        exported = self._model.module if step.exported is None else step.exported
        allowed = None if step.budget is None else self._allowed()
        blamed = blame(self._model, exported, step.graph, case, allowed)
        where = "" if str(case) in failure else f", in case {case}"
        return failure if blamed is None else f"{failure}; {blamed}{where}"

    def verification(self) -> dict[str, Any]:
        """The manifest's `verification`: a record for each pass, and the last one as the overall result."""
        passes = [verdict.to_json() for verdict in self._verdicts]
        return {"passes": passes, "overall": {key: value for key, value in passes[-1].items() if key != "pass"}}

    def divergence(self, runner: Runner) -> dict[str, Any]:
        """A record of where greedy text of the runner leaves eager's; empty without a generation, or without text."""
        if self._model.cache is None or not self._text:
            return {}
        return {"divergence": divergence(self._model, runner, [case.feeds for case in self._text])}

    def _allowed(self) -> Budget | None:
        return self._caused if self._override is None else self._override

    def _fidelity(self, step: Step) -> Verdict:
        exported = self._model.module if step.exported is None else step.exported
        found = measure(step.name, self._model, step.runner, self._reference(exported), self._grid)
        if found.beyond and not found.broken:
            self._roundings.setdefault(exported, OwnRounding(self._model, self._reference(exported))).settle(found)
        change = invariance(step.name, self._model, step.runner, self._trials)
        wrong = (*broken(found), *beyond(found), *noisy(found))
        failures = (*wrong, *changed(change, self._promised(exported)))
        told = found.telling(None) if wrong else self._changed_case(change)
        return Verdict(step.name, "fidelity", FIDELITY, found.outputs(), change, found.cases, failures, told)

    def _drift(self, step: Step, budget: Budget) -> Verdict:
        self._caused = budget if self._caused is None else self._caused.looser(budget)
        allowed = self._allowed()
        assert allowed is not None
        reference = self._reference(self._model.module)
        found = measure(step.name, self._model, step.runner, reference, self._grid)
        drift = measure(step.name, self._model, step.runner, reference, self._text) if self._text else found
        change = invariance(step.name, self._model, step.runner, self._trials)
        accuracy = check_accuracy(self._model, step.runner, self._labelled) if self._labelled else None
        wrong = (*broken(found), *drifted(drift, allowed))
        failures = (*wrong, *unsteady(change, allowed), *inaccurate(accuracy, allowed))
        shown = found.telling(None) if found.broken else drift.telling(allowed)
        told = shown if wrong else self._changed_case(change)
        outputs = with_grid(drift, found)
        return Verdict(step.name, "drift", allowed, outputs, change, found.cases, failures, told, accuracy)

    def _changed_case(self, change: Invariance) -> Case | None:
        """Where the answer for a row changes most."""
        changes = [difference for difference in change.changes().values() if difference is not None]
        name = max(changes, key=lambda difference: difference.max_abs).worst.case if changes else ""
        return next((trial.changed for trial in self._trials if str(trial.changed) == name), None)

    def _reference(self, module: nn.Module) -> Reference:
        return self._references.setdefault(module, Reference(self._model, module))

    def _promised(self, exported: nn.Module) -> frozenset[str]:
        """What must not change an answer: our families promise all, others' modules and files what eager keeps."""
        if exported not in self._kept:
            eager = invariance("eager", self._model, self._reference(exported).run, self._trials)
            ours = self._model.family not in ("module", "onnx")
            changes = eager.changes().items()
            self._kept[exported] = frozenset(cause for cause, change in changes if ours or not varies(change))
        return self._kept[exported]


def _check_measurable(model: EagerModel, budget: Budget, labelled: Sequence[tuple[str, str]]) -> None:
    if budget.accuracy is not None and not labelled:
        raise PluginError("budget: accuracy needs labelled text (--eval FILE)")
    if budget.agreement is not None and all(decision(model, spec) is None for spec in model.outputs):
        raise PluginError(f"budget: agreement needs logits; the outputs are {', '.join(s.name for s in model.outputs)}")


def _mates(cases: Sequence[Case], text: Sequence[Case]) -> list[Case]:
    """What rows are taken from alone: a batch of short text and one of long text, else the largest full batch."""
    if len(text) > 1 and text[0].shape[0] > 1:
        return [text[len(text) // 4], text[3 * len(text) // 4]]
    full = [case for case in cases if case.mask == "full" and case.shape]
    return [max(full, key=lambda case: case.shape)] if full else []


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: the last step's verdict, and the first failure of all (None: pass)."""

    last: Verdict | None  # None where its runner failed
    failure: str | None

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        last = None if self.last is None else self.last.to_json()
        return {
            "verdict": "pass" if self.failure is None else "fail",
            "outputs": {} if last is None else last["outputs"],
            "invariance": {"padding": None, "batch": None} if last is None else last["invariance"],
            "cases": [] if self.last is None else list(self.last.cases),
        }


def compare(
    model: EagerModel, steps: Sequence[Step], lines: Sequence[str] | None = None, override: Budget | None = None
) -> Comparison:
    """Judge the steps in order, the artifact itself last; the first one outside its budget gives the failure."""
    assert steps
    judge = Judge(model, lines, override)
    failure: str | None = None
    last: Verdict | None = None
    for step in steps:
        try:
            last = judge.judge(step)
            if failure is None and last.failure is not None:
                failure = judge.explain(step, last.failure, last.telling)
        except BudgetError as error:
            last, failure = None, failure or str(error)
    return Comparison(last, failure)
