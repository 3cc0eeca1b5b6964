"""Pairs of texts: what a sequence-to-sequence model is trained and judged on.

start, t1, ..., tn -> t1, ..., tn, end                 each target token from those before it and the source
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tx_export._training_bytes import train_byte_tokenizer
from tx_export._training_lines import read_fields
from tx_export._training_loop import Objective
from tx_export._training_material import Material
from tx_export._training_steps import LoopOptions, Metrics, running, smoothed_loss, with_unknown_words
from tx_export._training_text import encode_texts, held_out_of, padded
from tx_export.errors import LoadError
from tx_export.spec import BuiltInSpec, GenerationSpec

__all__ = ["Pair", "Pairs", "greedy", "read_pairs"]

_IGNORED = -100


@dataclass(frozen=True)
class Pair:
    """A source, and a right target; several pairs of one source are several right answers."""

    source: str
    target: str


@dataclass(frozen=True)
class PairRows:
    """Encoded pairs: ids of each source, and of each target with its start and end."""

    sources: list[list[int]]
    targets: list[list[int]]


@dataclass(frozen=True)
class PairBatch:
    """Rows padded to the longest."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # int64 [B, T]
    decoder_input_ids: Tensor  # int64 [B, S]
    targets: Tensor  # int64 [B, S]; -100 behind the end


class Pairs(Material[Pair]):
    """Lines `source<TAB>target`."""

    fields: ClassVar[frozenset[str]] = frozenset()

    def read(self, path: Path) -> list[Pair]:
        return read_pairs(path)

    def split(self, path: Path, examples: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
        """By source, so that no answer to a held-out source is seen."""
        sources = list(dict.fromkeys(pair.source for pair in examples))
        held = {sources[number] for number in held_out_of(path, len(sources), share, seed)}
        return (
            [pair for pair in examples if pair.source not in held],
            [pair for pair in examples if pair.source in held],
        )

    def tokenizer(self, examples: Sequence[Pair], vocab_size: int) -> Tokenizer:
        texts = [text for pair in examples for text in (pair.source, pair.target)]
        return train_byte_tokenizer(texts, vocab_size, "$A [SEP]")

    def settled(self, path: Path, examples: Sequence[Pair], fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    def objective(
        self, spec: BuiltInSpec, tokenizer: Tokenizer, parts: tuple[list[Pair], list[Pair]], options: LoopOptions
    ) -> Objective:
        ids, max_length = spec.generation(), cast("Any", spec).max_length
        assert ids is not None and ids.start is not None
        train, held_out = (encode_pairs(tokenizer, part, ids, max_length) for part in parts)
        return Objective(
            [len(source) + len(target) for source, target in zip(train.sources, train.targets, strict=True)],
            lambda module, chosen: _gradients(module, train, chosen, options),
            lambda module: _evaluate(module, held_out, ids, options.batch_size),
        )


def read_pairs(path: Path) -> list[Pair]:
    """Lines `source<TAB>target` in UTF-8, blank lines aside; LoadError names the line that is wrong."""
    pairs = []
    for place, fields in read_fields(path, "source<TAB>target"):
        if len(fields) != 2:
            raise LoadError(f"{place}: {len(fields)} column(s); expected source<TAB>target")
        source, target = (field.strip() for field in fields)
        if not source or not target:
            raise LoadError(f"{place}: the {'target' if source else 'source'} is empty")
        pairs.append(Pair(source, target))
    return pairs


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[Pair], ids: GenerationSpec, max_length: int) -> PairRows:
    """Sources as the tokenizer writes them; targets between start and end; both cut at `max_length`."""
    assert ids.start is not None
    return PairRows(
        encode_texts(tokenizer, [pair.source for pair in pairs], max_length),
        [[ids.start, *_target(tokenizer, pair.target)[: max_length - 1], ids.eos[0]] for pair in pairs],
    )


def _target(tokenizer: Tokenizer, text: str) -> list[int]:
    """Its words where they are entries of a vocabulary that is decoded word by word, else as the tokenizer cuts it."""
    words = [tokenizer.token_to_id(word) for word in text.split()] if tokenizer.decoder is None else [None]
    if None not in words:
        return cast("list[int]", words)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _collate(rows: PairRows, chosen: Sequence[int], size: int) -> Iterator[PairBatch]:
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        sources, targets = [rows.sources[i] for i in part], [rows.targets[i] for i in part]
        yield PairBatch(
            padded(sources, 0),
            padded([[1] * len(source) for source in sources], 0),
            padded([target[:-1] for target in targets], 0),
            padded([target[1:] for target in targets], _IGNORED),
        )


def _gradients(module: nn.Module, rows: PairRows, chosen: Sequence[int], options: LoopOptions) -> float:
    """Add the gradient of the mean loss over the target tokens of the chosen rows; returns that loss."""
    loss, tokens = 0.0, sum(len(rows.targets[i]) - 1 for i in chosen)
    for batch in _collate(rows, chosen, options.batch_size // options.accumulation):
        with running(module, options):
            ids = with_unknown_words(batch.input_ids, options.word_dropout)
            logits = module(ids, batch.attention_mask, batch.decoder_input_ids)
        part = smoothed_loss(logits, batch.targets, options.label_smoothing) / tokens
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    return loss


@torch.no_grad()
def _evaluate(module: nn.Module, rows: PairRows, ids: GenerationSpec, batch_size: int) -> Metrics:
    """`exact`: the greedy answer is one of the source's; `accuracy` of tokens, and mean cross-entropy of them."""
    training = module.training
    module.eval()
    order = sorted(range(len(rows.sources)), key=lambda i: (len(rows.sources[i]), rows.sources[i]))
    right, loss, tokens = 0, 0.0, 0
    for batch in _collate(rows, order, batch_size):
        logits = module(batch.input_ids, batch.attention_mask, batch.decoder_input_ids)
        right += int((logits.argmax(dim=-1) == batch.targets).sum())
        loss += smoothed_loss(logits, batch.targets, 0.0).item()
        tokens += int((batch.targets != _IGNORED).sum())
    exact = _exact(module, rows, order, ids, batch_size)
    module.train(training)
    return {"exact": exact, "accuracy": right / tokens, "loss": loss / tokens}


def _exact(module: nn.Module, rows: PairRows, order: Sequence[int], ids: GenerationSpec, batch_size: int) -> float:
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for i in order:
        answers.setdefault(tuple(rows.sources[i]), []).append(rows.targets[i][1:-1])
    sources, limit, right = list(answers), max(map(len, rows.targets)), 0
    for start in range(0, len(sources), batch_size):
        part = sources[start : start + batch_size]
        found = greedy(module, part, ids, limit)
        right += sum(answer in answers[source] for source, answer in zip(part, found, strict=True))
    return right / len(sources)


@torch.no_grad()
def greedy(module: nn.Module, sources: Sequence[Sequence[int]], ids: GenerationSpec, limit: int) -> list[list[int]]:
    """The likeliest token again and again, to the end or `limit`; ids without start and end."""
    model, start = cast("Any", module), cast("int", ids.start)
    mask = padded([[1] * len(source) for source in sources], 0)
    cross = model.encode(padded(sources, 0), mask)
    tokens, past = [torch.full((len(sources), 1), start)], [None] * len(cross)
    done = torch.zeros(len(sources), dtype=torch.bool)
    while len(tokens) <= limit and not done.all():
        real = torch.ones(len(sources), len(tokens), dtype=torch.int64)
        hidden, past = model.decode(tokens[-1], real, mask, cross, past)
        tokens.append(model.logits(hidden)[:, -1:].argmax(dim=-1))
        done |= torch.isin(tokens[-1][:, 0], torch.tensor(ids.eos))
    rows = torch.cat(tokens[1:], dim=1).tolist()
    ends = [next((place for place, token in enumerate(row) if token in ids.eos), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
