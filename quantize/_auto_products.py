"""The products and tables of a graph, each as a graph of its own, and the forms that passes can give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tx_export._graph import array_of, linear_at
from tx_export.errors import PassError
from tx_export.passes import GraphPass, Outcome, Pass, Stored
from tx_export.quantize._weights import candidates, name_of

__all__ = ["FLOAT", "Form", "Part", "Product", "apply", "lowered", "passes_of", "products_of", "weight_bytes"]


@dataclass(frozen=True)
class Form:
    """A precision by the passes that make it, each with the options that it has for all products."""

    name: str
    passes: tuple[GraphPass, ...] = ()


FLOAT = Form("fp32")
_ORDER = {"static_int8": 0, "smooth": 1}  # ranges go by names that others change; scales come before what rounds them


@dataclass(frozen=True)
class Part:
    """One node that reads a weight, with its bias: what goes in, what comes out, by name, and the graph between."""

    inputs: tuple[str, ...]
    output: str
    graph: ir.Model


@dataclass(frozen=True)
class Product:
    """A weight and the nodes that read it, whose precision is one decision."""

    name: str
    parts: tuple[Part, ...]
    is_table: bool  # only looked up by rows
    nbytes: int


def products_of(model: ir.Model) -> list[Product]:
    """In the order of the graph, tables last; what has no constant weight of two dimensions is none."""
    nodes: dict[str, list[ir.Node]] = {}
    for node in candidates(model.graph, ""):
        if _ends(node) is not None:
            nodes.setdefault(name_of(node), []).append(node)
    found = []
    for name, readers in nodes.items():
        parts = tuple(_part(model, node) for node in readers)
        is_table = all(node.op_type == "Gather" for node in readers)
        found.append(Product(name, parts, is_table, weight_bytes(parts[0].graph)))
    return found


def _ends(node: ir.Node) -> tuple[list[ir.Value], ir.Value] | None:
    """The computed inputs and the output of what is lowered as one."""
    if node.op_type in ("MatMul", "Gemm"):
        linear = linear_at(node)
        return None if isinstance(linear, str) else ([linear.x], linear.output)
    computed = [value for value in node.inputs if value is not None and array_of(value) is None]
    return (list(dict.fromkeys(computed)), node.outputs[0]) if array_of(_weight(node)) is not None else None


def _weight(node: ir.Node) -> ir.Value | None:
    return node.inputs[0 if node.op_type == "Gather" else 1]


def _part(model: ir.Model, node: ir.Node) -> Part:
    ends = _ends(node)
    assert ends is not None
    inputs, output = ends
    graph = ir.convenience.extract(model.graph, inputs, [output])
    part = ir.Model(graph, ir_version=model.ir_version)
    return Part(tuple(value.name or "" for value in inputs), output.name or "", part)


def weight_bytes(model: ir.Model) -> int:
    """Of all constants."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def lowered(product: Product, form: Form) -> tuple[ir.Model, ...] | str:
    """The parts in this form, or the reason why a pass does not give it."""
    graphs = []
    for part in product.parts:
        graph = part.graph.clone()
        for item in passes_of([(product.name, form)]):
            if (reason := _refusal(item, graph)) is not None:
                return reason
        graphs.append(graph)
    return tuple(graphs)


def _refusal(item: GraphPass, graph: ir.Model) -> str | None:
    """Run it in place; what it says where it changes nothing."""
    try:
        outcome = _run(item, graph)
    except PassError as error:
        return str(error)
    if outcome.modified:
        return None
    return next((left.reason for left in outcome.coverage.left), f"{item.name()} has no form for it")


def passes_of(choice: Sequence[tuple[str, Form]]) -> tuple[GraphPass, ...]:
    """What makes this choice, by names of weights: each pass once, with all that it is for."""
    only: dict[GraphPass, list[str]] = {}
    for name, form in choice:
        for item in form.passes:
            only.setdefault(item, []).append(name)
    ordered = sorted(only, key=lambda item: _ORDER.get(item.name(), len(_ORDER)))
    return tuple(dataclasses.replace(item, only=",".join(only[item])) for item in ordered)  # type: ignore[call-arg]


def apply(model: ir.Model, passes: Sequence[GraphPass]) -> tuple[tuple[Pass, ...], tuple[Stored, ...]]:
    """Run them in place; returns what repeats them, with no more than they used, and what they store."""
    repeat: list[Pass] = []
    stored: list[Stored] = []
    for item in passes:
        outcome = _run(item, model)
        if not outcome.modified:
            raise PassError(f"auto: {item.name()} changed nothing in the whole graph, but did so in single products")
        repeat += outcome.coverage.repeat or (item,)
        stored += outcome.coverage.stored
    return tuple(repeat), tuple(stored)


def _run(item: GraphPass, model: ir.Model) -> Outcome:
    outcome = item(model)
    assert isinstance(outcome, Outcome)
    return outcome
