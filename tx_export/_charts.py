"""Figures of matplotlib, which is optional: started and written in one place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tx_export.errors import TxExportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "save_png"]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; TxExportError names the extra when matplotlib is absent."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise TxExportError("a chart needs matplotlib: pip install 'tx-export[plot]'") from error
    return figure.Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """TxExportError names the path when it can't be written."""
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise TxExportError(f"{path}: can't write the chart: {error.strerror}") from error
