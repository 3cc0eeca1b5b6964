"""Reading blocks back, by the layout that the documentation of MatMulNBits gives, and what its arithmetic explains."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from tx_export.passes import Outcome
from tx_export.quantize.blockwise import Blockwise

from .graphs import Array


def quantize(model: ir.Model, **options: Any) -> Outcome:
    outcome = Blockwise(**options)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def initializer(model: ir.Model, name: str) -> Array:
    value = model.graph.initializers[name].const_value
    assert value is not None
    return value.numpy()


def unpacked(model: ir.Model) -> list[Array]:
    """The weights [N, K] of all MatMulNBits, in float64."""
    return [_weight(node) for node in model.graph if node.op_type == "MatMulNBits"]


def scales(model: ir.Model) -> list[Array]:
    """Theirs [N, blocks]."""
    return [_array(node.inputs[2]) for node in model.graph if node.op_type == "MatMulNBits"]


def _array(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def _weight(node: ir.Node) -> Array:
    """Value number i of a row stands in byte i // 2, in its low half if i is even; so do zero points of blocks."""
    k, n, bits, block_size = (node.attributes.get_int(name) for name in ("K", "N", "bits", "block_size"))
    assert k is not None and n is not None and bits is not None and block_size is not None
    per_byte, place = 8 // bits, np.arange(k)
    rows = _array(node.inputs[1]).reshape(n, -1)
    q = rows[:, place // per_byte] >> (place % per_byte * bits) & (2**bits - 1)
    block = place // block_size
    if len(node.inputs) > 3:
        zeros = _array(node.inputs[3])
        zero = zeros[:, block // per_byte] >> (block % per_byte * bits) & (2**bits - 1)
    else:
        zero = np.full((n, k), 2 ** (bits - 1))
    weight: Array = (q.astype(np.float64) - zero) * _array(node.inputs[2])[:, block]
    return weight


def arithmetic_bound(x: Array, weight: Array, block_size: int | None) -> Array:
    """How far x @ weight [K, N] may be from exact: 2e-6 of sum |x| |w| in float32, which is K up to 1024.

    Accuracy level 4 (a block size) rounds x to 127 levels of a sign for each row and block: half a step of it more.
    """
    size = np.abs(x.astype(np.float64))
    bound: Array = 2e-6 * size @ np.abs(weight)
    for start in range(0, x.shape[-1], block_size) if block_size is not None else ():
        at = slice(start, start + (block_size or 0))
        step = size[..., at].max(axis=-1, keepdims=True) / 127
        bound = bound + step / 2 * (1 + 1e-4) * np.abs(weight[at]).sum(axis=0)
    return bound
