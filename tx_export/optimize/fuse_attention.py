"""Replace softmax attention that was written by hand by one com.microsoft::MultiHeadAttention a layer.

Every way of writing softmax(scale q k^T + mask) v is matched, in any layout of heads; what differs from it stays, with
the reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from tx_export._attention_candidates import candidates
from tx_export._graph import replace
from tx_export.optimize._attention_masks import Mask, masked, scale_of
from tx_export.optimize._attention_match import Attention, match
from tx_export.optimize._attention_products import Operand, shape_of
from tx_export.optimize._attention_rows import emit, rows, unrowed, unscaled
from tx_export.optimize._attention_sizes import free_scores
from tx_export.passes import Coverage, GraphPass, Left, Outcome

__all__ = ["FuseAttention"]


@dataclass(frozen=True)
class FuseAttention(GraphPass):
    """Equal in every row, also one whose keys are all hidden; layers with one mask share what is computed of it."""

    def call(self, model: ir.Model) -> Outcome:
        found, left = candidates(model.graph), []
        freed = free_scores(model.graph) if found else 0
        known: dict[Hashable, Mask | str] = {}
        for softmax in found:
            reason = _fuse(softmax, known)
            if reason is not None:
                left.append(Left(softmax.outputs[0].name or "Softmax", reason))
        RemoveUnusedNodesPass()(model)
        TopologicalSortPass()(model)  # values may be computed behind the softmax
        done = len(found) - len(left)
        return Outcome(model, done + freed > 0, Coverage(done, len(found), tuple(left)))


def _fuse(softmax: ir.Node, known: dict[Hashable, Mask | str]) -> str | None:
    """Put the operator in the place of the attention around a softmax, or say why not."""
    found = match(softmax)
    if isinstance(found, str):
        return found
    heads, scale = found.num_heads, scale_of(found.steps)
    operands = []
    for operand in (found.q, found.k):
        value, factor = unscaled(operand.value)
        scale *= factor
        operands.append(rows(softmax, Operand(value, operand.axes), heads))
    value = rows(softmax, found.v, heads)
    mask = _mask(softmax, found, operands, known)
    if isinstance(mask, str):
        return mask
    attributes = [ir.AttrInt64("num_heads", heads), ir.AttrFloat32("scale", scale)]
    if mask.keys is not None:
        attributes.append(ir.AttrFloat32("mask_filter_value", mask.fill))
    inputs = [*operands, value, None, mask.keys, mask.bias]
    while inputs[-1] is None:
        inputs.pop()
    dims = [*shape_of(operands[0])[:2], shape_of(value)[2]]
    context = emit(softmax, "com.microsoft::MultiHeadAttention", inputs, dims, *attributes)
    replace(found.output, unrowed(softmax, context, heads, found.axes))
    return None


def _mask(
    softmax: ir.Node, found: Attention, operands: list[ir.Value], known: dict[Hashable, Mask | str]
) -> Mask | str:
    """The mask of these steps, computed once: of the same values, on scores of the same shape, it is the same."""
    masking = [step for step in found.steps if step.kind != "times"]
    key = (found.steps if masking else (), str(found.dims))
    if key not in known:
        known[key] = masked(softmax, found.steps, found.dims, *operands)
    return known[key]
