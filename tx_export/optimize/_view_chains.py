"""What a chain of Reshape, Transpose, Slice and the like does to the elements of a value, as a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from tx_export._graph import array_of
from tx_export.optimize._views import Atom, Size, View

__all__ = ["bases", "viewed"]


def bases(value: ir.Value) -> list[ir.Value]:
    """The values that it may be a view of, the farthest first."""
    found: list[ir.Value] = []
    node = value.producer()
    while node is not None and not node.domain and node.op_type in _STEPS and node.inputs[0] is not None:
        found.insert(0, node.inputs[0])
        node = node.inputs[0].producer()
    return found


def viewed(value: ir.Value, base: ir.Value) -> View | None:
    """The view that `value` is of one of its bases; None where it can't be told."""
    chain: list[ir.Value] = []
    inner: ir.Value | None = value
    while inner is not base:
        assert inner is not None
        chain.append(inner)
        node = inner.producer()
        assert node is not None
        inner = node.inputs[0]
    sizes = _sizes(base)
    if sizes is None:
        return None
    view = View(sizes, [[] if size == 1 else [Atom(axis, size)] for axis, size in enumerate(sizes)])
    for step in reversed(chain):
        node = step.producer()
        assert node is not None
        if not _STEPS[node.op_type](view, node, step):
            return None
    return view


def _sizes(value: ir.Value) -> list[Size] | None:
    if value.shape is None:
        return None
    sizes = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if None in sizes else sizes  # type: ignore[return-value]


def _reshape(view: View, node: ir.Node, output: ir.Value) -> bool:
    sizes = _sizes(output)
    return sizes is not None and view.reshape(sizes)


def _transpose(view: View, node: ir.Node, output: ir.Value) -> bool:
    order = node.attributes.get_ints("perm", list(reversed(range(len(view.axes)))))
    view.axes = [view.axes[axis] for axis in order]
    return True


def _squeeze(view: View, node: ir.Node, output: ir.Value) -> bool:
    dropped = _axes(node, len(view.axes))
    if dropped is None or any(view.axes[axis] for axis in dropped):
        return False
    view.axes = [atoms for axis, atoms in enumerate(view.axes) if axis not in dropped]
    return True


def _unsqueeze(view: View, node: ir.Node, output: ir.Value) -> bool:
    given = array_of(node.inputs[1])
    if given is None:
        return False
    rank = len(view.axes) + given.size
    for axis in sorted(int(axis) % rank for axis in given.reshape(-1)):
        view.axes.insert(axis, [])
    return True


def _axes(node: ir.Node, rank: int) -> set[int] | None:
    given = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if given is None else {int(axis) % rank for axis in given.reshape(-1)}


def _gather(view: View, node: ir.Node, output: ir.Value) -> bool:
    index = array_of(node.inputs[1])
    if index is None or index.size != 1 or index.ndim > 1 or not view.axes:
        return False
    axis = node.attributes.get_int("axis", 0) % len(view.axes)
    size = view.length(axis)
    if size is None or not view.keep(axis, index.item() % size, 1):
        return False
    if index.ndim == 0:
        view.axes.pop(axis)
    return True


def _slice(view: View, node: ir.Node, output: ir.Value) -> bool:
    given = [array_of(value) for value in node.inputs[1:]]
    if len(given) < 3 or any(array is None or array.size != 1 for array in given):
        return False
    start, end, axis, step = (*(array.item() for array in given if array is not None), 1)[:4]
    axis %= len(view.axes)
    size = view.length(axis)
    if step != 1 or size is None:
        return False
    start, end = (max(0, min(size, at + size if at < 0 else at)) for at in (start, end))
    width = end - start
    return width > 0 and size % width == 0 and start % width == 0 and view.keep(axis, start, width)


def _split(view: View, node: ir.Node, output: ir.Value) -> bool:
    axis, parts = node.attributes.get_int("axis", 0) % len(view.axes), len(node.outputs)
    size, widths = view.length(axis), array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if size is None or size % parts or (widths is not None and set(widths.tolist()) != {size // parts}):
        return False
    return view.keep(axis, output.index() * (size // parts), size // parts)  # type: ignore[operator]


def _same(view: View, node: ir.Node, output: ir.Value) -> bool:
    return True


_STEPS: Mapping[str, Callable[[View, ir.Node, ir.Value], bool]] = {
    "Flatten": _reshape,
    "Gather": _gather,
    "Identity": _same,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
