"""Recovery after pruning: the smaller module learns to compute what the whole one does, on text without labels."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import nn

from tx_export._distillation_answers import live
from tx_export._distillation_course import UNLABELLED, Course, Goal, Lesson, kinds_of, student_weights
from tx_export._training_loop import Progress, minimize
from tx_export._training_steps import LoopOptions
from tx_export._training_text import Rows, encode_texts
from tx_export.errors import LoadError
from tx_export.plugins import foreign
from tx_export.spec import EagerModel

__all__ = ["recover"]

_log = logging.getLogger("tx_export")
_HELD_OUT_EVERY, _BATCH = 10, 16
_PEAK = 3e-4  # the highest learning rate


def recover(
    teacher: EagerModel, student: nn.Module, lines: Sequence[str], steps: int, seed: int, progress: Progress
) -> nn.Module:
    """A copy of a pruned student, in eval mode, that has learnt on text to compute what its teacher does.

    Every tenth line is held out and decides which step is kept; where none is better than the start, the start is.
    LoadError without a tokenizer, or with fewer than two lines. The same arguments give the same weights.
    """
    if teacher.text is None:
        raise LoadError(f"{teacher.source}: there is no tokenizer, so nothing can be recovered with text")
    texts = [line.strip() for line in lines if line.strip()]
    if len(texts) < 2:
        raise LoadError(
            f"text to recover with: {len(texts)} line(s); it takes at least two, as every tenth only judges"
        )
    options = _recovery(len(texts), steps, seed)
    learning = copy.deepcopy(student).requires_grad_(True)
    _without_dropout(learning)
    held = range(0, len(texts), _HELD_OUT_EVERY)
    course = Course(
        train=_lesson(teacher, [text for number, text in enumerate(texts) if number not in held]),
        held_out=_lesson(teacher, [texts[number] for number in held]),
        inputs=teacher.inputs,
        pad_id=teacher.text.pad_id,
        kinds=kinds_of(teacher),
        goal=Goal(temperature=1.0),
        options=options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pupil = course.pupil(learning)
        start = course.judge(pupil)
        fitted = minimize(pupil, 1, course.objective(), options, None, progress)
    recovered = copy.deepcopy(student)
    if fitted.metrics["loss"] < start["loss"]:
        recovered.load_state_dict(student_weights(fitted.weights))
    else:
        _log.warning("recovery: no step of %d was better than none on the lines held out", fitted.steps)
    return recovered.eval()


def _recovery(count: int, steps: int, seed: int) -> LoopOptions:
    warmup = max(1, steps // 10)
    return LoopOptions(
        batch_size=min(_BATCH, count),
        steps=steps,
        warmup=warmup,
        rate_factor=_PEAK * math.sqrt(warmup),
        label_smoothing=0.0,
        average=0.98,
        evaluate_every=max(1, steps // 10),
        patience=steps,
        seed=seed,
    )


def _lesson(teacher: EagerModel, texts: Sequence[str]) -> Lesson:
    assert teacher.text is not None
    with foreign(f"{teacher.source}: the tokenizer", LoadError):
        tokenizer = Tokenizer.from_str(teacher.text.tokenizer)
        tokenizer.no_padding()
    ids = encode_texts(tokenizer, texts, teacher.text.max_length)
    return Lesson(Rows(ids, torch.full((len(ids),), UNLABELLED), torch.ones(len(ids))), live(teacher))


def _without_dropout(module: nn.Module) -> None:
    """Set every dropout to zero: nn.Dropout's `p`, and the shares that attention keeps as a number."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]
