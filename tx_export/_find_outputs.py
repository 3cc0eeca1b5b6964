"""What a user's module gives, found by running it: names, dtypes, dims; and what its forward may not do.

Small and large sizes tell which dimension an axis follows. Running the small one again behind the large one tells
whether forward keeps state; other values tell whether every input, and every output, has to do with the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export._lint_frames import module_paths
from tx_export._lint_run import watched
from tx_export._lint_source import assigned_at
from tx_export._module_adapter import Call, ModuleAdapter
from tx_export._module_inputs import beyond, example, sizes_of
from tx_export._module_outputs import Place, leaves, output_names
from tx_export._module_source import UserModule
from tx_export._module_state import Slot, State, as_it_was, changes, dotted, state_of
from tx_export._slow_path import slow_path
from tx_export._torch_state import isolated
from tx_export.errors import LoadError
from tx_export.spec import Dim, TensorSpec

__all__ = ["adapted", "output_spec", "run"]

_log = logging.getLogger("tx_export")
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16"),
)
_DRAWS = 4  # of values, before an input or output is said to have to do with nothing


def run(user: UserModule, forward: Callable[..., Any], inputs: Sequence[Tensor], seed: int = 0) -> Any:
    """What forward returns; its errors become LoadError."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    what = f"{user.reference}: running it on inputs of shape {shapes}"
    with plugins.foreign(what, LoadError), isolated(seed), torch.no_grad(), slow_path():
        return forward(*inputs)


def adapted(
    user: UserModule, call: Call, module: nn.Module, specs: Sequence[TensorSpec]
) -> tuple[ModuleAdapter, tuple[TensorSpec, ...]]:
    """The module behind an adapter, and its outputs; a notice for each thing about them that may surprise."""
    module, slots = _settled(user, call, module, specs)
    small, large = sizes_of(specs)
    inputs = example(specs, small)
    with as_it_was(module, slots):
        found = _found(user, call, module, inputs)
    if not all(map(torch.equal, inputs, example(specs, small))):
        call = replace(call, copied=True)
    places = tuple(place for place, value in found.items() if isinstance(value, Tensor))
    if not places:
        raise LoadError(f"{user.reference}: forward returns no tensor; expected at least one")
    names, renamed = output_names(places, [spec.name for spec in specs])
    adapter = ModuleAdapter(module, call, places, slots).eval()
    answers = run(user, adapter, example(specs, small)), run(user, adapter, example(specs, large))
    outputs = tuple(
        output_spec(f"{user.reference}: output {name!r}", name, pair, (small, large), specs)
        for name, pair in zip(names, zip(*answers, strict=True), strict=True)
    )
    notices = [
        _listed("dropped, as they are no tensors", _dropped(found)),
        _listed("outputs with a name of their own", renamed),
        _listed("outputs that are an input as it is", [] if call.copied else _passed_on(found, names, specs, inputs)),
        *_unrelated(user, adapter, specs, names, answers[0]),
    ]
    for notice in filter(None, notices):
        _log.warning("%s: %s", user.reference, notice)
    return adapter, outputs


def _found(
    user: UserModule, call: Call, module: nn.Module, inputs: Sequence[Tensor], seed: int = 0
) -> dict[Place, Any]:
    """What forward returns, by place; LoadError for tensors that no graph can give."""
    found = leaves(run(user, partial(call, module), inputs, seed))
    for place, value in found.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or _dtype(value) not in _DTYPES):
            kind = _dtype(value) if value.layout == torch.strided else str(value.layout)
            raise LoadError(
                f"{user.reference}: output {'.'.join(place)!r} is {kind}; "
                f"ONNX Runtime gives dense tensors of {', '.join(_DTYPES)}"
            )
    return found


def _listed(what: str, items: Sequence[str]) -> str:
    return f"{what}: {', '.join(items)}" if items else ""


def _settled(
    user: UserModule, call: Call, module: nn.Module, specs: Sequence[TensorSpec]
) -> tuple[nn.Module, tuple[Slot, ...]]:
    """The module with its tables grown to the largest size, and what its forward still writes to.

    LoadError names what it keeps if its answers depend on earlier runs, or on growing without bound.
    """
    grown = ""
    for sizes in sizes_of(specs)[1], beyond(specs):
        trial = user.copy(module)
        slots, growing = _trial(user, call, trial, specs, sizes)
        if not growing:
            if grown:
                _log.warning("%s: %s had to grow to the largest inputs", user.reference, grown)
            return module, slots
        module, grown = trial, ", ".join(map(dotted, growing))
    raise LoadError(
        f"{user.reference}: forward grows {grown} with its inputs; give every dimension a "
        "bound (tokens<=512), so that it can be grown before the export, or build it at its largest size in __init__"
    )


def _trial(
    user: UserModule, call: Call, module: nn.Module, specs: Sequence[TensorSpec], large: Mapping[str, int]
) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """What forward writes to, and those tensors among it that stay as large as the largest input made them."""
    small, _ = sizes_of(specs)
    before = state_of(module)
    first = _found(user, call, module, example(specs, small))
    run(user, partial(call, module), example(specs, large))
    between = state_of(module)
    again = _found(user, call, module, example(specs, small), seed=1)
    after = state_of(module)
    slots = tuple(sorted({*changes(before, between), *changes(before, after)}))
    if not _same(first, again, 1e-4):
        cause = f"forward changes {', '.join(map(dotted, slots))}" if slots else "random numbers in forward?"
        where = _line(user, partial(call, module), module, example(specs, small), slots)
        raise LoadError(
            f"{where}{user.reference}: it answers differently when it is run again on the same inputs ({cause}); "
            "an artifact keeps no state between runs, and draws no random numbers"
        )
    return slots, tuple(slot for slot in slots if _shape(between, slot) == _shape(after, slot) != _shape(before, slot))


def _line(
    user: UserModule, forward: Callable[..., Any], module: nn.Module, inputs: Sequence[Tensor], slots: Sequence[Slot]
) -> str:
    """`FILE:LINE: ` of the user's that writes to the first slot, or that draws random numbers; empty if unknown."""
    paths = module_paths(module)
    if slots:
        part = module.get_submodule(slots[0][0])
        place = assigned_at(part, paths[id(part)], slots[0][2])
    else:
        _, notes = watched(lambda: run(user, forward, inputs), paths)
        place = next(iter(notes.of("random")), None)
    return "" if place is None else f"{place.file}:{place.line}: "


def _shape(state: State, slot: Slot) -> tuple[int, ...] | None:
    value = state[slot][0] if slot in state else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _same(first: Mapping[Place, Any], second: Mapping[Place, Any], tolerance: float) -> bool:
    """Whether two answers agree within a tolerance, relative to large values and absolute for small ones."""
    pairs = [(value, second.get(place)) for place, value in first.items() if isinstance(value, Tensor)]
    return all(
        isinstance(other, Tensor)
        and value.shape == other.shape
        and torch.allclose(value, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        for value, other in pairs
    )


def output_spec(
    place: str,
    name: str,
    pair: tuple[Tensor, Tensor],
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    inputs: Sequence[TensorSpec],
) -> TensorSpec:
    """An output that was seen at two sizes: an axis that grew like a dimension of the inputs has its name."""
    first, second = pair
    if first.ndim != second.ndim:
        raise LoadError(f"{place} has {first.ndim} dimensions, and {second.ndim} for larger inputs")
    named = {dim.name: dim for spec in reversed(inputs) for dim in spec.dims if isinstance(dim, Dim)}
    small, large = sizes
    dims: list[int | Dim] = []
    for axis, (short, long) in enumerate(zip(first.shape, second.shape, strict=True)):
        known = (named[key] for key in small if (small[key], large[key]) == (short, long))
        own = Dim(f"{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{axis}".lstrip("0123456789"))
        dims.append(short if short == long else next(known, own))
    return TensorSpec(name, _dtype(first), tuple(dims))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dropped(found: Mapping[Place, Any]) -> list[str]:
    dropped = {".".join(place): value for place, value in found.items() if not isinstance(value, Tensor)}
    return [f"{name} ({'None' if value is None else type(value).__name__})" for name, value in dropped.items()]


def _passed_on(
    found: Mapping[Place, Any], names: Sequence[str], specs: Sequence[TensorSpec], inputs: Sequence[Tensor]
) -> list[str]:
    outputs = zip(names, (value for value in found.values() if isinstance(value, Tensor)), strict=True)
    by_address = {(tensor.data_ptr(), tensor.shape): spec.name for spec, tensor in zip(specs, inputs, strict=True)}
    addresses = ((name, by_address.get((output.data_ptr(), output.shape))) for name, output in outputs)
    return [f"{name!r} is {source!r}" for name, source in addresses if source is not None]


def _unrelated(
    user: UserModule,
    adapter: ModuleAdapter,
    specs: Sequence[TensorSpec],
    names: Sequence[str],
    expected: Sequence[Tensor],
) -> list[str]:
    """Inputs that changed no output, and outputs that no input changed, over a few draws of other values."""
    small, _ = sizes_of(specs)

    def changed(inputs: Sequence[Tensor]) -> set[str]:
        answer = run(user, adapter, inputs)
        return {
            name for name, old, new in zip(names, expected, answer, strict=True) if not _same({(): old}, {(): new}, 0)
        }

    idle, alive = [], {name for name, old in zip(names, expected, strict=True) if not old.numel()}
    for index, spec in enumerate(specs):
        others = [example(specs, small, seed)[index] for seed in range(1, _DRAWS)]
        others = [other for other in others if not torch.equal(other, example(specs, small)[index])]
        reached: set[str] = set()
        while others and not reached:
            inputs = list(example(specs, small))
            inputs[index] = others.pop()
            reached = changed(inputs)
            idle += [repr(spec.name)] if not others and not reached else []
        alive |= reached
    for seed in range(1, _DRAWS):
        alive |= changed(example(specs, small, seed)) if len(alive) < len(names) else set()
    constant = [repr(name) for name in names if name not in alive]
    return [
        _listed("inputs that change no output; they are kept, and may be left out", idle),
        _listed("outputs that are the same whatever the inputs hold", constant),
    ]
