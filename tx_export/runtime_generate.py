"""Token-by-token generation with a cache of keys and values; numpy and ONNX Runtime only.

The graph takes input_ids [batch, tokens], attention_mask [batch, past + tokens], logits_at [kept], and for each layer
past.N.key and past.N.value [batch, heads, past, head_dim]; it gives logits [batch, kept, vocabulary], and present.N.key
and present.N.value, which hold past + tokens. This file is copied into artifacts as generate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["Run", "logits_with_cache", "names"]

Arrays = dict[str, np.ndarray]
Run = Callable[[Mapping[str, np.ndarray]], Arrays]

_STEPS = 4  # single tokens at the end of a row that is read to check the cache


def logits_with_cache(run: Run, cache: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Logits [batch, tokens, vocabulary] at every position, read as a generation does: a prompt, a part, single steps.

    `cache` is the manifest's: layers, heads, head_dim. `arrays` holds input_ids and attention_mask [batch, tokens].
    """
    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    past = _empty(cache, len(ids))
    found = []
    for start, end in _parts(ids.shape[1]):
        logits, past = _read(run, ids[:, start:end], mask[:, :end], past)
        found.append(logits)
    return {"logits": np.concatenate(found, axis=1)}


def _parts(tokens: int) -> Iterator[tuple[int, int]]:
    """A prompt, then two tokens at once, then single ones, as far as there are so many."""
    steps = min(_STEPS, tokens - 1)
    part = 2 if tokens > steps + 2 else 0
    prompt = tokens - steps - part
    yield 0, prompt
    if part:
        yield prompt, prompt + part
    for end in range(prompt + part + 1, tokens + 1):
        yield end - 1, end


def _empty(cache: Mapping[str, Any], batch: int) -> Arrays:
    shape = (batch, cache["heads"], 0, cache["head_dim"])
    return {name: np.zeros(shape, np.float32) for name in names(cache, "past")}


def names(cache: Mapping[str, Any], what: str) -> list[str]:
    """Of the tensors of a cache, `what` is past or present."""
    return [f"{what}.{layer}.{kind}" for layer in range(cache["layers"]) for kind in ("key", "value")]


def _read(run: Run, ids: np.ndarray, mask: np.ndarray, past: Arrays) -> tuple[np.ndarray, Arrays]:
    """Logits of all new tokens, and the longer cache. Several tokens on top of a cache go row by row: the fused
    operator takes one row then."""
    first = next(iter(past.values()), np.empty((1, 1, 0, 1)))
    if len(ids) > 1 and ids.shape[1] > 1 and first.shape[2]:
        rows = [_read(run, _row(ids, i), _row(mask, i), _rows(past, i)) for i in range(len(ids))]
        grown = rows[0][1]
        return np.concatenate([logits for logits, _ in rows]), {
            name: np.concatenate([present[name] for _, present in rows]) for name in grown
        }
    at = np.arange(ids.shape[1])
    outputs = run({"input_ids": ids, "attention_mask": mask, "logits_at": at, **past})
    present = {name: outputs[name.replace("past", "present", 1)] for name in past}
    return outputs["logits"], present


def _row(array: np.ndarray, index: int) -> np.ndarray:
    return array[index : index + 1]


def _rows(arrays: Arrays, index: int) -> Arrays:
    return {name: _row(array, index) for name, array in arrays.items()}
