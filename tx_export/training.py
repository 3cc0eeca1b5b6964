"""Train a classifier from labelled text: options and data in, a folder with weights, tokenizer and record out.

FILE.tsv -> label, text -> tokenizer -> rows -> fit -> model.safetensors, tokenizer.json, training.json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from tx_export._fake_quantize import fake_quantized, read_arithmetic
from tx_export._training_folder import fields_of, fingerprint, identity, make_folder, replaced, started, write_folder
from tx_export._training_loop import Progress, TrainRecord, fit
from tx_export._training_steps import LoopOptions
from tx_export._training_text import (
    Example,
    encode,
    labels_of,
    read_examples,
    read_tokenizer,
    require_special_tokens,
    split,
    train_tokenizer,
)
from tx_export.errors import LoadError
from tx_export.spec import BuiltInSpec

__all__ = [
    "Example",
    "LoopOptions",
    "Progress",
    "TrainOptions",
    "TrainRecord",
    "TrainResult",
    "read_examples",
    "train",
    "train_tokenizer",
]

_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class TrainOptions:
    """What to train, on what, and where to; the labels and the vocabulary's size come from the data."""

    spec: BuiltInSpec  # with fields `labels`, `vocab_size`, `max_length`, `d_model`, `dropout`: the classifier
    data: Path  # lines of label<TAB>text[<TAB>confidence], UTF-8
    output: Path  # the folder; its checkpoint, if there is one, is continued
    held_out: Path | None = None  # decides when to stop; without it a seeded tenth of the data does
    tokenizer: Path | None = None  # a tokenizer.json; without it one is trained on the data
    initial: Path | None = None  # safetensors of weights to start from; those it lacks start random
    dropout: float | None = None  # while training, instead of the spec's, which the saved configuration keeps
    qat: str | None = None  # the 8-bit pass whose rounding is trained and judged with, say dynamic_int8
    loop: LoopOptions = field(default_factory=LoopOptions)


@dataclass(frozen=True)
class TrainResult:
    """The folder, the configuration of the model in it, and its held-out `accuracy` and `loss` at the best step."""

    folder: Path
    spec: BuiltInSpec
    metrics: dict[str, float]
    best_step: int
    steps: int


def train(options: TrainOptions, progress: Progress) -> TrainResult:
    """Train and write the folder; `progress` gets a record after each step.

    The same options and data give the same weights on the same machine with the same number of threads. A run that was
    stopped leaves `checkpoint.pt` in the folder and is continued by the same call. LoadError names what can't be used.
    """
    _check(options)
    train_set, held_out = _examples(options)
    spec, tokenizer = _fitted_to_data(options, train_set)
    fields = fields_of(spec)
    labels, max_length = fields["labels"], fields["max_length"]
    rows = encode(tokenizer, train_set, labels, max_length), encode(tokenizer, held_out, labels, max_length)
    make_folder(options.output)
    record, saved = _record(options, spec), options.output / "checkpoint.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.loop.seed)
        module = _module(spec, options)
        fitted = fit(module, fields["d_model"], rows, options.loop, (saved, fingerprint(record)), progress)
    write_folder(options.output, record, tokenizer, fitted, (len(train_set), len(held_out)))
    saved.unlink(missing_ok=True)
    return TrainResult(options.output, spec, fitted.metrics, fitted.best_step, fitted.steps)


def _check(options: TrainOptions) -> None:
    missing = {"labels", "vocab_size", "max_length", "d_model", "dropout"} - fields_of(options.spec).keys()
    if missing:
        raise LoadError(
            f"{type(options.spec).__name__} has no {', '.join(sorted(missing))}; only classifiers can be trained"
        )
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise LoadError(f"dropout is {options.dropout}; it must be in [0, 1)")
    if options.qat is not None:
        read_arithmetic(options.qat)
        if options.loop.precision != "float32":
            raise LoadError(f"qat: {options.loop.precision} would round what has to be rounded to 8 bits; use float32")


def _examples(options: TrainOptions) -> tuple[list[Example], list[Example]]:
    examples = read_examples(options.data)
    if options.held_out is not None:
        return examples, read_examples(options.held_out)
    return split(options.data, examples, _HELD_OUT_SHARE, options.loop.seed)


def _fitted_to_data(options: TrainOptions, examples: Sequence[Example]) -> tuple[BuiltInSpec, Tokenizer]:
    fields = fields_of(options.spec)
    labels = labels_of(options.data, examples, fields["labels"])
    if options.tokenizer is not None:
        tokenizer = read_tokenizer(options.tokenizer)
    else:
        tokenizer = train_tokenizer([example.text for example in examples], fields["vocab_size"])
    if options.loop.word_dropout > 0:
        require_special_tokens(tokenizer, options.tokenizer)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return replaced(options.spec, {"labels": labels, "vocab_size": vocab_size}), tokenizer


def _module(spec: BuiltInSpec, options: TrainOptions) -> nn.Module:
    module = started(spec, options.dropout, options.initial)
    return module if options.qat is None else fake_quantized(module, read_arithmetic(options.qat))


def _record(options: TrainOptions, spec: BuiltInSpec) -> dict[str, Any]:
    """What decides the weights: configuration, options, and the contents of the files."""
    files = {name: getattr(options, name) for name in ("data", "held_out", "tokenizer", "initial")}
    return {
        "model": type(spec).__name__.lower(),
        "config": fields_of(spec),
        "dropout": fields_of(spec)["dropout"] if options.dropout is None else options.dropout,
        "qat": None if options.qat is None else str(read_arithmetic(options.qat)),
        "loop": dataclasses.asdict(options.loop),
        "files": {name: identity(path) for name, path in files.items() if path is not None},
        "split": "file" if options.held_out is not None else f"seeded {_HELD_OUT_SHARE:g}",
    }
