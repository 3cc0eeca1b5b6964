"""What several commands take, and how their options are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "ARTIFACT",
    "FILE",
    "LOOP",
    "NEW_FILE",
    "NEW_FOLDER",
    "PATH",
    "check_isa",
    "debug",
    "isa",
    "json",
    "loop",
    "parse_contenders",
    "parse_numbers",
    "parse_settings",
    "settings",
    "size",
    "source",
    "threads",
]

LOOP = f"{__name__}.loop"  # where a click context keeps the options of the training loop that were given
_Command = TypeVar("_Command", bound=Callable[..., Any])

ARTIFACT = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
PATH = click.Path(exists=True, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)


def parse_settings(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(f"{item!r} is not KEY=VALUE, say num_layers=2")
        if key in settings:
            raise click.BadParameter(f"{key} is given twice")
        settings[key] = value
    return settings


def parse_numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    if not all(item.strip().isdecimal() and int(item) > 0 for item in text.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of positive numbers, say 1,8")
    return tuple(int(item) for item in text.split(","))


def parse_contenders(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    known = ("eager", "compile", "fp32")
    names = tuple(item.strip() for item in text.split(",") if item.strip())
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"unknown contender {unknown[0]!r}; known: {', '.join(known)}")
    return names


def check_isa(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    from tx_export.providers.cpu import Cpu

    if name not in (None, *Cpu.isas):
        raise click.BadParameter(f"{name!r} is not one of {', '.join(map(repr, Cpu.isas))}")
    return name


debug = click.option("--debug", is_flag=True, expose_value=False, help="Show logs, warnings and tracebacks.")
json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
threads = click.option("--threads", type=click.IntRange(min=1), help="Threads; default: all that the process may use.")
source = click.option("--source", help="The model that the artifact was built from; default: the manifest's.")
isa = click.option(
    "--isa", metavar="NAME", callback=check_isa, help="Of the CPUs to run on; default: any. avx2: without VNNI."
)
size = click.option("--size", type=click.Choice(("small", "medium", "large")), default="small", show_default=True)
settings = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, callback=parse_settings, help="A model option; repeat."
)


def _collect(context: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None:
        context.meta.setdefault(LOOP, {})[option.name] = value


def _of_loop(name: str, field: str, kind: Any, meaning: str) -> Callable[[_Command], _Command]:
    return click.option(name, field, type=kind, expose_value=False, callback=_collect, help=meaning)


def loop(command: _Command) -> _Command:
    """The options of the training loop; what isn't given keeps the loop's default."""
    count, share = click.IntRange(min=1), click.FloatRange(0, 1, max_open=True)
    options = (
        _of_loop("--batch", "batch_size", count, "Examples an update; default: 32, for train 32, 64 or 128 by size."),
        _of_loop("--accumulation", "accumulation", count, "Parts that a batch is cut into."),
        _of_loop("--epochs", "epochs", count, "At most."),
        _of_loop("--steps", "steps", count, "At most, instead of epochs."),
        _of_loop("--warmup", "warmup", count, "Steps until the learning rate falls."),
        _of_loop("--rate-factor", "rate_factor", float, "Times the article's learning rate."),
        _of_loop("--label-smoothing", "label_smoothing", share, "Probability that the other labels share."),
        _of_loop("--word-dropout", "word_dropout", share, "Share of tokens read as unknown."),
        _of_loop("--average", "average", share, "Decay of the moving average of the weights; 0: none."),
        _of_loop("--clip", "clip", float, "Largest norm of the gradient."),
        _of_loop("--precision", "precision", click.Choice(("float32", "bfloat16")), "Of forward and backward."),
        _of_loop("--activations", "activations", click.Choice(("keep", "recompute")), "recompute saves memory."),
        _of_loop("--evaluate-every", "evaluate_every", count, "Steps; default: once an epoch."),
        _of_loop("--patience", "patience", count, "Evaluations without a better one before training stops."),
        _of_loop("--checkpoint-every", "checkpoint_every", count, "Steps."),
        _of_loop("--seed", "seed", int, "Of weights, order and dropout."),
    )
    for option in reversed(options):
        command = option(command)
    return command
