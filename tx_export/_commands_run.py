"""The command `run`: texts to results, and of an artifact that generates, their continuations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tx_export import _arguments

__all__ = ["run"]

_GIVEN = f"{__name__}.run"  # where a click context keeps the options of a generation that were given


def _collect(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value not in (None, ()):
        context.meta.setdefault(_GIVEN, {})[option.name] = list(value) if option.multiple else value


def _generation(command: Callable[..., Any]) -> Callable[..., Any]:
    """What isn't given is as the artifact has it; the ranges are those of generate.Options."""
    options: tuple[tuple[str, Any, str], ...] = (
        ("--max-new-tokens", int, "The most tokens of a continuation; default: 128."),
        ("--temperature", float, "Above 0, tokens are drawn; default: 0, the likeliest."),
        ("--top-k", int, "Draw from so many of the likeliest."),
        ("--top-p", float, "Draw from the likeliest that hold so much of the probability."),
        ("--min-p", float, "Draw from those that have so much of the likeliest one's probability."),
        ("--repetition-penalty", float, "Above 1, what is there already is less likely."),
        ("--seed", int, "Of what is drawn; default: 0."),
        ("--beams", int, "Continuations that are followed at once."),
        ("--length-penalty", float, "Of beams; above 0, longer ones are preferred."),
    )
    stop = click.option(
        "--stop", multiple=True, metavar="TEXT", expose_value=False, callback=_collect,
        help="A continuation ends before it; repeat.",
    )  # fmt: skip
    command = stop(command)
    for name, kind, meaning in reversed(options):
        command = click.option(name, type=kind, expose_value=False, callback=_collect, help=meaning)(command)
    return command


@click.command()
@click.argument("artifact", type=_arguments.ARTIFACT)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pair", "pairs", multiple=True, metavar="TEXT", help="The second text of each TEXT, or many for one.")
@click.option("--input", "source", metavar="FILE|-", help=".txt, .tsv, .jsonl or .csv; - is standard input.")
@click.option("--column", metavar="NAME", help="The column of a .csv that holds the text.")
@click.option("--provider", metavar="NAME", help="Default: the artifact's first.")
@_generation
@click.option("--interactive", is_flag=True, help="Answer one line after another.")
@_arguments.threads
@_arguments.json
@_arguments.debug
@click.pass_context
def run(
    context: click.Context, artifact: Path, texts: tuple[str, ...], pairs: tuple[str, ...], source: str | None,
    column: str | None, provider: str | None, interactive: bool, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Run ARTIFACT on texts: arguments, a file, or piped input; what generates continues them."""
    from tx_export import runtime

    options = context.meta.get(_GIVEN, {})
    if interactive:
        if texts or pairs or source is not None:
            raise click.UsageError("--interactive reads its lines from standard input; it takes no other text")
        runtime.converse(artifact, provider=provider, threads=threads, options=options, as_json=as_json)
        return
    runtime.run(
        artifact, texts, pairs=pairs, source=source, column=column, provider=provider, threads=threads,
        options=options, as_json=as_json,
    )  # fmt: skip
