"""What a sweep is asked for, and all of it that decides its figures."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tx_export import __version__
from tx_export._sweep_points import Point
from tx_export._sweep_record import digest
from tx_export.compiler import BuildOptions
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.metrics import Budget
from tx_export.runtime import UsageError, available_threads, cpu_name
from tx_export.spec import EagerModel

__all__ = ["Keep", "SweepOptions", "decisive", "load_source", "shared_by_all"]

Keep = Literal["all", "frontier", "none"]

_AXES = ("prune_heads", "prune_ffn", "quantize")
_SHARED = ("size", "task", "budget", "max_length", "provider", "target_ort", "ops")


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
    if (build.quantize, build.prune_heads, build.passes, build.output) != (None, None, None, None):
        raise UsageError("sweep: quantize, prune_heads, passes and output belong to the points")
    if build.budget is not None:
        Budget.parse(build.budget)
    return dataclasses.replace(build, force=True)  # an artifact without a row is ours: the sweep was stopped behind it


def load_source(build: BuildOptions) -> EagerModel:
    """The eager model, as `build` loads it."""
    return load(
        build.source,
        size=build.size,
        settings=build.settings,
        weights=build.weights,
        task=build.task,
        inputs=build.inputs,
        max_length=build.max_length,
    )


def decisive(options: SweepOptions, points: Sequence[Point], model: EagerModel) -> dict[str, Any]:
    """All that decides the figures, as JSON; of a user's module the file that it is in, not what that imports."""
    build = options.build
    described = (model.task, model.inputs, model.outputs, sorted(model.config.items()), model.text)
    return {
        "source": model.source,
        **{axis: list(dict.fromkeys(getattr(point, axis) for point in points)) for axis in _AXES},
        **{name: getattr(build, name) for name in _SHARED},
        "settings": dict(sorted(build.settings.items())),
        "inputs": list(build.inputs),
        "tokens": list(options.tokens),
        "keep": options.keep,
        "weights": model.weights,
        "model": hashlib.sha256(repr(described).encode()).hexdigest(),
        "code": _digest("source", _code(build.source)),
        "calibrate": _digest("--calibrate", build.calibrate),
        "eval": _digest("--eval", build.evaluate),
        "threads": options.threads or available_threads(),
        "cpu": cpu_name(),
        "versions": {"tx-export": __version__} | {name: version(name) for name in ("torch", "onnxruntime")},
    }


def _code(source: str | None) -> Path | None:
    file = (source or "").rpartition(":")[0]
    return Path(file) if file.endswith(".py") else None


def _digest(option: str, path: Path | None) -> str | None:
    try:
        return None if path is None else digest(path)
    except OSError as error:
        raise LoadError(f"{option} {path}: can't be read: {error.strerror or error}") from error
