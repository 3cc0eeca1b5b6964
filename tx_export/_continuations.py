"""What eager says to a source: the decoder input of text that is judged on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tx_export._reference import eager_runner
from tx_export.spec import EagerModel

__all__ = ["continued"]

Array = NDArray[Any]

_TOKENS = 12


def continued(model: EagerModel, feeds: Mapping[str, Array]) -> Array:
    """The start and the likeliest tokens behind it, [batch, 12] or as many as fit: input_ids [batch, tokens] decide."""
    assert model.cache is not None and model.generation is not None
    run, start = eager_runner(model), model.generation.start or 0
    ids = np.full((len(feeds["input_ids"]), 1), start)
    while ids.shape[1] < min(_TOKENS, model.cache.max_length):
        logits = run({**feeds, "decoder_input_ids": ids})["logits"][:, -1]
        ids = np.concatenate([ids, logits.argmax(axis=-1)[:, None]], axis=1)
    return ids
