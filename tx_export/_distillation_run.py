"""Distil a student from a teacher: two models and text in, a folder with weights, tokenizer and record out.

Where both read text alike, the teacher runs on the same ids at each step, and shows its layers. Where their tokenizers
differ, or nothing but the outputs is wanted, it is asked about each text once, and what it says is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tx_export._distillation_answers import Ask, asked, in_order, live, remembered
from tx_export._distillation_course import UNLABELLED, Course, Goal, Lesson, Pupil, kinds_of, student_weights
from tx_export._distillation_student import check_pair, new_student, places, with_text
from tx_export._training_folder import fields_of, fingerprint, identity, make_folder, write_folder
from tx_export._training_loop import Progress, minimize
from tx_export._training_steps import LoopOptions
from tx_export._training_text import Example, Rows, encode_texts, read_texts, require_special_tokens, split
from tx_export.errors import LoadError
from tx_export.spec import BuiltInSpec, EagerModel

__all__ = ["DistillOptions", "DistillResult", "distill"]

_log = logging.getLogger("tx_export")
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class DistillOptions:
    """Who learns from whom, on what, and where to."""

    teacher: EagerModel
    student: BuiltInSpec | EagerModel  # a new one, or one that starts from its weights
    data: Sequence[Path]  # files of label<TAB>text[<TAB>confidence], or of a text a line
    output: Path  # the folder; its checkpoint, if there is one, is continued
    held_out: Path | None = None  # decides when to stop; without it a seeded tenth of the data does
    tokenizer: Path | None = None  # of a new student, and of a user's module; without it the teacher's
    initial: Path | None = None  # safetensors of weights for a new student; those it lacks start random
    dropout: float | None = None  # of a new student while it trains, instead of its own
    goal: Goal = field(default_factory=Goal)
    loop: LoopOptions = field(default_factory=LoopOptions)


@dataclass(frozen=True)
class DistillResult:
    """The folder, the held-out metrics at the best step, and the layers that were linked, counted from 1."""

    folder: Path
    metrics: dict[str, float]
    best_step: int
    steps: int
    linked: dict[str, list[tuple[int, int]]]


def distill(options: DistillOptions, progress: Progress) -> DistillResult:
    """Train the student and write the folder; `progress` gets a record after each step.

    The same options and data give the same weights on the same machine with the same number of threads; a run that was
    stopped is continued by the same call. LoadError names what can't be used.
    """
    teacher, student = _pair(options)
    examples = _examples(options)
    record, saved = _record(options, teacher, student), options.output / "checkpoint.pt"
    make_folder(options.output)
    mark = fingerprint(record)
    course = _course(options, teacher, student, examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.loop.seed)
        pupil = course.pupil(copy.deepcopy(student.module).requires_grad_(True))
        fitted = minimize(pupil, _width(student), course.objective(), options.loop, (saved, mark), progress)
    fitted = dataclasses.replace(fitted, weights=student_weights(fitted.weights))
    linked = _linked(pupil)
    assert student.text is not None
    tokenizer, counts = Tokenizer.from_str(student.text.tokenizer), (len(examples[0]), len(examples[1]))
    write_folder(options.output, record | {"linked": linked}, tokenizer, fitted, counts)
    for file in (saved, *options.output.glob("answers.*")):
        file.unlink(missing_ok=True)
    return DistillResult(options.output, fitted.metrics, fitted.best_step, fitted.steps, linked)


def _pair(options: DistillOptions) -> tuple[EagerModel, EagerModel]:
    given = options.student
    if isinstance(given, EagerModel):
        if (options.tokenizer, options.initial, options.dropout) != (None, None, None):
            raise LoadError(f"tokenizer, weights and dropout are for a new student; {given.source} brings its own")
        teacher, student = options.teacher, given
    else:
        labels = fields_of(given).get("labels", ())
        teacher = with_text(options.teacher, given.task, labels, options.tokenizer)
        student = new_student(
            given,
            teacher,
            tokenizer=options.tokenizer,
            dropout=options.dropout,
            initial=options.initial,
            seed=options.loop.seed,
        )
    check_pair(teacher, student)
    return teacher, student


def _examples(options: DistillOptions) -> tuple[list[Example], list[Example]]:
    examples = [example for file in options.data for example in read_texts(file)]
    if options.held_out is not None:
        return examples, read_texts(options.held_out)
    labelled = [example for example in examples if example.label]
    rest = [example for example in examples if not example.label] if labelled else []
    train, held_out = split(options.data[0], labelled or examples, _HELD_OUT_SHARE, options.loop.seed)
    return train + rest, held_out


def _course(
    options: DistillOptions,
    teacher: EagerModel,
    student: EagerModel,
    examples: tuple[list[Example], list[Example]],
) -> Course:
    assert student.text is not None and teacher.text is not None
    tokenizer = Tokenizer.from_str(student.text.tokenizer)
    tokenizer.no_padding()
    if options.loop.word_dropout > 0:
        require_special_tokens(tokenizer, student.source)
    limit, labels, order = student.text.max_length, student.text.labels, None
    if labels:
        order = places(labels, teacher.text.labels, student.source)
    if teacher.task != "text-classification" or teacher.text.scores != "softmax":
        labels = ()
        if any(example.label for part in examples for example in part):
            _log.warning("the labels of the data are not used: the teacher does not choose one of several for a text")
    alike = _read_alike(teacher, student)
    if alike and (options.goal.hidden or options.goal.attention or _by_token(teacher)):
        limit, asks = min(limit, teacher.text.max_length), [live(teacher)] * 2
    else:
        asks = _asks(options, teacher, examples, alike)
    lessons = [
        Lesson(_rows(tokenizer, part, labels, limit), ask if order is None else in_order(ask, order))
        for part, ask in zip(examples, asks, strict=True)
    ]
    pad_id, kinds = student.text.pad_id, kinds_of(teacher)
    return Course(lessons[0], lessons[1], student.inputs, pad_id, kinds, options.goal, options.loop)


def _asks(
    options: DistillOptions,
    teacher: EagerModel,
    examples: tuple[list[Example], list[Example]],
    alike: bool,
) -> list[Ask]:
    if _by_token(teacher) or len(teacher.outputs) > 1:
        raise LoadError(f"{teacher.source} gives more than a row for a text, and the student has another tokenizer")
    if not alike and (options.goal.hidden or options.goal.attention):
        _log.warning("teacher and student have different tokenizers: only what they say about whole texts is matched")
    named = zip(("train", "held-out"), examples, strict=True)
    return [
        remembered(asked(teacher, [item.text for item in part], options.output / f"answers.{name}"))
        for name, part in named
    ]


def _by_token(model: EagerModel) -> bool:
    return any(len(output.dims) > 2 for output in model.outputs)


def _read_alike(teacher: EagerModel, student: EagerModel) -> bool:
    """Whether both make the same ids of a text; padding and truncation aside."""
    assert student.text is not None and teacher.text is not None
    both = [Tokenizer.from_str(model.text.tokenizer) for model in (teacher, student) if model.text is not None]
    for tokenizer in both:
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return bool(both[0].to_str() == both[1].to_str())


def _rows(tokenizer: Tokenizer, examples: Sequence[Example], labels: Sequence[str], max_length: int) -> Rows:
    found = sorted({example.label for example in examples} - {""}) if labels else []
    targets = dict(zip(found, places(found, labels, "the data"), strict=True))
    return Rows(
        encode_texts(tokenizer, [example.text for example in examples], max_length),
        torch.tensor([targets.get(example.label, UNLABELLED) for example in examples]),
        torch.tensor([example.confidence for example in examples]),
    )


def _width(student: EagerModel) -> int:
    """What the learning rate is scaled by."""
    return int(student.config.get("d_model") or student.config.get("hidden_size") or 512)


def _linked(pupil: Pupil) -> dict[str, list[tuple[int, int]]]:
    return {
        name: [(link.student + 1, link.teacher + 1) for link in found]
        for name, found in (("hidden", pupil.hidden), ("attention", pupil.weights))
    }


def _record(options: DistillOptions, teacher: EagerModel, student: EagerModel) -> dict[str, Any]:
    """What decides the weights: models, options, and the contents of the files."""
    named = {f"data {number}": path for number, path in enumerate(options.data, 1)}
    named |= {
        name: path for name in ("held_out", "tokenizer", "initial") if (path := getattr(options, name)) is not None
    }
    return {
        "model": student.family,
        "config": dict(student.config),
        "start": student.weights,
        "dropout": options.dropout,
        "teacher": {"source": teacher.source, "task": teacher.task, "weights": teacher.weights},
        "goal": dataclasses.asdict(options.goal),
        "loop": dataclasses.asdict(options.loop),
        "files": {name: identity(path) for name, path in named.items()},
        "split": "file" if options.held_out is not None else f"seeded {_HELD_OUT_SHARE:g}",
    }
