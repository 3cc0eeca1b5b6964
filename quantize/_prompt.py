"""A graph with a cache as its passes look into it: a whole text is read in one run, from an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from tx_export.passes import Context

__all__ = ["open_prompt"]

Feeds = Mapping[str, np.ndarray]


def open_prompt(model: ir.Model, context: Context) -> Callable[[Feeds], dict[str, np.ndarray]]:
    """A session on the graph, or on a part of it, that takes what the plain form of the model takes.

    It gives all that the graph gives, where `context.open` gives what a generation reads step by step.
    """
    if context.open_cached is None:
        return context.open(model)
    joined = _joined(model)
    run = context.open_cached(joined)
    asked = [value for value in joined.graph.inputs if value.const_value is None]
    return lambda feeds: run({value.name or "": _begun(value, feeds) for value in asked} | dict(feeds))


def _joined(model: ir.Model) -> ir.Model:
    """A copy in which a decoder reads what the encoder beside it gives."""
    copy = model.clone()
    graph = copy.graph
    encoded = {value.name: value for node in graph for value in node.outputs}
    crossing = [value for value in graph.inputs if str(value.name).startswith("cross.")]
    for value in crossing:
        value.replace_all_uses_with(encoded[str(value.name).replace("cross.", "encoded.", 1)])
        graph.inputs.remove(value)
    if crossing:  # with what the encoder gives among its outputs it would be taken for a pair
        graph.outputs[:] = [value for value in graph.outputs if not str(value.name).startswith("encoded.")]
        graph.sort()
    return copy


def _begun(value: ir.Value, feeds: Feeds) -> np.ndarray:
    """What the cached form takes beside the plain one: logits at all positions, no padding, nothing read so far."""
    if (given := feeds.get(value.name or "")) is not None:
        return given
    ids = feeds.get("decoder_input_ids", feeds["input_ids"])  # [B, S]
    if value.name == "logits_at":
        return np.arange(ids.shape[1])
    if value.dtype == ir.DataType.INT64:
        return np.ones_like(ids)
    assert value.shape is not None
    return np.zeros((len(ids), *(dim if isinstance(dim, int) else 0 for dim in value.shape[1:])), np.float32)
