"""Read the attention around a softmax: product, scale and masks, softmax, product; or say why it is none.

scores = times(q k^T), masked        [..., T, S]
context = softmax(scores) v          [..., T, D]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from tx_export._attention_candidates import comes_from_product, is_product
from tx_export._graph import only_use
from tx_export.optimize._attention_products import (
    Dims,
    Operand,
    context_product,
    factor_of,
    same,
    same_all,
    scalar,
    scores_product,
    shape_of,
)

__all__ = ["Attention", "Step", "match"]

Kind = Literal["times", "plus", "minus", "hidden", "kept"]


@dataclass(frozen=True)
class Step:
    """What is done to the scores: times a number, plus or minus a value, or a number put where hidden or not kept."""

    kind: Kind
    rank: int  # of the scores: 4 is [B, H, T, S], 3 is [B * H, T, S]
    number: float = 1.0
    value: ir.Value | None = None


@dataclass(frozen=True)
class _Scores:
    q: Operand  # [..., T, D]
    k: Operand  # [..., S, D]
    dims: Dims  # as they are at this point
    steps: tuple[Step, ...] = ()
    heads: Dims = ()  # [B, H], where they were seen apart


@dataclass(frozen=True)
class Attention:
    """Softmax attention over `num_heads` heads of queries [B, T], keys [B, S]; operands have a batch of B or B * H."""

    q: Operand
    k: Operand
    v: Operand
    steps: tuple[Step, ...]
    dims: Dims  # [B, H, T, S]
    output: ir.Value
    axes: tuple[int, ...]  # of the output, in terms of [..., T, D]

    @property
    def num_heads(self) -> int:
        return int(self.dims[1])  # type: ignore[arg-type]


def match(softmax: ir.Node) -> Attention | str:
    """The attention around a softmax, or why it is none that the operator computes."""
    value = softmax.inputs[0]
    if softmax.graph is not None and softmax.graph.opset_imports.get("", 13) < 13:
        return "its softmax is of an opset before 13"
    if softmax.attributes.get_int("axis", -1) not in (-1, len(shape_of(value)) - 1):
        return "its softmax runs over another axis than the last"
    scores = _scores(value, softmax)
    if isinstance(scores, str):
        return scores
    behind = _behind(softmax.outputs[0])
    if isinstance(behind, str):
        return behind
    node, weights = behind
    context = context_product(node, weights)
    if isinstance(context, str):
        return context
    for rank in (len(scores.q.axes), len(context[0].axes)):
        if rank not in (3, 4):
            return f"its products have {rank} dimensions" if rank else "the shape of its scores is unknown"
    seen = [dims for dims in (scores.heads, shape_of(value)[:-2], shape_of(weights)[:-2]) if len(dims) == 2]
    heads = seen[0] if seen else _split_batch(shape_of(value)[0])
    found = Attention(
        scores.q, scores.k, context[0], scores.steps, [*heads, *scores.dims[-2:]], node.outputs[0], context[1]
    )
    return _misfit(found) or found


def _misfit(found: Attention) -> str | None:
    batch, heads, queries, keys = found.dims
    for role, operand, tokens in (("query", found.q, queries), ("key", found.k, keys), ("value", found.v, keys)):
        dims, dtype = operand.dims, operand.value.dtype
        if dtype != ir.DataType.FLOAT:
            return f"its {role} is {dtype.name if dtype else 'of an unknown type'}; the operator takes FLOAT"
        if not isinstance(heads, int) or not isinstance(dims[-1], int):
            return "the number or the size of its heads is unknown"
        if operand.axes[0] is None:
            return f"its {role} is the same for every row of the batch"
        lead = dims[:-2]
        whole = same_all(lead, [batch, heads]) or (role != "query" and same_all(lead, [batch, 1]))
        flat = len(lead) == 1 and same_all(_split(lead[0], heads), [batch, heads])
        if not (whole or flat) or not same(dims[-2], tokens):
            return f"its {role} has the shape {_text(dims)}, its scores {_text(found.dims)}"
    return None if same(found.q.dims[-1], found.k.dims[-1]) else "its query and key differ in channels"


def _text(dims: Dims) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"


def _split_batch(size: int | ir.SymbolicDim) -> Dims:
    """[B, H] of a dimension written as H*B; one head otherwise."""
    found = re.fullmatch(r"(\d+)\*[\w*]+", str(size.value)) if isinstance(size, ir.SymbolicDim) else None
    return _split(size, int(found[1]) if found is not None else 1)


def _split(size: int | ir.SymbolicDim, heads: int) -> Dims:
    if isinstance(size, int):
        return [size // heads, heads] if size % heads == 0 else []
    if heads == 1:
        return [size, 1]
    text = str(size.value)
    return [ir.SymbolicDim(text.removeprefix(f"{heads}*")), heads] if text.startswith(f"{heads}*") else []


def _scores(value: ir.Value | None, reader: ir.Node) -> _Scores | str:
    """Everything between the product and what reads the value."""
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return "no product stands before its softmax"
    if only_use(value) is not reader:
        return "its scores are read elsewhere"
    if is_product(node):
        operands = scores_product(node)
        dims = shape_of(value)
        return operands if isinstance(operands, str) else _Scores(*operands, dims, (), _pair(dims))
    walk = _WALKS.get(node.op_type)
    return f"{node.op_type} stands between its product and its softmax" if walk is None else walk(node, value)


def _pair(dims: Dims) -> Dims:
    return dims[:2] if len(dims) == 4 else ()


def _then(
    node: ir.Node, value: ir.Value, inner: int, kind: Kind, number: float = 1.0, other: ir.Value | None = None
) -> _Scores | str:
    """The scores that come from input `inner`, and one step more."""
    before = _scores(node.inputs[inner], node)
    if isinstance(before, str):
        return before
    if not same_all(before.dims, shape_of(value)):
        unknown = any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in before.dims)
        return "the shape of its scores is unknown" if unknown else "its scores are broadcast to a larger shape"
    step = Step(kind, len(before.dims), number, other)
    return dataclasses.replace(before, steps=(*before.steps, step))


def _times(node: ir.Node, value: ir.Value) -> _Scores | str:
    for inner in (0, 1) if node.op_type == "Mul" else (0,):
        factor = factor_of(node, inner)
        if factor is not None:
            return _then(node, value, inner, "times", factor)
    return "its scores are multiplied by something else than one number"


def _plus(node: ir.Node, value: ir.Value) -> _Scores | str:
    for inner in (0, 1) if node.op_type == "Add" else (0,):
        if comes_from_product(node.inputs[inner]):
            other = node.inputs[1 - inner]
            return _then(node, value, inner, "plus" if node.op_type == "Add" else "minus", other=other)
    return "its scores are subtracted"


def _where(node: ir.Node, value: ir.Value) -> _Scores | str:
    kinds: tuple[tuple[int, Kind], ...] = ((2, "hidden"), (1, "kept"))
    for inner, kind in kinds:
        number = scalar(node.inputs[3 - inner])
        if number is not None:
            return _then(node, value, inner, kind, number, node.inputs[0])
    return "its mask puts something else than one number in"


def _view(node: ir.Node, value: ir.Value) -> _Scores | str:
    before = _scores(node.inputs[0], node)
    if isinstance(before, str):
        return before
    dims = shape_of(value)
    if len(dims) not in (3, 4) or not same_all(before.dims[-2:], dims[-2:]):
        return "its scores are reshaped otherwise than by splitting heads"
    return dataclasses.replace(before, dims=dims, heads=before.heads or _pair(dims))


def _nothing(node: ir.Node, value: ir.Value) -> _Scores | str:
    source = node.inputs[0]
    if source is None or source.dtype != value.dtype:
        return "its scores change their type before the softmax"
    return _scores(source, node)


_WALKS: dict[str, Callable[[ir.Node, ir.Value], _Scores | str]] = {
    "Add": _plus,
    "Cast": _nothing,
    "Div": _times,
    "Identity": _nothing,
    "Mul": _times,
    "Reshape": _view,
    "Sub": _plus,
    "Where": _where,
}


def _behind(weights: ir.Value) -> tuple[ir.Node, ir.Value] | str:
    """The product that reads the weights, and the weights as it reads them."""
    node = only_use(weights)
    if node is None:
        return "its weights are an output" if weights.is_graph_output() else "its weights are read elsewhere"
    if is_product(node):
        return node, weights
    if node.op_type in ("MatMul", "Einsum"):
        return "a product with a constant stands between its weights and the values"
    if node.op_type == "Reshape" and same_all(shape_of(weights)[-2:], shape_of(node.outputs[0])[-2:]):
        return _behind(node.outputs[0])
    if node.op_type in ("Identity", "Cast") and weights.dtype == node.outputs[0].dtype:
        return _behind(node.outputs[0])
    return f"{node.op_type} stands between its weights and the values"
