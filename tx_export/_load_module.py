"""A user's own nn.Module: a class, an instance or a function that returns one; its outputs are found by running it.

The eager model holds a copy in eval mode: the user's object keeps its mode, parameters, buffers and attributes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export._find_outputs import adapted, run
from tx_export._load_fit import check_finite, fill, matched
from tx_export._load_text import bounded
from tx_export._load_weights import read_weights
from tx_export._module_adapter import Call
from tx_export._module_inputs import declared, example, looked_up, sizes_of, with_ranges
from tx_export._module_source import UserModule, find_module
from tx_export._torch_state import isolated
from tx_export.errors import PluginError
from tx_export.spec import EagerModel, TensorSpec

__all__ = ["load_module"]

_log = logging.getLogger("tx_export")
_TASK = "feature-extraction"


def load_module(
    reference: str,
    *,
    inputs: Sequence[str],
    weights: Path | int | None,
    task: str | None,
    max_length: int | None,
    source: str,
) -> EagerModel:
    """From `path/to/file.py:NAME` or `package.module:NAME`; inputs are text forms, else from its tx_inputs()."""
    if isinstance(weights, int):
        raise PluginError(f"{reference} brings its own weights; --weights takes a .safetensors file for it")
    if task not in (None, _TASK):
        raise PluginError(f"task {task!r}: a user's module takes and gives arrays; its task is {_TASK} only")
    with plugins.importable(reference), isolated(0):
        user = find_module(reference)
        specs = bounded(declared(user, inputs), max_length)
        call = Call.of(reference, user.module, [spec.name for spec in specs], user.widened)
        module, specs = _started(user, call, specs)
        origin = f"module {_state_hash(module)}"
        if weights is not None:
            read = read_weights((weights,))
            fill(module, matched(module, read, str, ()))
            origin = f"checkpoint {read.sha256}"
        check_finite(module.named_parameters(), reference)
        adapter, outputs = adapted(user, call, module, specs)
    return EagerModel(
        name=reference.rpartition(":")[2],
        source=source,
        family="module",
        task=_TASK,
        module=adapter,
        inputs=specs,
        outputs=outputs,
        config={},
        weights=origin,
    )


def _started(user: UserModule, call: Call, specs: tuple[TensorSpec, ...]) -> tuple[nn.Module, tuple[TensorSpec, ...]]:
    """The module with the parameters that its first run makes, and the inputs with the ranges that run suggests."""
    trial = user.copy(user.module)
    inputs = example(specs, sizes_of(specs)[0])
    with looked_up(trial, specs, inputs) as rows:
        run(user, partial(call, trial), inputs)
    specs = with_ranges(specs, trial, rows)
    made = sorted(_parameters(trial) - _parameters(user.module))
    if not made:
        return user.module, specs
    _log.warning("%s: its first run made %s: random numbers from seed 0", user.reference, ", ".join(dict(made)))
    trial.eval()
    return trial, specs


def _parameters(module: nn.Module) -> set[tuple[str, str]]:
    """Name and class of each; a lazy one changes its class when it gets its shape."""
    return {(name, type(tensor).__name__) for name, tensor in module.named_parameters()}


def _state_hash(module: nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes, sorted by name."""
    digest = hashlib.sha256()
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
