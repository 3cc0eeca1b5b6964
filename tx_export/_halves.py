"""A graph that holds an encoder and a decoder side by side, as the two graphs that a generation runs.

The decoder half takes cross.N.key and cross.N.value as inputs where the encoder half gives encoded.N.key and
encoded.N.value, so nothing flows between them: passes see one graph, in which a shared embedding is one weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tx_export._own_sizes import read_own_sizes

__all__ = ["halves", "unload_weights"]

_ENCODED = "encoded."
_SMALL_BYTES = 256  # such weights stay in both files


def halves(model: ir.Model) -> Mapping[str, ir.Model]:
    """By the names of their files: `encoder` and `decoder`, or `model` where the graph is no pair."""
    encoded = {str(value.name) for value in model.graph.outputs if str(value.name).startswith(_ENCODED)}
    if not encoded:
        return {"model": model}
    decoded = {str(value.name) for value in model.graph.outputs} - encoded
    return {"encoder": _half(model, encoded), "decoder": _half(model, decoded)}


def _half(model: ir.Model, outputs: set[str]) -> ir.Model:
    """What the outputs are computed from, over the same weights; what an encoder gives has a decoder's names."""
    half = model.clone()
    for value in [value for value in half.graph.outputs if value.name not in outputs]:
        half.graph.outputs.remove(value)
    RemoveUnusedNodesPass()(half)
    read_own_sizes(half.graph)
    for value in [value for value in half.graph.inputs if not value.uses()]:
        half.graph.inputs.remove(value)
    for value in half.graph.outputs:
        if str(value.name).startswith(_ENCODED):
            value.name = str(value.name).replace(_ENCODED, "cross.", 1)
    return half


def unload_weights(model: ir.Model, folder: Path) -> None:
    """Write the weights into one file, which both halves then read."""
    ir.external_data.load_to_model(model)
    ir.external_data.unload_from_model(model, folder, "model.onnx.data", size_threshold_bytes=_SMALL_BYTES)
