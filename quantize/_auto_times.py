"""How long a product takes in each form, on this machine, in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tx_export import plugins, runtime
from tx_export.timing import Contender, Plan, Shape, Timing, measure

__all__ = ["kind_of", "times"]

# Other processes only ever add time, so the quickest of many calls is nearest to what the machine can.
_PLAN = Plan(rounds=7, calls=5, seconds=0.03, warm_up=2, pause=0.15)
_SEED = 0


def kind_of(model: ir.Model) -> Hashable:
    """Graphs of one kind take as long: equal operators over equal shapes."""
    return tuple(
        (node.op_type, tuple(str(value.shape) for value in node.inputs if value is not None)) for node in model.graph
    )


def times(
    forms: Mapping[str, ir.Model], shapes: Sequence[Shape], provider: str, rows: str, isa: str = ""
) -> dict[str, list[float]]:
    """Milliseconds of each form at each shape; all have the same inputs, and rounds alternate between them.

    `rows` is the name of the dimension that counts the rows of a batch.
    """
    settings = plugins.find("provider", provider)(**({"isa": isa} if isa else {})).session()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_feeds(folder, next(iter(forms.values())), shapes, rows)
        contenders = []
        for number, (form, model) in enumerate(forms.items()):
            path = folder / f"{number}.onnx"
            ir.save(model, path)
            load = {
                "graph": str(path),
                "settings": settings,
                "threads": runtime.available_threads(),
                "feeds": name,
            }
            contenders.append(Contender(form, (sys.executable, "-m", "tx_export._product_worker"), load))
        found = measure(contenders, shapes, lambda line: None, _PLAN)
    return {form: [_quickest(found, form, shape) for shape in shapes] for form in forms}


def _quickest(found: Sequence[Timing], form: str, shape: Shape) -> float:
    return min(min(map(min, timing.rounds)) for timing in found if (timing.contender, timing.shape) == (form, shape))


def _write_feeds(folder: Path, model: ir.Model, shapes: Sequence[Shape], rows: str) -> None:
    for shape in shapes:
        random = np.random.default_rng(_SEED)
        feeds = {value.name or "": _values(value, shape, rows, random) for value in model.graph.inputs}
        np.savez(folder / f"{shape}.npz", **feeds)  # type: ignore[arg-type]


def _values(value: ir.Value, shape: Shape, rows: str, random: np.random.Generator) -> np.ndarray:
    """Activations are normal; masks, which are integers, are full."""
    dims = list(value.shape) if value.shape is not None else []
    symbols = [str(dim) for dim in dims if not isinstance(dim, int)]
    # One dimension alone counts rows, or the positions of all of them. A mask of scores has tokens twice.
    sizes = iter([*shape] if len(symbols) > 1 else [shape.batch if symbols == [rows] else shape.batch * shape.tokens])
    filled = [dim if isinstance(dim, int) else next(sizes, shape.tokens) for dim in dims]
    kind = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    return random.normal(size=filled).astype(kind) if kind.kind == "f" else np.ones(filled, kind)
