"""What training reads and writes beside text: weights to start from, and the folder of the result.

model.safetensors (its header holds the configuration), tokenizer.json, training.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import nn

from tx_export._training_loop import Fitted
from tx_export.errors import LoadError
from tx_export.spec import BuiltInSpec

__all__ = ["fields_of", "fingerprint", "identity", "make_folder", "replaced", "started", "write_folder"]


def started(spec: BuiltInSpec, dropout: float | None, initial: Path | None) -> nn.Module:
    """A new module with another dropout, if one is given, and the weights of a safetensors file, as far as it goes."""
    module = (spec if dropout is None else replaced(spec, {"dropout": dropout})).build()
    if initial is not None:
        _fill(module, initial)
    return module


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
    module.load_state_dict(given, strict=False)  # what shares its tensor with a given weight goes by that


def make_folder(folder: Path) -> None:
    """LoadError where it can't be written, or holds a trained model already."""
    if (folder / "model.safetensors").exists():
        raise LoadError(f"{folder} already holds a trained model; choose another folder, or delete it")
    probe = folder / "checkpoint.pt.tmp"  # better to fail now than at the first checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LoadError(f"{folder}: cannot be written: {error.strerror or error}") from error


def identity(path: Path) -> dict[str, str]:
    """The name of a file, and what is in it."""
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def fingerprint(record: Mapping[str, Any]) -> str:
    """What a checkpoint must carry to be continued: of all that decides the weights."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_folder(
    folder: Path, record: Mapping[str, Any], tokenizer: Tokenizer, fitted: Fitted, examples: tuple[int, int]
) -> None:
    """`record` holds the model's `config`, which goes into the header of the weights too."""
    outcome = {
        "metrics": fitted.metrics,
        "best_step": fitted.best_step,
        "steps": fitted.steps,
        "examples": {"train": examples[0], "held_out": examples[1]},
        "torch": torch.__version__,
    }
    text = json.dumps({**record, **outcome}, indent=2, sort_keys=True) + "\n"
    # One key only: safetensors writes metadata in the order of a hash table.
    header = {"config": json.dumps(record["config"], sort_keys=True)}
    first: dict[int, str] = {}  # weights that are shared are written once
    shared = ((name, first.setdefault(weight.data_ptr(), name)) for name, weight in fitted.weights.items())
    weights = {name: fitted.weights[name].contiguous() for name, kept in shared if name == kept}
    _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _replace(folder / "training.json", text.encode())
    _replace(folder / "model.safetensors", safetensors.torch.save(weights, header))


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def fields_of(spec: BuiltInSpec) -> dict[str, Any]:
    """The configuration, as JSON values and tuples."""
    return dataclasses.asdict(cast("Any", spec))


def replaced(spec: BuiltInSpec, changes: dict[str, Any]) -> BuiltInSpec:
    """The spec with other values of these fields."""
    return cast("BuiltInSpec", dataclasses.replace(cast("Any", spec), **changes))
