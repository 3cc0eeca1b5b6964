"""The declared inputs of a user's module: read, given their ranges, and examples of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export._module_source import UserModule
from tx_export._torch_state import isolated
from tx_export.errors import LoadError
from tx_export.spec import Dim, TensorSpec

__all__ = ["beyond", "declared", "example", "looked_up", "sizes_of", "with_ranges"]

_SMALL = (2, 5, 7, 11, 13, 17, 19, 23)  # of the named dimensions in the order of their names' first use
_LARGE = (3, 37, 49, 67, 83, 101, 127, 149)  # each grows by another amount: tokens - 1 never looks like the batch
_LONGEST = 1024  # of a bounded dimension, as when the artifact is verified


def declared(user: UserModule, texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """From text forms, else from the module's own tx_inputs()."""
    specs = tuple(TensorSpec.parse(text) for text in texts or _own(user))
    if not specs:
        raise LoadError(f"{user.reference}: tx_inputs() returned no inputs; at least one is needed")
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LoadError(f"{user.reference}: inputs are declared twice: {', '.join(twice)}")
    return specs


def with_ranges(specs: Sequence[TensorSpec], module: nn.Module, looked_up: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Where none was given: a mask is 0 or 1, integers are ids of the embedding that reads them, else the smallest."""
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]

    def ranged(spec: TensorSpec) -> TensorSpec:
        if spec.low is not None:
            return spec
        if spec.is_mask:
            return replace(spec, low=0, high=1)
        if "int" not in spec.dtype or not rows:
            return spec
        return replace(spec, low=0, high=looked_up.get(spec.name, min(rows)) - 1)

    return tuple(ranged(spec) for spec in specs)


def sizes_of(specs: Sequence[TensorSpec]) -> tuple[dict[str, int], dict[str, int]]:
    """Two sizes for each named dimension: a small one, and (but for the batch) the largest that will be verified."""
    bounds: dict[str, int | None] = {}
    for dim in (dim for spec in specs for dim in spec.dims if isinstance(dim, Dim)):
        known = [bound for bound in (bounds.get(dim.name), dim.bound) if bound is not None]
        bounds[dim.name] = min(known, default=None)
    small: dict[str, int] = {}
    large: dict[str, int] = {}
    for index, (name, bound) in enumerate(bounds.items()):
        most = _LARGE[index % len(_LARGE)]
        large[name] = most if bound is None else min(bound, most if name == "batch" else _LONGEST)
        fitting = range(max(1, min(_SMALL[index % len(_SMALL)], large[name] - 1)), 0, -1)
        taken = {large[other] - small[other] for other in small}
        small[name] = next((size for size in fitting if large[name] - size not in taken), fitting[0])
    return small, large


def beyond(specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The large sizes, with dimensions that have no bound larger still."""
    bounded = {dim.name for spec in specs for dim in spec.dims if isinstance(dim, Dim) and dim.bound is not None}
    return {name: size if name in bounded else 2 * size for name, size in sizes_of(specs)[1].items()}


def example(specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int = 0) -> tuple[Tensor, ...]:
    """Random numbers in the range of each input; masks are 0 at half of the positions."""
    return tuple(_draw(spec, spec.shape(sizes), seed + 100 * index) for index, spec in enumerate(specs))


@contextmanager
def looked_up(module: nn.Module, specs: Sequence[TensorSpec], inputs: Sequence[Tensor]) -> Iterator[dict[str, int]]:
    """Watches which inputs an embedding looks up: the rows of the smallest such, by input, once forward has run."""
    found: dict[str, int] = {}

    def note(part: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(part, nn.Embedding)
        for spec, tensor in zip(specs, inputs, strict=True):
            if args and args[0].shape == tensor.shape and bool((args[0] == tensor).all()):
                found[spec.name] = min(part.num_embeddings, found.get(spec.name, part.num_embeddings))

    hooks = [part.register_forward_pre_hook(note) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _own(user: UserModule) -> Sequence[str]:
    if user.inputs is None:
        raise LoadError(
            f"{user.reference}: its inputs are not known; give each with --input 'NAME:DTYPE[DIM,...]{{LO..HI}}', "
            "or add a tx_inputs() that returns such texts"
        )
    with plugins.foreign(f"{user.reference}: tx_inputs()", LoadError), isolated(0):
        texts = user.inputs()
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise LoadError(f"{user.reference}: tx_inputs() returned {texts!r:.80}; expected a list of input texts")
    return texts


def _draw(spec: TensorSpec, shape: tuple[int, ...], seed: int) -> Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"input {spec.name!r}: torch has no dtype {spec.dtype}")
    if spec.is_mask and shape:
        mask = torch.ones(shape)
        # Whether 1 means real or padding, something is left.
        mask[..., (torch.arange(shape[-1] // 2) - 1 - seed) % shape[-1]] = 0
        return mask.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        unit = torch.rand(shape, generator=generator)
        low, high = -1.0 if spec.low is None else spec.low, 1.0 if spec.high is None else spec.high
        return (low + (high - low) * unit).to(dtype)
    low, high = int(spec.low or 0), int(1 if spec.high is None else spec.high)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)
