"""An ONNX file as a graph that the passes take: of a recent opset, flat, without what only its exporter reads.

The file may be of any exporter and age. What it computes stays; shapes are measured by running it at two sizes, which
neither operators of other domains nor missing shapes can stop.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
)
from onnxscript.version_converter import ConvertVersionPass

from tx_export import runtime
from tx_export._module_inputs import example, sizes_of
from tx_export._onnx_sizes import fold_sizes
from tx_export._releases import RELEASES
from tx_export.errors import LoadError
from tx_export.spec import TensorSpec

__all__ = ["prepare", "read_graph"]

_log = logging.getLogger("tx_export")
_OPSET = 18  # what the passes write, and are tested with; newer ones stay
_OLDEST = 13  # from here on an opset that can't be raised will do
_PLAIN = {"provider": "CPUExecutionProvider", "graph_optimization": "none"}


def read_graph(path: Path) -> ir.Model:
    """The graph as the file has it, its functions inlined; weights are read when they are needed."""
    runtime.external_files(path)
    try:
        model = ir.load(path)
        InlinePass()(model)
        RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        RemoveInitializersFromInputsPass()(model)
    except Exception as error:  # of protobuf, onnx_ir or a file that isn't what it says
        raise LoadError(f"{path}: not an ONNX file that can be read: {error}") from error
    return model


def prepare(path: Path, inputs: Sequence[TensorSpec], newest: int) -> ir.Model:
    """The graph of a file for the passes: with the dimensions of these inputs, and an opset of at most `newest`."""
    model = read_graph(path)
    _set_opset(path, model, newest)
    for node in model.graph.all_nodes():
        model.graph.opset_imports.setdefault(node.domain, 1)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)  # may hold paths of the machine that wrote it
    NameFixPass()(model)
    model.ir_version = next(ir_version for opset, ir_version in RELEASES.values() if opset >= _opset(model))
    model.producer_name, model.producer_version = "tx-export", None
    _measure_shapes(model, inputs)
    fold_sizes(model.graph)
    RemoveUnusedNodesPass()(model)
    return model


def _opset(model: ir.Model) -> int:
    return model.graph.opset_imports[""]


def _set_opset(path: Path, model: ir.Model, newest: int) -> None:
    """At least what the passes write, at most the newest that the target takes, by onnx's own converter."""
    imports = model.graph.opset_imports
    imports.setdefault("", imports.pop("ai.onnx", _OPSET))
    opset = _opset(model)
    wanted = min(max(opset, _OPSET), newest)
    if opset == wanted:
        return
    ConvertVersionPass(wanted, fallback=True)(model)
    if _opset(model) == wanted:
        return
    if not _OLDEST <= opset < wanted:
        raise LoadError(f"{path}: onnx's version converter can't turn its opset {opset} into {wanted}")
    _log.warning("%s: onnx's version converter can't turn its opset %d into %d; it stays", path, opset, wanted)


def _measure_shapes(model: ir.Model, inputs: Sequence[TensorSpec]) -> None:
    """Give every value of the graph its type, and its shape in terms of the inputs' dimensions."""
    small, large = sizes_of(inputs)
    first, second = _arrays(model, inputs, (small, large))
    names = {(small[name], large[name]): ir.SymbolicDim(name) for name in small}
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.name not in first or value.name not in second:
            continue
        one, other = first[value.name], second[value.name]
        value.dtype = ir.DataType.from_numpy(one.dtype)
        dims = [_dim(*pair, names) for pair in zip(one.shape, other.shape, strict=False)]
        value.shape = ir.Shape(dims) if one.ndim == other.ndim else None


def _dim(small: int, large: int, names: Mapping[tuple[int, int], ir.SymbolicDim]) -> int | ir.SymbolicDim:
    """A size that was `small` and then `large`: a number, a named one, a multiple of one, or one of its own."""
    if small == large:
        return small
    if (small, large) in names:
        return names[small, large]
    for (one, other), dim in names.items():
        if small % one == 0 and small // one * other == large:
            return ir.SymbolicDim(f"{small // one}*{dim.value}")
    return ir.SymbolicDim(f"size_{small}_{large}")


def _arrays(
    model: ir.Model, inputs: Sequence[TensorSpec], runs: Sequence[Mapping[str, int]]
) -> Iterator[dict[str, np.ndarray]]:
    """Every value of the graph that is a tensor, in a run for each of these sizes."""
    copy = model.clone()
    copy.graph.outputs[:] = [value for node in copy.graph for value in node.outputs if value.name]
    names = [str(value.name) for value in copy.graph.outputs]
    with tempfile.TemporaryDirectory(prefix="tx-export-") as folder:
        path = Path(folder) / "values.onnx"
        ir.save(copy, path, external_data="values.data")
        session = runtime.open_session(path, "0", "cpu", _PLAIN, runtime.available_threads())
    for sizes in runs:
        feeds = {spec.name: tensor.numpy() for spec, tensor in zip(inputs, example(inputs, sizes), strict=True)}
        found = dict(zip(names, session.run(names, feeds), strict=True))
        yield feeds | {name: array for name, array in found.items() if isinstance(array, np.ndarray)}
