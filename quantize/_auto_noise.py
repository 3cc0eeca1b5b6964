"""The error of the whole model with one product lowered, for every product and form, from one session.

The session runs the graph in float32 and adds to the output of each product a value that is fed, 0 if it isn't. What a
lowered product makes differently, on the same inputs, is fed there: the rest of the model then answers as it would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer
from tx_export.passes import Context
from tx_export.quantize._auto_products import Part, Product
from tx_export.quantize._prompt import open_prompt

__all__ = ["Noises", "noise_of"]

Feeds = Mapping[str, np.ndarray]
_KEPT_BYTES = 1 << 28  # of the inputs of products that are held at a time


def noise_of(metrics: Mapping[str, float]) -> float:
    """Relative noise power, which adds up where decibels don't."""
    return float(10 ** (-metrics["sqnr_db"] / 10))


class Noises:
    """Noise powers relative to the signal, of the worst output, on some text."""

    def __init__(self, model: ir.Model, products: Sequence[Product], context: Context, feeds: Sequence[Feeds]) -> None:
        self.context, self.feeds = context, feeds
        self.parts = [part for product in products for part in product.parts]
        self.model = model
        self.whole = open_prompt(_disturbed(model, self.parts), context)
        assert context.drift is not None
        self.own = noise_of(context.drift(self.whole, feeds))  # of the graph before: a pruned one has some

    def measured(
        self, products: Sequence[tuple[Product, Mapping[str, Sequence[ir.Model]]]]
    ) -> Iterator[dict[str, float]]:
        """For each product, whose forms are given as graphs of its parts, the noise by form."""
        for some in _portions(products, self.feeds):
            inputs = self._inputs([part for product, _ in some for part in product.parts])
            for product, forms in some:
                exact = self._outputs(product, [part.graph for part in product.parts], inputs)
                yield {
                    form: self._noise(product, exact, self._outputs(product, graphs, inputs))
                    for form, graphs in forms.items()
                }

    def _inputs(self, parts: Sequence[Part]) -> list[dict[str, np.ndarray]]:
        """What the parts read, by name, for each batch."""
        names = {name for part in parts for name in part.inputs}
        copy = self.model.clone()
        copy.graph.outputs.clear()
        copy.graph.outputs.extend(value for node in copy.graph for value in node.outputs if value.name in names)
        run = open_prompt(copy, self.context) if copy.graph.outputs else lambda _: {}
        return [dict(feeds) | run(feeds) for feeds in self.feeds]

    def _outputs(self, product: Product, graphs: Sequence[ir.Model], inputs: Sequence[Feeds]) -> list[list[np.ndarray]]:
        """Of each part, for each batch."""
        outputs = []
        for part, graph in zip(product.parts, graphs, strict=True):
            run = open_prompt(graph, self.context)
            outputs.append([run({name: feeds[name] for name in part.inputs})[part.output] for feeds in inputs])
        return outputs

    def _noise(
        self, product: Product, exact: Sequence[Sequence[np.ndarray]], got: Sequence[Sequence[np.ndarray]]
    ) -> float:
        drift = self.context.drift
        assert drift is not None
        places = [self.parts.index(part) for part in product.parts]
        errors = {
            id(feeds): {_fed(place): got[i][batch] - exact[i][batch] for i, place in enumerate(places)}
            for batch, feeds in enumerate(self.feeds)
        }
        noise = noise_of(drift(lambda feeds: self.whole({**feeds, **errors[id(feeds)]}), self.feeds))
        return max(noise - self.own, 0.0)


def _portions(
    products: Sequence[tuple[Product, Mapping[str, Sequence[ir.Model]]]], feeds: Sequence[Feeds]
) -> Iterator[Sequence[tuple[Product, Mapping[str, Sequence[ir.Model]]]]]:
    """Neighbours, so many that their inputs can be held."""
    positions = sum(max((array.size for array in batch.values()), default=0) for batch in feeds)
    widest = max((_width(product) for product, _ in products), default=1)
    count = max(1, _KEPT_BYTES // (4 * positions * widest or 1))
    for start in range(0, len(products), count):
        yield products[start : start + count]


def _width(product: Product) -> int:
    dims = [dim for part in product.parts for value in part.graph.graph.inputs for dim in list(value.shape or ())[-1:]]
    return max((dim for dim in dims if isinstance(dim, int)), default=1)


def _disturbed(model: ir.Model, parts: Sequence[Part]) -> ir.Model:
    """A copy that adds an input, with the default 0, to the output of each part."""
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    for place, part in enumerate(parts):
        _disturb(copy.graph, values[part.output], _fed(place))
    return copy


def _disturb(graph: ir.Graph, value: ir.Value, name: str) -> None:
    node = value.producer()
    assert node is not None
    error = add_initializer(graph, name, np.zeros((), np.float32))
    error.shape = None  # it takes any
    graph.inputs.append(error)
    add = ir.node("Add", [value, error])
    (sum_,) = add.outputs
    sum_.type, sum_.shape = value.type, value.shape
    whole_name = value.name
    ir.convenience.replace_all_uses_with(value, sum_, replace_graph_outputs=True)
    add.replace_input_with(0, value)
    graph.insert_after(node, add)
    if sum_.is_graph_output():
        value.name, sum_.name = f"{whole_name}.exact", whole_name


def _fed(place: int) -> str:
    return f"auto.error.{place}"
