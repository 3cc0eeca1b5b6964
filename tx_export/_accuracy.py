"""Labelled text: how often the eager model and a runner are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tx_export._grid import Case
from tx_export._judging_text import batches
from tx_export._measure import answer
from tx_export._reference import Runner, eager_runner
from tx_export.errors import LoadError
from tx_export.spec import EagerModel

__all__ = ["Accuracy", "check_accuracy", "check_labels", "read_rows"]


@dataclass(frozen=True)
class Accuracy:
    """Shares of the labelled rows: right in eager, right in the artifact, the same in both."""

    eager: float
    artifact: float
    agreement: float
    rows: int

    def to_json(self) -> dict[str, float | int]:
        return dataclasses.asdict(self)


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Label and text of each line `label<TAB>text`; LoadError names the line that isn't one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: can't read it: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        label, tab, text = line.partition("\t")
        if line.strip() and not (tab and label.strip() and text.strip()):
            raise LoadError(f"{path}, line {number}: expected label<TAB>text, not {line[:60]!r}")
        if line.strip():
            rows.append((label.strip(), text.strip()))
    if not rows:
        raise LoadError(f"{path}: no rows; expected lines of label<TAB>text")
    return rows


def check_labels(model: EagerModel, rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The labels of a text classifier; LoadError for another task, or for a row whose label it doesn't have."""
    labels = model.text.labels if model.text is not None else ()
    if model.task != "text-classification" or not labels:
        raise LoadError(f"{model.source}: accuracy needs a text classifier with labels; the task is {model.task}")
    unknown = sorted({label for label, _ in rows} - set(labels))
    if unknown or not rows:
        raise LoadError(
            f"{model.source}: unknown label {', '.join(unknown) or '(no rows)'}; known: {', '.join(labels)}"
        )
    return labels


def check_accuracy(model: EagerModel, runner: Runner, rows: Sequence[tuple[str, str]]) -> Accuracy:
    """Judge (label, text) rows by the largest logit; LoadError for rows that can't be judged."""
    labels = check_labels(model, rows)
    wanted = np.array([labels.index(label) for label, _ in rows])
    eager, name = eager_runner(model), model.outputs[0].name
    expected, actual = np.empty_like(wanted), np.empty_like(wanted)
    for chosen, feeds in batches(model, [text for _, text in rows]):
        right = eager(feeds)
        expected[chosen] = right[name].argmax(axis=-1)
        actual[chosen] = answer("accuracy", runner, Case("text", feeds), right)[name].argmax(axis=-1)
    return Accuracy(
        eager=float((expected == wanted).mean()),
        artifact=float((actual == wanted).mean()),
        agreement=float((expected == actual).mean()),
        rows=len(rows),
    )
