"""Labelled texts: what a classifier is trained and judged on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from tokenizers import Tokenizer

from tx_export._training_loop import Objective, label_objective
from tx_export._training_material import Material
from tx_export._training_steps import LoopOptions
from tx_export._training_text import Example, encode, labels_of, read_examples, split, train_tokenizer
from tx_export.spec import BuiltInSpec

__all__ = ["Labels"]


class Labels(Material[Example]):
    """Lines `label<TAB>text[<TAB>confidence]`."""

    fields: ClassVar[frozenset[str]] = frozenset({"labels"})

    def read(self, path: Path) -> list[Example]:
        return read_examples(path)

    def split(
        self, path: Path, examples: Sequence[Example], share: float, seed: int
    ) -> tuple[list[Example], list[Example]]:
        return split(path, examples, share, seed)

    def tokenizer(self, examples: Sequence[Example], vocab_size: int) -> Tokenizer:
        return train_tokenizer([example.text for example in examples], vocab_size)

    def settled(self, path: Path, examples: Sequence[Example], fields: dict[str, Any]) -> dict[str, Any]:
        return {"labels": labels_of(path, examples, fields["labels"])}

    def objective(
        self, spec: BuiltInSpec, tokenizer: Tokenizer, parts: tuple[list[Example], list[Example]], options: LoopOptions
    ) -> Objective:
        fields = cast("Any", spec)
        train, held_out = (encode(tokenizer, part, fields.labels, fields.max_length) for part in parts)
        return label_objective(train, held_out, options)
