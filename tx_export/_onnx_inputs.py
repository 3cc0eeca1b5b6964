"""What an ONNX file takes, read from its graph: dtypes, dimensions that vary, and the numbers an input may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tx_export._graph import array_of
from tx_export.errors import LoadError
from tx_export.spec import Dim, TensorSpec

__all__ = ["by_position", "compared_id", "declared_inputs", "with_tables"]

# Names that exporters make up where the user gave none: they differ between inputs that must agree.
_MADE_UP = re.compile(r".*_dynamic_axes_\d+|unk__\d+|\?|None|-?\d+|")
_POSITIONS = ("batch", "tokens")
_PASSED = ("Cast", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_TABLES = {"EmbedLayerNormalization": {0: 2, 1: 4}, "Gather": {1: 0}, "GatherBlockQuantized": {1: 0}}  # ids: table
_FAR = 16  # nodes behind one another


def declared_inputs(path: Path, graph: ir.Graph, given: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The inputs in the file's order; a text form in `given` replaces what the file says of that input."""
    by_hand = {spec.name: spec for spec in map(TensorSpec.parse, given)}
    names = [str(value.name) for value in graph.inputs]
    if unknown := [name for name in by_hand if name not in names]:
        raise LoadError(f"{path}: it has no input {unknown[0]!r}; there are {', '.join(names)}")
    read = {str(value.name): _spec(path, value, by_hand.get(str(value.name))) for value in graph.inputs}
    if not given:
        return _renamed(tuple(read.values()))
    ours: dict[str, int | Dim] = {}
    for name, spec in by_hand.items():
        dims = zip(read[name].dims, spec.dims, strict=True)
        ours |= {old.name: new for old, new in dims if isinstance(old, Dim)}
    return tuple(by_hand.get(name, _with_dims(spec, ours)) for name, spec in read.items())


def _spec(path: Path, value: ir.Value, by_hand: TensorSpec | None) -> TensorSpec:
    """As the file says it; LoadError where it says too little, or something else than what was given by hand."""
    assert value.name is not None and value.dtype is not None
    dtype = value.dtype.numpy().name
    if by_hand is None and value.shape is None:
        raise LoadError(
            f"{path}: input {value.name!r} has no shape; give it with --input '{value.name}:{dtype}[batch,tokens]'"
        )
    if by_hand is not None and (by_hand.dtype != dtype or len(by_hand.dims) != len(value.shape or by_hand.dims)):
        shape = "" if value.shape is None else f" with {len(value.shape)} dimensions"
        raise LoadError(f"{path}: input {value.name!r} is {dtype}{shape} in the file, not {by_hand}")
    if value.shape is None:
        assert by_hand is not None
        return by_hand
    return TensorSpec(value.name, dtype, tuple(_dim(dim, axis) for axis, dim in enumerate(value.shape)))


def _dim(dim: int | ir.SymbolicDim, axis: int) -> int | Dim:
    """A number, or a name: the file's where it has one, else one of the axis."""
    if isinstance(dim, int) and dim > 0:
        return dim
    name = str(dim.value) if isinstance(dim, ir.SymbolicDim) and dim.value is not None else ""
    return Dim(_at(axis) if _MADE_UP.fullmatch(name) else re.sub(r"\W", "_", name).lstrip("0123456789") or _at(axis))


def _at(axis: int) -> str:
    return _POSITIONS[axis] if axis < len(_POSITIONS) else f"axis{axis}"


def by_position(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """All dimensions that vary, named by their axis alone: one size for the first of every input, and so on."""
    return tuple(
        replace(
            spec,
            dims=tuple(
                Dim(_at(axis), dim.bound) if isinstance(dim, Dim) else dim for axis, dim in enumerate(spec.dims)
            ),
        )
        for spec in specs
    )


def _renamed(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Rows and positions get the names that they have everywhere; those of the mask, or of the first matrix of ids."""
    matrices = [spec for spec in specs if len(spec.dims) == 2 and np.dtype(spec.dtype).kind in "iub"]
    first = next((spec for spec in matrices if spec.is_mask), next(iter(matrices), specs[0]))
    used = {dim.name for spec in specs for dim in spec.dims if isinstance(dim, Dim)}
    ours: dict[str, int | Dim] = {}
    for dim, name in zip(first.dims if first in matrices else first.dims[:1], _POSITIONS, strict=False):
        if isinstance(dim, Dim) and dim.name not in ours and name not in used:
            ours[dim.name] = Dim(name)
    return tuple(_with_dims(spec, ours) for spec in specs)


def _with_dims(spec: TensorSpec, names: Mapping[str, int | Dim]) -> TensorSpec:
    """Dimensions by these names replaced."""
    dims = tuple(names.get(dim.name, dim) if isinstance(dim, Dim) else dim for dim in spec.dims)
    return replace(spec, dims=dims)


def with_tables(graph: ir.Graph, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Integers without a range are ids of the smallest table that is looked up by them; a mask is 0 or 1."""
    values = {value.name: value for value in graph.inputs}

    def ranged(spec: TensorSpec) -> TensorSpec:
        if spec.low is not None:
            return spec
        if spec.is_mask:
            return replace(spec, low=0, high=1)
        rows = min(_rows(values[spec.name]), default=None) if np.dtype(spec.dtype).kind in "iu" else None
        return spec if rows is None else replace(spec, low=0, high=rows - 1)

    return tuple(map(ranged, specs))


def _rows(ids: ir.Value) -> Iterator[int]:
    """The sizes of the tables that are looked up by these ids."""
    for node, index in _readers(ids):
        table = _TABLES.get(node.op_type, {}).get(index)
        rows = node.inputs[table] if table is not None and node.attributes.get_int("axis", 0) == 0 else None
        if rows is not None and rows.shape is not None and len(rows.shape) == 2 and isinstance(rows.shape[0], int):
            yield rows.shape[0]


def compared_id(graph: ir.Graph, specs: Sequence[TensorSpec]) -> int | None:
    """The one number that the ids are compared with: the padding, where positions are counted from ids."""
    ids = next((value for value in graph.inputs if (value.name or "").endswith("input_ids")), None)
    if ids is None or not any(spec.is_mask for spec in specs):
        return None
    others = (node.inputs[1 - index] for node, index in _readers(ids) if node.op_type == "Equal")
    found = {int(array) for array in map(array_of, others) if array is not None and array.size == 1}
    return found.pop() if len(found) == 1 else None


def _readers(value: ir.Value, far: int = _FAR) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that read a value, and at which input, also behind nodes that only lay it out."""
    for use in value.uses():
        yield use.node, use.idx
        if far and use.idx == 0 and use.node.op_type in _PASSED and not use.node.domain:
            yield from _readers(use.node.outputs[0], far - 1)
