"""Train a built-in model from text: options and data in, a folder with weights, tokenizer and record out.

FILE -> examples -> tokenizer -> rows -> minimize -> model.safetensors, tokenizer.json, training.json

The model's task decides what an example is: label and text, source and target, or a line of running text.
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
from tx_export._training_labels import Labels
from tx_export._training_loop import Progress, TrainRecord, minimize
from tx_export._training_material import Material
from tx_export._training_pairs import Pairs
from tx_export._training_running_text import RunningText
from tx_export._training_steps import LoopOptions
from tx_export._training_text import Example, read_examples, read_tokenizer, require_special_tokens, train_tokenizer
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
_MATERIALS: dict[str, Material[Any]] = {
    "text-classification": Labels(),
    "text2text-generation": Pairs(),
    "text-generation": RunningText(),
}


@dataclass(frozen=True)
class TrainOptions:
    """What to train, on what, and where to; the labels and the vocabulary's size come from the data."""

    spec: BuiltInSpec  # with fields `vocab_size`, `max_length`, `d_model` and `dropout`, and `labels` of a classifier
    data: Path  # UTF-8: lines of label<TAB>text[<TAB>confidence], of source<TAB>target, or of running text, by its task
    output: Path  # the folder; its checkpoint, if there is one, is continued
    held_out: Path | None = None  # decides when to stop; without it a seeded tenth of the data does
    tokenizer: Path | None = None  # a tokenizer.json; without it one is trained on the data
    initial: Path | None = None  # safetensors of weights to start from; those it lacks start random
    dropout: float | None = None  # while training, instead of the spec's, which the saved configuration keeps
    qat: str | None = None  # the 8-bit pass whose rounding is trained and judged with, say dynamic_int8
    loop: LoopOptions = field(default_factory=LoopOptions)


@dataclass(frozen=True)
class TrainResult:
    """The folder, the configuration of the model in it, and its held-out metrics at the best step.

    `loss`; of a classifier `accuracy`; of a sequence-to-sequence model `exact` and the `accuracy` of its tokens; of a
    language model `perplexity` and `word_perplexity`.
    """

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
    material = _material(options)
    parts = _examples(options, material)
    spec, tokenizer = _fitted_to_data(options, material, parts[0])
    objective = material.objective(spec, tokenizer, parts, options.loop)
    make_folder(options.output)
    record, saved = _record(options, spec), options.output / "checkpoint.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.loop.seed)
        module, d_model = _module(spec, options), fields_of(spec)["d_model"]
        fitted = minimize(module, d_model, objective, options.loop, (saved, fingerprint(record)), progress)
    write_folder(options.output, record, tokenizer, fitted, (len(parts[0]), len(parts[1])))
    saved.unlink(missing_ok=True)
    return TrainResult(options.output, spec, fitted.metrics, fitted.best_step, fitted.steps)


def _material(options: TrainOptions) -> Material[Any]:
    """What the spec's task is trained on; LoadError for options that can't be used."""
    task, name = options.spec.task, type(options.spec).__name__
    if task not in _MATERIALS:
        raise LoadError(f"{name} can't be trained from text alone: its task is {task}; known: {', '.join(_MATERIALS)}")
    missing = {"vocab_size", "max_length", "d_model", "dropout"} | _MATERIALS[task].fields
    if missing := missing - fields_of(options.spec).keys():
        raise LoadError(f"{name} has no {', '.join(sorted(missing))}")
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise LoadError(f"dropout is {options.dropout}; it must be in [0, 1)")
    if options.qat is not None:
        read_arithmetic(options.qat)
        if options.loop.precision != "float32":
            raise LoadError(f"qat: {options.loop.precision} would round what has to be rounded to 8 bits; use float32")
    return _MATERIALS[task]


def _examples(options: TrainOptions, material: Material[Any]) -> tuple[list[Any], list[Any]]:
    examples = material.read(options.data)
    if options.held_out is not None:
        return examples, material.read(options.held_out)
    return material.split(options.data, examples, _HELD_OUT_SHARE, options.loop.seed)


def _fitted_to_data(
    options: TrainOptions, material: Material[Any], examples: Sequence[Any]
) -> tuple[BuiltInSpec, Tokenizer]:
    fields = fields_of(options.spec)
    settled = material.settled(options.data, examples, fields)
    if options.tokenizer is not None:
        tokenizer = read_tokenizer(options.tokenizer)
    else:
        tokenizer = material.tokenizer(examples, fields["vocab_size"])
    if options.loop.word_dropout > 0:
        require_special_tokens(tokenizer, options.tokenizer)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return replaced(options.spec, {**settled, "vocab_size": vocab_size}), tokenizer


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
