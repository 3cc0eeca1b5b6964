"""Teacher and student brought together: one task, labels by name, and for a built-in student a new module."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tx_export import plugins
from tx_export._load_builtin import parse_settings
from tx_export._load_fit import build_seeded
from tx_export._load_text import table_of
from tx_export._training_folder import fields_of, replaced, started
from tx_export._training_text import read_tokenizer
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import BuiltInSpec, EagerModel, Scores, TextSpec

__all__ = ["check_pair", "new_student", "places", "student_of", "with_text"]

_GIVES = {"text-classification": "logits for labels", "sentence-embedding": "an embedding of a text"}


def places(names: Sequence[str], known: Sequence[str], whose: str) -> list[int]:
    """Where each name stands among the teacher's labels, the case aside; LoadError for one that isn't there."""
    found = []
    for name in names:
        exact = [index for index, label in enumerate(known) if label == name]
        alike = exact or [index for index, label in enumerate(known) if label.casefold() == name.casefold()]
        if len(alike) != 1:
            raise LoadError(
                f"{whose} has the label {name!r}, which is not one of the teacher's: {', '.join(known)}; "
                "labels are matched by their names (id2label in a config.json)"
            )
        found += alike
    return found


def student_of(source: str, size: str, settings: Mapping[str, str]) -> BuiltInSpec | EagerModel:
    """A built-in family to make a new student of, or what else `load` takes, with its weights."""
    family: Any = plugins.find("model", source) if source in plugins.names("model") else None
    if family is None or not issubclass(family, BuiltInSpec):
        return load(source, size=size, settings=settings)
    spec: BuiltInSpec = family(**(dict(family.sizes[size]) | parse_settings(source, family, settings)))
    return spec


def with_text(teacher: EagerModel, task: str, labels: Sequence[str], tokenizer: Path | None) -> EagerModel:
    """The teacher; a user's module is taken for one of the task, if it gives one row for a text."""
    if teacher.family != "module":
        return teacher
    if tokenizer is None:
        raise LoadError(f"{teacher.source}: a user's module brings no tokenizer; give it one with --tokenizer")
    (first, *_), limit = teacher.outputs, table_of(teacher.inputs) or 512
    if len(first.dims) != 2 or (labels and first.dims[1] != len(labels)):
        raise LoadError(f"{teacher.source}: its output {first} is not {_GIVES.get(task, 'a row for each text')}")
    read = read_tokenizer(tokenizer)
    text = TextSpec(read.to_str(), limit, read.token_to_id("[PAD]") or 0, tuple(labels), _scores(labels))
    output = dataclasses.replace(first, name="logits" if labels else first.name)
    return dataclasses.replace(teacher, task=task, text=text, outputs=(output, *teacher.outputs[1:]))


def _scores(labels: Sequence[str]) -> Scores:
    return "sigmoid" if len(labels) == 1 else "softmax"


def new_student(
    spec: BuiltInSpec,
    teacher: EagerModel,
    *,
    tokenizer: Path | None,
    dropout: float | None,
    initial: Path | None,
    seed: int,
) -> EagerModel:
    """A built-in student with the teacher's labels, and its tokenizer unless another one is given."""
    assert teacher.text is not None
    read = Tokenizer.from_str(teacher.text.tokenizer) if tokenizer is None else read_tokenizer(tokenizer)
    labels = tuple(fields_of(spec).get("labels", ()))
    if labels and not _same(labels, teacher.text.labels):
        labels = teacher.text.labels
    entries = 1 + max(read.get_vocab(with_added_tokens=True).values())
    spec = replaced(spec, {"vocab_size": entries} | ({"labels": labels} if labels else {}))
    fields = json.loads(json.dumps(fields_of(spec)))
    family = type(spec).__module__.rpartition(".")[2]
    pad_id = teacher.text.pad_id if tokenizer is None else read.token_to_id("[PAD]") or 0
    return EagerModel(
        name=family,
        source=family,
        family=family,
        task=spec.task,
        module=build_seeded(lambda: started(spec, dropout, initial), seed),
        inputs=spec.inputs(),
        outputs=spec.outputs(),
        config=fields,
        weights=f"random seed {seed}",
        text=TextSpec(read.to_str(), table_of(spec.inputs()) or 512, pad_id, labels, _scores(labels)),
    )


def _same(names: Sequence[str], others: Sequence[str]) -> bool:
    return sorted(map(str.casefold, names)) == sorted(map(str.casefold, others))


def check_pair(teacher: EagerModel, student: EagerModel) -> None:
    """LoadError where what the teacher gives is not what the student is to give."""
    if student.text is None or teacher.text is None:
        bare = student if student.text is None else teacher
        raise LoadError(f"{bare.source}: there is no tokenizer, so it can't learn or teach with text")
    if teacher.task != student.task:
        wanted = _GIVES.get(student.task, student.task)
        raise LoadError(
            f"{teacher.source} is for {teacher.task}, but a teacher of {student.source} must give {wanted} "
            f"({student.task})"
        )
    if student.text.labels and teacher.text.scores != student.text.scores:
        raise LoadError(
            f"{teacher.source} scores its labels by {teacher.text.scores}, {student.source} by {student.text.scores}"
        )
    if len(student.text.labels) not in (0, len(teacher.text.labels)):
        raise LoadError(
            f"{teacher.source} has the labels {', '.join(teacher.text.labels)}, "
            f"{student.source} {', '.join(student.text.labels)}; they must be the same"
        )
    if teacher.task == "fill-mask" and teacher.outputs[0].dims[-1] != student.outputs[0].dims[-1]:
        raise LoadError(
            f"{teacher.source} scores {teacher.outputs[0].dims[-1]} words, {student.source} "
            f"{student.outputs[0].dims[-1]}; they need one vocabulary"
        )
    if len(teacher.outputs) != len(student.outputs):
        raise LoadError(
            f"{teacher.source} has {len(teacher.outputs)} outputs, {student.source} {len(student.outputs)}; "
            "they are matched one by one"
        )
