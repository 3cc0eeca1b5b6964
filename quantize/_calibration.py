"""What values of a graph hold on calibration text, at the positions that are real, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from tx_export.errors import PassError
from tx_export.passes import Context
from tx_export.quantize._prompt import open_prompt

__all__ = ["observe"]

Feeds = Mapping[str, np.ndarray]

_POSITIONS = 512  # of tokens, with padding; more of them are no quicker


def observe(model: ir.Model, values: Sequence[ir.Value], context: Context) -> Iterator[dict[str, np.ndarray]]:
    """For each batch of the text, or part of one, float32 rows [n, channels] of each value by its name.

    Padding is left out of what is laid out as the inputs' mask [batch, tokens], or as their product; of values of
    other shapes all rows are given. PassError without text, and for values that are not finite.
    """
    if not context.feeds:
        raise PassError(
            "calibration needs text, and the model takes arrays only; give it a tokenizer.json, or choose a pass that "
            "needs no text, say dynamic_int8"
        )
    names = {value.name or "" for value in values}
    giving = _giving(model, names)
    run = open_prompt(giving, context) if giving.graph.outputs else lambda feeds: {}  # all of them are fed
    return _batches(run, names, (part for feeds in context.feeds for part in _parts(feeds)))


def _giving(model: ir.Model, names: set[str]) -> ir.Model:
    """A copy whose outputs are these values, but for those that are fed."""
    copy = model.clone()
    found = [value for node in copy.graph for value in node.outputs if value.name in names]
    copy.graph.outputs.clear()
    for value in found:
        value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object: the copy shares those of the original
        copy.graph.outputs.append(value)
    return copy


def _parts(feeds: Feeds) -> Iterator[Feeds]:
    """The rows of a batch of long texts in several: so much that values together hold is in memory at once."""
    shapes = {array.shape for array in feeds.values()}
    if len(shapes) != 1 or not any(name.endswith("mask") for name in feeds):
        yield feeds
        return
    rows, tokens = shapes.pop()
    step = max(1, _POSITIONS // max(1, tokens))
    yield from ({name: array[i : i + step] for name, array in feeds.items()} for i in range(0, rows, step))


def _batches(
    run: Callable[[Feeds], dict[str, np.ndarray]], names: set[str], batches: Iterable[Feeds]
) -> Iterator[dict[str, np.ndarray]]:
    for feeds in batches:
        arrays = {name: array for name, array in feeds.items() if name in names} | run(feeds)
        rows = {name: _real_rows(arrays.pop(name), feeds) for name in sorted(arrays)}
        for name, array in rows.items():
            if bad := int(array.size - np.isfinite(array).sum()):
                raise PassError(f"calibration: {bad} of {array.size} numbers of {name} are NaN or infinite in a batch")
        yield rows


def _real_rows(array: np.ndarray, feeds: Feeds) -> np.ndarray:
    rows: np.ndarray = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    for name, mask in feeds.items():
        whole = array.ndim > 2 and array.shape[:2] == mask.shape
        if name.endswith("mask") and mask.ndim == 2 and (whole or (array.ndim == 2 and len(array) == mask.size)):
            real = np.repeat(mask.reshape(-1) != 0, len(rows) // mask.size)
            return rows if real.all() else rows[real]
    return rows
