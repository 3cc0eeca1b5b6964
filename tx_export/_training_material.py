"""What a kind of data is to the training loop: how it is read, encoded, learnt from and judged."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tokenizers import Tokenizer

from tx_export._training_loop import Objective
from tx_export._training_steps import LoopOptions
from tx_export.spec import BuiltInSpec

__all__ = ["Material"]

Example = TypeVar("Example")


class Material(abc.ABC, Generic[Example]):
    """Of the models of one task; an example is what a line of the file holds."""

    fields: ClassVar[frozenset[str]]  # that the configuration must have beside those that all materials need

    @abc.abstractmethod
    def read(self, path: Path) -> list[Example]:
        """The examples of a file; LoadError names the line that is wrong."""

    @abc.abstractmethod
    def split(
        self, path: Path, examples: Sequence[Example], share: float, seed: int
    ) -> tuple[list[Example], list[Example]]:
        """Training and held-out part, a seeded random choice; both keep the file's order."""

    @abc.abstractmethod
    def tokenizer(self, examples: Sequence[Example], vocab_size: int) -> Tokenizer:
        """A new one of at most so many entries, trained on the examples."""

    @abc.abstractmethod
    def settled(self, path: Path, examples: Sequence[Example], fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of the configuration that the examples decide."""

    @abc.abstractmethod
    def objective(
        self, spec: BuiltInSpec, tokenizer: Tokenizer, parts: tuple[list[Example], list[Example]], options: LoopOptions
    ) -> Objective:
        """What to minimize: the loss of the first part; the second is held out."""
