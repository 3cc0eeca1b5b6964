"""What a teacher says: to a batch of the student's ids, or to texts that it reads with a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tx_export._distillation_watch import Watched, watching
from tx_export._judging_text import batches
from tx_export._training_folder import fingerprint
from tx_export._training_text import Batch
from tx_export.errors import LoadError
from tx_export.spec import EagerModel, TensorSpec

__all__ = ["Answer", "Ask", "asked", "call", "in_order", "live", "remembered"]


class Answer(NamedTuple):
    """What a model computes for a batch: its outputs, and what was seen on the way."""

    outputs: tuple[Tensor, ...]
    seen: Watched


Ask = Callable[[Sequence[int], Batch], Answer]  # the numbers of rows, and these rows as a batch


def call(module: nn.Module, inputs: Sequence[TensorSpec], batch: Batch, input_ids: Tensor) -> tuple[Tensor, ...]:
    """The outputs for a batch, with these ids instead of its own."""
    values = {
        "input_ids": input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": torch.zeros_like(input_ids),
    }
    if unknown := [spec.name for spec in inputs if spec.name not in values]:
        raise LoadError(f"text gives {', '.join(values)}, but the model also takes {', '.join(unknown)}")
    return _tuple(module(*(values[spec.name].to(getattr(torch, spec.dtype)) for spec in inputs)))


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def live(teacher: EagerModel) -> Ask:
    """The teacher runs on each batch."""

    def ask(_numbers: Sequence[int], batch: Batch) -> Answer:
        with torch.no_grad(), watching(teacher.module) as seen:
            outputs = call(teacher.module, teacher.inputs, batch, batch.input_ids)
        return Answer(outputs, seen)

    return ask


def remembered(answers: Tensor) -> Ask:
    """What the teacher said before, row by row."""
    return lambda numbers, _batch: Answer((answers[list(numbers)],), Watched())


def asked(teacher: EagerModel, texts: Sequence[str], file: Path) -> Tensor:
    """The output [N, D] for each text; kept in the file, for a run that is continued."""
    mark = fingerprint({"teacher": teacher.weights, "texts": list(texts)})
    if file.exists():
        with safe_open(file, "pt") as kept:
            if (kept.metadata() or {}).get("fingerprint") == mark:
                answers_kept: Tensor = kept.get_tensor("answers")
                return answers_kept
    answers: list[Tensor] = [torch.empty(0)] * len(texts)
    with torch.no_grad():
        for chosen, feeds in batches(teacher, texts):
            outputs = _tuple(teacher.module(*(torch.from_numpy(feeds[spec.name]) for spec in teacher.inputs)))
            for number, row in zip(chosen, outputs[0], strict=True):
                answers[number] = row
    found = torch.stack(answers)
    unfinished = file.with_name(file.name + ".tmp")
    safetensors.torch.save_file({"answers": found}, unfinished, {"fingerprint": mark})
    unfinished.replace(file)
    return found


def in_order(ask: Ask, labels: Sequence[int]) -> Ask:
    """The first output with its last axis in the order of the student's labels."""

    def ordered(numbers: Sequence[int], batch: Batch) -> Answer:
        answer = ask(numbers, batch)
        return answer._replace(outputs=(answer.outputs[0][..., list(labels)], *answer.outputs[1:]))

    return ordered
