"""A user's module as ours are: forward takes the declared inputs by position and returns the outputs in order."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tx_export._module_outputs import Place, leaves
from tx_export._module_state import Slot, as_it_was
from tx_export.errors import LoadError

__all__ = ["Call", "ModuleAdapter", "users_path"]

_log = logging.getLogger("tx_export")
_Kind = inspect.Parameter


def users_path(path: str) -> str:
    """The dotted path that the user knows, of one inside the adapter: `module.encoder.0` is `encoder.0`."""
    return "" if path == "module" else path.removeprefix("module.")


@dataclass(frozen=True)
class Call:
    """How forward gets the declared inputs."""

    keywords: tuple[str, ...]  # for each input; empty: by position
    widened: bool  # the module was of half precision, so its inputs are widened too
    copied: bool = False  # forward writes to its inputs, and gets copies

    @classmethod
    def of(cls, reference: str, module: nn.Module, inputs: Sequence[str], widened: bool) -> Call:
        """By position where no name stands in the way, else by name; LoadError shows the signature."""
        try:
            signature = inspect.signature(module.forward)
        except (TypeError, ValueError):  # forward is no Python function
            return cls((), widened)
        return cls(_keywords(reference, signature, tuple(inputs)), widened)

    def __call__(self, module: nn.Module, *inputs: Tensor) -> Any:
        if self.copied:
            inputs = tuple(tensor.clone() for tensor in inputs)
        if self.widened:
            inputs = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)
        if self.keywords:
            return module(**dict(zip(self.keywords, inputs, strict=True)))
        return module(*inputs)


class ModuleAdapter(nn.Module):
    """Holds the user's module as `module`; what its forward writes to `slots` is gone when it returns."""

    def __init__(self, module: nn.Module, call: Call, places: tuple[Place, ...], slots: tuple[Slot, ...]) -> None:
        super().__init__()
        self.module = module
        self.call, self.places, self.slots = call, places, slots

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with as_it_was(self.module, self.slots):
            found = leaves(self.call(self.module, *inputs))
        missing = [".".join(place) for place in self.places if not isinstance(found.get(place), Tensor)]
        if missing:
            raise LoadError(f"forward returned no tensor {', '.join(missing)}, which it did on other inputs")
        return tuple(_widened(found[place]) for place in self.places)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16


def _keywords(reference: str, signature: inspect.Signature, inputs: tuple[str, ...]) -> tuple[str, ...]:
    parameters = signature.parameters.values()
    positional = [item.name for item in parameters if item.kind in (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)]
    named = {item.name for item in parameters if item.kind in (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)}
    misplaced = any(name in named and name not in positional[index : index + 1] for index, name in enumerate(inputs))
    strangers = sorted({*inputs} - named)
    if _fits(signature, inputs, ()) and not misplaced:
        if strangers and named & {*inputs}:
            _log.warning("%s: forward has no %s: inputs go by position", reference, ", ".join(strangers))
        return ()
    if _fits(signature, (), inputs):
        return inputs
    needed = [item.name for item in parameters if item.default is item.empty and item.name in named - {*inputs}]
    reason = f"{', '.join(needed)} is missing" if not strangers else "neither the names nor the number fits"
    raise LoadError(f"{reference}: the inputs {', '.join(inputs)} don't fit forward{_short(signature)}: {reason}")


def _short(signature: inspect.Signature) -> inspect.Signature:
    """Without annotations."""
    bare = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _fits(signature: inspect.Signature, positions: Sequence[str], keywords: Sequence[str]) -> bool:
    try:
        signature.bind(*positions, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
