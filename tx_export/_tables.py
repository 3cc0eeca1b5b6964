"""What a command prints on stdout: JSON, or columns for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from tx_export._distillation_run import DistillResult
    from tx_export.training import TrainResult

__all__ = [
    "print_columns",
    "print_comparison",
    "print_graph",
    "print_json",
    "print_manifest",
    "print_profile",
    "print_table",
    "print_training",
]

_WIDE = 200  # characters


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_columns(rows: Iterable[Sequence[object]]) -> None:
    """Rows as left-aligned columns, two spaces apart."""
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """What an artifact is, in one screen."""
    plain = ("name", "task", "source", "weights", "pipeline", "opset", "ir_version", "min_onnxruntime")
    rows: list[tuple[str, str]] = [("artifact", str(folder))]
    rows += [(key, str(manifest.get(key, ""))) for key in plain]
    rows += [
        ("domain", f"{name} {used['version']}, {used['nodes']} nodes")
        for name, used in manifest.get("domains", {}).items()
    ]
    rows += [(kind[:-1], _tensor(tensor)) for kind in ("inputs", "outputs") for tensor in manifest.get(kind, ())]
    counted = ("fused", "quantized", "pruned", "pruned_neurons", "pruned_weights")
    rows += [(key.replace("_", " "), _coverage(manifest[key])) for key in counted if manifest.get(key)]
    rows += [("recovered", _recovered(manifest["recovered"]))] if "recovered" in manifest else []
    rows += [("verified", _verified(record)) for record in manifest.get("verification", {}).get("passes", ())]
    rows += [("file", f"{name}, {entry['bytes']:,} bytes") for name, entry in sorted(manifest["files"].items())]
    print_columns(rows)


def print_graph(graph: Mapping[str, Any]) -> None:
    """What an ONNX file holds."""
    rows = [(key, str(graph[key])) for key in ("file", "ir_version", "bytes")]
    rows += [("opset", f"{domain or 'ai.onnx'} {version}") for domain, version in graph["domains"].items()]
    rows += [(kind[:-1], _tensor(tensor)) for kind in ("inputs", "outputs") for tensor in graph[kind]]
    rows += [("nodes", f"{count} {name}") for name, count in graph["nodes"].items()]
    print_columns(rows)


def print_profile(times: Iterable[Mapping[str, Any]]) -> None:
    """Where the time of each graph goes."""
    for graph in times:
        click.echo(f"\n{graph['file']}, {graph['run']}: {graph['ms']:.3f} ms in operators")
        rows = [
            (row["operator"], row["nodes"], f"{row['ms']:.4f}", f"{row['share']:.1%}") for row in graph["operators"]
        ]
        print_columns([("operator", "nodes", "ms", "share"), *rows])


def print_comparison(report: Mapping[str, Any]) -> None:
    """The worst figures per output, then the verdict."""
    measures = ("max_abs", "sqnr_db", "cosine", "agreement", "non_finite")
    rows: list[list[str]] = [["output", *measures]]
    for name, measured in report["outputs"].items():
        rows.append([name, *(_figure(measured.get(measure)) for measure in measures)])
    print_columns(rows)
    for kind, value in report.get("invariance", {}).items():
        click.echo(f"invariance to {kind}: {_figure(value)}")
    click.echo(f"{len(report.get('cases', ()))} cases: {report['verdict']}")


def print_table(table: Table) -> None:
    """A table of rich, never cut: off a terminal it is as wide as it needs to be."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(table)


def print_training(result: TrainResult | DistillResult) -> None:
    """Where the weights are and how good they are."""
    metrics = sorted(result.metrics.items())
    steps = f"{result.best_step} of {result.steps}"
    print_columns(
        [("weights", result.folder), ("best step", steps), *((f"held-out {name}", f"{x:.4f}") for name, x in metrics)]
    )


def _tensor(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['name']}:{tensor['dtype']}[{','.join(map(str, tensor['dims']))}]"


def _recovered(record: Mapping[str, Any]) -> str:
    before, after = (_figure(record[when]["sqnr_db"]) for when in ("before", "after"))
    return f"in {record['steps']} steps, from {before} to {after} dB beside the whole model"


def _verified(record: Mapping[str, Any]) -> str:
    errors = "; ".join(
        f"{name} {_figure(measured['sqnr_db'])} dB, largest difference {_figure(measured['max_abs'])}"
        for name, measured in record["outputs"].items()
    )
    return f"{record['pass']}: {record['kind']} {errors} (budget {record['budget']})"


def _coverage(coverage: Mapping[str, Any]) -> str:
    left = "; ".join(f"{item['name']}: {item['reason']}" for item in coverage.get("left", ())[:3])
    return f"{coverage['done']} of {coverage['of']}" + (f" (left: {left})" if left else "")


def _figure(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
