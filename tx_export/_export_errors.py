"""Why an export failed, in one line: what happened, the module, the user's line and the remedy; torch's words in a log.

An export that torch calls a success fails here too where it froze a dimension or emitted an operator that nobody has.
"""

from __future__ import annotations

import ast
import re
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from torch import fx

from tx_export._lint_frames import Place, module_paths, place_in_text, place_of_error
from tx_export._lint_rules import finding
from tx_export._lint_trace import needed_value, trace
from tx_export.errors import ExportError
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["check_exported", "export_error"]

_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
_UNSUPPORTED = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


def export_error(model: EagerModel, error: Exception) -> ExportError:
    """What torch raised, as an error of ours; the whole of its text goes into a log file that the message names."""
    reason = _reason(model, list(_causes(error)))
    with tempfile.NamedTemporaryFile("w", prefix="tx-export-", suffix=".log", delete=False, encoding="utf-8") as log:
        log.writelines(traceback.format_exception(error))
    return ExportError(f"{model.source}: {reason} (the exporter's own words: {log.name})")


def check_exported(model: EagerModel, graph: ir.Model) -> None:
    """ExportError where a named dimension became a number, or an operator is in a domain that nobody knows."""
    for node in graph.graph.all_nodes():
        if node.domain not in _DOMAINS and node.op_identifier() not in graph.functions:
            detail = f"operator {node.op_type!r} of domain {node.domain!r}"
            raise ExportError(f"{model.source}: {_told('foreign', _place_of_node(node, model), detail, model)}")
    varying = {dim.name for spec in model.inputs for dim in spec.dims if isinstance(dim, Dim) and dim.bound != 1}
    ends = zip((*model.inputs, *model.outputs), (*graph.graph.inputs, *graph.graph.outputs), strict=False)
    frozen = {name: size for spec, value in ends for name, size in _numbers(spec, value) if name in varying}
    if frozen:
        raise ExportError(f"{model.source}: {_frozen_by(model, frozen)}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _reason(model: EagerModel, causes: list[BaseException]) -> str:
    root, paths = causes[-1], module_paths(model.module)
    found = (place_of_error(cause, paths) for cause in reversed(causes))
    place = next((place for place in found if place is not None), None)
    if unsupported := _UNSUPPORTED.search(str(root)):
        operator = unsupported[1].replace(".", "::", 1)
        node = next((node for cause in causes for node in _nodes(cause)), None)
        where = None if node is None else _place_of_fx(node, model)
        if "complex" in operator or "complex-valued" in str(root):
            return _told("complex", where, f" ({operator})", model)
        return _told("unsupported", where, operator, model)
    if needed_value(root) is not None:
        return _told("data-branch", place, "", model)
    if "Constraints violated" in str(root) or "specialized" in str(root):
        return _frozen_by(model, {})
    if "complex" in str(root).lower():
        return _told("complex", place, "", model)
    line = next(iter(str(root).strip().splitlines()), "no message")
    return _told("failed", place, f"{type(root).__name__}: {line}", model)


def _told(kind: str, place: Place | None, detail: str, model: EagerModel) -> str:
    """A rule's sentence at a place, or of the whole module where no line of the user's is known."""
    if place is not None:
        return str(finding(kind, place, detail))
    found = finding(kind, Place("", 0, "forward", type(model.module).__name__), detail)
    return f"{found.message}; {found.remedy}"


def _frozen_by(model: EagerModel, frozen: dict[str, int]) -> str:
    """Which dimensions became which numbers, by the first line that made a number of one of them."""
    asked = [question for question in trace(model).questions if question.number]
    asked.sort(key=lambda each: each.place.through != "user")
    question = next((each for each in asked if not frozen or {*each.dims} & frozen.keys()), None)
    names = list(frozen) or ([] if question is None else list(question.dims))
    detail = " and ".join(f"{name!r} ({frozen[name]})" if name in frozen else repr(name) for name in names)
    return _told("frozen-dimension", None if question is None else question.place, detail, model)


def _numbers(spec: TensorSpec, value: ir.Value) -> Iterator[tuple[str, int]]:
    """The named dimensions of a tensor that are numbers in the graph."""
    for dim, size in zip(spec.dims, value.shape or (), strict=False):
        if isinstance(dim, Dim) and isinstance(size, int):
            yield dim.name, size


def _nodes(error: BaseException) -> Iterator[fx.Node]:
    """What the exporter was translating when it raised."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("node")
        if isinstance(node, fx.Node):
            yield node


def _place_of_fx(node: fx.Node, model: EagerModel) -> Place | None:
    scopes: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    inner = [path for path, _ in scopes.values()][-1:]
    return place_in_text(node.meta.get("stack_trace") or "", _users_name(model, *inner))


def _place_of_node(node: ir.Node, model: EagerModel) -> Place | None:
    properties = node.metadata_props
    scopes = ast.literal_eval(properties.get("pkg.torch.onnx.name_scopes", "[]"))[:-1]  # the last is the node
    return place_in_text(properties.get("pkg.torch.onnx.stack_trace", ""), _users_name(model, *scopes[-1:]))


def _users_name(model: EagerModel, path: str = "") -> str:
    """What the user calls the module at a path of ours; torch numbers its calls: `layer@1`."""
    return module_paths(model.module)[id(model.module.get_submodule(re.sub(r"@\d+", "", path)))]
