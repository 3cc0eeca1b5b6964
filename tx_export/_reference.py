"""What eager answers, kept for every later check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tx_export._grid import Case
from tx_export._slow_path import slow_path
from tx_export.errors import LoadError
from tx_export.spec import EagerModel

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Reference", "Runner", "eager_runner"]

Array = NDArray[Any]
Runner = Callable[[Mapping[str, Array]], dict[str, Array]]

_KEPT_BYTES = 1 << 29  # of eager outputs; what doesn't fit is computed again for each check


def eager_runner(model: EagerModel, module: nn.Module | None = None) -> Runner:
    """Run the model's module, or another with the same inputs and outputs, as a runner; LoadError where it raises."""
    chosen = model.module if module is None else module

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        import torch

        try:
            with torch.inference_mode(), slow_path():
                found = chosen(*(torch.from_numpy(np.ascontiguousarray(feeds[spec.name])) for spec in model.inputs))
        except Exception as error:
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise LoadError(f"{model.source}: eager fails with {sizes}: {type(error).__name__}: {error}") from error
        tensors = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        if len(tensors) != len(model.outputs):
            raise LoadError(f"{model.source}: forward returns {len(tensors)} tensors, not {len(model.outputs)}")
        narrow = (torch.float16, torch.bfloat16)
        arrays = (tensor.float() if tensor.dtype in narrow else tensor for tensor in tensors)
        return {spec.name: array.detach().cpu().numpy() for spec, array in zip(model.outputs, arrays, strict=True)}

    return run


class Reference:
    """The eager outputs of cases, computed once."""

    def __init__(self, model: EagerModel, module: nn.Module | None = None) -> None:
        self.run = eager_runner(model, module)
        self._model, self._module = model, model.module if module is None else module
        self._kept: dict[Case, dict[str, Array]] = {}
        self._bytes = 0

    def __call__(self, case: Case) -> dict[str, Array]:
        if case in self._kept:
            return self._kept[case]
        outputs = self.run(case.feeds)
        size = sum(array.nbytes for array in outputs.values())
        if self._bytes + size <= _KEPT_BYTES:
            self._kept[case] = outputs
            self._bytes += size
        return outputs

    def in_float64(self, case: Case) -> dict[str, Array] | None:
        """The same outputs in float64; None of a module that doesn't compute so."""
        wide = copy.deepcopy(self._module).double()
        feeds = {
            name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in case.feeds.items()
        }
        try:
            return eager_runner(self._model, wide)(feeds)
        except LoadError:
            return None
