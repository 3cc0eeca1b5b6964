"""An ONNX file as a module: the untouched file in ONNX Runtime, which is the reference of everything made from it."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tx_export import runtime
from tx_export.errors import LoadError
from tx_export.providers.cpu import Cpu

__all__ = ["OnnxModule", "file_hash"]

# As artifacts run: with exact 8-bit products, and the same fusions, as roundings of a quantized file go with them.
_SETTINGS = Cpu().session()
_NUMBERS = (
    "bool",
    "double",
    "float",
    "float16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)


class OnnxModule(nn.Module):
    """Takes and gives tensors in the order of the file's inputs and outputs.

    Raises ArtifactError for a file that ONNX Runtime refuses or whose weights lie elsewhere, LoadError for one that
    takes or gives something else than tensors of numbers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        runtime.external_files(path)  # refuses what leads out of the folder, before anything else reads the file
        self.path = path
        self._session = runtime.open_session(path, "0", "cpu", _SETTINGS, torch.get_num_threads())
        self.input_names, self.output_names = (
            _names(path, kind, values)
            for kind, values in (("input", self._session.get_inputs()), ("output", self._session.get_outputs()))
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        feeds = {name: tensor.numpy() for name, tensor in zip(self.input_names, tensors, strict=True)}
        outputs = self._session.run(self.output_names, feeds)
        return tuple(torch.from_numpy(np.asarray(output)) for output in outputs)


def _names(path: Path, kind: str, values: list[Any]) -> list[str]:
    for value in values:
        if value.type not in [f"tensor({number})" for number in _NUMBERS]:
            raise LoadError(f"{path}: {kind} {value.name!r} is {value.type}; only tensors of numbers can be compared")
    if not values:
        raise LoadError(f"{path}: it has no {kind}s, so there is nothing to compare")
    names = [value.name for value in values]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise LoadError(f"{path}: two {kind}s are named {twice[0]!r}; each needs a name of its own")
    return names


def file_hash(path: Path) -> str:
    """sha256 of a file and of those in which its weights lie."""
    digest = hashlib.sha256()
    for part in (path, *(path.parent / name for name in runtime.external_files(path))):
        with part.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
