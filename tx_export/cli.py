"""The command line: parse, one library call, print. Heavy imports are inside the commands, so that --help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from tx_export import (
    __version__,
    _arguments,
    _commands_onnx,
    _commands_run,
    _commands_sweep,
    _commands_training,
    _console,
    _tables,
)

__all__ = ["main", "program"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run tx-export and exit."""
    sys.exit(_console.run(program, sys.argv[1:] if arguments is None else arguments))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, no_args_is_help=False)
@click.version_option(__version__, prog_name="tx-export", message="%(prog)s %(version)s")
@_arguments.debug
def program() -> None:
    """Compile PyTorch Transformers into small, fast, proven ONNX artifacts."""


@program.command()
@click.argument("source", required=False)
@_arguments.size
@_arguments.settings
@click.option("--weights", metavar="FILE|random[:SEED]", help="Default: the shipped or the checkpoint's weights.")
@click.option("--task", metavar="NAME", help="Default: what the checkpoint says.")
@click.option(
    "--input", "inputs", metavar="SPEC", multiple=True, help="NAME:DTYPE[DIM,...]{LO..HI} of a module; repeat."
)
@click.option("--quantize", metavar="PASS|none", help="Default: dynamic_int8 for cpu, none for cuda.")
@click.option("--prune-heads", metavar="SPEC", help="A ratio of all heads, or LAYER:HEAD,...;LAYER:...")
@click.option("--recover", type=_arguments.FILE, help="Text that the pruned model learns on from the whole one.")
@click.option("--steps", type=click.IntRange(min=1), help="Of --recover; default: 1000.")
@click.option("--passes", metavar="TEXT", help="The whole pipeline, instead of --quantize and --prune-heads.")
@click.option("--calibrate", type=_arguments.FILE, help="Text for choices and for measuring drift, one a line.")
@click.option("--eval", "evaluate", type=_arguments.FILE, help="Labelled text, for the accuracy budget.")
@click.option("--budget", metavar="KEY=X,...", help="max_abs, sqnr_db, cosine, agreement, accuracy, invariance_db.")
@click.option("--max-length", type=click.IntRange(min=1), help="The most tokens of a text.")
@click.option("--provider", default="cpu", show_default=True, help="Where the artifact will run.")
@click.option(
    "--target-ort",
    metavar="X.Y",
    help="The oldest ONNX Runtime to run on; default: as old as operators allow.",
)
@_arguments.isa
@click.option("--ops", type=click.Choice(("fused", "standard")), default="fused", show_default=True)
@click.option("-o", "--output", metavar="DIR", type=_arguments.NEW_FOLDER, help="Default: artifacts/NAME.")
@click.option("--force", is_flag=True, help="Replace an artifact that is there.")
@_arguments.json
@_arguments.debug
def build(
    source: str | None, size: str, settings: dict[str, str], weights: str | None, task: str | None,
    inputs: tuple[str, ...], quantize: str | None, prune_heads: str | None, recover: Path | None, steps: int | None,
    passes: str | None, calibrate: Path | None, evaluate: Path | None, budget: str | None, max_length: int | None,
    provider: str, target_ort: str | None, isa: str | None, ops: Literal["fused", "standard"], output: Path | None,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Build an artifact from SOURCE: a built-in name, a checkpoint folder, file.py:NAME or package.module:NAME.

    Without SOURCE, the shipped sentiment classifier.
    """
    if passes is not None and (quantize, prune_heads) != (None, None):
        raise click.UsageError("--passes is the whole pipeline; it can't stand beside --quantize or --prune-heads")
    if isa is not None and provider != "cpu":
        raise click.UsageError(f"--isa is for --provider cpu, not {provider}")
    from tx_export.artifact import check_target

    if output is not None:
        check_target(output, force)  # before imports that take seconds
    from tx_export import compiler, runtime

    options = compiler.BuildOptions(
        source=source, size=size, settings=settings, weights=weights, task=task, inputs=inputs, quantize=quantize,
        prune_heads=prune_heads, recover=recover, steps=steps, passes=passes, calibrate=calibrate, evaluate=evaluate,
        budget=budget, max_length=max_length, provider=provider, target_ort=target_ort, isa=isa, ops=ops,
        output=output, force=force,
    )  # fmt: skip
    with _console.working() as progress:
        folder = compiler.build(options, progress)
    manifest = runtime.read_manifest(folder)
    _tables.print_json(manifest) if as_json else _tables.print_manifest(folder, manifest)


@program.command()
@click.argument("artifact", type=_arguments.ARTIFACT)
@_arguments.source
@_arguments.json
@_arguments.debug
def compare(artifact: Path, source: str | None, as_json: bool) -> None:
    """Compare ARTIFACT with its eager model over all shapes and masks that it promises."""
    from tx_export import compiler
    from tx_export.errors import BudgetError

    with _console.working():
        report = compiler.compare(artifact, source)
    _tables.print_json(report) if as_json else _tables.print_comparison(report)
    if report["verdict"] != "pass":
        raise BudgetError(report.get("reason") or f"{artifact} is outside its error budget")


@program.command()
@click.argument("artifact", type=_arguments.ARTIFACT)
@_arguments.source
@click.option("--batch", default="1,8", show_default=True, callback=_arguments.parse_numbers)
@click.option("--tokens", default="16,128,512", show_default=True, callback=_arguments.parse_numbers)
@click.option("--against", default="eager,compile,fp32", show_default=True, callback=_arguments.parse_contenders)
@_arguments.threads
@click.option("--chart", type=_arguments.NEW_FILE, metavar="FILE.png", help="Draw a chart too (needs the plot extra).")
@_arguments.json
@_arguments.debug
def bench(
    artifact: Path, source: str | None, batch: tuple[int, ...], tokens: tuple[int, ...], against: tuple[str, ...],
    threads: int | None, chart: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time ARTIFACT beside eager, torch.compile and fp32; the table goes into its REPORT.md too."""
    from tx_export import benchmark

    with _console.working() as progress:
        report = benchmark.bench(
            artifact, source=source, batch=batch, tokens=tokens, against=against, threads=threads, progress=progress
        )
        if os.access(artifact / "REPORT.md", os.W_OK):
            benchmark.record(report, artifact / "REPORT.md")
        if chart is not None:
            benchmark.chart(report, chart)
    _tables.print_json(report) if as_json else _tables.print_table(benchmark.table(report))


@program.command()
@click.argument("path", metavar="ARTIFACT|FILE.onnx", type=_arguments.PATH)
@click.option("--profile", "profiled", is_flag=True, help="Run it, and show where the time goes by operator.")
@_arguments.json
@_arguments.debug
def inspect(path: Path, profiled: bool, as_json: bool) -> None:
    """Show what an artifact or an ONNX file is."""
    found = _read(path)
    times = _profile(path) if profiled else []
    if as_json:
        _tables.print_json(found | ({"profile": times} if profiled else {}))
        return
    _tables.print_manifest(path, found) if path.is_dir() else _tables.print_graph(found)
    _tables.print_profile(times)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        from tx_export.runtime import read_manifest

        return read_manifest(path)
    from tx_export._graph_summary import summarize

    return summarize(path)


def _profile(path: Path) -> list[dict[str, Any]]:
    from tx_export._profile import profile

    return profile(path)


@program.command(name="list")
@_arguments.debug
def list_() -> None:
    """List the models, passes and providers, each in one line."""
    from tx_export import plugins

    kinds: tuple[plugins.Kind, ...] = ("model", "pass", "provider")
    _tables.print_columns((kind, name, plugins.summary(kind, name)) for kind in kinds for name in plugins.names(kind))


program.add_command(_commands_run.run)
program.add_command(_commands_training.train)
program.add_command(_commands_training.distill)
program.add_command(_commands_sweep.sweep)
program.add_command(_commands_onnx.quantize)
program.add_command(_commands_onnx.optimize)
