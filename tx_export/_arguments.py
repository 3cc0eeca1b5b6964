"""What several commands take, and how their options are read."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = [
    "ARTIFACT",
    "FILE",
    "NEW_FILE",
    "NEW_FOLDER",
    "PATH",
    "debug",
    "json",
    "parse_contenders",
    "parse_numbers",
    "parse_settings",
    "settings",
    "size",
    "source",
    "threads",
]

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


debug = click.option("--debug", is_flag=True, expose_value=False, help="Show logs, warnings and tracebacks.")
json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
threads = click.option("--threads", type=click.IntRange(min=1), help="Threads; default: all that the process may use.")
source = click.option("--source", help="The model that the artifact was built from; default: the manifest's.")
size = click.option("--size", type=click.Choice(("small", "medium", "large")), default="small", show_default=True)
settings = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, callback=parse_settings, help="A model option; repeat."
)
