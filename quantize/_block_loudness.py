"""How loud each input of a product is: its mean square on calibration text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tx_export.passes import Context
from tx_export.quantize._calibration import observe
from tx_export.quantize._weights import weight_of

__all__ = ["loudness"]


def loudness(model: ir.Model, nodes: Sequence[ir.Node], context: Context) -> dict[ir.Value, np.ndarray]:
    """Float64 [K] for each weight [K, N] or [N, K] that a product among these nodes reads."""
    read = [(node.inputs[0], weight) for node in nodes if node.op_type != "Gather" and (weight := weight_of(node))]
    inputs = list({x.name: x for x, _ in read if x is not None}.values())
    sums: dict[str, np.ndarray] = {}
    for batch in observe(model, inputs, context):
        for name, rows in batch.items():
            sums[name] = sums.get(name, 0) + np.square(rows, dtype=np.float64).sum(axis=0)
    found: dict[ir.Value, np.ndarray] = {}
    for x, weight in read:
        # Products that share a weight add up; their units are the same, as they read the same text.
        if x is not None and (x.name or "") in sums:
            found[weight] = found.get(weight, 0) + sums[x.name or ""]
    return found
