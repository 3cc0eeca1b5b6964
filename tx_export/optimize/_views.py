"""What a chain of Reshape, Transpose, Slice and the like does to the elements of a value: a view of it.

An axis of a view is a list of atoms, in order; an atom is a piece of one axis of the base. Example: [B, T, 96] reshaped
to [B, T, 3, 32], taken at 1 of its third axis and transposed: [[T], [B], [32]], with the atom of size 3 fixed at 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from tx_export._graph import array_of

__all__ = ["View", "bases", "viewed"]

Size = int | str  # a number, or the name of a dimension that varies


@dataclass(eq=False)
class _Atom:
    """A piece of one axis of the base; of several pieces of an axis, `place` orders them from the outermost on."""

    axis: int
    size: Size
    place: tuple[int, ...] = ()


@dataclass
class View:
    """Elements of a base with axes of these sizes: those at the fixed atoms, along new axes. Size 1 has no atom."""

    sizes: Sequence[Size]
    axes: list[list[_Atom]]
    fixed: dict[_Atom, int] = field(default_factory=dict)

    def is_order_kept(self) -> bool:
        """Whether the elements are all of the base's, in its order."""
        return not self.fixed and _is_ordered([atom for axis in self.axes for atom in axis])

    def is_whole(self) -> bool:
        """Whether it is the base itself."""
        return self.is_order_kept() and self._keeps_axes()

    def permutation(self) -> list[int] | None:
        """The axes of the base in the order of the view's, where each view's is one whole axis."""
        order = [axis[0].axis for axis in self.axes if axis and not axis[0].place]
        whole = not self.fixed and all(len(axis) == 1 for axis in self.axes)
        return order if whole and sorted(order) == list(range(len(self.sizes))) else None

    def part(self) -> tuple[int, int, int] | None:
        """(axis, start, end), where it is a range of one axis of the base, and all others as they are."""
        cut = {atom.axis for atom in self.fixed}
        if len(cut) != 1 or not self._keeps_axes():
            return None
        (axis,) = cut
        kept, fixed = self.axes[axis], sorted(self.fixed, key=lambda atom: atom.place)
        if not _is_ordered([atom for atoms in self.axes for atom in atoms]) or not _is_ordered([*fixed, *kept]):
            return None  # other pieces inside: every second element, and so on
        width = math.prod(int(atom.size) for atom in kept)
        start = 0
        for atom in fixed:
            start = start * int(atom.size) + self.fixed[atom]
        return axis, start * width, (start + 1) * width

    def _keeps_axes(self) -> bool:
        pairs = enumerate(self.axes)
        return len(self.axes) == len(self.sizes) and all(atom.axis == axis for axis, atoms in pairs for atom in atoms)


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
    view = View(sizes, [[] if size == 1 else [_Atom(axis, size)] for axis, size in enumerate(sizes)])
    for step in reversed(chain):
        node = step.producer()
        assert node is not None
        if not _STEPS[node.op_type](view, node, step):
            return None
    return view


def _is_ordered(atoms: Sequence[_Atom]) -> bool:
    return all((a.axis, a.place) < (b.axis, b.place) for a, b in itertools.pairwise(atoms))


def _sizes(value: ir.Value) -> list[Size] | None:
    if value.shape is None:
        return None
    sizes = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if None in sizes else sizes  # type: ignore[return-value]


def _reshape(view: View, node: ir.Node, output: ir.Value) -> bool:
    sizes = _sizes(output)
    grouped = None if sizes is None else _grouped([atom for axis in view.axes for atom in axis], sizes)
    view.axes = grouped or []
    return grouped is not None


def _grouped(atoms: list[_Atom], sizes: Sequence[Size]) -> list[list[_Atom]] | None:
    """The atoms, as axes of these sizes; from both ends, until one size is left for all that is left."""
    front: list[list[_Atom]] = []
    back: list[list[_Atom]] = []
    sizes = list(sizes)
    while sizes and (taken := _taken(atoms, sizes[0], 0)) is not None:
        front.append(taken)
        sizes.pop(0)
    while sizes and (taken := _taken(atoms, sizes[-1], -1)) is not None:
        back.insert(0, taken)
        sizes.pop()
    if len(sizes) == 1:
        return [*front, atoms, *back]
    return [*front, *back] if not sizes and not atoms else None


def _taken(atoms: list[_Atom], size: Size, end: int) -> list[_Atom] | None:
    """Take atoms of that size together off one end of the list; one that is too large is cut in two."""
    taken: list[_Atom] = []
    rest = list(atoms)
    while size != 1:
        if not rest:
            return None
        atom = rest.pop(end)
        if atom.size == size:
            size = 1
        elif isinstance(size, str) or isinstance(atom.size, str):
            return None
        elif size % atom.size == 0:
            size //= atom.size
        elif atom.size % size == 0:
            outer, inner = _cut(atom, size if end == 0 else atom.size // size)
            atom, left = (outer, inner) if end == 0 else (inner, outer)
            rest.insert(0 if end == 0 else len(rest), left)
            size = 1
        else:
            return None
        taken.insert(len(taken) if end == 0 else 0, atom)
    atoms[:] = rest
    return taken


def _cut(atom: _Atom, outer: int) -> tuple[_Atom, _Atom]:
    sizes = (outer, int(atom.size) // outer)
    first, second = (_Atom(atom.axis, size, (*atom.place, number)) for number, size in enumerate(sizes))
    return first, second


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
    index, axis = array_of(node.inputs[1]), node.attributes.get_int("axis", 0) % max(len(view.axes), 1)
    if index is None or index.size != 1 or not view.axes:
        return False
    sizes = [atom.size for atom in view.axes[axis]]
    if any(isinstance(size, str) for size in sizes):
        return False
    whole = math.prod(int(size) for size in sizes)
    if not _fix(view, axis, int(index.reshape(())) % whole, 1):
        return False
    if index.ndim == 0:
        view.axes.pop(axis)
    return index.ndim < 2


def _slice(view: View, node: ir.Node, output: ir.Value) -> bool:
    given = [array_of(value) for value in node.inputs[1:]]
    if any(array is None or array.size != 1 for array in given) or len(given) < 3:
        return False
    start, end, axis, step = (*(int(array.reshape(())) for array in given if array is not None), 1)[:4]
    size = _length(view, axis % len(view.axes))
    if step != 1 or size is None:
        return False
    start, end = (max(0, min(size, at + size if at < 0 else at)) for at in (start, end))
    width = end - start
    return width > 0 and size % width == 0 and start % width == 0 and _fix(view, axis % len(view.axes), start, width)


def _split(view: View, node: ir.Node, output: ir.Value) -> bool:
    axis = node.attributes.get_int("axis", 0) % len(view.axes)
    size, widths = _length(view, axis), array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if size is None or (widths is not None and len(set(widths.tolist())) > 1):
        return False
    parts = len(node.outputs)
    return size % parts == 0 and _fix(view, axis, node.outputs.index(output) * (size // parts), size // parts)


def _length(view: View, axis: int) -> int | None:
    sizes = [atom.size for atom in view.axes[axis]]
    return None if any(isinstance(size, str) for size in sizes) else math.prod(int(size) for size in sizes)


def _fix(view: View, axis: int, start: int, width: int) -> bool:
    """Keep the `width` entries of an axis from `start`, a multiple of it."""
    size = _length(view, axis)
    grouped = None if size is None else _grouped(list(view.axes[axis]), (size // width, width))
    if grouped is None:
        return False
    outer, view.axes[axis] = grouped
    number = start // width
    for atom in reversed(outer):
        view.fixed[atom] = number % int(atom.size)
        number //= int(atom.size)
    return True


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
