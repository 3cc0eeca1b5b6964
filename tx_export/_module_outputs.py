"""What a forward returns, as tensors with names.

tensor                          output_0
tuple or list                   output_0, output_1, ...
dict, NamedTuple, dataclass     the keys, or the names of the fields
nested                          the parts joined by dots: hidden.0, encoder.logits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tx_export.errors import LoadError

__all__ = ["Place", "leaves", "output_names"]

Place = tuple[str, ...]  # the keys on the way to a value


def leaves(outputs: Any) -> dict[Place, Any]:
    """Every value that is not a collection itself, tensor or not, under the keys that lead to it."""
    if isinstance(outputs, Tensor):
        return {("output_0",): outputs}
    entries = _entries(outputs)
    if entries is None:
        raise LoadError(
            f"the module returned {type(outputs).__name__}; expected a tensor, or a tuple, dict or dataclass of tensors"
        )
    prefix = "output_" if _is_plain(outputs) else ""
    return dict(leaf for key, value in entries for leaf in _leaves(value, (f"{prefix}{key}",)))


def output_names(places: Sequence[Place], inputs: Collection[str]) -> tuple[tuple[str, ...], list[str]]:
    """A name for each place, all different, none that of an input; and what was renamed, in words."""
    names: list[str] = []
    renamed = []
    for index, place in enumerate(places):
        wanted = ".".join(place)
        name = f"{wanted}_out" if wanted in inputs else wanted or f"output_{index}"
        while name in names or name in inputs:
            name += "_"
        if name != wanted:
            renamed.append(f"{wanted!r} is called {name!r}")
        names.append(name)
    return tuple(names), renamed


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    entries = _entries(value)
    if entries is None:
        yield place, value
        return
    for key, entry in entries:
        yield from _leaves(entry, (*place, str(key)))


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return None


def _is_plain(value: Any) -> bool:
    """Whether its entries have numbers, not names."""
    return isinstance(value, tuple | list) and getattr(value, "_fields", None) is None
