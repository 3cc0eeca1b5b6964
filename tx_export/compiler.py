"""build: the whole pipeline on one page.

load -> export -> passes, each compared with eager -> artifact folder -> read back and self-tested
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from tx_export import plugins, runtime
from tx_export._emulation import emulated
from tx_export._manifest import describe, report, samples
from tx_export._sources import source_of
from tx_export.artifact import check_target, open_graph, seal, staged, write_graph
from tx_export.errors import ArtifactError, BudgetError, ExportError, LoadError, PluginError
from tx_export.export import Target, export
from tx_export.lint import Finding, lint
from tx_export.load import load
from tx_export.metrics import Budget
from tx_export.passes import Context, Coverage, Outcome, Pass, Pipeline
from tx_export.spec import EagerModel
from tx_export.verify import LONGEST, Judge, Runner, Split, Step, default_lines, read_rows, split_lines, text_feeds
from tx_export.verify import compare as compare_steps

__all__ = ["BuildOptions", "build", "compare", "source_of"]

Progress = Callable[[str], None]

_log = logging.getLogger("tx_export")

# The optimization passes for a provider, in order. Others that exist were slower where they were measured.
_ALWAYS = "fold_constants fuse_gelu fuse_fast_gelu fuse_attention merge_views pack_qkv"
_FUSED = {"cpu": _ALWAYS, "cuda": f"{_ALWAYS} fuse_bias_gelu fuse_residual_norm"}
_STANDARD = "fold_constants merge_views"
_QUANTIZE = {"cpu": "dynamic_int8", "cuda": "none"}


@dataclass(frozen=True)
class BuildOptions:
    """What `tx-export build` is asked for; None means the default that the design names."""

    source: str | None = None
    size: str = "small"
    settings: Mapping[str, str] = field(default_factory=dict)
    weights: str | None = None
    task: str | None = None
    inputs: tuple[str, ...] = ()
    quantize: str | None = None
    passes: str | None = None
    calibrate: Path | None = None
    evaluate: Path | None = None
    budget: str | None = None
    max_length: int | None = None
    provider: str = "cpu"
    target_ort: str | None = None
    ops: Literal["fused", "standard"] = "fused"
    output: Path | None = None
    force: bool = False


def build(options: BuildOptions, progress: Progress = lambda message: None) -> Path:
    """Compile a source into an artifact folder and return it; nothing is left of a build that fails.

    Raises BudgetError outside the error budget, other errors of the tree for what can't be done.
    """
    provider = plugins.find("provider", options.provider)()
    pipeline, asked = _pipeline(options)
    target = Target.parse(options.target_ort, options.ops)
    override = None if options.budget is None else Budget.parse(options.budget)
    if options.output is not None:
        check_target(options.output, options.force)
    split, labelled = _read_split(options.calibrate), _read_labelled(options.evaluate)
    progress("load")
    model = _load(options)
    folder = options.output or Path("artifacts") / model.name
    check_target(folder, options.force)
    judge = Judge(model, split.judging, override, labelled, max(LONGEST, options.max_length or 0))
    if model.family == "module":
        progress("lint")
        _heed(lint(model))
    progress("export")
    graph = export(model, target)
    settings = plugins.find("provider", "cpu")().session()  # verified where the build runs
    context = _context(model, split, options, settings)
    made = _run_passes(model, graph, pipeline, asked, judge, context, progress)
    if override is not None and all(item.budget is None for item in pipeline.passes):
        judge.check(Step("export", context.open(graph), override, graph=graph))
    target.check(graph)
    check_target(folder, options.force)  # another build may have got there first
    with staged(folder) as new:
        progress("write")
        _write(new, model, graph, provider, pipeline, judge, made, options)
    return folder


def _pipeline(options: BuildOptions) -> tuple[Pipeline, frozenset[str]]:
    """The passes to run, and the names of those that were asked for, which must change something."""
    if options.passes is not None and options.quantize is not None:
        raise PluginError("--passes replaces the whole pipeline; it can't stand beside --quantize")
    if options.passes is not None:
        pipeline = Pipeline.parse(options.passes, lambda name: plugins.find("pass", name))
        return pipeline, frozenset(item.name() for item in pipeline.passes)
    quantize = options.quantize or _QUANTIZE[options.provider]
    lossless = _FUSED[options.provider] if options.ops == "fused" else _STANDARD
    lossy = "" if quantize == "none" else quantize
    lowered = "lower_contrib" if options.ops == "standard" and lossy else ""
    pipeline = Pipeline.parse(f"{lossless} {lossy} {lowered}", lambda name: plugins.find("pass", name))
    return pipeline, frozenset([lossy.partition("{")[0]] if lossy else [])


def _load(options: BuildOptions) -> EagerModel:
    return load(
        options.source,
        size=options.size,
        settings=options.settings,
        weights=options.weights,
        task=options.task,
        inputs=options.inputs,
        max_length=options.max_length,
    )


def _heed(findings: Sequence[Finding]) -> None:
    """Tell the warnings; ExportError for the first error."""
    for found in findings:
        if found.severity == "error":
            raise ExportError(str(found))
        _log.warning("%s", found)


def _read_split(calibrate: Path | None) -> Split:
    if calibrate is None:
        return split_lines(default_lines())
    try:
        return split_lines(calibrate.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"--calibrate {calibrate}: can't be read: {error}") from error


def _read_labelled(path: Path | None) -> list[tuple[str, str]]:
    return [] if path is None else list(read_rows(path))


def _context(model: EagerModel, split: Split, options: BuildOptions, settings: Mapping[str, Any]) -> Context:
    return Context(
        module=model.module,
        feeds=text_feeds(model, split.choosing) if model.text is not None else (),
        # Where the CPU stands in for another provider, half precision is rounded as that one does.
        open=lambda graph: open_graph(graph if options.provider == "cpu" else emulated(graph), settings),
        provider=options.provider,
    )


def _run_passes(
    model: EagerModel,
    graph: ir.Model,
    pipeline: Pipeline,
    asked: frozenset[str],
    judge: Judge,
    context: Context,
    progress: Progress,
) -> dict[str, Coverage]:
    """Run the graph passes, judging the graph behind each; returns what each changed."""
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
    pipeline.run_graph(graph, context, asked, after)
    return changed


def _opened(step: str, graph: ir.Model, context: Context) -> Runner:
    try:
        return context.open(graph)
    except ArtifactError as error:
        raise ArtifactError(f"{step}: {error}") from error


def _write(
    folder: Path,
    model: EagerModel,
    graph: ir.Model,
    provider: Any,
    pipeline: Pipeline,
    judge: Judge,
    changed: Mapping[str, Coverage],
    options: BuildOptions,
) -> None:
    write_graph(graph, folder / "model.onnx")
    if model.text is not None:
        (folder / "tokenizer.json").write_text(model.text.tokenizer, encoding="utf-8")
    (folder / "run.py").write_bytes(Path(runtime.__file__).read_bytes())
    limits = samples(
        model, folder / "samples.npz", open_graph(graph, provider.session()) if options.provider == "cpu" else None
    )
    manifest = describe(
        folder / "model.onnx", model, provider, pipeline, judge.verification() | {"self_test": limits}, changed
    )
    packages = [f"{provider.package}>={manifest['min_onnxruntime']}", "numpy", *(["tokenizers"] if model.text else [])]
    (folder / "requirements.txt").write_text("\n".join(["# Python 3.11 or later", *packages, ""]), encoding="utf-8")
    seal(folder, manifest)
    (folder / "REPORT.md").write_text(report(manifest), encoding="utf-8")
    if options.provider == "cpu" and not runtime.self_test(runtime.Model(folder))["agrees"]:
        raise BudgetError("self-test: the artifact, as written, does not reproduce its samples")


def compare(artifact: Path, source: str | None) -> dict[str, Any]:
    """The JSON of `compare`; on failure `reason` names the first pass outside its budget."""
    manifest = runtime.read_manifest(artifact)
    model = source_of(manifest, source)
    opened = runtime.Model(artifact)
    record = manifest["verification"]["passes"][-1]
    budget = Budget.parse(record["budget"]) if record["kind"] == "drift" else None
    found = compare_steps(model, [Step("artifact", opened.run_arrays, budget, graph=ir.load(artifact / "model.onnx"))])
    if found.failure is None:
        return found.to_json()
    changed = f"model.onnx is not what its own recipe makes; {found.failure}"
    return found.to_json() | {"reason": _first_failure(manifest, model) or changed}


def _first_failure(manifest: Mapping[str, Any], model: EagerModel) -> str | None:
    """Make the graph again as the manifest says, and judge it behind each pass."""
    settings = plugins.find("provider", "cpu")().session()
    ops: Literal["fused", "standard"] = "fused" if manifest["fused"]["done"] else "standard"
    judge = Judge(model)
    try:
        graph = export(model, Target.parse(manifest["min_onnxruntime"], ops))
        pipeline = Pipeline.parse(manifest["pipeline"], lambda name: plugins.find("pass", name))
        context = Context(model.module, (), lambda each: open_graph(each, settings))
        _run_passes(model, graph, pipeline, frozenset(), judge, context, lambda message: None)
    except BudgetError as error:
        return str(error)
    return None
