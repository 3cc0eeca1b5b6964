"""What artifacts are timed on: sizes within their bounds, full random batches, and the worker that runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tx_export.spec import Dim, TensorSpec
from tx_export.timing import Contender, Shape

__all__ = ["artifact_contender", "inputs_of", "within_bounds", "write_feeds"]

_SEED = 0


def artifact_contender(name: str, load: Mapping[str, Any]) -> Contender:
    """An artifact by its own run.py; `load` holds its folder, the folder of the feeds, provider and threads."""
    return Contender(name, (sys.executable, "-m", "tx_export._bench_worker", "artifact"), load)


def inputs_of(manifest: Mapping[str, Any]) -> list[TensorSpec]:
    """From the manifest's form: name, dtype, dims as text, and maybe a range."""
    return [
        TensorSpec.parse(
            f"{item['name']}:{item['dtype']}[{','.join(map(str, item['dims']))}]"
            + ("{{{}..{}}}".format(*item["range"]) if item.get("range") else "")
        )
        for item in manifest["inputs"]
    ]


def within_bounds(
    inputs: Sequence[TensorSpec], batch: Sequence[int], tokens: Sequence[int], progress: Callable[[str], None]
) -> Iterator[Shape]:
    """The sizes that the inputs allow; `progress` is told which are left out."""
    rows = [tensor.dims[0] for tensor in inputs if tensor.dims]
    columns = [dim for tensor in inputs for dim in tensor.dims[1:]]
    kept = {}
    for kind, dims, sizes in (("batch", rows, batch), ("tokens", columns, tokens)):
        bound = min((dim.bound for dim in dims if isinstance(dim, Dim) and dim.bound is not None), default=None)
        kept[kind] = [size for size in dict.fromkeys(sizes) if bound is None or size <= bound]
        for size in dict.fromkeys(sizes):
            if size not in kept[kind]:
                progress(f"{kind} {size} is left out: the artifact takes up to {bound}")
    yield from (Shape(b, t) for b in kept["batch"] for t in kept["tokens"])


def write_feeds(folder: Path, inputs: Sequence[TensorSpec], shapes: Sequence[Shape]) -> None:
    """Seeded values in their ranges, masks full; the first dim of all is the batch, the other names are tokens."""
    rows = str(inputs[0].dims[0]).partition("<=")[0] if inputs[0].dims else ""
    for shape in shapes:
        random = np.random.default_rng(_SEED)
        feeds = {}
        for tensor in inputs:
            names = [dim.name for dim in tensor.dims if isinstance(dim, Dim)]
            sizes = {name: shape.batch if name == rows else shape.tokens for name in names}
            feeds[tensor.name] = _values(tensor, tensor.shape(sizes), random)
        np.savez(folder / f"{shape}.npz", **feeds)  # type: ignore[arg-type]


def _values(tensor: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if tensor.is_mask:
        return np.ones(shape, tensor.dtype)
    low, high = tensor.low or 0, 1 if tensor.high is None else tensor.high
    if np.dtype(tensor.dtype).kind == "f":
        return random.uniform(low, high, shape).astype(tensor.dtype)
    return random.integers(int(low), int(high), shape, endpoint=True).astype(tensor.dtype)
