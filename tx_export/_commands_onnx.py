"""tx-export quantize and optimize: the passes for an ONNX file from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tx_export import _arguments, _console, _tables

__all__ = ["optimize", "quantize"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _shared(command: _Command) -> _Command:
    """What both take: the file and what it takes, text, a budget, a target, an output."""
    options = (
        click.argument("file", metavar="FILE.onnx", type=_arguments.FILE),
        click.option(
            "--input", "inputs", metavar="SPEC", multiple=True, help="NAME:DTYPE[DIM,...]{LO..HI} of an input; repeat."
        ),
        click.option("--tokenizer", type=_arguments.FILE, help="Default: tokenizer.json beside the file, if any."),
        click.option("--calibrate", type=_arguments.FILE, help="Text for choices and for measuring drift, one a line."),
        click.option("--eval", "evaluate", type=_arguments.FILE, help="Labelled text, for the accuracy budget."),
        click.option(
            "--budget", metavar="KEY=X,...", help="max_abs, sqnr_db, cosine, agreement, accuracy, invariance_db."
        ),
        click.option("--max-length", type=click.IntRange(min=1), help="The most tokens of a text."),
        click.option("--provider", default="cpu", show_default=True, help="Where the result will run."),
        click.option("--target-ort", metavar="X.Y", help="The oldest ONNX Runtime to run on."),
        _arguments.isa,
        click.option(
            "-o", "--output", metavar="DIR|NEW.onnx", type=click.Path(path_type=Path), help="Default: artifacts/NAME."
        ),
        click.option("--force", is_flag=True, help="Replace what is there."),
        _arguments.json,
        _arguments.debug,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.option("--quantize", "scheme", metavar="PASS", help="Default: dynamic_int8.")
@click.option("--passes", metavar="TEXT", help="The whole pipeline, instead of --quantize.")
@_shared
def quantize(
    scheme: str | None, passes: str | None, file: Path, inputs: tuple[str, ...], tokenizer: Path | None,
    calibrate: Path | None, evaluate: Path | None, budget: str | None, max_length: int | None, provider: str,
    target_ort: str | None, isa: str | None, output: Path | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Quantize FILE.onnx, optimized first, and prove it against the file itself.

    -o DIR writes an artifact folder, -o NEW.onnx the file alone.
    """
    if scheme is not None and passes is not None:
        raise click.UsageError("--passes is the whole pipeline; it can't stand beside --quantize")
    if scheme == "none":
        raise click.UsageError("--quantize none leaves nothing to do here; tx-export optimize keeps the precision")
    if passes is None and scheme is None:
        scheme = "dynamic_int8"
    _build(
        scheme, passes, file, inputs, tokenizer, calibrate, evaluate, budget, max_length, provider, target_ort, isa,
        output, force, as_json,
    )  # fmt: skip


@click.command()
@_shared
def optimize(
    file: Path, inputs: tuple[str, ...], tokenizer: Path | None, calibrate: Path | None, evaluate: Path | None,
    budget: str | None, max_length: int | None, provider: str, target_ort: str | None, isa: str | None,
    output: Path | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Optimize FILE.onnx by the passes that keep its meaning, and prove it against the file itself.

    -o DIR writes an artifact folder, -o NEW.onnx the file alone.
    """
    _build(
        "none", None, file, inputs, tokenizer, calibrate, evaluate, budget, max_length, provider, target_ort, isa,
        output, force, as_json,
    )  # fmt: skip


def _build(
    scheme: str | None, passes: str | None, file: Path, inputs: tuple[str, ...], tokenizer: Path | None,
    calibrate: Path | None, evaluate: Path | None, budget: str | None, max_length: int | None, provider: str,
    target_ort: str | None, isa: str | None, output: Path | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    if file.suffix != ".onnx":
        raise click.BadParameter(f"{file} doesn't end in .onnx", param_hint="FILE.onnx")
    if isa is not None and provider != "cpu":
        raise click.UsageError(f"--isa is for --provider cpu, not {provider}")
    from tx_export._onnx_output import build_onnx
    from tx_export.compiler import BuildOptions

    options = BuildOptions(
        source=str(file), inputs=inputs, tokenizer=None if tokenizer is None else str(tokenizer), quantize=scheme,
        passes=passes, calibrate=calibrate, evaluate=evaluate, budget=budget, max_length=max_length,
        provider=provider, target_ort=target_ort, isa=isa, force=force,
    )  # fmt: skip
    with _console.working() as progress:
        path, manifest = build_onnx(options, output, progress)
    _tables.print_json(manifest) if as_json else _tables.print_manifest(path, manifest)
