"""What a forward changes on its module: parameters, buffers, attributes; and a way to run it that changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Slot", "State", "as_it_was", "changes", "dotted", "state_of"]

Slot = tuple[str, str, str]  # the dotted path of the submodule, which of its tables, the key in it
State = Mapping[Slot, tuple[Any, tuple[object, ...]]]  # the value, kept so that its id stays its own, and its mark

_TABLES = ("_parameters", "_buffers", "_modules", "__dict__")
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set)
_ABSENT = object()


def state_of(module: nn.Module) -> State:
    """Everything that hangs on the module and its submodules; what is inside other objects is not seen."""
    return {
        (path, table, key): (value, _mark(value))
        for path, part in module.named_modules()
        for table in _TABLES
        for key, value in _entries(part, table).items()
        if table != "__dict__" or key not in _TORCHS_OWN
    }


def changes(before: State, after: State) -> tuple[Slot, ...]:
    """The slots that were set, removed or written to in place."""
    return tuple(
        slot
        for slot in sorted(before.keys() | after.keys())
        if slot not in before or slot not in after or before[slot][1] != after[slot][1]
    )


def dotted(slot: Slot) -> str:
    """The path that the user would write: `encoder.table`."""
    return ".".join(part for part in (slot[0], slot[2]) if part)


@contextmanager
def as_it_was(module: nn.Module, slots: Sequence[Slot]) -> Iterator[None]:
    """What is written to these slots inside goes to copies, and is gone afterwards."""
    kept = []
    for path, table, key in slots:
        entries = _entries(module.get_submodule(path), table)
        kept.append((entries, key, entries.get(key, _ABSENT)))
        if key in entries:
            entries[key] = _fresh(entries[key])
    try:
        yield
    finally:
        for entries, key, value in kept:
            if value is _ABSENT:
                entries.pop(key, None)
            else:
                entries[key] = value


def _entries(part: nn.Module, table: str) -> dict[str, Any]:
    entries: dict[str, Any] = vars(part) if table == "__dict__" else vars(part)[table]
    return entries


def _mark(value: object) -> tuple[object, ...]:
    if isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer):
        return (id(value),)
    if isinstance(value, Tensor):
        # Writing through .data leaves the version as it is, but hardly ever the sum.
        version = 0 if value.is_inference() else value._version
        total = value.detach().sum(dtype=None if value.is_complex() else torch.float64).item()
        return (id(value), tuple(value.shape), version, str(total))
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return (id(value), *(tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in items))
    if isinstance(value, int | float | str):
        return (type(value), value)
    return (id(value),)


def _fresh(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value
