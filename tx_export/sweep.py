"""Many builds of one source, and which of them are worth having.

ratios of pruning x quantizations -> an artifact each -> error, size, latency -> frontier

The folder holds the artifacts, a chart, and sweep.json:

    complete   whether all that was asked is done; a sweep that was stopped is continued by the same call
    asked      all that decides the figures: options, sha256 of files and weights, versions, CPU, threads
    points     a row each: name (its folder), prune_heads, prune_ffn, quantize, status (built, over_budget or failed)
               and reason; of those built also
                   sqnr_db, max_abs, cosine, agreement, accuracy     of the worst output, against the whole model;
                                                                     null: infinite for sqnr_db, else not measured
                   labelled_rows                                     that the accuracy is of: fewer where a pass chooses
                                                                     by the others
                   bytes                                             of the graph with its weights
                   pruned, pruned_neurons, heads_per_layer           as in the manifest
                   manifest_sha256                                   null once the artifact is thrown away
                   latency                                           by shape, say 1x16: ratio to the first point built,
                                                                     in the same rounds; ms on one scale for all
                   frontier                                          bytes or shapes with which no point beats this one
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tx_export import compiler
from tx_export._bench_feeds import within_bounds
from tx_export._sweep_latency import put_on_one_scale, time_beside
from tx_export._sweep_options import Keep, SweepOptions, decisive, shared_by_all
from tx_export._sweep_points import Point, points_of
from tx_export._sweep_record import Record, Row, check_folder, digest
from tx_export._sweep_report import chart, frontier, mark, table
from tx_export.compiler import BuildOptions
from tx_export.errors import ArtifactError, BudgetError, ExportError, PassError, TxExportError
from tx_export.metrics import FIDELITY_DB
from tx_export.runtime import UsageError, read_manifest
from tx_export.timing import Plan, Shape

__all__ = ["SweepOptions", "chart", "frontier", "sweep", "table"]

Progress = Callable[[str], None]

_WORST: Mapping[str, Any] = {"sqnr_db": min, "max_abs": max, "cosine": min, "agreement": min}  # of all outputs

_COUNTED = ("done", "of", "left")

_log = logging.getLogger("tx_export")


@contextmanager
def _each_notice_once() -> Iterator[None]:
    """Every build would tell the same of the source."""
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = len(told)
        told.add(record.getMessage())
        return len(told) > known

    _log.addFilter(is_new)
    try:
        yield
    finally:
        _log.removeFilter(is_new)


@_each_notice_once()
def sweep(options: SweepOptions, progress: Progress = lambda line: None, plan: Plan | None = None) -> dict[str, Any]:
    """Build and time all points that aren't there yet, and return what sweep.json holds.

    A point outside its budget, or that can't be built, is a row with the reason. Raises UsageError, PluginError or
    LoadError before anything is built, and the error of the first point when none could be built.
    """
    check_folder(options.output)
    shared = shared_by_all(options)
    points = points_of(options.prune_heads, options.prune_ffn, options.quantize, shared)
    progress("load")
    model = compiler.load_source(shared)
    asked, inputs = decisive(options, points, model), model.inputs
    del model  # each build has its own
    shapes = list(within_bounds(inputs, (1,), options.tokens, progress))
    if options.tokens and not shapes:
        raise UsageError(f"sweep: no length of --tokens is within the bounds of {asked['source']}")
    record = Record(options.output, asked, [point.name for point in points])
    record.resume(options.force)
    _build(record, points, shared, progress)
    _time(record, shapes, {"provider": shared.provider, "threads": asked["threads"]}, progress, plan)
    _finish(record, options.keep)
    return record.to_json()


def _tell(progress: Progress, step: str, line: str) -> None:
    progress(f"{step}: {line}")


def _build(record: Record, points: Sequence[Point], shared: BuildOptions, progress: Progress) -> None:
    lacking = record.lacking()
    if len(lacking) < len(points):
        progress(f"{len(points) - len(lacking)} of {len(points)} points are there already")
    for number, point in enumerate(points, start=1):
        if point.name in lacking:
            step = functools.partial(_tell, progress, f"{number} of {len(points)}, {point.name}")
            record.put(_built(point, record.folder, shared, step))


def _built(point: Point, folder: Path, shared: BuildOptions, progress: Progress) -> Row:
    """The row of a point; only what is wrong with the point itself becomes a row, a full disk doesn't."""
    row: Row = {"name": point.name} | dataclasses.asdict(point)
    asked = dataclasses.replace(point.options(shared), output=folder / point.name)
    if point.is_exact and asked.budget is None:  # so that its drift and accuracy are measured on text, as the others'
        asked = dataclasses.replace(asked, budget=f"sqnr_db={FIDELITY_DB:g}")
    try:
        compiler.build(asked, progress)
    except BudgetError as error:
        return row | {"status": "over_budget", "reason": str(error)}
    except (ArtifactError, ExportError, PassError) as error:
        if _is_of_the_disk(error):
            raise
        return row | {"status": "failed", "reason": str(error)}
    return row | {"status": "built", "reason": None} | _figures(folder / point.name)


def _is_of_the_disk(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, OSError) or _is_of_the_disk(error.__cause__))


def _figures(folder: Path) -> Row:
    manifest = read_manifest(folder)
    verification = manifest["verification"]
    record = verification.get("whole", verification["overall"])
    found = {key: [output[key] for output in record["outputs"].values()] for key in _WORST}
    graph = [entry["bytes"] for name, entry in manifest["files"].items() if name.endswith((".onnx", ".onnx.data"))]
    return {
        **{key: worst([x for x in found[key] if x is not None], default=None) for key, worst in _WORST.items()},
        "accuracy": record.get("accuracy", {}).get("artifact"),
        "labelled_rows": record.get("accuracy", {}).get("rows"),
        "bytes": sum(graph),
        **{key: {each: manifest[key][each] for each in _COUNTED} for key in manifest if key.startswith("pruned")},
        "heads_per_layer": manifest["heads_per_layer"],
        "manifest_sha256": digest(folder / "manifest.json"),
        "latency": {},
        "frontier": [],
    }


def _time(
    record: Record, shapes: Sequence[Shape], load: Mapping[str, Any], progress: Progress, plan: Plan | None
) -> None:
    built = record.built()
    for row in built if shapes else ():
        if not row["latency"]:
            folders = record.folder / built[0]["name"], record.folder / row["name"]
            step = functools.partial(_tell, progress, row["name"])
            record.put(row | {"latency": time_beside(*folders, shapes, load, step, plan)})


def _finish(record: Record, keep: Keep) -> None:
    """Compare the points, write it down, throw away what shall not stay, and draw."""
    built = record.built()
    if not built:
        first = next(iter(record.rows.values()))
        kind = BudgetError if first["status"] == "over_budget" else TxExportError
        raise kind(f"none of the {len(record.rows)} points could be built; {first['name']}: {first['reason']}")
    put_on_one_scale(row["latency"] for row in built)
    mark(built)
    gone = [row for row in built if keep == "none" or (keep == "frontier" and not row["frontier"])]
    for row in gone:
        row["manifest_sha256"] = None
    record.is_complete = True
    record.write()
    for row in gone:
        record.discard(row["name"])
    try:
        chart(record.to_json(), record.folder / "sweep.png")
    except TxExportError as error:  # matplotlib is optional
        _log.warning("sweep.png is not drawn: %s", error)
