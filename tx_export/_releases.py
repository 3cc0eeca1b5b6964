"""Releases of ONNX Runtime: what each takes, and which first has an operator as it is used."""

from __future__ import annotations

import onnx_ir as ir

from tx_export.errors import ExportError

__all__ = ["RELEASES", "first_release", "least_onnxruntime"]

# ONNX Runtime: the newest opset and IR version that a release takes (its compatibility page and release notes).
RELEASES: dict[tuple[int, int], tuple[int, int]] = {
    (1, 14): (18, 8),
    (1, 15): (19, 8),
    (1, 16): (19, 9),
    (1, 17): (20, 9),
    (1, 18): (21, 10),
    (1, 19): (21, 10),
    (1, 20): (21, 10),
    (1, 21): (22, 10),
    (1, 22): (23, 10),
    (1, 23): (23, 11),
    (1, 24): (24, 11),
}
# The release whose CPU provider first has an operator of com.microsoft; those not named here are older than 1.14.
_FIRST_RELEASE: dict[str, tuple[int, int]] = {
    "MultiHeadAttention": (1, 15),
    "SkipSimplifiedLayerNormalization": (1, 16),
    "RotaryEmbedding": (1, 17),
    "MatMulNBits": (1, 17),
    "GroupQueryAttention": (1, 18),
    "GatherBlockQuantized": (1, 23),  # of uint8 with zero points, its pull request 25214
}
_FIRST_8_BIT_BLOCKS = (1, 22)  # of MatMulNBits, its pull request 24491
# Attention takes a bias for one row or one head since its pull request 21710, and that of one head for all rows but the
# first since 24017.
_FIRST_BIAS, _FIRST_SHARED_BIAS = (1, 20), (1, 22)
# Older ones load the graph and compute something else: each was run against the same arithmetic in numpy.
_FIRST_MASKED_HEADS = (1, 21)  # of MultiHeadAttention: keys [B, H, T, head_dim] of which a mask hides some
_FIRST_WINDOW = (1, 24)  # of GroupQueryAttention
# Where GroupQueryAttention has them, and since when: attention_bias and head_sink.
_FIRST_INPUTS = {10: (1, 22), 11: (1, 23)}


def least_onnxruntime(model: ir.Model) -> str:
    """The oldest ONNX Runtime that takes this graph, say `1.15.0`."""
    opset, ir_version = model.opset_imports.get("", 0), model.ir_version
    releases = [release for release, newest in RELEASES.items() if newest[0] >= opset and newest[1] >= ir_version]
    if not releases:
        raise ExportError(f"no ONNX Runtime is known that takes opset {opset} and IR {ir_version}")
    major, minor = max([min(releases), *(first_release(node) for node in model.graph.all_nodes())])
    return f"{major}.{minor}.0"


def first_release(node: ir.Node) -> tuple[int, int]:
    """The first that has the operator, and computes it right as it is used here."""
    oldest = min(RELEASES)
    if node.domain != "com.microsoft":
        return oldest
    if node.op_type == "GroupQueryAttention":
        return _of_grouped(node)
    if node.op_type in ("Attention", "MultiHeadAttention"):
        return max(_FIRST_RELEASE.get(node.op_type, oldest), _of_scores(node))
    if node.op_type == "MatMulNBits" and node.attributes.get_int("bits", 4) == 8:
        return _FIRST_8_BIT_BLOCKS
    return _FIRST_RELEASE.get(node.op_type, oldest)


def _of_grouped(node: ir.Node) -> tuple[int, int]:
    given = [first for place, first in _FIRST_INPUTS.items() if _input(node, place) is not None]
    windowed = node.attributes.get_int("local_window_size", -1) > 0
    return max([_FIRST_RELEASE[node.op_type], *given, *([_FIRST_WINDOW] if windowed else [])])


def _of_scores(node: ir.Node) -> tuple[int, int]:
    bias, key, mask = (_input(node, place) for place in (5, 1, 4))
    if bias is not None:
        return _FIRST_SHARED_BIAS if bias.shape is None or bias.shape[1] == 1 else _FIRST_BIAS
    in_heads = key is not None and key.shape is not None and len(key.shape) == 4
    return _FIRST_MASKED_HEADS if in_heads and mask is not None else min(RELEASES)


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None
