"""What a sweep is asked for, and all of it that decides its figures."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tx_export import __version__
from tx_export._sweep_points import Point
from tx_export._sweep_record import digest
from tx_export.compiler import BuildOptions
from tx_export.errors import LoadError
from tx_export.metrics import Budget
from tx_export.runtime import UsageError, available_threads, cpu_name
from tx_export.spec import EagerModel

__all__ = ["Keep", "SweepOptions", "decisive", "shared_by_all"]

Keep = Literal["all", "frontier", "none"]

_AXES = ("prune_heads", "prune_ffn", "quantize")
_OF_POINTS = ("quantize", "prune_heads", "passes", "output")
_SAID_OTHERWISE = (*_OF_POINTS, "source", "weights", "force")


@dataclass(frozen=True)
class SweepOptions:
    """What `tx-export sweep` is asked for; `build` holds what all points share."""

    output: Path
    build: BuildOptions = field(default_factory=BuildOptions)
    prune_heads: str = "0"  # ratios
    prune_ffn: str = "0"  # ratios
    quantize: str = "none,dynamic_int8"  # passes with their options, or none
    tokens: tuple[int, ...] = (16, 128)  # lengths to time at, one row each; empty: nothing is timed
    threads: int | None = None  # None: all that the process may use
    keep: Keep = "all"  # which artifacts stay at the end
    force: bool = False  # throw away the sweep that is there


def shared_by_all(options: SweepOptions) -> BuildOptions:
    """UsageError where it holds what belongs to the points, PluginError for a budget that can't be read."""
    build = options.build
    if given := [name for name in _OF_POINTS if getattr(build, name) is not None]:
        raise UsageError(f"sweep: {given[0]} belongs to the points; it can't be shared by all")
    if build.budget is not None:
        Budget.parse(build.budget)
    return dataclasses.replace(build, force=True)  # an artifact without a row is ours: the sweep was stopped behind it


def decisive(options: SweepOptions, points: Sequence[Point], model: EagerModel) -> dict[str, Any]:
    """All that decides the figures, as JSON; of a user's module the file that it is in, not what that imports."""
    described = (model.task, model.inputs, model.outputs, sorted(model.config.items()), model.text)
    shared = {item.name: getattr(options.build, item.name) for item in dataclasses.fields(BuildOptions)}
    return {
        "source": model.source,
        **{axis: list(dict.fromkeys(getattr(point, axis) for point in points)) for axis in _AXES},
        **{name: _as_json(name, value) for name, value in shared.items() if name not in _SAID_OTHERWISE},
        "tokens": list(options.tokens),
        "keep": options.keep,
        "weights": model.weights,
        "model": hashlib.sha256(repr(described).encode()).hexdigest(),
        "code": _as_json("source", _code(options.build.source)),
        "threads": options.threads or available_threads(),
        "cpu": cpu_name(),
        "versions": {"tx-export": __version__} | {name: version(name) for name in ("torch", "onnxruntime")},
    }


def _code(source: str | None) -> Path | None:
    file = (source or "").rpartition(":")[0]
    return Path(file) if file.endswith(".py") else None


def _as_json(name: str, value: Any) -> Any:
    """Of a file what it holds, not where it is."""
    if isinstance(value, Path):
        try:
            return digest(value)
        except OSError as error:
            raise LoadError(f"{name}: {value} can't be read: {error.strerror or error}") from error
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    return list(value) if isinstance(value, tuple) else value
