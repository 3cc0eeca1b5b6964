"""Text that drift is judged on: lines to batches of ids, and which lines may be used to choose something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tx_export._continuations import continued
from tx_export.errors import LoadError
from tx_export.plugins import foreign
from tx_export.spec import EagerModel

__all__ = ["Split", "batches", "default_lines", "split_lines", "text_feeds"]

Array = NDArray[Any]

_BATCH = 8
_EVERY = 5
_TOGETHER = 256  # lines


class Split(NamedTuple):
    """Lines that passes may choose by, and lines that are only ever judged on."""

    choosing: tuple[str, ...]
    judging: tuple[str, ...]


def split_lines(lines: Sequence[str]) -> Split:
    """Every fifth line is kept for judging; blank lines are dropped. LoadError where fewer than five are left."""
    kept = tuple(line.strip() for line in lines if line.strip())
    if len(kept) < _EVERY:
        raise LoadError(f"calibration text: {len(kept)} lines; it takes at least {_EVERY}, as every fifth only judges")
    choosing = tuple(line for number, line in enumerate(kept, start=1) if number % _EVERY)
    return Split(choosing, kept[_EVERY - 1 :: _EVERY])


def default_lines() -> tuple[str, ...]:
    """The 200 sentences that ship with the package."""
    text = resources.files("tx_export").joinpath("sentences.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def text_feeds(model: EagerModel, lines: Sequence[str]) -> list[dict[str, Array]]:
    """Inputs made from text, in batches of like length, padded on the right to the longest row of the batch."""
    return [feeds for _, feeds in batches(model, lines)]


def batches(model: EagerModel, lines: Sequence[str]) -> Iterator[tuple[list[int], dict[str, Array]]]:
    """The numbers of the lines in each batch, and its inputs."""
    if model.text is None:
        raise LoadError(f"{model.source}: there is no tokenizer, so text can't be used")
    with foreign(f"{model.source}: the tokenizer", LoadError):
        tokenizer = Tokenizer.from_str(model.text.tokenizer)
        tokenizer.no_padding()
        specials = tokenizer.num_special_tokens_to_add(False)
    if model.text.max_length <= specials:
        raise LoadError(f"max-length {model.text.max_length} leaves no room beside {specials} special tokens")
    with foreign(f"{model.source}: the tokenizer", LoadError):
        tokenizer.enable_truncation(model.text.max_length)
        rows = [row for start in range(0, len(lines), _TOGETHER) for row in _rows(tokenizer, lines, start)]
    # Without a mask a padded row would be another text.
    size = _BATCH if any(spec.is_mask for spec in model.inputs) else 1
    order = sorted(range(len(rows)), key=lambda number: (rows[number].shape[1], number))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen, _batch(model, [rows[number] for number in chosen])


def _rows(tokenizer: Tokenizer, lines: Sequence[str], start: int) -> list[Array]:
    """Ids and token types [2, tokens] of some lines: what else the tokenizer tells takes a hundred times as much."""
    encoded = tokenizer.encode_batch(list(lines[start : start + _TOGETHER]))
    return [np.array([row.ids, row.type_ids], np.uint32) for row in encoded]


def _batch(model: EagerModel, rows: Sequence[Array]) -> dict[str, Array]:
    assert model.text is not None
    shape = (len(rows), max(1, *(row.shape[1] for row in rows)))
    values = {
        "input_ids": np.full(shape, model.text.pad_id),
        "attention_mask": np.zeros(shape, dtype=np.int64),
        "token_type_ids": np.zeros(shape, dtype=np.int64),
    }
    for number, row in enumerate(rows):
        tokens = row.shape[1]
        values["input_ids"][number, :tokens], values["token_type_ids"][number, :tokens] = row
        values["attention_mask"][number, :tokens] = 1
    if model.cache is not None and model.cache.cross:
        values["decoder_input_ids"] = continued(model, values)
    unknown = [spec.name for spec in model.inputs if spec.name not in values]
    if unknown:
        raise LoadError(
            f"{model.source}: text gives {', '.join(values)}, but the model also takes {', '.join(unknown)}"
        )
    return {spec.name: values[spec.name].astype(spec.dtype) for spec in model.inputs}
