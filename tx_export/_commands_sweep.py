"""tx-export sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from tx_export import _arguments, _console, _tables

__all__ = ["sweep"]


def _lengths(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    return () if text == "none" else _arguments.parse_numbers(context, option, text)


@click.command()
@click.argument("source", required=False)
@click.option("--prune-heads", metavar="LIST", default="0", show_default=True, help="Ratios of all heads.")
@click.option("--prune-ffn", metavar="LIST", default="0", show_default=True, help="Ratios of feed-forward neurons.")
@click.option("--quantize", metavar="LIST", default="none,dynamic_int8", show_default=True, help="Passes, or none.")
@click.option("-o", "--output", metavar="DIR", type=_arguments.NEW_FOLDER, required=True, help="Of the whole sweep.")
@_arguments.size
@_arguments.settings
@click.option("--weights", metavar="FILE|random[:SEED]", help="Default: the shipped or the checkpoint's weights.")
@click.option("--task", metavar="NAME", help="Default: what the checkpoint says.")
@click.option(
    "--input", "inputs", metavar="SPEC", multiple=True, help="NAME:DTYPE[DIM,...]{LO..HI} of a module; repeat."
)
@click.option("--recover", type=_arguments.FILE, help="Text that each pruned point learns on from the whole model.")
@click.option("--steps", type=click.IntRange(min=1), help="Of --recover; default: 1000.")
@click.option("--calibrate", type=_arguments.FILE, help="Text for choices and for measuring drift, one a line.")
@click.option("--eval", "evaluate", type=_arguments.FILE, help="Labelled text, for the accuracy.")
@click.option("--budget", metavar="KEY=X,...", help="What each point must keep to, as in build.")
@click.option("--max-length", type=click.IntRange(min=1), help="The most tokens of a text.")
@click.option(
    "--tokens", metavar="LIST|none", default="16,128", show_default=True, callback=_lengths, help="To time, batch 1."
)
@_arguments.threads
@click.option(
    "--keep", type=click.Choice(("all", "frontier", "none")), default="all", show_default=True, help="Artifacts."
)
@click.option("--force", is_flag=True, help="Start anew where another sweep is.")
@_arguments.json
@_arguments.debug
def sweep(
    source: str | None, prune_heads: str, prune_ffn: str, quantize: str, output: Path, size: str,
    settings: dict[str, str], weights: str | None, task: str | None, inputs: tuple[str, ...], recover: Path | None,
    steps: int | None, calibrate: Path | None, evaluate: Path | None, budget: str | None, max_length: int | None,
    tokens: tuple[int, ...], threads: int | None, keep: Literal["all", "frontier", "none"], force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Build SOURCE at every combination of the lists, and show which points are worth having.

    DIR gets an artifact for each, sweep.json and sweep.png. A sweep that was stopped is continued by the same command.
    """
    from tx_export._sweep_record import check_folder

    check_folder(output)  # before imports that take seconds
    from tx_export.compiler import BuildOptions
    from tx_export.sweep import SweepOptions, sweep, table

    build = BuildOptions(
        source=source, size=size, settings=settings, weights=weights, task=task, inputs=inputs, recover=recover,
        steps=steps, calibrate=calibrate, evaluate=evaluate, budget=budget, max_length=max_length,
    )  # fmt: skip
    options = SweepOptions(
        output=output, build=build, prune_heads=prune_heads, prune_ffn=prune_ffn, quantize=quantize, tokens=tokens,
        threads=threads, keep=keep, force=force,
    )  # fmt: skip
    with _console.working() as progress:
        report = sweep(options, progress)
    _tables.print_json(report) if as_json else _tables.print_table(table(report))
