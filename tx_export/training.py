"""Train a classifier from labelled text: options and data in, a folder with weights, tokenizer and record out.

FILE.tsv -> label, text -> tokenizer -> rows -> fit -> model.safetensors, tokenizer.json, training.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import nn

from tx_export._fake_quantize import fake_quantized, read_arithmetic
from tx_export._training_loop import Fitted, Progress, TrainRecord, fit
from tx_export._training_steps import LoopOptions
from tx_export._training_text import (
    SPECIAL_TOKENS,
    Example,
    encode,
    labels_of,
    read_examples,
    read_tokenizer,
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
    fields = _fields(spec)
    labels, max_length = fields["labels"], fields["max_length"]
    rows = encode(tokenizer, train_set, labels, max_length), encode(tokenizer, held_out, labels, max_length)
    _make_folder(options.output)
    fingerprint = hashlib.sha256(json.dumps(_record(options, spec), sort_keys=True).encode()).hexdigest()
    saved = options.output / "checkpoint.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.loop.seed)
        module = _module(spec, options)
        fitted = fit(module, fields["d_model"], rows, options.loop, (saved, fingerprint), progress)
    _write(options, spec, tokenizer, fitted, (len(train_set), len(held_out)))
    saved.unlink(missing_ok=True)
    return TrainResult(options.output, spec, fitted.metrics, fitted.best_step, fitted.steps)


def _check(options: TrainOptions) -> None:
    missing = {"labels", "vocab_size", "max_length", "d_model", "dropout"} - _fields(options.spec).keys()
    if missing:
        raise LoadError(
            f"{type(options.spec).__name__} has no {', '.join(sorted(missing))}; only classifiers can be trained"
        )
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise LoadError(f"dropout is {options.dropout}; it must be in [0, 1)")
    if options.qat is not None and options.loop.precision != "float32":
        raise LoadError(f"qat: {options.loop.precision} would round what has to be rounded to 8 bits; use float32")
    if (options.output / "model.safetensors").exists():
        raise LoadError(f"{options.output} already holds a trained model; choose another folder, or delete it")


def _examples(options: TrainOptions) -> tuple[list[Example], list[Example]]:
    examples = read_examples(options.data)
    if options.held_out is not None:
        return examples, read_examples(options.held_out)
    return split(options.data, examples, _HELD_OUT_SHARE, options.loop.seed)


def _fitted_to_data(options: TrainOptions, examples: Sequence[Example]) -> tuple[BuiltInSpec, Tokenizer]:
    fields = _fields(options.spec)
    labels = labels_of(options.data, examples, fields["labels"])
    if options.tokenizer is not None:
        tokenizer = read_tokenizer(options.tokenizer)
    else:
        tokenizer = train_tokenizer([example.text for example in examples], fields["vocab_size"])
    if options.loop.word_dropout > 0 and [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != [0, 1, 2, 3]:
        raise LoadError(f"{options.tokenizer}: word dropout needs {', '.join(SPECIAL_TOKENS)} as ids 0 to 3")
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return _replaced(options.spec, {"labels": labels, "vocab_size": vocab_size}), tokenizer


def _module(spec: BuiltInSpec, options: TrainOptions) -> nn.Module:
    module = (spec if options.dropout is None else _replaced(spec, {"dropout": options.dropout})).build()
    if options.initial is not None:
        _fill(module, options.initial)
    return module if options.qat is None else fake_quantized(module, read_arithmetic(options.qat))


def _fill(module: nn.Module, initial: Path) -> None:
    weights = module.state_dict()
    try:
        given = safetensors.torch.load_file(initial)
    except Exception as error:
        raise LoadError(f"{initial}: not a safetensors file that can be read: {error}") from error
    for name, tensor in given.items():
        if name not in weights or weights[name].shape != tensor.shape:
            wanted = f"it is {list(weights[name].shape)}" if name in weights else "there is no such weight"
            raise LoadError(f"{initial}: {name} {list(tensor.shape)} does not fit the model; {wanted}")
    module.load_state_dict(weights | given)


def _make_folder(folder: Path) -> None:
    probe = folder / "checkpoint.pt.tmp"  # better to fail now than at the first checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LoadError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _record(options: TrainOptions, spec: BuiltInSpec) -> dict[str, Any]:
    """What decides the weights: configuration, options, and the contents of the files."""
    files = {name: getattr(options, name) for name in ("data", "held_out", "tokenizer", "initial")}
    return {
        "model": type(spec).__name__.lower(),
        "config": _fields(spec),
        "dropout": _fields(spec)["dropout"] if options.dropout is None else options.dropout,
        "qat": None if options.qat is None else str(read_arithmetic(options.qat)),
        "loop": dataclasses.asdict(options.loop),
        "files": {name: _identity(path) for name, path in files.items() if path is not None},
        "split": "file" if options.held_out is not None else f"seeded {_HELD_OUT_SHARE:g}",
    }


def _identity(path: Path) -> dict[str, str]:
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _write(
    options: TrainOptions, spec: BuiltInSpec, tokenizer: Tokenizer, fitted: Fitted, examples: tuple[int, int]
) -> None:
    outcome = {
        "metrics": fitted.metrics,
        "best_step": fitted.best_step,
        "steps": fitted.steps,
        "examples": {"train": examples[0], "held_out": examples[1]},
        "torch": torch.__version__,
    }
    record = json.dumps(_record(options, spec) | outcome, indent=2, sort_keys=True) + "\n"
    # One key only: safetensors writes metadata in the order of a hash table.
    header = {"config": json.dumps(_fields(spec), sort_keys=True)}
    weights = {name: tensor.contiguous() for name, tensor in fitted.weights.items()}
    _replace(options.output / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _replace(options.output / "training.json", record.encode())
    _replace(options.output / "model.safetensors", safetensors.torch.save(weights, header))


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _fields(spec: BuiltInSpec) -> dict[str, Any]:
    return dataclasses.asdict(cast("Any", spec))


def _replaced(spec: BuiltInSpec, changes: dict[str, Any]) -> BuiltInSpec:
    return cast("BuiltInSpec", dataclasses.replace(cast("Any", spec), **changes))
