"""Running text: what a language model is trained and judged on.

[CLS], t1, ..., tn -> t1, ..., tn, [SEP]               each token of a line from those before it

What is longer than the model goes on in a row that begins with the last token before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tx_export._load_text import read_utf8
from tx_export._training_bytes import train_byte_tokenizer
from tx_export._training_loop import Objective
from tx_export._training_material import Material
from tx_export._training_steps import LoopOptions, Metrics, running, smoothed_loss, with_unknown_words
from tx_export._training_text import held_out_of, padded
from tx_export.errors import LoadError
from tx_export.spec import BuiltInSpec, GenerationSpec

__all__ = ["RunningText"]

_IGNORED = -100


@dataclass(frozen=True)
class TextBatch:
    """Rows padded to the longest, and for each position the token that follows."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]; -100 behind the end


class RunningText(Material[str]):
    """A sentence or paragraph a line."""

    fields: ClassVar[frozenset[str]] = frozenset()

    def read(self, path: Path) -> list[str]:
        lines = [line.strip() for line in read_utf8(path).removeprefix("\ufeff").split("\n") if line.strip()]
        if not lines:
            raise LoadError(f"{path}: no text")
        return lines

    def split(self, path: Path, examples: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
        held = held_out_of(path, len(examples), share, seed)
        return (
            [line for i, line in enumerate(examples) if i not in held],
            [line for i, line in enumerate(examples) if i in held],
        )

    def tokenizer(self, examples: Sequence[str], vocab_size: int) -> Tokenizer:
        return train_byte_tokenizer(examples, vocab_size, "[CLS] $A")

    def settled(self, path: Path, examples: Sequence[str], fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    def objective(
        self, spec: BuiltInSpec, tokenizer: Tokenizer, parts: tuple[list[str], list[str]], options: LoopOptions
    ) -> Objective:
        ids, max_length = spec.generation(), cast("Any", spec).max_length
        assert ids is not None
        train, held_out = (encode_lines(tokenizer, part, ids, max_length) for part in parts)
        words = sum(len(line.split()) for line in parts[1])
        return Objective(
            [len(row) for row in train],
            lambda module, chosen: _gradients(module, train, chosen, options),
            lambda module: evaluate_rows(module, held_out, words, options.batch_size),
        )


def encode_lines(tokenizer: Tokenizer, lines: Sequence[str], ids: GenerationSpec, max_length: int) -> list[list[int]]:
    """Rows of at most max_length + 1 ids, so that each token but a line's first is to be foretold once."""
    encodings = tokenizer.encode_batch(list(lines), add_special_tokens=False)
    begin = [] if ids.bos is None else [ids.bos]
    whole = ([*begin, *encoding.ids, ids.eos[0]] for encoding in encodings)
    return [row[at : at + max_length + 1] for row in whole for at in range(0, len(row) - 1, max_length)]


def _collate(rows: Sequence[list[int]], chosen: Sequence[int], size: int) -> Iterator[TextBatch]:
    for start in range(0, len(chosen), size):
        part = [rows[i] for i in chosen[start : start + size]]
        yield TextBatch(
            padded([row[:-1] for row in part], 0),
            padded([[1] * (len(row) - 1) for row in part], 0),
            padded([row[1:] for row in part], _IGNORED),
        )


def _gradients(module: nn.Module, rows: Sequence[list[int]], chosen: Sequence[int], options: LoopOptions) -> float:
    """Add the gradient of the mean loss over the tokens of the chosen rows; returns that loss."""
    loss, tokens = 0.0, sum(len(rows[i]) - 1 for i in chosen)
    for batch in _collate(rows, chosen, options.batch_size // options.accumulation):
        with running(module, options):
            logits = module(with_unknown_words(batch.input_ids, options.word_dropout), batch.attention_mask)
        part = smoothed_loss(logits, batch.targets, options.label_smoothing) / tokens
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    return loss


@torch.no_grad()
def evaluate_rows(module: nn.Module, rows: Sequence[list[int]], words: int, batch_size: int) -> Metrics:
    """`perplexity` of a token, `word_perplexity` (the same text's for each of so many words), mean cross-entropy."""
    training = module.training
    module.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    loss, tokens = 0.0, sum(len(row) - 1 for row in rows)
    for batch in _collate(rows, order, batch_size):
        loss += smoothed_loss(module(batch.input_ids, batch.attention_mask), batch.targets, 0.0).item()
    module.train(training)
    return {
        "perplexity": math.exp(loss / tokens),
        "word_perplexity": math.exp(loss / words),
        "loss": loss / tokens,
    }
