"""The form of a generative model that is exported: new tokens and a cache in, logits and the longer cache out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from torch import nn

from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.cross import CrossAttention
from tx_export.models.parts.decoder import CachedDecoder, Decoder
from tx_export.models.parts.encoder_decoder import CachedEncoderDecoder, EncoderDecoder
from tx_export.runtime_generate import Run, logits_with_cache
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["cached_form", "plain_runner", "with_own_cache"]


def cached_form(model: EagerModel) -> EagerModel:
    """Over the same parameters; a model that generates nothing stays as it is."""
    cache = model.cache
    if cache is None:
        return model
    batch, longest = Dim("batch"), cache.max_length
    *source, ids, mask = (*model.inputs, _mask_of(model.inputs[-1])) if cache.cross else model.inputs
    logits = model.outputs[0]

    def caches(what: str, length: Dim, heads: Sequence[int]) -> list[TensorSpec]:
        dims = [(batch, count, length, cache.head_dim) for count in heads for _ in ("key", "value")]
        return [TensorSpec(name, logits.dtype, each) for name, each in zip(cache.names(what), dims, strict=True)]

    def encoded(what: str) -> list[TensorSpec]:
        tokens = model.inputs[0].dims[1]
        assert isinstance(tokens, Dim)
        length = Dim(tokens.name, tokens.bound or longest)
        return caches(what, length, _heads(model.module, CrossAttention)) if cache.cross else []

    heads = cache.by_layer or (cache.heads,) * cache.layers

    inputs = (
        *source,
        dataclasses.replace(ids, dims=(batch, Dim(_new(ids), longest))),
        dataclasses.replace(mask, dims=(batch, Dim("total", longest))),
        TensorSpec("logits_at", "int64", (Dim("kept", longest),), 0, 1),
        *encoded("cross"),
        *caches("past", Dim("past", longest), heads),
    )
    outputs = (
        *encoded("encoded"),
        dataclasses.replace(logits, dims=(batch, Dim("kept", longest), logits.dims[-1])),
        *caches("present", Dim("grown", longest), heads),
    )
    return dataclasses.replace(model, module=_module(model.module), inputs=inputs, outputs=outputs)


def with_own_cache(model: EagerModel) -> EagerModel:
    """With the cache of its module, of whose layers pruning may have left different numbers of heads."""
    if model.cache is None or not model.cache.layers:
        return model
    heads = _heads(model.module, CausalSelfAttention)
    own = dataclasses.replace(model.cache, heads=max(heads), by_layer=heads if len(set(heads)) > 1 else ())
    return dataclasses.replace(model, cache=own)


def _heads(plain: nn.Module, kind: type[CausalSelfAttention | CrossAttention]) -> tuple[int, ...]:
    """Of keys and values, of each layer of the decoder."""
    found = [module for module in plain.modules() if isinstance(module, kind)]
    return tuple(each.num_kv_heads if isinstance(each, CausalSelfAttention) else each.num_heads for each in found)


def _mask_of(ids: TensorSpec) -> TensorSpec:
    return TensorSpec(ids.name.replace("input_ids", "attention_mask"), "int64", ids.dims, 0, 1)


def _new(ids: TensorSpec) -> str:
    """The name of the dim of new tokens."""
    assert isinstance(ids.dims[1], Dim)
    return ids.dims[1].name


def _module(plain: nn.Module) -> nn.Module:
    if isinstance(plain, EncoderDecoder):
        return CachedEncoderDecoder(plain)
    assert isinstance(plain, Decoder)
    return CachedDecoder(plain)


def plain_runner(model: EagerModel, run: Run) -> Run:
    """A runner of the exported form as one of the model's own inputs and outputs."""
    if model.cache is None:
        return run
    # A graph of two halves runs the one that the feeds are for.
    return functools.partial(
        logits_with_cache, (run, run) if model.cache.cross else run, dataclasses.asdict(model.cache)
    )
