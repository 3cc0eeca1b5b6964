"""PyTorch's own attention functions, emitted as fused operators while a module is exported.

F.scaled_dot_product_attention, and F.multi_head_attention_forward, which nn.MultiheadAttention and the stock encoders
and decoders call, are met by name: nothing has to be found again in the graph. A query that sees no key gets zeros.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tx_export._torch_masks import EVERYTHING, Mask, mask_of, padding_and_pairs
from tx_export.models.parts.attention import Ops

__all__ = ["torch_attention"]

_TORCH = functional.scaled_dot_product_attention


@contextmanager
def torch_attention(ops: Ops) -> Iterator[None]:
    """While exporting: attention that torch computes is emitted as `emitting(ops)` says."""
    detect = transformer._detect_is_causal_mask
    # Whether a mask is the causal one is asked of its values, for speed only; while exporting they aren't known.
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        with _Emission(ops):
            yield
    finally:
        transformer._detect_is_causal_mask = detect


class _Emission(TorchFunctionMode):
    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._hidden = WeakIdKeyDictionary()  # float masks of zeros -> None, of zeros and -inf -> the bool mask

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is _TORCH:
            return _dot_product(self._ops, *args, **given)
        if func is functional.multi_head_attention_forward:
            return self._multi_head(*args, **given)
        result = func(*args, **given)
        if func is torch.zeros_like:
            self._hidden[result] = None
        elif func is Tensor.masked_fill_ and result in self._hidden:
            self._hidden[result] = args[1] if args[2] == -math.inf else None
        return result

    def _multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As torch documents it: query [T, B, E], key and value [S, B, E]; returns [T, B, E] and the weights."""
        bound = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        unusual = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
        if not (unusual or given["query"].ndim != 3 or given["add_zero_attn"] or given["training"]):
            for name in ("key_padding_mask", "attn_mask"):
                given[name] = self._as_bool(given[name])
            return _multi_head(self._ops if given["query"].dtype == torch.float32 else "plain", given)
        # Torch's own form, with the one call of attention in it emitted; inside of a mode's method the mode is off.
        functional.scaled_dot_product_attention = functools.partial(_dot_product, self._ops)
        try:
            found: tuple[Tensor, Tensor | None] = functional.multi_head_attention_forward(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = _TORCH
        return found

    def _as_bool(self, mask: Tensor | None) -> Tensor | None:
        """The bool mask that a float one was made of, where torch made it so."""
        known: Tensor | None = None if mask is None else self._hidden.get(mask)  # type: ignore[no-untyped-call]
        return mask if known is None else known


def _dot_product(
    ops: Ops,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch documents it: query [B, H, T, D], or [B, T, D] with one head."""
    if query.ndim == 2:
        query, key, value = query[None], key[None], value[None]
        return _dot_product(ops, query, key, value, attn_mask, dropout_p, is_causal, scale)[0]
    if query.ndim > 4:
        lead = query.shape[:-3]
        if attn_mask is not None and attn_mask.ndim > 3:
            attn_mask = attn_mask.expand(*lead, -1, -1, -1).flatten(0, -4)
        query, key, value = (each.expand(*lead, -1, -1, -1).flatten(0, -4) for each in (query, key, value))
        context = _dot_product(ops, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return torch.unflatten(context, 0, lead)
    if query.ndim == 3:
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        query, key, value = query[:, None], key[:, None], value[:, None]
        return _dot_product(ops, query, key, value, attn_mask, dropout_p, is_causal, scale)[:, 0]
    sizes = (query.shape[1], key.shape[1], value.shape[1], query.shape[-1], value.shape[-1])
    if not all(isinstance(size, int) for size in sizes) or query.ndim != 4 or dropout_p:
        return _TORCH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dtype != torch.float32:
        ops = "plain"  # the fused operators are float32's
    query, key, value = _one_batch(query, key, value)
    heads, lengths = query.shape[1], (query.shape[0], query.shape[2], key.shape[2])
    key, value = (_repeated(tensor, heads // tensor.shape[1]) for tensor in (key, value))
    mask = EVERYTHING if attn_mask is None else mask_of(attn_mask, *lengths)
    if is_causal and not statically_known_true(lengths[1] == lengths[2]):
        square = torch.ones(lengths[1:], dtype=torch.bool, device=query.device)
        mask, is_causal = mask_of(square.tril(), *lengths), False
    context = _attend(ops, _merged(query), _merged(key), _merged(value), heads, mask, is_causal, scale)
    return _split(context, heads)


def _one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same batch for all: torch takes one row for every row."""
    batch = next((each.shape[0] for each in tensors if not statically_known_true(each.shape[0] == 1)), 1)
    return tuple(each if each.shape[0] is batch else each.expand(batch, -1, -1, -1) for each in tensors)


def _multi_head(ops: Ops, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    q, k, v, heads = given["query"], given["key"], given["value"], given["num_heads"]
    (length, batch, _), keys = q.shape, k.shape[0]
    padding, weighted = given["key_padding_mask"], given["need_weights"]
    causal = given["is_causal"] and padding is None and not weighted
    # The hint says what the mask holds, and torch takes its word.
    pairs = None if causal else given["attn_mask"]
    mask = padding_and_pairs(padding, pairs, heads, batch, length, keys)
    separate = given["use_separate_proj_weight"] or given["in_proj_bias"] is None
    if q is k and k is v and ops == "fused" and not separate and not weighted:
        context, weights = _packed(q.transpose(0, 1), given, mask, causal), None
    else:
        q, k, v = (_projected(given, index) for index in range(3))
        context = _attend(ops, q, k, v, heads, mask, causal, None)
        weights = _weights(q, k, heads, mask, causal, None) if weighted else None
    if weights is not None and given["average_attn_weights"]:
        weights = weights.mean(dim=1)
    out = functional.linear(context, given["out_proj_weight"], given["out_proj_bias"])
    return out.transpose(0, 1), weights


def _projected(given: Mapping[str, Any], index: int) -> Tensor:
    """The queries, keys or values [B, T, E]."""
    x = given[("query", "key", "value")[index]].transpose(0, 1)
    width = given["embed_dim_to_check"]
    rows = slice(index * width, (index + 1) * width)
    bias = None if given["in_proj_bias"] is None else given["in_proj_bias"][rows]
    if given["use_separate_proj_weight"]:
        return functional.linear(x, given[("q_proj_weight", "k_proj_weight", "v_proj_weight")[index]], bias)
    return functional.linear(x, given["in_proj_weight"][rows], bias)


def _packed(x: Tensor, given: Mapping[str, Any], mask: Mask, causal: bool) -> Tensor:
    """Self-attention with its input projection, x [B, T, E]."""
    keys = None if mask.keys is None else mask.keys.to(torch.int32)
    context = torch.onnx.ops.symbolic(
        "com.microsoft::Attention",
        (x, given["in_proj_weight"].t(), given["in_proj_bias"], keys, None, mask.bias),
        {"num_heads": given["num_heads"], "unidirectional": int(causal)},
        dtype=x.dtype,
        shape=x.shape,
        version=1,
    )
    return _shown(context, given["num_heads"], mask)


def _attend(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Mask, causal: bool, scale: float | None
) -> Tensor:
    """q [B, T, H D], k and v [B, S, H D] -> [B, T, H D]."""
    if ops == "fused":
        context = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            (q, k, v, None, None if mask.keys is None else mask.keys.to(torch.int32), mask.bias),
            {"num_heads": heads, "unidirectional": int(causal), "scale": scale or 1 / math.sqrt(q.shape[2] // heads)},
            dtype=q.dtype,
            shape=(*q.shape[:2], v.shape[2]),
            version=1,
        )
    elif ops == "attention":
        bias = _bias(mask, q.shape[1])
        context, *_ = torch.onnx.ops.attention(
            q, k, v, bias, q_num_heads=heads, kv_num_heads=heads, is_causal=causal, scale=scale
        )
    else:
        context = _merged(_weights(q, k, heads, mask, causal, scale) @ _split(v, heads))
    return _shown(context, heads, mask)


def _weights(q: Tensor, k: Tensor, heads: int, mask: Mask, causal: bool, scale: float | None) -> Tensor:
    """softmax(q k^T scale + bias): [B, H, T, S]."""
    q, k = _split(q, heads), _split(k, heads)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        square = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = mask_of(square.tril(), q.shape[0], q.shape[2], k.shape[2])
    bias = _bias(mask, q.shape[2])
    return (scores if bias is None else scores + bias.to(scores.dtype)).softmax(dim=-1)


def _bias(mask: Mask, queries: int) -> Tensor | None:
    if mask.keys is None:
        return mask.bias
    zero = torch.zeros((), device=mask.keys.device)
    bias = torch.where(mask.keys[:, None, None, :], zero, torch.finfo(torch.float32).min)
    return bias.expand(-1, -1, queries, -1)


def _shown(context: Tensor, heads: int, mask: Mask) -> Tensor:
    """Zeros for the queries that see no key; context [B, T, H D]."""
    if mask.visible is None:
        return context
    visible = mask.visible.to(context.dtype)
    if visible.shape[1] == 1:
        return context * visible[:, 0]
    return _merged(_split(context, heads) * visible)


def _split(x: Tensor, heads: int) -> Tensor:
    """[B, T, H D] -> [B, H, T, D]."""
    return torch.unflatten(x, 2, (heads, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H D]."""
    return x.transpose(1, 2).flatten(2)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each key or value head for `times` query heads: [B, H, S, D] -> [B, H times, S, D]."""
    return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
