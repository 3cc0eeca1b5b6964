"""Run a pipeline: its module passes before the export, its graph passes behind it, each step judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import onnx_ir as ir

from tx_export import plugins
from tx_export._emulation import emulated
from tx_export.artifact import open_graph
from tx_export.errors import ArtifactError
from tx_export.metrics import Budget
from tx_export.passes import Context, Coverage, Outcome, Pass, Pipeline
from tx_export.spec import EagerModel
from tx_export.verify import Judge, Runner, Step, grid, text_feeds

__all__ = ["Progress", "context_of", "run_graph_passes", "run_module_passes"]

Progress = Callable[[str], None]

_PROBE_TOKENS = 17


def context_of(
    model: EagerModel, lines: Sequence[str], provider: str, release: tuple[int, int] | None = None
) -> Context:
    """What passes are given: by `lines` they may choose something."""
    settings = plugins.find("provider", "cpu")().session()  # verified where the build runs
    probes = [case.feeds for case in grid(model, _PROBE_TOKENS) if case.mask != "empty"]
    return Context(
        module=model.module,
        feeds=text_feeds(model, lines) if model.text is not None and lines else (),
        # Where the CPU stands in for another provider, half precision is rounded as that one does.
        open=lambda graph: open_graph(graph if provider == "cpu" else emulated(graph), settings),
        provider=provider,
        probes=probes[::-1],  # the largest first
        release=release,
    )


def run_module_passes(
    model: EagerModel, pipeline: Pipeline, asked: frozenset[str], context: Context, progress: Progress
) -> tuple[EagerModel, Pipeline, dict[str, Coverage]]:
    """The changed model, which everything behind is judged against; the pipeline that repeats it; what was changed."""
    changed: dict[str, Coverage] = {}

    def after(item: Pass, coverage: Coverage) -> None:
        progress(f"{item.name()}: {coverage.done} of {coverage.of}")
        changed["pruned"] = changed["pruned"].plus(coverage) if "pruned" in changed else coverage

    module, repeating = pipeline.run_module(model.module, context, asked, after)
    pruned = model if module is model.module else dataclasses.replace(model, module=module)
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
        changed[outcome.subject or item.name()] = outcome.coverage
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
