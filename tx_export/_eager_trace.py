"""What eager computes on the way: every float tensor that goes into or comes out of one of the user's modules."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export._grid import Case
from tx_export._module_adapter import ModuleAdapter
from tx_export._reference import eager_runner
from tx_export.spec import EagerModel

__all__ = ["Moment", "Origin", "Trace", "trace"]

Array = NDArray[Any]

_MOST_BYTES = 1 << 29  # of tensors; a graph holds several times as much when all of its values are kept


@dataclass(frozen=True, eq=False)
class Origin:
    """The forward that a tensor was first seen in: it returned it, or handed it to a module inside."""

    owner: str  # dotted path as in named_modules; empty for the user's whole module
    call: int  # from 1
    returned: bool
    given: tuple[int, ...] = ()  # the moments of what the owner was given, if it returned this
    bias: Array | None = None  # what the owner added last


@dataclass(frozen=True, eq=False)
class Moment:
    """A tensor when it was first seen."""

    array: Array
    real: Array  # bool, of its shape: at positions that are padding, or not finite in eager, nothing is compared
    origin: Origin


@dataclass
class Trace:
    """Distinct tensors in the order of their making, the outputs by name, and the modules that ran."""

    outputs: dict[str, Moment] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)  # of each dotted path
    calls: Counter[str] = field(default_factory=Counter)
    weights: dict[str, set[int]] = field(default_factory=dict)  # numbers of elements of its own, without its modules'

    def common(self, paths: Sequence[str]) -> str:
        """The innermost module that ran and holds all of these."""
        parts = [path.split(".") for path in paths]
        shared = list(parts[0])
        for other in parts[1:]:
            same = (a == b for a, b in zip(shared, other, strict=False))
            shared = shared[: next((i for i, equal in enumerate(same) if not equal), min(len(shared), len(other)))]
        while shared and ".".join(shared) not in self.calls:
            shared.pop()
        return ".".join(shared)

    def spoilt(self) -> Origin | None:
        """Where a value first was not a number, or infinite, if that shows in the outputs."""
        found = [moment.array for moment in self.outputs.values() if not np.isfinite(moment.array).all()]
        is_bad = np.isnan if any(np.isnan(array).any() for array in found) else np.isinf
        return next((moment.origin for moment in self.moments if found and is_bad(moment.array).any()), None)

    def is_leaf(self, path: str) -> bool:
        return bool(path) and not any(other.startswith(f"{path}.") for other in self.calls)

    def label(self, path: str, call: int | None = None) -> str:
        """`layers.3.attention (MultiheadAttention)`, with the number of the call where there are several."""
        name = f"{path} ({self.classes[path]})" if path else self.classes[path]
        return f"{name}, call {call}" if call is not None and self.calls[path] > 1 else name


def trace(model: EagerModel, module: nn.Module, case: Case) -> Trace:
    """Run eager on a case and keep what its modules take and give."""
    users = module.module if isinstance(module, ModuleAdapter) else module
    recorder = _Recorder(model, case)
    handles = []
    for path, part in users.named_modules():
        recorder.trace.classes[path] = type(part).__name__
        recorder.trace.weights[path] = {weight.numel() for weight in part.parameters(recurse=False)}
        handles.append(part.register_forward_pre_hook(recorder.entering(path), with_kwargs=True))
        handles.append(part.register_forward_hook(recorder.leaving(path, part)))
    try:
        outputs = eager_runner(model, module)(case.feeds)
    finally:
        for handle in handles:
            handle.remove()
    whole = Origin("", 1, returned=True)
    recorder.see(outputs, whole)
    for name, array in outputs.items():
        recorder.trace.outputs[name] = recorder.moment(array.astype(np.float32), whole)
    return recorder.trace


class _Recorder:
    def __init__(self, model: EagerModel, case: Case) -> None:
        self.trace = Trace()
        masks = [spec.name for spec in model.inputs if spec.is_mask and len(spec.dims) == 2]
        self._mask = case.feeds[masks[0]] != 0 if masks else None  # [B, T]
        self._running: list[tuple[str, int, tuple[int, ...]]] = []  # path, number of the call, what it was given
        self._seen: dict[bytes, int] = {}
        self._bytes = 0

    def entering(self, path: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            outer, call, _ = self._running[-1] if self._running else ("", 1, ())
            given = self.see((args, kwargs), Origin(outer, call, returned=False))
            self.trace.calls[path] += 1
            self._running.append((path, self.trace.calls[path], given))

        return hook

    def leaving(self, path: str, part: nn.Module) -> Any:
        bias = dict(part.named_parameters(recurse=False)).get("bias")
        added = None if bias is None else bias.detach().cpu().float().numpy()

        def hook(part: nn.Module, args: Any, outputs: Any) -> None:
            _, call, given = self._running.pop()
            self.see(outputs, Origin(path, call, True, given, added))

        return hook

    def see(self, found: Any, origin: Origin) -> tuple[int, ...]:
        """Keep the tensors that are new; returns which moments all of them are."""
        return tuple(self._index(array, origin) for array in _float_arrays(found) if array.size)

    def _index(self, array: Array, origin: Origin) -> int:
        digest = hashlib.sha256(array.tobytes()).digest()
        if digest not in self._seen:
            self._bytes += array.nbytes
            if self._bytes > _MOST_BYTES:
                raise MemoryError(f"the modules' tensors take more than {_MOST_BYTES} bytes")
            self._seen[digest] = len(self.trace.moments)
            self.trace.moments.append(self.moment(array, origin))
        return self._seen[digest]

    def moment(self, array: Array, origin: Origin) -> Moment:
        return Moment(array, _real(array.shape, self._mask) & np.isfinite(array), origin)


def _float_arrays(found: Any) -> Iterator[Array]:
    if isinstance(found, Tensor):
        if found.dtype.is_floating_point:
            yield found.detach().to("cpu", torch.float32, copy=True).numpy()
    elif isinstance(found, np.ndarray):
        if found.dtype.kind == "f":
            yield found.astype(np.float32)
    elif isinstance(found, Mapping):
        yield from (array for value in found.values() for array in _float_arrays(value))
    elif isinstance(found, tuple | list):
        yield from (array for value in found for array in _float_arrays(value))


def _real(shape: tuple[int, ...], mask: Array | None) -> Array:
    """Where a tensor holds real positions, by the shape of the mask [B, T]; a row without any is not real."""
    real: Array = np.ones(shape, dtype=bool)
    if mask is None or mask.all():
        return real
    rows, positions = mask.shape
    if shape[:2] == (rows, positions):
        return real & mask.reshape(mask.shape + (1,) * (len(shape) - 2))
    if shape[:2] == (positions, rows):
        return real & mask.T.reshape(mask.T.shape + (1,) * (len(shape) - 2))
    if shape[:1] == (rows,):
        real &= mask.any(axis=1).reshape(-1, *(1,) * (len(shape) - 1))
    if shape[:1] == (rows,) and shape[2:3] == (positions,):
        real &= mask.reshape(rows, 1, positions, *(1,) * (len(shape) - 3))
    return real
