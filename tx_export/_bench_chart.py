"""The chart of a benchmark: medians as grouped bars, one group a shape, one color a contender."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tx_export.errors import TxExportError

__all__ = ["draw"]

_LOG_FROM = 8  # times the smallest bar; beyond it small bars can't be read on a linear scale


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG; TxExportError names the extra when matplotlib is absent, or the path when it can't be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TxExportError("a chart needs matplotlib: pip install 'tx-export[plot]'") from error
    rows = report["rows"]
    shapes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    p50 = {(row["contender"], row["batch"], row["tokens"]): row["p50_ms"] for row in rows}
    figure = Figure(figsize=(max(6.0, 0.42 * len(rows) + 2.5), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(shapes))]
        bars = axes.bar(places, [p50[name, *shape] for shape in shapes], width, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2, rotation=90 if len(rows) > 12 else 0)
    if max(p50.values()) > _LOG_FROM * min(p50.values()):
        axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(shapes)), [f"{batch} x {tokens}" for batch, tokens in shapes])
    axes.set_xlabel("batch x tokens")
    axes.set_ylabel("median latency, ms (lower is better)")
    axes.set_title(f"{report['artifact']} on {report['cpu']}, {report['threads']} threads", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise TxExportError(f"{path}: can't write the chart: {error.strerror}") from error
