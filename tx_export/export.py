"""Export: an EagerModel becomes an onnx_ir.Model through torch.onnx, with every named dimension dynamic.

The opset and IR version follow the oldest ONNX Runtime that the artifact must run on.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any, Literal, Self

import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, NameFixPass
from torch import nn

from tx_export._export_errors import check_exported, export_error
from tx_export._module_adapter import ModuleAdapter, users_path
from tx_export._onnx_graph import prepare
from tx_export._onnx_module import OnnxModule
from tx_export._releases import RELEASES, first_release, least_onnxruntime
from tx_export._slow_path import slow_path
from tx_export._torch_attention import torch_attention
from tx_export.errors import ExportError
from tx_export.models.parts.attention import Ops, emitting
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["Target", "export", "least_onnxruntime"]

_OPSET, _ATTENTION_OPSET = 18, 23  # the oldest that the exporter writes; the first with a standard Attention
_UNBOUNDED = (1 << 31) - 1
_SIZES = (2, 7, 5, 3, 11, 13)  # of the example's named dimensions: all different, none 0 or 1, which would be frozen


@dataclass(frozen=True)
class Target:
    """The oldest ONNX Runtime to run on, and what the graph is written in for it."""

    release: tuple[int, int] | None  # None: as old as the operators allow
    opset: int
    ir_version: int
    ops: Ops

    @classmethod
    def parse(cls, version: str | None, ops: Literal["fused", "standard"]) -> Self:
        """Read `X.Y` or `X.Y.Z`; None means as old as the operators allow."""
        if version is None:
            return cls(None, _OPSET, 8, _spelling(ops, False))
        parts = version.split(".")
        if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
            raise ExportError(f"--target-ort {version!r}: expected X.Y or X.Y.Z, say 1.17")
        release = (int(parts[0]), int(parts[1]))
        if release < min(RELEASES):
            raise ExportError(f"--target-ort {version}: ONNX Runtime 1.14 is the oldest that takes opset {_OPSET}")
        newest_opset, newest_ir = RELEASES[min(release, max(RELEASES))]
        standard = ops == "standard" and newest_opset >= _ATTENTION_OPSET
        opset = _ATTENTION_OPSET if standard else _OPSET
        return cls(release, opset, min(newest_ir, 10 if standard else 8), _spelling(ops, standard))

    def check(self, graph: ir.Model, model: EagerModel) -> None:
        """ExportError if the graph of a model is not what this target takes; values are read from the graph."""
        opset, ir_version = graph.opset_imports.get("", 0), graph.ir_version
        exported = not isinstance(model.module, OnnxModule)  # a file keeps an opset that will do
        if exported and (opset, ir_version) != (self.opset, self.ir_version):
            raise ExportError(
                f"asked for opset {self.opset} and IR {self.ir_version}, the file has opset {opset} and IR {ir_version}"
            )
        for node in graph.graph.all_nodes():
            first = first_release(node)
            if self.release is not None and first > self.release:
                raise ExportError(
                    f"operator com.microsoft::{node.op_type} needs ONNX Runtime {first[0]}.{first[1]}, "
                    f"the target is {self.release[0]}.{self.release[1]}; --ops standard does without it"
                )


def _spelling(ops: str, standard_attention: bool) -> Ops:
    if ops == "fused":
        return "fused"
    return "attention" if standard_attention else "plain"


def export(model: EagerModel, target: Target) -> ir.Model:
    """The graph of a model, unoptimized: exported from its module, or read where that is an ONNX file."""
    if isinstance(model.module, OnnxModule):
        newest = max(RELEASES) if target.release is None else min(target.release, max(RELEASES))
        return prepare(model.module.path, model.inputs, RELEASES[newest][0])
    return _exported(model, target)


def _exported(model: EagerModel, target: Target) -> ir.Model:
    """Ends named as in the spec, named dims dynamic up to their bounds."""
    feeds = _example(model.inputs)
    # A dimension that is never above 1 is none.
    dims = {name: torch.export.Dim(name, min=1, max=most) for name, most in _bounds(model.inputs).items() if most > 1}
    shapes = tuple(
        {axis: dims[dim.name] for axis, dim in enumerate(spec.dims) if isinstance(dim, Dim) and dim.name in dims}
        for spec in model.inputs
    )
    with (
        _quiet(),
        slow_path(),
        _evaluating(model.module),
        torch.no_grad(),
        emitting(target.ops),
        torch_attention(target.ops),
    ):
        try:
            program = torch.onnx.export(
                model.module,
                feeds,
                dynamo=True,
                dynamic_shapes=_like_forward(model, shapes),
                opset_version=target.opset,
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # torch.export and the module raise anything
            raise export_error(model, error) from error
        assert program is not None
        check_exported(model, program.model)
    graph: ir.Model = program.model
    ClearMetadataAndDocStringPass()(graph)  # holds the paths of this machine
    _name_ends(graph.graph, model)
    NameFixPass()(graph)  # inputs and outputs keep their names, what else had one of them gets another
    graph.ir_version = target.ir_version
    graph.producer_name, graph.producer_version = "tx-export", None
    return graph


def _example(inputs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    sizes = {name: min(_SIZES[i % len(_SIZES)], bound) for i, (name, bound) in enumerate(_bounds(inputs).items())}
    return tuple(_draw(spec, spec.shape(sizes)) for spec in inputs)


def _bounds(inputs: tuple[TensorSpec, ...]) -> dict[str, int]:
    """The named dimensions in order; one that is given several bounds keeps the smallest."""
    bounds: dict[str, int] = {}
    for dim in (dim for spec in inputs for dim in spec.dims if isinstance(dim, Dim)):
        bounds[dim.name] = min(bounds.get(dim.name, _UNBOUNDED), dim.bound or _UNBOUNDED)
    return bounds


def _draw(spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """Seeded numbers; a mask ends in zeros, as one of ones only could hide the branch that reads it."""
    dtype, generator = getattr(torch, spec.dtype), torch.Generator().manual_seed(0)
    if spec.is_mask and shape:
        mask = torch.ones(shape)
        mask[..., -1] = 0
        return mask.to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = int(spec.low or 0), int(1 if spec.high is None else spec.high)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def _like_forward(model: EagerModel, shapes: tuple[dict[int, torch.export.Dim], ...]) -> tuple[Any, ...]:
    """torch.export wants a variadic forward's shapes one level deeper."""
    first = next(iter(inspect.signature(model.module.forward).parameters.values()), None)
    return (shapes,) if first is not None and first.kind is first.VAR_POSITIONAL else shapes


def _name_ends(graph: ir.Graph, model: EagerModel) -> None:
    """Give inputs and outputs the names of the spec."""
    if len(graph.inputs) != len(model.inputs) or len(graph.outputs) != len(model.outputs):
        raise ExportError(
            f"{model.source}: the graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, "
            f"{len(model.inputs)} and {len(model.outputs)} were declared"
        )
    names = [spec.name for spec in (*model.inputs, *model.outputs)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ExportError(f"{model.source}: inputs and outputs must differ in name; given twice: {', '.join(twice)}")
    _separate_outputs(graph)
    for value in list(graph.initializers.values()) if isinstance(model.module, ModuleAdapter) else ():
        value.name = users_path(str(value.name))
    for value in (
        *graph.inputs,
        *graph.initializers.values(),
        *(v for node in graph.all_nodes() for v in node.outputs),
    ):
        value.metadata_props.clear()  # what torch.export calls them
    for value, name in zip((*graph.inputs, *graph.outputs), names, strict=True):
        value.name = name


def _separate_outputs(graph: ir.Graph) -> None:
    """An output that is an input, a weight or another output gets a value of its own, which can have its own name."""
    taken: set[ir.Value | None] = {*graph.inputs, *graph.initializers.values()}
    for index, value in enumerate(graph.outputs):
        if value in taken:
            own = ir.Value(shape=value.shape, type=value.type)
            graph.append(ir.node("Identity", [value], outputs=[own]))
            graph.outputs[index] = own
        taken.add(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch logs, warns of and prints to stderr, unless we are debugging."""
    if logging.getLogger("tx_export").getEffectiveLevel() <= logging.DEBUG:
        yield
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
