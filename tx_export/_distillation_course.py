"""A student learns what its teacher computes: outputs, hidden states and attention weights, on text.

loss = (1 - hard) outputs + hard labels + hidden (mean of linked layers) + attention (mean of linked layers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tx_export._distillation_answers import Answer, Ask, call
from tx_export._distillation_losses import Kind, agreement, attention_loss, output_loss
from tx_export._distillation_watch import Link, links, watching
from tx_export._training_loop import Objective
from tx_export._training_steps import LoopOptions, Metrics, running, smoothed_loss, with_unknown_words
from tx_export._training_text import Batch, Rows, collate
from tx_export.errors import TxExportError
from tx_export.spec import EagerModel, TensorSpec

__all__ = [
    "UNLABELLED",
    "Course",
    "Goal",
    "Lesson",
    "Pupil",
    "kinds_of",
    "student_weights",
]

_CLASSIFIES = ("text-classification", "token-classification", "fill-mask")
UNLABELLED = -100  # the target of a row without a label
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Goal:
    """How much each part of the loss counts."""

    temperature: float = 2.0  # of the soft targets
    hard: float = 0.1  # share of the labelled loss
    hidden: float = 1.0  # hidden states; 0: none
    attention: float = 1.0  # attention weights; 0: none

    def __post_init__(self) -> None:
        if not self.temperature > 0 or not 0 <= self.hard <= 1 or min(self.hidden, self.attention) < 0:
            raise TxExportError(
                "temperature must be above 0, the labelled share in [0, 1], hidden and attention at least 0"
            )


@dataclass(frozen=True)
class Lesson:
    """Rows as the student reads them, and what the teacher says to some of them, by number and as a batch."""

    rows: Rows
    ask: Ask


class Pupil(nn.Module):
    """A student with what it needs while it learns: projections of its hidden states to the teacher's width."""

    def __init__(self, student: nn.Module, hidden: tuple[Link, ...], weights: tuple[Link, ...]) -> None:
        super().__init__()
        self.student, self.hidden, self.weights = student, hidden, weights
        self.projections = nn.ModuleList(_projection(*link.widths) for link in hidden)

    def layer_losses(self, ours: Answer, theirs: Answer, mask: Tensor) -> Parts:
        """`hidden` and `attention`, as far as layers are linked; means over them and over the real tokens."""
        real, found = mask != 0, Parts()
        if self.hidden:
            losses = [
                output_loss(
                    project(ours.seen.hidden[link.student][real]), theirs.seen.hidden[link.teacher][real], "values"
                )
                for link, project in zip(self.hidden, self.projections, strict=True)
            ]
            found["hidden"] = _mean(losses)
        if self.weights:
            pairs = [(ours.seen.weights[link.student], theirs.seen.weights[link.teacher]) for link in self.weights]
            found["attention"] = _mean([attention_loss(s, t, mask) for s, t in pairs])
        return found


def student_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a pupil's weights that belong to the student, under its names."""
    return {name.removeprefix("student."): value for name, value in weights.items() if name.startswith("student.")}


def _projection(ours: int, theirs: int) -> nn.Module:
    return nn.Identity() if ours == theirs else nn.Linear(ours, theirs, bias=False)


def kinds_of(model: EagerModel) -> tuple[Kind, ...]:
    """How each output is compared."""
    scores = model.text.scores if model.text is not None and model.task == "text-classification" else "softmax"
    logits: Kind = "values" if scores == "identity" else scores
    return tuple(logits if model.task in _CLASSIFIES and spec.name == "logits" else "values" for spec in model.outputs)


@dataclass(frozen=True)
class Course:
    """All that the loss of a pupil is made of; the rows of `held_out` only judge."""

    train: Lesson
    held_out: Lesson
    inputs: Sequence[TensorSpec]  # of the student
    pad_id: int
    kinds: Sequence[Kind]
    goal: Goal
    options: LoopOptions

    def pupil(self, student: nn.Module) -> Pupil:
        """The student linked with what its teacher shows of itself, as one row tells."""
        (batch,) = collate(self.train.rows, [0], 1, self.pad_id)
        theirs = self.train.ask([0], batch).seen
        with torch.no_grad(), watching(student) as ours:
            call(student, self.inputs, batch, batch.input_ids)
        states = (batch.input_ids.shape, 3)
        hidden = links(ours.hidden, theirs.hidden, lambda s, t: states == _states(s) == _states(t))
        weights = links(ours.weights, theirs.weights, lambda s, t: s.shape == t.shape)
        return Pupil(student, hidden if self.goal.hidden > 0 else (), weights if self.goal.attention > 0 else ())

    def objective(self) -> Objective:
        return Objective([len(ids) for ids in self.train.rows.ids], self.gradients, self.judge)

    def gradients(self, pupil: nn.Module, chosen: Sequence[int]) -> float:
        """Add the gradient of the mean loss over the chosen rows, micro-batch by micro-batch; returns that loss."""
        size, loss = self.options.batch_size // self.options.accumulation, 0.0
        for start in range(0, len(chosen), size):
            numbers = chosen[start : start + size]
            part = self._losses(pupil, self.train, numbers, self.options.word_dropout)["loss"]
            part = part * (len(numbers) / len(chosen))
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        return loss

    @torch.no_grad()
    def judge(self, pupil: nn.Module) -> Metrics:
        """Means over the held-out rows, in eval mode; `accuracy` only where each of them has a label."""
        training, rows = pupil.training, self.held_out.rows
        pupil.eval()
        order = sorted(range(len(rows.ids)), key=lambda number: len(rows.ids[number]))
        metrics: Metrics = {}
        for start in range(0, len(order), self.options.batch_size):
            numbers = order[start : start + self.options.batch_size]
            for name, value in self._losses(pupil, self.held_out, numbers, 0.0).items():
                metrics[name] = metrics.get(name, 0.0) + value.item() * len(numbers) / len(order)
        pupil.train(training)
        if (rows.targets == UNLABELLED).any():
            metrics.pop("accuracy", None)
        return metrics

    def _losses(self, pupil: nn.Module, lesson: Lesson, numbers: Sequence[int], word_dropout: float) -> Parts:
        assert isinstance(pupil, Pupil)
        (batch,) = collate(lesson.rows, numbers, len(numbers), self.pad_id)
        theirs = lesson.ask(numbers, batch)
        with running(pupil.student, self.options), watching(pupil.student) as seen:
            outputs = call(pupil.student, self.inputs, batch, with_unknown_words(batch.input_ids, word_dropout))
            ours = Answer(outputs, seen)
            found = self._output_losses(ours, theirs, batch) | pupil.layer_losses(ours, theirs, batch.attention_mask)
        loss = (
            found["output"] if "labels" not in found else torch.lerp(found["output"], found["labels"], self.goal.hard)
        )
        for name, factor in (("hidden", self.goal.hidden), ("attention", self.goal.attention)):
            loss = loss + factor * found[name] if name in found else loss
        return found | {"loss": loss}

    def _output_losses(self, ours: Answer, theirs: Answer, batch: Batch) -> Parts:
        mask, labelled = batch.attention_mask, batch.targets != UNLABELLED
        pairs = [(_flat(s, mask), _flat(t, mask)) for s, t in zip(ours.outputs, theirs.outputs, strict=True)]
        losses = [
            output_loss(s, t, kind, self.goal.temperature) for (s, t), kind in zip(pairs, self.kinds, strict=True)
        ]
        found = {"output": _mean(losses), "agreement": agreement(*pairs[0], self.kinds[0])}
        if labelled.any():
            logits, smoothing = pairs[0][0], self.options.label_smoothing
            labels = smoothed_loss(logits, batch.targets, smoothing, UNLABELLED, batch.confidence)
            right = (logits.argmax(dim=-1) == batch.targets).float().mean()
            found |= {"labels": labels / labelled.sum(), "accuracy": right}
        return found


def _states(x: Tensor) -> tuple[torch.Size, int]:
    """Batch and tokens, and the number of dimensions."""
    return x.shape[:2], x.ndim


def _flat(x: Tensor, mask: Tensor) -> Tensor:
    """Rows [N, D]: the real tokens of an output [B, T, D], else one for each text."""
    return x[mask != 0] if x.ndim == 3 and x.shape[:2] == mask.shape else x.reshape(len(mask), -1)


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()
