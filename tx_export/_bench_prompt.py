"""What is timed of a model that generates: a prompt read from an empty cache, up to the logits of its last token.

Behind an encoder the prompt is its source, and the decoder takes its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tx_export.spec import EagerModel

__all__ = ["read_prompt", "reading_module", "with_empty_cache"]

_FIRST = "decoder_input_ids"


def with_empty_cache(sessions: Sequence[Any], feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the sessions take beside each other: full random batches, and nothing read so far."""
    given = {name: array[:, :1] if name == _FIRST else array for name, array in feeds.items()}
    ids = given.get(_FIRST, given["input_ids"])
    for item in (item for session in sessions for item in session.get_inputs()):
        if item.name == "logits_at":
            given[item.name] = np.array([ids.shape[1] - 1])
        elif item.name.startswith("past."):
            dtype = np.float16 if item.type == "tensor(float16)" else np.float32
            given[item.name] = np.zeros((len(ids), item.shape[1], 0, item.shape[3]), dtype)
        elif item.name.endswith("mask") and item.name not in given:
            given[item.name] = np.ones_like(ids)
    return given


def read_prompt(sessions: Sequence[Any], given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run one session, or an encoder and then a decoder."""
    found = dict(given)
    for session in sessions:
        names = [item.name for item in session.get_outputs()]
        inputs = {item.name: found[item.name] for item in session.get_inputs()}
        found.update(zip(names, session.run(names, inputs), strict=True))
    return found


def reading_module(model: EagerModel, feeds: Mapping[str, np.ndarray]) -> tuple[Any, list[Any]]:
    """The module that does the same in PyTorch, and its inputs; of others the module and the feeds as they are."""
    import torch

    from tx_export._cached_form import cached_form

    cached = model if model.cache is None or model.cache.cross else cached_form(model)
    inputs = []
    for tensor in cached.inputs:
        array = feeds.get(tensor.name)
        if tensor.name == "logits_at":
            array = np.array([feeds["input_ids"].shape[1] - 1])
        elif array is None:
            sizes = [dim if isinstance(dim, int) else 0 for dim in tensor.dims[1:]]
            array = np.zeros((len(feeds["input_ids"]), *sizes), tensor.dtype)
        elif model.cache is not None and tensor.name == _FIRST:
            array = array[:, :1]
        inputs.append(torch.from_numpy(np.ascontiguousarray(array)))
    return cached.module, inputs
