"""The form of a generative model that is exported: new tokens and a cache in, logits and the longer cache out."""

from __future__ import annotations

import dataclasses
import functools

from tx_export.models.parts.decoder import CachedDecoder, Decoder
from tx_export.runtime_generate import Run, logits_with_cache
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["cached_form", "plain_runner"]


def cached_form(model: EagerModel) -> EagerModel:
    """Over the same parameters; a model that generates nothing stays as it is."""
    cache = model.cache
    if cache is None:
        return model
    assert isinstance(model.module, Decoder)
    batch, longest = Dim("batch"), cache.max_length
    ids, mask = model.inputs
    logits = model.outputs[0]

    def caches(what: str, length: str) -> list[TensorSpec]:
        dims = (batch, cache.heads, Dim(length, longest), cache.head_dim)
        return [TensorSpec(name, logits.dtype, dims) for name in cache.names(what)]

    inputs = (
        dataclasses.replace(ids, dims=(batch, Dim("tokens", longest))),
        dataclasses.replace(mask, dims=(batch, Dim("total", longest))),
        TensorSpec("logits_at", "int64", (Dim("kept", longest),), 0, 1),
        *caches("past", "past"),
    )
    outputs = (
        dataclasses.replace(logits, dims=(batch, Dim("kept", longest), logits.dims[-1])),
        *caches("present", "grown"),
    )
    return dataclasses.replace(model, module=CachedDecoder(model.module), inputs=inputs, outputs=outputs)


def plain_runner(model: EagerModel, run: Run) -> Run:
    """A runner of the exported form as one of the model's own inputs and outputs."""
    if model.cache is None:
        return run
    return functools.partial(logits_with_cache, run, dataclasses.asdict(model.cache))
