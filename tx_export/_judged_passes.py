"""Run a pipeline: its module passes before the export, its graph passes behind it, each step judged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from tx_export import plugins
from tx_export._cached_form import plain_runner, with_own_cache
from tx_export._coverage import of_graph_passes, of_module_passes
from tx_export._emulation import emulated
from tx_export._measure import measure
from tx_export._reference import Reference
from tx_export._saturation import saturated
from tx_export.artifact import open_graph
from tx_export.errors import ArtifactError
from tx_export.metrics import Budget
from tx_export.passes import Context, Coverage, ModulePass, Outcome, Pass, Pipeline
from tx_export.spec import EagerModel
from tx_export.verify import Case, Judge, Runner, Step, check_accuracy, grid, text_feeds

__all__ = ["Progress", "context_of", "run_graph_passes", "run_module_passes"]

Progress = Callable[[str], None]

_PROBE_TOKENS = 17


def context_of(
    model: EagerModel,
    lines: Sequence[str],
    provider: str,
    release: tuple[int, int] | None = None,
    budget: Budget | None = None,
    labelled: Sequence[tuple[str, str]] = (),
    isa: str | None = None,
) -> Context:
    """What passes are given: by `lines`, and by `labelled` ones, they may choose something."""
    asked = {} if budget is None else dataclasses.asdict(budget)
    probes = [case.feeds for case in grid(model, _PROBE_TOKENS) if case.mask != "empty"]
    start = functools.partial(_as_on_target, provider=provider, isa=isa or "")
    return Context(
        module=model.module,
        feeds=text_feeds(model, lines) if model.text is not None and lines else (),
        open=lambda graph: plain_runner(model, start(graph)),
        provider=provider,
        isa=isa or "",
        probes=probes[::-1],  # the largest first
        release=release,
        budget={key: limit for key, limit in asked.items() if limit is not None},
        drift=_Drift(model),
        accuracy=(lambda runner: check_accuracy(model, runner, labelled).artifact) if labelled else None,
        open_cached=None if model.cache is None else start,
    )


def _as_on_target(graph: ir.Model, provider: str, isa: str) -> Runner:
    """A session here that rounds as the target does: half precision of other providers, 8 bits of other CPUs."""
    cpu = plugins.find("provider", "cpu")
    if provider != "cpu":
        return open_graph(emulated(graph), cpu().session())
    shown = saturated(graph) if isa == "avx2" else graph
    return open_graph(shown, cpu(isa=isa if shown is graph else "").session())


class _Drift:
    """With the keys of a budget, the worst of all outputs; what eager answers is kept."""

    def __init__(self, model: EagerModel) -> None:
        self._model, self._reference = model, Reference(model)
        self._cases: dict[int, Case] = {}  # by the identity of their feeds, which they hold

    def __call__(self, runner: Runner, feeds: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
        cases = [self._cases.setdefault(id(each), Case("text", each)) for each in feeds]
        found = measure("drift", self._model, runner, self._reference, cases).outputs().values()
        worst: dict[str, float] = {}
        for key, pick in (("max_abs", max), ("sqnr_db", min), ("cosine", min), ("agreement", min)):
            values = [value for difference in found if (value := getattr(difference, key)) is not None]
            worst |= {key: pick(values)} if values else {}
        return worst


def run_module_passes(
    model: EagerModel, pipeline: Pipeline, asked: frozenset[str], context: Context, progress: Progress
) -> tuple[EagerModel, Pipeline, dict[str, Coverage]]:
    """The changed model, which everything behind is judged against; the pipeline that repeats it; what was changed."""
    changed: dict[str, Coverage] = {}

    def after(item: ModulePass, coverage: Coverage) -> None:
        progress(f"{item.name()}: {coverage.done} of {coverage.of}")
        before = changed.get(item.subject)
        changed[item.subject] = coverage if before is None else of_module_passes(before, coverage)

    module, repeating = pipeline.run_module(model.module, context, asked, after)
    pruned = model if module is model.module else with_own_cache(dataclasses.replace(model, module=module))
    return pruned, repeating, changed


def run_graph_passes(
    graph: ir.Model,
    pipeline: Pipeline,
    asked: frozenset[str],
    judge: Judge,
    context: Context,
    progress: Progress,
) -> tuple[Pipeline, dict[str, Coverage]]:
    """Run the graph passes, judging the graph behind each; the pipeline that repeats it, and what each changed."""
    changed: dict[str, Coverage] = {}
    caused: Budget | None = None

    def after(item: Pass, outcome: Outcome) -> None:
        nonlocal caused
        subject = outcome.subject or item.name()
        before = changed.get(subject)
        changed[subject] = outcome.coverage if before is None else of_graph_passes(before, outcome.coverage)
        if not outcome.modified:
            return
        progress(f"{item.name()}: {outcome.coverage.done} of {outcome.coverage.of}; verify")
        if item.budget is not None:
            caused = Budget.parse(item.budget)
        judge.check(Step(item.name(), _opened(item.name(), graph, context), caused, graph=graph))

    progress("verify")
    judge.check(Step("export", _opened("export", graph, context), graph=graph))
    return pipeline.run_graph(graph, context, asked, after), changed


def _opened(step: str, graph: ir.Model, context: Context) -> Runner:
    try:
        return context.open(graph)
    except ArtifactError as error:
        raise ArtifactError(f"{step}: {error}") from error
