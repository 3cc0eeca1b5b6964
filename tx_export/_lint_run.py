"""Runs of the module on real numbers that note the user's line of each call a graph can't hold, or holds badly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tx_export._lint_frames import Paths, Place, place_here

__all__ = ["Kind", "Notes", "watched"]

Kind = Literal["data-value", "data-shape", "random", "complex", "infinite-fill", "large-fill", "nan"]

_READERS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"})
_FILLS = frozenset(
    {"masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "tensor", "mul", "__mul__"}
    | {"__rmul__", "mul_", "__imul__", "__setitem__", "index_fill", "index_fill_", "pad", "scalar_tensor"}
)
_HALF_LIMIT = torch.finfo(torch.float16).max
_LIMITS = frozenset(torch.finfo(dtype).max for dtype in (torch.float32, torch.float64, torch.bfloat16))


@dataclass
class Notes:
    """The places of each kind, in the order in which they ran, each once."""

    places: dict[tuple[Kind, Place], str] = field(default_factory=dict)  # -> the operator, as torch calls it

    def of(self, kind: Kind) -> dict[Place, str]:
        return {place: name for (each, place), name in self.places.items() if each == kind}


class _Functions(TorchFunctionMode):
    """What the user's own line calls by name."""

    def __init__(self, paths: Paths, notes: Notes) -> None:
        super().__init__()
        self.paths, self.notes = paths, notes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READERS:
            self._note("data-value", name)
        if name in _FILLS and (kind := _fill_kind(args, kwargs)) is not None:
            self._note(kind, name)
        return func(*args, **kwargs)

    def _note(self, kind: Kind, name: str) -> None:
        place = place_here(self.paths)
        if place is not None and place.through == "user":
            self.notes.places.setdefault((kind, place), name)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What reaches the operators, whoever called them."""

    supports_higher_order_operators = True  # flex_attention and the like pass by

    def __init__(self, paths: Paths, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths, self.notes = paths, notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for kind in _operator_kinds(func, args, found):
            place = place_here(self.paths)
            if place is not None:
                self.notes.places.setdefault((kind, place), str(func))
        return found


def watched(run: Callable[[], Any], paths: Paths) -> tuple[Any, Notes]:
    """What a run returns, and what was noted in it."""
    notes = Notes()
    with _Operators(paths, notes), _Functions(paths, notes):
        return run(), notes


def _fill_kind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind | None:
    """Of the numbers among the arguments; the extremes of a dtype are what they should be."""
    numbers = [value for value in tree_iter([args, dict(kwargs)]) if isinstance(value, int | float)]
    if -math.inf in numbers:
        return "infinite-fill"
    finite = (value for value in numbers if abs(value) < math.inf and abs(value) not in _LIMITS)
    large = (value for value in finite if abs(value) > _HALF_LIMIT)
    return "large-fill" if any(isinstance(value, float) or value < 0 for value in large) else None


def _operator_kinds(func: Any, args: tuple[Any, ...], found: Any) -> Iterator[Kind]:
    tensors = [value for value in tree_iter(found) if isinstance(value, Tensor)]
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        yield "random"
    if torch.Tag.dynamic_output_shape in tags and not _indexes_by_number(func, args):
        yield "data-shape"
    if any(tensor.is_complex() for tensor in tensors):
        yield "complex"
    if any(_has_nan(tensor) for tensor in tensors) and not any(_has_nan(value) for value in tree_iter(args)):
        yield "nan"


def _indexes_by_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Indexing gives a shape of its own with a mask only."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) for value in args[1])


def _has_nan(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any())
