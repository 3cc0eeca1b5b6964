"""What each product can become: its forms here, with their bytes, their time and their noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tx_export import plugins
from tx_export.errors import PluginError
from tx_export.passes import Context, GraphPass
from tx_export.quantize import _auto_times
from tx_export.quantize._auto_noise import Noises
from tx_export.quantize._auto_products import FLOAT, Form, Product, apply, lowered, passes_of, weight_bytes
from tx_export.timing import Shape

__all__ = ["Candidate", "Product", "candidates_of", "forms_of", "measure_noise", "measure_times"]

_BLOCK_SIZE = 128  # as exact as dynamic int8 has use for, and a quarter faster than 32


@dataclass
class Candidate:
    """A form of one product."""

    form: Form
    graphs: tuple[ir.Model, ...]  # of the parts
    nbytes: int
    timed_as: str  # the form whose time it takes
    ms: list[float] = field(default_factory=list)  # at each shape; empty: no decision depends on it
    noise: float = 0.0  # of the whole model with only this product in this form, relative to the signal


def forms_of(model: ir.Model, context: Context) -> list[Form]:
    """What there is for the provider; forms that calibrate do so once, for all products."""
    blocks = [_pass("blockwise", f"bits={bits}, block_size={_BLOCK_SIZE}", context) for bits in (8, 4)]
    in_blocks = [Form(f"{bits} bit blocks", (item,)) for bits, item in zip((8, 4), blocks, strict=True)]
    if context.provider == "cuda":
        return [Form("fp16", (_pass("float16", "", context),)), *in_blocks]
    int8 = _pass("dynamic_int8", "", context)
    forms = [Form("int8", (int8,))]
    if (smooth := _calibrated("smooth", model, context)) is not None:
        forms.append(Form("smooth int8", (smooth, int8)))
    if (static := _calibrated("static_int8", model, context)) is not None:
        forms.append(Form("static int8", (static,)))
    return [*forms, *in_blocks]


def _pass(name: str, options: str, context: Context) -> GraphPass:
    item: GraphPass = plugins.find("pass", name).parse(options)
    return dataclasses.replace(item, context=context)


def _calibrated(name: str, model: ir.Model, context: Context) -> GraphPass | None:
    """The pass with what it finds for the whole graph, None where it finds nothing or there is no text to do so."""
    try:
        item = _pass(name, "", context)
    except PluginError:
        return None
    if not context.feeds:
        return None
    outcome = item(model.clone())
    repeat = [each for each in outcome.coverage.repeat if isinstance(each, type(item))]  # type: ignore[attr-defined]
    return dataclasses.replace(repeat[0], context=context) if repeat and outcome.modified else None


def candidates_of(model: ir.Model, product: Product, forms: Sequence[Form]) -> tuple[list[Candidate], list[str]]:
    """fp32 first, then every form that its passes can give it, and why others can't be given."""
    found = [Candidate(FLOAT, tuple(part.graph for part in product.parts), product.nbytes, FLOAT.name)]
    refused = []
    for form in forms:
        graphs = lowered(product, form)
        if isinstance(graphs, str):
            refused.append(graphs)
        else:
            timed_as = _timed_as(model, product, form, forms)
            found.append(Candidate(form, graphs, max(map(weight_bytes, graphs)), timed_as))
    return found, refused


def _timed_as(model: ir.Model, product: Product, form: Form, forms: Sequence[Form]) -> str:
    """The form without its first pass where that adds no node to the whole graph, as folded scales don't."""
    rest = next((other for other in forms if other.passes == form.passes[1:]), None)
    if rest is None:
        return form.name
    whole = model.clone()
    apply(whole, passes_of([(product.name, Form("", form.passes[:1]))]))
    return rest.name if len(whole.graph) == len(model.graph) else form.name


def measure_times(
    products: Sequence[Product],
    candidates: Sequence[Sequence[Candidate]],
    shapes: Sequence[Shape],
    context: Context,
    rows: str,
) -> None:
    """Fill in `ms`: measured once for all parts of one kind, and not where there is no choice or no product."""
    if not shapes:
        return
    kinds: dict[Hashable, dict[str, ir.Model]] = {}
    for product, forms in zip(products, candidates, strict=True):
        if not product.is_table and len(forms) > 1:
            for candidate in forms:
                for part, graph in zip(product.parts, candidate.graphs, strict=True):
                    kinds.setdefault(_auto_times.kind_of(part.graph), {}).setdefault(candidate.form.name, graph)
    target = context.provider, rows, context.isa
    measured = {kind: _auto_times.times(graphs, shapes, *target) for kind, graphs in kinds.items()}
    for product, forms in zip(products, candidates, strict=True):
        for candidate in forms:
            of_parts = [
                measured.get(_auto_times.kind_of(part.graph), {}).get(candidate.timed_as, [0.0] * len(shapes))
                for part in product.parts
            ]
            candidate.ms = [sum(each) for each in zip(*of_parts, strict=True)]


def measure_noise(
    model: ir.Model,
    products: Sequence[Product],
    candidates: Sequence[Sequence[Candidate]],
    context: Context,
    feeds: Sequence[Mapping[str, np.ndarray]],
) -> None:
    """Fill in `noise` of all but fp32."""
    noises = Noises(model, products, context, feeds)
    graphs: list[tuple[Product, Mapping[str, Sequence[ir.Model]]]] = [
        (product, {each.form.name: each.graphs for each in forms[1:]})
        for product, forms in zip(products, candidates, strict=True)
    ]
    for forms, found in zip(candidates, noises.measured(graphs), strict=True):
        for each in forms[1:]:
            each.noise = found[each.form.name]
