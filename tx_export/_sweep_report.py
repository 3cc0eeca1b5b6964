"""What a sweep says to people: its frontier, a table and a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tx_export._charts import new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = ["chart", "costs_of", "error_of", "frontier", "mark", "table"]

_RATIOS = ("prune_heads", "prune_ffn")
_CAPTION = "* no other point is as good in error (SQNR) and in this, and better in one of them"


def frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which of the (error, cost) are on the Pareto frontier: no other is as low in both and lower in one."""
    return [not any(x <= error and y <= cost and (x, y) != (error, cost) for x, y in points) for error, cost in points]


def error_of(row: Mapping[str, Any]) -> float:
    """Noise over signal in dB: lower is better. JSON has no infinity: a point that equals eager has null."""
    return -math.inf if row["sqnr_db"] is None else -float(row["sqnr_db"])


def costs_of(row: Mapping[str, Any]) -> dict[str, float]:
    """What a point costs: bytes, and ms at each shape."""
    return {"bytes": row["bytes"]} | {shape: figures["ms"] for shape, figures in row["latency"].items()}


def mark(built: Sequence[dict[str, Any]]) -> None:
    """Write into each row of those that were built with which costs it is on the frontier."""
    best = {cost: frontier([(error_of(row), costs_of(row)[cost]) for row in built]) for cost in costs_of(built[0])}
    for index, row in enumerate(built):
        row["frontier"] = [cost for cost, marked in best.items() if marked[index]]


def table(report: Mapping[str, Any]) -> Table:
    """A table for the terminal; below it stand the reasons of points that could not be built."""
    from rich.table import Table
    from rich.text import Text  # plain: a reason may hold [brackets]

    rows = report["points"]
    built = _built(rows)
    costs = list(costs_of(built[0]))
    errors = [key for key in ("sqnr_db", "agreement", "accuracy") if any(row[key] is not None for row in built)]
    ratios = [key for key in _RATIOS if any(row[key] for row in rows)]
    told = [f"{row['name']}: {row['reason']}" for row in rows if row not in built]
    if len({row["labelled_rows"] for row in built}) > 1:
        told.append("accuracy: not of the same rows everywhere; a pass chose by some of them (labelled_rows)")
    title = f"{report['asked']['cpu']}, {report['asked']['threads']} threads, batch x tokens in ms"
    shown = Table(title=title, caption=Text("\n".join([_CAPTION, *told])), caption_justify="left")
    for column in ratios:
        shown.add_column(column, justify="right")
    shown.add_column("quantize", overflow="fold")
    for column in (*errors, *("MB" if cost == "bytes" else cost for cost in costs)):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = _figures(row, errors, costs) if row in built else [row["status"].replace("_", " ")]
        shown.add_row(*(f"{row[key]:g}" for key in ratios), row["quantize"], *cells)
    return shown


def _figures(row: Mapping[str, Any], errors: Sequence[str], costs: Sequence[str]) -> list[str]:
    return [_error(key, row[key]) for key in errors] + [_cost(row, cost) for cost in costs]


def _built(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["status"] == "built"]


def _error(key: str, value: float | None) -> str:
    if value is None:
        return "-" if key != "sqnr_db" else "inf"
    return f"{value:.1f}" if key == "sqnr_db" else f"{value:.3f}"


def _cost(row: Mapping[str, Any], cost: str) -> str:
    value = costs_of(row)[cost]
    star = "*" if cost in row["frontier"] else " "
    return f"{value / 1e6:.2f} {star}" if cost == "bytes" else f"{value:.3g} {star}"


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Draw SQNR over each cost into a PNG, the frontier as a line.

    TxExportError names the extra when matplotlib is absent, or the path when it can't be written.
    """
    built = _built(report["points"])
    costs = list(costs_of(built[0]))
    figure = new_figure(4.5 * len(costs) + 1, 4.5)
    for index, cost in enumerate(costs):
        axes = figure.add_subplot(1, len(costs), index + 1)
        _panel(axes, built, cost)
        axes.set_xlabel("size, MB" if cost == "bytes" else f"median latency at {cost}, ms")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("SQNR against eager, dB (higher is better)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{report['asked']['source']} on {report['asked']['cpu']}; numbers: ratio of pruned heads")
    save_png(figure, path)


def _panel(axes: Axes, built: Sequence[Mapping[str, Any]], cost: str) -> None:
    scale = 1e-6 if cost == "bytes" else 1.0
    finite = [-error_of(row) for row in built if error_of(row) > -math.inf]
    top = max(finite, default=0.0) + 10  # where what equals eager is drawn
    places = {row["name"]: (costs_of(row)[cost] * scale, min(-error_of(row), top)) for row in built}
    for quantize in dict.fromkeys(row["quantize"] for row in built):
        here = [row for row in built if row["quantize"] == quantize]
        across, up = zip(*(places[row["name"]] for row in here), strict=True)
        axes.scatter(across, up, s=24, label=quantize)
        for row in here:
            axes.annotate(
                "/".join(f"{row[key]:g}" for key in _RATIOS if key == _RATIOS[0] or row[key]),
                places[row["name"]], xytext=(4, 3), textcoords="offset points", fontsize=7,
            )  # fmt: skip
    best = sorted(places[row["name"]] for row in built if cost in row["frontier"])
    axes.plot([x for x, _ in best], [y for _, y in best], color="0.6", linewidth=1, zorder=0)
