"""What an export of a user's module would freeze, lose or get wrong: each with its file, line and remedy.

Nothing is guessed from the text: the module runs, on symbolic sizes and on numbers, and what happens is reported.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tx_export._lint_frames import Place, module_paths
from tx_export._lint_rules import Finding, finding
from tx_export._lint_run import Notes, watched
from tx_export._lint_source import assigned_at, defined_at
from tx_export._lint_trace import Trace, needed_value, trace, without_traces
from tx_export._module_adapter import ModuleAdapter
from tx_export._module_inputs import example, sizes_of
from tx_export._module_state import Slot, changes, dotted, state_of
from tx_export._slow_path import slow_path
from tx_export._torch_state import isolated
from tx_export._user_code import foreign
from tx_export.errors import LoadError
from tx_export.spec import EagerModel

__all__ = ["Finding", "lint"]


def lint(model: EagerModel) -> tuple[Finding, ...]:
    """Errors first, each in the order in which its lines ran. The module stays as it is."""
    module = without_traces(model.module)
    before = state_of(module)
    inputs = example(model.inputs, sizes_of(model.inputs)[0])
    answer, notes = watched(lambda: _run(module, inputs), module_paths(module))
    slots = module.slots if isinstance(module, ModuleAdapter) else changes(before, state_of(module))
    traced = trace(model)
    found = [
        *_training(model.module),
        *_sizes(traced),
        *_values(traced, notes),
        *_state(_users(module), slots),
        *_numbers(notes),
        *_random(module, inputs, answer, notes),
        *_empty_rows(model, module, inputs),
    ]
    wrong = {(each.file, each.line) for each in found if each.severity == "error"}
    told = (each for each in found if each.kind != "data-value" or (each.file, each.line) not in wrong)
    return tuple(sorted(dict.fromkeys(told), key=lambda each: each.severity != "error"))


def _users(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, ModuleAdapter) else module


def _run(module: nn.Module, inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    with foreign("forward", LoadError), isolated(seed), torch.no_grad(), slow_path():
        return [value for value in tree_leaves(module(*inputs)) if isinstance(value, Tensor)]


def _training(module: nn.Module) -> Iterator[Finding]:
    """Parts of the user's that are still in train mode."""
    paths = module_paths(module)
    for part in _users(module).modules():
        place = defined_at(part, paths[id(part)]) if part.training else None
        if place is not None:
            yield finding("train-mode", place)


def _sizes(traced: Trace) -> Iterator[Finding]:
    """Numbers that Python makes of a dimension, and branches of the user's that divide its declared range."""
    for question in traced.questions:
        dims, through = " and ".join(map(repr, question.dims)), question.place.through
        # Where this way of tracing stops, torch.export takes its other one, which reads Python and keeps such numbers;
        # what torch's own code asks, it may ask in this run only.
        if question.number and through in ("user", "operator") and traced.failure is None:
            yield finding("frozen-dimension", question.place, dims)
        elif not question.number and through == "user":
            yield finding("shape-branch", question.place, dims)


def _values(traced: Trace, notes: Notes) -> Iterator[Finding]:
    """What Python reads out of tensors, and what it decides by that; an export leaves assertions out."""
    place, own = traced.place, ("user", "operator")
    if place is not None and place.through in own and needed_value(traced.failure) == "branch" and not _asserts(place):
        yield finding("data-branch", place)
    yield from (finding("data-value", place) for place in notes.of("data-value") if not _asserts(place))
    yield from (finding("data-shape", place) for place in notes.of("data-shape") if place.through != "library")


def _asserts(place: Place) -> bool:
    return linecache.getline(place.file, place.line).lstrip().startswith("assert")


def _numbers(notes: Notes) -> Iterator[Finding]:
    """The first line of each module that computes with complex numbers, and every fill too large for half precision."""
    first = {place.module: place for place in reversed(notes.of("complex"))}
    yield from (finding("complex", place) for place in first.values())
    yield from (finding("large-fill", place) for place in notes.of("large-fill"))


def _state(module: nn.Module, slots: Sequence[Slot]) -> Iterator[Finding]:
    """What forward writes to its module."""
    paths = module_paths(module)
    for slot in slots:
        part = module.get_submodule(slot[0])
        place = assigned_at(part, paths[id(part)], slot[2])
        if place is not None:
            yield finding("state", place, dotted(slot))


def _random(module: nn.Module, inputs: Sequence[Tensor], answer: Sequence[Tensor], notes: Notes) -> Iterator[Finding]:
    """Operators that draw, if another seed gives another answer."""
    drawn = notes.of("random")
    if drawn and not all(map(torch.equal, answer, _run(module, inputs, seed=1))):
        yield from (finding("random", place, name) for place, name in drawn.items())


def _empty_rows(model: EagerModel, module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[Finding]:
    """Where NaN comes from when the last row of every mask is empty: the fills with -inf, else where it was born."""
    masks = [spec.is_mask and bool(spec.dims) for spec in model.inputs]
    emptied = [feed.clone() if is_mask else feed for feed, is_mask in zip(inputs, masks, strict=True)]
    for feed, is_mask in zip(emptied, masks, strict=True):
        if is_mask:
            feed[-1] = 0
    if not any(masks):
        return
    answer, notes = watched(lambda: _run(module, emptied), module_paths(module))
    if any(bool(value.isnan().any()) for value in answer):
        fills = notes.of("infinite-fill") or dict(list(notes.of("nan").items())[:1])
        parts = dict(_users(module).named_modules())
        for place in fills:
            stock = isinstance(parts.get(place.module), nn.MultiheadAttention)
            yield finding("nan-weights" if stock else "nan", place)
