"""What a benchmark says to people: plain lines, a table, and a chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tx_export._charts import new_figure, save_png
from tx_export.timing import Shape

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["chart", "record", "remarks", "table"]

_WIDE_SPREAD = 0.2  # between rounds; on an idle machine they lie within a few percent

_LATENCY = "## Latency"  # the last section of REPORT.md

_LOG_FROM = 8  # times the smallest bar; beyond it small bars can't be read on a linear scale


def remarks(report: Mapping[str, Any]) -> list[str]:
    """Plain lines: who is faster or slower by how much, what is within noise, and which rows are too noisy to trust."""
    lines = []
    for row in report["rows"]:
        against = row["against_artifact"]
        shape = Shape(row["batch"], row["tokens"])
        if against is not None:
            lines.append(_comparison(report["artifact"], row["contender"], shape, **against))
        if row["spread"] > _WIDE_SPREAD:
            lines.append(
                f"{row['contender']} {shape}: rounds differ by {row['spread']:.0%}; the machine was not quiet enough"
            )
    return lines


def table(report: Mapping[str, Any]) -> Table:
    """A table for the terminal, with the remarks below it."""
    from rich.table import Table

    title = (
        f"{report['cpu']}, {report['threads']} threads, onnxruntime {report['onnxruntime']}, torch {report['torch']}"
    )
    shown = Table(title=title, caption="\n".join(remarks(report)), caption_justify="left")
    columns = (
        "contender",
        "provider",
        "batch",
        "tokens",
        "p50 ms",
        "p95 ms",
        "first ms",
        "calls",
        "tokens/s",
        "peak MB",
        "load ms",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in ("contender", "provider") else "right", no_wrap=True)
    previous = None
    for row in report["rows"]:
        if previous not in (None, (row["batch"], row["tokens"])):
            shown.add_section()
        previous = (row["batch"], row["tokens"])
        milliseconds = [f"{row[key]:.2f}" for key in ("p50_ms", "p95_ms", "first_ms")]
        whole = [f"{row[key]:,.0f}" for key in ("calls", "tokens_per_s", "peak_rss_mb", "load_ms")]
        shown.add_row(row["contender"], row["provider"], str(row["batch"]), str(row["tokens"]), *milliseconds, *whole)
    return shown


def record(report: Mapping[str, Any], path: Path) -> None:
    """Put the medians into the REPORT.md of an artifact, in place of those of an earlier benchmark."""
    where = (
        f"{report['cpu']}, {report['threads']} threads, onnxruntime {report['onnxruntime']}, torch {report['torch']}"
    )
    columns = (
        "contender", "provider", "batch", "tokens", "p50_ms", "p95_ms", "first_ms", "calls", "tokens_per_s",
        "peak_rss_mb", "load_ms",
    )  # fmt: skip
    lines = [_LATENCY, "", where, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in report["rows"]]
    lines += ["", *(f"- {remark}" for remark in remarks(report)), ""]
    before = path.read_text(encoding="utf-8").partition(_LATENCY)[0]
    path.write_text(before + "\n".join(lines), encoding="utf-8")


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Draw the medians as grouped bars into a PNG, one group a shape.

    TxExportError names the extra when matplotlib is absent, or the path when it can't be written.
    """
    rows = report["rows"]
    shapes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    p50 = {(row["contender"], row["batch"], row["tokens"]): row["p50_ms"] for row in rows}
    figure = new_figure(max(6.0, 0.42 * len(rows) + 2.5), 4.5)
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
    save_png(figure, path)


def _comparison(artifact: str, contender: str, shape: Shape, ratio: float, verdict: str) -> str:
    """`ratio` is the contender's time by the artifact's, and `verdict` is said of the contender."""
    if verdict == "within noise":
        return f"{shape}: {artifact} and {contender} are within noise"
    if verdict == "slower":
        return f"{shape}: {artifact} is {ratio:.3g} times as fast as {contender}"
    return f"{shape}: {artifact} is {1 / ratio - 1:.0%} slower than {contender} here"
