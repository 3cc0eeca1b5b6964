"""What running an ONNX file tells: which of its dimensions are one, how long inputs may be, and what it gives."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tx_export._find_outputs import output_spec
from tx_export._load_text import bounded, table_of
from tx_export._module_inputs import example, sizes_of
from tx_export._onnx_inputs import by_position
from tx_export._onnx_module import OnnxModule
from tx_export.errors import LoadError
from tx_export.metrics import fidelity_bound
from tx_export.spec import TensorSpec

__all__ = ["fitting", "measured", "outputs_of"]

_log = logging.getLogger("tx_export")
_LONGEST = 1024  # tokens that are tried
_ADVICE = "--input 'NAME:DTYPE[DIM,...]{LO..HI}'"


def _run(module: OnnxModule, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    """The answers to seeded inputs of these sizes."""
    try:
        outputs: tuple[Tensor, ...] = module(*example(specs, sizes))
    except Exception as error:  # of ONNX Runtime
        shapes = ", ".join(f"{spec.name} {list(spec.shape(sizes))}" for spec in specs)
        told = next(iter(str(error).splitlines()), type(error).__name__)
        raise LoadError(f"{module.path}: it can't be run with {shapes}: {told}") from error
    return outputs


def _runs(module: OnnxModule, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> bool:
    try:
        _run(module, specs, sizes)
    except LoadError:
        return False
    return True


def fitting(module: OnnxModule, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """As they are if the file runs at sizes that all differ, else with dimensions that go by their axis alone."""
    try:
        _run(module, specs, sizes_of(specs)[0])
    except LoadError as error:
        together = by_position(specs)
        if _runs(module, together, sizes_of(together)[0]):
            return together
        raise LoadError(f"{error}; say what it takes with {_ADVICE}") from error
    return specs


def measured(module: OnnxModule, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """With the most tokens that the file takes as a bound, where it takes fewer than the most that are tried."""
    sizes = sizes_of(specs)[0]
    if "tokens" not in sizes or table_of(specs) is not None:
        return specs
    full = tuple(replace(spec, low=1) if spec.is_mask else spec for spec in specs)  # positions may count what is real
    if "batch" in sizes and _runs(module, full, sizes | {"batch": 1}):
        sizes["batch"] = 1
    low, high = sizes["tokens"], _LONGEST
    if _runs(module, full, sizes | {"tokens": high}):
        return specs
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _runs(module, full, sizes | {"tokens": middle}) else (low, middle)
    _log.warning("%s: it takes up to %d tokens, as running it shows", module.path, low)
    return bounded(specs, low)


def outputs_of(module: OnnxModule, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Names, dtypes and dimensions, from runs at two sizes; LoadError for answers that nothing can be compared with."""
    small, large = sizes_of(specs)
    first, again, second = (_run(module, specs, sizes) for sizes in (small, small, large))
    for name, one, other in zip(module.output_names, first, again, strict=True):
        _check(f"{module.path}: output {name!r}", one.double(), other.double())
    return tuple(
        output_spec(f"{module.path}: output {name!r}", name, (one, other), (small, large), specs)
        for name, one, other in zip(module.output_names, first, second, strict=True)
    )


def _check(place: str, one: Tensor, other: Tensor) -> None:
    if not torch.isfinite(one).all():
        raise LoadError(
            f"{place} has values that are not finite, for random inputs; if that is due to a mask of which 1 hides, "
            f"or to numbers out of range, say what they may be with {_ADVICE}"
        )
    if one.shape != other.shape or (one.numel() and (one - other).abs().max() > fidelity_bound(float(one.abs().max()))):
        raise LoadError(
            f"{place} differs when the file is run again on the same inputs (random numbers, or Dropout in training "
            "mode?); such a file is no reference"
        )
