"""What eager says next: the decoder input of text that is judged on, and where an artifact would first say another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tx_export._reference import Runner, eager_runner
from tx_export.spec import EagerModel

__all__ = ["continued", "divergence"]

Array = NDArray[Any]

_TOKENS = 12
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 8, 32


def continued(model: EagerModel, feeds: Mapping[str, Array]) -> Array:
    """The start and the likeliest tokens behind it, [batch, 12] or as many as fit: input_ids [batch, tokens] decide."""
    assert model.cache is not None and model.generation is not None
    start = np.full((len(feeds["input_ids"]), 1), model.generation.start or 0)
    return _extended(model, {**feeds, "decoder_input_ids": start}, _TOKENS - 1)["decoder_input_ids"]


def _extended(model: EagerModel, feeds: Mapping[str, Array], new: int) -> dict[str, Array]:
    """The feeds with the likeliest tokens behind their last ids, as many as fit."""
    assert model.cache is not None
    name = "decoder_input_ids" if model.cache.cross else "input_ids"
    run, feeds = eager_runner(model), dict(feeds)
    for _ in range(min(new, model.cache.max_length - feeds[name].shape[1])):
        likeliest = run(feeds)["logits"][:, -1].argmax(axis=-1)[:, None]
        feeds[name] = np.concatenate([feeds[name], likeliest], axis=1)
        if not model.cache.cross:
            feeds["attention_mask"] = np.ones_like(feeds[name])
    return feeds


def divergence(model: EagerModel, runner: Runner, texts: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
    """Where greedy text of a graph leaves eager's: for each prompt that it does, the new token's number and the margin.

    A margin is how much more eager's logit has than that of the token that the graph takes. Prompts are the beginnings
    of `texts`; both read eager's own continuation, so the first place where they differ is where the text would.
    """
    assert model.cache is not None
    begun = _prompts(model, texts)
    feeds = _extended(model, begun, _NEW_TOKENS)
    name = "decoder_input_ids" if model.cache.cross else "input_ids"
    first = begun[name].shape[1] - 1
    expected, found = (run(feeds)["logits"][:, first:-1] for run in (eager_runner(model), runner))
    left = []
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        taken = ours.argmax(axis=-1)
        places = np.flatnonzero(taken != theirs.argmax(axis=-1))
        if len(places):
            place = int(places[0])
            margin = float(theirs[place].max() - theirs[place, taken[place]])
            left.append({"prompt": row, "token": place + 1, "margin": round(margin, 6)})
    return {"prompts": len(expected), "tokens": expected.shape[1], "first": left}


def _prompts(model: EagerModel, texts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Rows of equal length without padding; the sources of an encoder as they are."""
    assert model.cache is not None
    if model.cache.cross:
        return {**texts[-1], "decoder_input_ids": texts[-1]["decoder_input_ids"][:, :1]}
    rows = [
        row[mask != 0] for feeds in texts for row, mask in zip(feeds["input_ids"], feeds["attention_mask"], strict=True)
    ]
    length = min(_PROMPT_TOKENS, max(map(len, rows)))
    ids = np.stack([row[:length] for row in rows if len(row) >= length][:_PROMPTS])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
