"""The frontier for people: a table, and a chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tx_export._charts import new_figure, save_png

__all__ = ["Row", "chart", "table"]

_ROWS = 12


@dataclass(frozen=True)
class Row:
    """A choice on the frontier; `sqnr_db` is predicted unless it was measured."""

    share: float | None  # of the time that the products take in fp32; None: not measured
    sqnr_db: float
    nbytes: int
    forms: tuple[str, ...]  # of the products
    is_measured: bool = False
    is_chosen: bool = False


def table(rows: Sequence[Row]) -> str:
    """Some of them, the chosen one among them, from fast to exact."""
    step = max(1, math.ceil(len(rows) / _ROWS))
    some = [row for number, row in enumerate(rows) if number % step == 0 or row.is_chosen or row.is_measured]
    cells = [["", "time", "SQNR dB", "MB", "forms"], *map(_cells, some)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    counted = ", ".join(f"{count} {form}" for form, count in sorted(Counter(row.forms).items()))
    decibels = f"{row.sqnr_db:.1f}" + ("" if row.is_measured else " expected")
    time = "-" if row.share is None else f"{row.share:.3f}"
    return ["->" if row.is_chosen else "", time, decibels, f"{row.nbytes / 1e6:.1f}", counted]


def chart(rows: Sequence[Row], path: Path) -> None:
    """Error over time, or over bytes where no time was measured; TxExportError without matplotlib."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    is_timed = all(row.share is not None for row in rows)
    for label, some, style in (
        ("expected", [row for row in rows if not row.is_measured], "-"),
        ("measured", [row for row in rows if row.is_measured], "o"),
        ("chosen", [row for row in rows if row.is_chosen], "*"),
    ):
        finite = [row for row in some if math.isfinite(row.sqnr_db)]
        x = [row.share if is_timed and row.share is not None else row.nbytes / 1e6 for row in finite]
        axes.plot(x, [row.sqnr_db for row in finite], style, label=label, markersize=14 if style == "*" else 6)
    axes.set_xlabel("time of the products / that in fp32" if is_timed else "MB of weights")
    axes.set_ylabel("SQNR dB")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, path)
