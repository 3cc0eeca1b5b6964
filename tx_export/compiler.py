"""build: the whole pipeline on one page.

load -> export -> passes, each compared with eager -> artifact folder -> read back and self-tested
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from tx_export import plugins, runtime, runtime_generate
from tx_export._cached_form import cached_form, plain_runner
from tx_export._judged_passes import Progress, context_of, run_graph_passes, run_module_passes
from tx_export._manifest import describe, samples
from tx_export._recipe import pipeline_of, provider_of
from tx_export._recovery import compare_recovered, measured, read_recovery, recovered
from tx_export._report import report
from tx_export._sources import source_of, with_own_text
from tx_export.artifact import check_target, open_graph, seal, staged, write_graphs
from tx_export.errors import BudgetError, ExportError, LoadError
from tx_export.export import Target, export
from tx_export.lint import lint
from tx_export.load import load
from tx_export.metrics import Budget
from tx_export.passes import Context, Coverage, Pipeline
from tx_export.spec import EagerModel
from tx_export.verify import LONGEST, Judge, Runner, Split, Step, default_lines, read_rows, split_lines
from tx_export.verify import compare as compare_steps

__all__ = ["BuildOptions", "build", "compare", "load_source", "source_of"]

_log = logging.getLogger("tx_export")


@dataclass(frozen=True)
class BuildOptions:
    """What `tx-export build` is asked for; None means the default that the design names."""

    source: str | None = None
    size: str = "small"
    settings: Mapping[str, str] = field(default_factory=dict)
    weights: str | None = None
    task: str | None = None
    inputs: tuple[str, ...] = ()
    tokenizer: str | None = None
    quantize: str | None = None
    prune_heads: str | None = None
    recover: Path | None = None
    steps: int | None = None
    passes: str | None = None
    calibrate: Path | None = None
    evaluate: Path | None = None
    budget: str | None = None
    max_length: int | None = None
    provider: str = "cpu"
    target_ort: str | None = None
    isa: str | None = None
    ops: Literal["fused", "standard"] = "fused"
    output: Path | None = None
    force: bool = False


def build(options: BuildOptions, progress: Progress = lambda message: None) -> Path:
    """Compile a source into an artifact folder and return it; nothing is left of a build that fails.

    Raises BudgetError outside the error budget, other errors of the tree for what can't be done.
    """
    provider = provider_of(options.provider, options.isa)
    pipeline, asked = pipeline_of(options.provider, options.ops, options.quantize, options.prune_heads, options.passes)
    recovery = read_recovery(options.recover, options.steps, pipeline)
    target = Target.parse(options.target_ort, options.ops)
    override = None if options.budget is None else Budget.parse(options.budget)
    if options.output is not None:
        check_target(options.output, options.force)
    split = _read_split(options.calibrate)
    chosen_by, labelled = _read_labelled(options.evaluate, pipeline)
    model = load_source(options, progress)
    folder = options.output or Path("artifacts") / model.name
    check_target(folder, options.force)
    longest = max(LONGEST, options.max_length or 0)
    judging = functools.partial(Judge, lines=split.judging, override=override, labelled=labelled, longest=longest)
    _heed(model, progress)
    given = split.choosing, options.provider, target.release, override, chosen_by, options.isa
    context = context_of(model, *given)
    whole, (model, pipeline, made) = model, run_module_passes(model, pipeline, asked, context, progress)
    model, learnt = recovered(whole, model, recovery, context, progress)
    judge = judging(model)
    context = context_of(model, *given) if model is not whole and override is None else context
    progress("export")
    graph = export(cached_form(model), target)
    pipeline, changed = run_graph_passes(graph, pipeline, asked, judge, context, progress)
    if override is not None and all(item.budget is None for item in pipeline.passes):
        judge.check(Step("export", context.open(graph), override, graph=graph))
    beside = {} if model is whole else _beside_whole(judging(whole), context.open(graph), override)
    verification = judge.verification() | beside | judge.divergence(context.open(graph))
    learnt = measured(learnt, whole, context.open(graph))
    target.check(graph, model)
    check_target(folder, options.force)  # another build may have got there first
    with staged(folder) as new:
        progress("write")
        _write(new, model, graph, provider, pipeline, verification, made | changed, learnt, options)
    return folder


def _beside_whole(judge: Judge, runner: Runner, override: Budget | None) -> dict[str, Any]:
    """What pruning costs has no limit but the one that is asked for."""
    return {"whole": judge.check(Step("whole", runner, override or Budget()))}


def load_source(options: BuildOptions, progress: Progress = lambda message: None) -> EagerModel:
    """The eager model that a build starts from."""
    progress("load")
    return load(
        options.source,
        size=options.size,
        settings=options.settings,
        weights=options.weights,
        task=options.task,
        inputs=options.inputs,
        tokenizer=options.tokenizer,
        max_length=options.max_length,
    )


def _heed(model: EagerModel, progress: Progress) -> None:
    """Of a user's module tell the warnings; for the first error ExportError, or BudgetError where eager gives NaN."""
    if model.family != "module":
        return
    progress("lint")
    for found in lint(model):
        if found.severity == "error":
            raise (BudgetError if found.kind.startswith("nan") else ExportError)(str(found))
        _log.warning("%s", found)


def _read_split(calibrate: Path | None) -> Split:
    if calibrate is None:
        return split_lines(default_lines())
    try:
        return split_lines(calibrate.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"--calibrate {calibrate}: can't be read: {error}") from error


def _read_labelled(path: Path | None, pipeline: Pipeline) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Rows to choose by, and rows to judge on: all, or every fifth where a pass chooses by the others."""
    rows = [] if path is None else list(read_rows(path))
    if not any(item.chooses_by_labels for item in pipeline.passes):
        return [], rows
    return [row for number, row in enumerate(rows, start=1) if number % 5], rows[4::5]


def _write(
    folder: Path,
    model: EagerModel,
    graph: ir.Model,
    provider: Any,
    pipeline: Pipeline,
    verification: Mapping[str, Any],
    changed: Mapping[str, Coverage],
    learnt: Mapping[str, Any],
    options: BuildOptions,
) -> None:
    graph = write_graphs(graph, folder)
    if model.text is not None:
        (folder / "tokenizer.json").write_text(model.text.tokenizer, encoding="utf-8")
    (folder / "run.py").write_bytes(Path(runtime.__file__).read_bytes())
    if model.cache is not None:
        (folder / "generate.py").write_bytes(Path(runtime_generate.__file__).read_bytes())
    here = plain_runner(model, open_graph(graph, provider.session())) if options.provider == "cpu" else None
    limits = samples(model, folder / "samples.npz", here)
    manifest = describe(graph, model, provider, pipeline, {**verification, "self_test": limits}, changed) | {**learnt}
    packages = [f"{provider.package}>={manifest['min_onnxruntime']}", "numpy", *(["tokenizers"] if model.text else [])]
    (folder / "requirements.txt").write_text("\n".join(["# Python 3.11 or later", *packages, ""]), encoding="utf-8")
    seal(folder, manifest)
    measured = "".join(coverage.measured for coverage in changed.values())
    (folder / "REPORT.md").write_text(report(manifest) + measured, encoding="utf-8")
    if options.provider == "cpu" and not runtime.self_test(runtime.Model(folder))["agrees"]:
        raise BudgetError("self-test: the artifact, as written, does not reproduce its samples")


def compare(artifact: Path, source: str | None) -> dict[str, Any]:
    """The JSON of `compare`; on failure `reason` names the first pass outside its budget."""
    manifest = runtime.read_manifest(artifact)
    whole, opened = with_own_text(source_of(manifest, source), artifact, manifest), runtime.Model(artifact)
    if "recovered" in manifest:
        return compare_recovered(whole, opened, manifest["recovered"])
    model = _as_exported(whole, manifest)
    record = manifest["verification"]["passes"][-1]
    budget = Budget.parse(record["budget"]) if record["kind"] == "drift" else None
    graph = None if _is_pair(model) else ir.load(artifact / "model.onnx")
    found = compare_steps(model, [Step("artifact", opened.run_arrays, budget, graph=graph)])
    if found.failure is None:
        return found.to_json()
    changed = f"the graph is not what its own recipe makes; {found.failure}"
    return found.to_json() | {"reason": _first_failure(manifest, model) or changed}


def _is_pair(model: EagerModel) -> bool:
    return model.cache is not None and model.cache.cross


def _as_exported(model: EagerModel, manifest: Mapping[str, Any]) -> EagerModel:
    """The model behind the module passes of the manifest, which repeat themselves without text."""
    if not any(key.startswith("pruned") and manifest[key]["done"] for key in manifest):
        return model
    pipeline, context = _recorded(model, manifest)
    return run_module_passes(model, pipeline, frozenset(), context, lambda message: None)[0]


def _recorded(model: EagerModel, manifest: Mapping[str, Any]) -> tuple[Pipeline, Context]:
    pipeline = Pipeline.parse(manifest["pipeline"], lambda name: plugins.find("pass", name))
    release = Target.parse(manifest["min_onnxruntime"], "fused").release
    return pipeline, context_of(model, (), "cpu", release, isa=manifest.get("isa"))


def _first_failure(manifest: Mapping[str, Any], model: EagerModel) -> str | None:
    """Make the graph again as the manifest says, and judge it behind each pass."""
    ops: Literal["fused", "standard"] = "fused" if manifest["fused"]["done"] else "standard"
    try:
        graph = export(cached_form(model), Target.parse(manifest["min_onnxruntime"], ops))
        pipeline, context = _recorded(model, manifest)
        run_graph_passes(graph, pipeline, frozenset(), Judge(model), context, lambda message: None)
    except BudgetError as error:
        return str(error)
    return None
