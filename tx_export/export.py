"""Export: an EagerModel becomes an onnx_ir.Model through torch.onnx, with every named dimension dynamic.

The opset and IR version follow the oldest ONNX Runtime that the artifact must run on.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, NameFixPass

from tx_export.errors import ExportError
from tx_export.models.parts.attention import Ops, emitting
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["Target", "export", "least_onnxruntime"]

# ONNX Runtime: the newest opset and IR version that a release takes (its compatibility page and release notes).
_RELEASES: dict[tuple[int, int], tuple[int, int]] = {
    (1, 14): (18, 8),
    (1, 15): (19, 8),
    (1, 16): (19, 9),
    (1, 17): (20, 9),
    (1, 18): (21, 10),
    (1, 19): (21, 10),
    (1, 20): (21, 10),
    (1, 21): (22, 10),
    (1, 22): (23, 10),
    (1, 23): (23, 11),
    (1, 24): (24, 11),
}
# The release whose CPU provider first has an operator of com.microsoft; those not named here are older than 1.14.
_FIRST_RELEASE: dict[str, tuple[int, int]] = {"MultiHeadAttention": (1, 15), "GatherBlockQuantized": (1, 20)}
_OPSET, _ATTENTION_OPSET = 18, 23  # the oldest that the exporter writes; the first with a standard Attention
_SIZES = (2, 7, 5, 3, 11, 13)  # of the example's named dimensions: all different, none 0 or 1, which would be frozen


@dataclass(frozen=True)
class Target:
    """The oldest ONNX Runtime to run on, and what the graph is written in for it."""

    release: tuple[int, int]
    opset: int
    ir_version: int
    ops: Ops

    @classmethod
    def parse(cls, version: str | None, ops: Literal["fused", "standard"]) -> Self:
        """Read `X.Y` or `X.Y.Z`; None means as old as the operators allow."""
        if version is None:
            return cls(min(_RELEASES), _OPSET, 8, "fused" if ops == "fused" else "plain")
        parts = version.split(".")
        if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
            raise ExportError(f"--target-ort {version!r}: expected X.Y or X.Y.Z, say 1.17")
        release = (int(parts[0]), int(parts[1]))
        if release < min(_RELEASES):
            raise ExportError(f"--target-ort {version}: ONNX Runtime 1.14 is the oldest that takes opset {_OPSET}")
        newest_opset, newest_ir = _RELEASES[min(release, max(_RELEASES))]
        standard = ops == "standard" and newest_opset >= _ATTENTION_OPSET
        opset = _ATTENTION_OPSET if standard else _OPSET
        return cls(release, opset, min(newest_ir, 10 if standard else 8), _spelling(ops, standard))

    def check(self, model: ir.Model) -> None:
        """ExportError if the graph is not what this target takes; values are read from the graph."""
        opset, ir_version = model.opset_imports.get("", 0), model.ir_version
        if (opset, ir_version) != (self.opset, self.ir_version):
            raise ExportError(
                f"asked for opset {self.opset} and IR {self.ir_version}, the file has opset {opset} and IR {ir_version}"
            )
        for node in model.graph:
            first = _FIRST_RELEASE.get(node.op_type, min(_RELEASES)) if node.domain == "com.microsoft" else self.release
            if first > self.release != min(_RELEASES):
                raise ExportError(
                    f"operator com.microsoft::{node.op_type} needs ONNX Runtime {first[0]}.{first[1]}, "
                    f"the target is {self.release[0]}.{self.release[1]}; --ops standard does without it"
                )


def _spelling(ops: str, standard_attention: bool) -> Ops:
    if ops == "fused":
        return "fused"
    return "attention" if standard_attention else "plain"


def least_onnxruntime(model: ir.Model) -> str:
    """The oldest ONNX Runtime that takes this graph, say `1.15.0`."""
    opset, ir_version = model.opset_imports.get("", 0), model.ir_version
    releases = [release for release, newest in _RELEASES.items() if newest[0] >= opset and newest[1] >= ir_version]
    if not releases:
        raise ExportError(f"no ONNX Runtime is known that takes opset {opset} and IR {ir_version}")
    first = [_FIRST_RELEASE[node.op_type] for node in model.graph if node.op_type in _FIRST_RELEASE and node.domain]
    major, minor = max([min(releases), *first])
    return f"{major}.{minor}.0"


def export(model: EagerModel, target: Target) -> ir.Model:
    """The graph of the module, unoptimized: ends named as in the spec, named dims dynamic up to their bounds."""
    feeds = _example(model.inputs)
    dims = _dynamic_dims(model.inputs)
    shapes = tuple(
        {axis: dims[dim.name] for axis, dim in enumerate(spec.dims) if isinstance(dim, Dim)} for spec in model.inputs
    )
    with _quiet(), _slow_path(), torch.no_grad(), emitting(target.ops):
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
            raise ExportError(f"{model.source}: {_reason(error)}") from error
    assert program is not None
    graph: ir.Model = program.model
    ClearMetadataAndDocStringPass()(graph)  # holds the paths of this machine
    _name_ends(graph, model)
    graph.ir_version = target.ir_version
    graph.producer_name, graph.producer_version = "tx-export", None
    return graph


def _example(inputs: tuple[TensorSpec, ...]) -> tuple[torch.Tensor, ...]:
    names = sorted({dim.name for spec in inputs for dim in spec.dims if isinstance(dim, Dim)}, key=_order(inputs).index)
    bounds = {dim.name: dim.bound for spec in inputs for dim in spec.dims if isinstance(dim, Dim)}
    sizes = {name: min(_SIZES[i % len(_SIZES)], bounds[name] or 1 << 30) for i, name in enumerate(names)}
    generator = torch.Generator().manual_seed(0)
    return tuple(_draw(spec, spec.shape(sizes), generator) for spec in inputs)


def _draw(spec: TensorSpec, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = (0, 1) if spec.is_mask else (int(spec.low or 0), int(spec.high if spec.high is not None else 1))
    drawn = torch.randint(low, high + 1, shape, generator=generator)
    if spec.is_mask:  # a mask of ones only could hide the branch that reads it
        drawn = torch.ones(shape, dtype=torch.int64)
        drawn[..., -1] = 0
        drawn[0] = 1
    return drawn.to(dtype)


def _order(inputs: tuple[TensorSpec, ...]) -> list[str]:
    return [dim.name for spec in inputs for dim in spec.dims if isinstance(dim, Dim)]


def _dynamic_dims(inputs: tuple[TensorSpec, ...]) -> dict[str, torch.export.Dim]:
    dims = {dim.name: dim.bound for spec in inputs for dim in spec.dims if isinstance(dim, Dim)}
    return {name: torch.export.Dim(name, min=1, max=bound or (1 << 31) - 1) for name, bound in dims.items()}


def _like_forward(model: EagerModel, shapes: tuple[dict[int, torch.export.Dim], ...]) -> tuple[Any, ...]:
    """torch.export wants a variadic forward's shapes one level deeper."""
    import inspect

    parameters = list(inspect.signature(model.module.forward).parameters.values())
    variadic = bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    return (shapes,) if variadic else shapes


def _name_ends(graph: ir.Model, model: EagerModel) -> None:
    """Give inputs and outputs the names of the spec, and everything else names that don't meet them."""
    values = [*graph.graph.inputs, *graph.graph.outputs]
    specs = [*model.inputs, *model.outputs]
    if len(graph.graph.inputs) != len(model.inputs) or len(graph.graph.outputs) != len(model.outputs):
        raise ExportError(
            f"{model.source}: the graph has {len(graph.graph.inputs)} inputs and {len(graph.graph.outputs)} outputs, "
            f"{len(model.inputs)} and {len(model.outputs)} were declared"
        )
    wanted = {spec.name for spec in specs}
    for node in graph.graph:
        for output in node.outputs:
            if output.name in wanted and output not in values:
                output.name = f"inner.{output.name}"
    for value, spec in zip(values, specs, strict=True):
        value.name = spec.name
    NameFixPass()(graph)


def _reason(error: Exception) -> str:
    """The line of a torch error that says what is wrong, without the text around it."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR if logging.getLogger("tx_export").level > logging.DEBUG else level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def _slow_path() -> Iterator[None]:
    """The fused inference path of nn.TransformerEncoder can't be exported."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
