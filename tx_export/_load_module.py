"""A user's own nn.Module: a class, an instance or a function that returns one; its outputs are found by running it.

The eager model holds a deep copy in eval mode, so the user's object keeps its mode and parameters.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export._load_fit import build_seeded, fill, matched
from tx_export._load_text import bounded
from tx_export._load_weights import read_weights
from tx_export._slow_path import slow_path
from tx_export.errors import LoadError, PluginError
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["load_module"]

_log = logging.getLogger("tx_export")
_SIZES = ((2, 3, 5, 7, 11, 13), (3, 4, 6, 8, 12, 14))  # of the named dimensions, in two runs


def load_module(
    reference: str,
    *,
    inputs: Sequence[str],
    weights: Path | int | None,
    task: str | None,
    max_length: int | None,
    source: str,
) -> EagerModel:
    """From `path/to/file.py:NAME` or `package.module:NAME`; inputs are text forms, else from its tx_inputs()."""
    if isinstance(weights, int):
        raise PluginError(f"{reference} brings its own weights; --weights takes a .safetensors file for it")
    found = build_seeded(lambda: plugins.import_object(reference), 0)
    module = _copied(reference, build_seeded(lambda: _module(reference, found), 0))
    specs = tuple(TensorSpec.parse(text) for text in inputs or _own_inputs(reference, found, module))
    specs = bounded(tuple(_with_range(spec, module) for spec in specs), max_length)
    origin = f"module {_state_hash(module)}"
    if weights is not None:
        read = read_weights((weights,))
        fill(module, matched(module, read, str, ()))
        origin = f"checkpoint {read.sha256}"
    flat, outputs = _find_outputs(reference, module, specs)
    return EagerModel(
        name=reference.rpartition(":")[2],
        source=source,
        family="module",
        task=task or "feature-extraction",
        module=flat.eval(),
        inputs=specs,
        outputs=outputs,
        config={},
        weights=origin,
    )


class _Flat(nn.Module):
    """Gives a module's outputs as a tuple of tensors, in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_named_outputs(self.module(*inputs)).values())


def _module(reference: str, found: object) -> nn.Module:
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise PluginError(
            f"{reference} is {type(found).__name__}; expected an nn.Module, a class of one, or a function"
        )
    with plugins.foreign(f"{reference}: building it", LoadError):
        module = found()
    if not isinstance(module, nn.Module):
        raise PluginError(f"{reference} returned {type(module).__name__}; expected an nn.Module")
    return module


def _copied(reference: str, module: nn.Module) -> nn.Module:
    with plugins.foreign(f"{reference}: copying it", LoadError):
        return copy.deepcopy(module).eval()


def _own_inputs(reference: str, found: object, module: nn.Module) -> Sequence[str]:
    """What the module's, the function's or the file's tx_inputs() returns."""
    own = getattr(module, "tx_inputs", None) or getattr(found, "tx_inputs", None)
    if own is None:
        try:
            own = plugins.import_object(f"{reference.rpartition(':')[0]}:tx_inputs")
        except PluginError as error:
            raise LoadError(
                f"{reference}: its inputs are not known; give each with --input 'NAME:DTYPE[DIM,...]{{LO..HI}}', "
                "or add a tx_inputs() that returns such texts"
            ) from error
    with plugins.foreign(f"{reference}: tx_inputs()", LoadError):
        texts = own()
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise LoadError(f"{reference}: tx_inputs() returned {texts!r:.80}; expected a list of input texts")
    return texts


def _with_range(spec: TensorSpec, module: nn.Module) -> TensorSpec:
    """Without a range, a mask is 0 or 1, and integers are ids of the smallest embedding."""
    if spec.low is not None:
        return spec
    if spec.is_mask:
        return TensorSpec(spec.name, spec.dtype, spec.dims, 0, 1)
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if "int" not in spec.dtype or not rows:
        return spec
    return TensorSpec(spec.name, spec.dtype, spec.dims, 0, min(rows) - 1)


def _find_outputs(
    reference: str, module: nn.Module, inputs: Sequence[TensorSpec]
) -> tuple[nn.Module, tuple[TensorSpec, ...]]:
    runs = []
    for sizes in _SIZES:
        named = _named_sizes(inputs, sizes)
        with plugins.foreign(f"{reference}: running it on a small input", LoadError), torch.no_grad(), slow_path():
            runs.append((named, module(*(_example(spec, named) for spec in inputs))))
    (first, outputs), (second, again) = runs
    shapes, shapes_again = _named_outputs(outputs), _named_outputs(again)
    specs = []
    for name, tensor in shapes.items():
        pairs = zip(tensor.shape, shapes_again[name].shape, strict=True)
        dims = tuple(_dim(f"{name}_{axis}", pair, first, second, inputs) for axis, pair in enumerate(pairs))
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), dims))
    plain = isinstance(outputs, Tensor) or (type(outputs) is tuple and len(outputs) > 1)
    return module if plain else _Flat(module), tuple(specs)


def _named_sizes(inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> dict[str, int]:
    dims = {dim.name: dim for spec in inputs for dim in spec.dims if isinstance(dim, Dim)}
    return {
        name: min(sizes[index % len(sizes)], dim.bound or sizes[-1]) for index, (name, dim) in enumerate(dims.items())
    }


def _dim(
    name: str, pair: tuple[int, int], first: Mapping[str, int], second: Mapping[str, int], inputs: Sequence[TensorSpec]
) -> int | Dim:
    """The named dimension that an output's axis follows in both runs; a number where it stays the same."""
    if pair[0] == pair[1]:
        return pair[0]
    dims = [dim for spec in inputs for dim in spec.dims if isinstance(dim, Dim)]
    return next((dim for dim in dims if (first[dim.name], second[dim.name]) == pair), Dim(name))


def _named_outputs(outputs: Any) -> dict[str, Tensor]:
    """Tensors by name: the keys of a mapping, else output_0, output_1, ...; entries that are None are left out."""
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    if isinstance(outputs, Mapping):
        named = {str(name): value for name, value in outputs.items() if value is not None}
    elif isinstance(outputs, tuple | list):
        named = {f"output_{index}": value for index, value in enumerate(outputs) if value is not None}
    else:
        raise LoadError(
            f"the module returned {type(outputs).__name__}; expected a tensor, or a tuple or dict of tensors"
        )
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise LoadError(f"the module's {name} is {type(value).__name__}; expected a tensor")
    return named


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """Ones for a mask, else random numbers in the range of the input, from seed 0."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"input {spec.name!r}: torch has no dtype {spec.dtype}")
    shape = spec.shape(sizes)
    if spec.is_mask:
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        unit = torch.rand(shape, generator=generator)
        low, high = -1.0 if spec.low is None else spec.low, 1.0 if spec.high is None else spec.high
        return (low + (high - low) * unit).to(dtype)
    low, high = int(spec.low or 0), int(1 if spec.high is None else spec.high)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def _state_hash(module: nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
