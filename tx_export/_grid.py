"""The grid that fidelity is judged on: batch {1, 2, 5} by tokens {1, 2, 17, maximum} by kinds of mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["MASK_KINDS", "Case", "grid"]

Array = NDArray[Any]

MASK_KINDS = ("full", "ragged", "left", "holed", "empty")

_BATCHES = (1, 2, 5)
_SIZES = (1, 2, 17)


@dataclass(frozen=True, eq=False)
class Case:
    """One run: the kind of mask (or `text`), and an array for each input."""

    mask: str
    feeds: Mapping[str, Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first input, [batch, tokens] mostly."""
        return next(iter(self.feeds.values())).shape

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return f"{size} text" if self.mask == "text" else f"{size} {self.mask} mask"

    def to_json(self) -> dict[str, Any]:
        batch, tokens = (*self.shape, None, None)[:2]
        return {"batch": batch, "tokens": tokens, "mask": self.mask}


def grid(model: EagerModel, longest: int = 1024, seed: int = 0) -> tuple[Case, ...]:
    """All cases of a model; a dim runs up to its bound, or to `longest` where that is less.

    Named dims other than `batch` are sized together, each differently where their sizes allow.
    """
    cases = []
    for number, sizes in enumerate(_all_sizes(model, longest)):
        for kind in _kinds(model, sizes):
            rng = np.random.default_rng([seed, number, MASK_KINDS.index(kind)])
            cases.append(Case(kind, _feeds(model, sizes, kind, rng)))
    return tuple(cases)


def _all_sizes(model: EagerModel, longest: int) -> Iterator[dict[str, int]]:
    bounds: dict[str, int | None] = {}
    for dim in (dim for spec in model.inputs for dim in spec.dims if isinstance(dim, Dim)):
        known = [bound for bound in (bounds.get(dim.name), dim.bound) if bound is not None]
        bounds[dim.name] = min(known, default=None)
    choices = {name: _choices(bound, longest) for name, bound in bounds.items() if name != "batch"}
    largest = {name: sizes[-1] for name, sizes in choices.items()}
    together = [
        {name: sizes[(step + shift) % len(sizes)] for shift, (name, sizes) in enumerate(choices.items())}
        for step in range(max((len(sizes) for sizes in choices.values()), default=1))
    ]
    if largest not in together:
        together.append(largest)
    for others in together:
        # The largest size costs as much as all others together: it runs with one row.
        many = max(others.values(), default=1) <= _SIZES[-1]
        for batch in (size for size in _BATCHES if size <= (bounds.get("batch") or size) and (many or size == 1)):
            yield others | {"batch": batch} if "batch" in bounds else others
            if "batch" not in bounds:
                break


def _choices(bound: int | None, longest: int) -> list[int]:
    if bound is None:
        return list(_SIZES)
    largest = min(bound, longest)
    return sorted({size for size in _SIZES if size <= largest} | {largest})


def _kinds(model: EagerModel, sizes: Mapping[str, int]) -> tuple[str, ...]:
    shapes = [spec.shape(sizes) for spec in model.inputs if spec.is_mask and spec.dims]
    if not shapes:
        return ("full",)
    # One position is either real or not.
    return MASK_KINDS if max(shape[-1] for shape in shapes) > 1 else ("full", "empty")


def _feeds(model: EagerModel, sizes: Mapping[str, int], kind: str, rng: np.random.Generator) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    for spec in model.inputs:
        shape = spec.shape(sizes)
        values = _mask(shape, kind, rng) if spec.is_mask and shape else _draw(spec, shape, model.pad_id, rng)
        feeds[spec.name] = values.astype(spec.dtype)
    if model.pad_id is not None:
        masks = [spec for spec in model.inputs if spec.is_mask]
        for spec in (spec for spec in model.inputs if _holds_ids(spec)):
            for mask in (mask for mask in masks if mask.dims == spec.dims):
                feeds[spec.name] = np.where(feeds[mask.name] != 0, feeds[spec.name], model.pad_id).astype(spec.dtype)
    return feeds


def _holds_ids(spec: TensorSpec) -> bool:
    return spec.name.endswith("input_ids")


def _draw(spec: TensorSpec, shape: tuple[int, ...], pad_id: int | None, rng: np.random.Generator) -> Array:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f" and (spec.low is None or spec.high is None):
        return rng.standard_normal(shape)
    low = 0 if spec.low is None else spec.low
    high = low + 1 if spec.high is None else spec.high
    if dtype.kind == "f":
        return rng.uniform(low, high, shape)
    low, high = int(low), int(high)
    if spec.name.endswith("token_type_ids") or dtype.kind == "b":
        high = min(high, 1)
    if pad_id is None or not _holds_ids(spec) or not low <= pad_id <= high or low == high:
        values = rng.integers(low, high, shape, endpoint=True)
        values.reshape(-1)[[0, -1][: values.size]] = [low, high][: values.size]  # rows that chance seldom looks up
        return values
    values = rng.integers(low, high, shape)  # one value fewer: the pad id is left out
    return values + (values >= pad_id)


def _mask(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Array:
    """0 and 1; positions are the last axis."""
    rows, positions = int(np.prod(shape[:-1])), shape[-1]
    if kind in ("full", "empty") or positions == 1:
        mask = np.ones((rows, positions), dtype=np.int64)
        if kind == "empty":
            mask[min(1, rows - 1)] = 0
    elif kind == "holed":
        mask = (rng.random((rows, positions)) < 0.7).astype(np.int64)
        real, hole = rng.permuted(np.tile(np.arange(positions), (rows, 1)), axis=1)[:, :2].T
        mask[np.arange(rows), real], mask[np.arange(rows), hole] = 1, 0
    else:
        lengths = rng.integers(1, positions, rows)
        if rows > 1:
            lengths[0] = positions
        mask = (np.arange(positions) < lengths[:, None]).astype(np.int64)
        mask = mask[:, ::-1] if kind == "left" else mask
    return mask.reshape(shape)
