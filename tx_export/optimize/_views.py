"""A view of a value: the same elements, or some of them, along other axes.

An axis of a view is a list of atoms, in order; an atom is a piece of one axis of the base. Example: [B, T, 96] reshaped
to [B, T, 3, 32], taken at 1 of its third axis and transposed: [[T], [B], [32]], with the atom of size 3 fixed at 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Atom", "Size", "View", "grouped"]

Size = int | str  # a number, or the name of a dimension that varies


@dataclass(eq=False)
class Atom:
    """A piece of one axis of the base; of several pieces of an axis, `place` orders them from the outermost on."""

    axis: int
    size: Size
    place: tuple[int, ...] = ()


@dataclass
class View:
    """Elements of a base with axes of these sizes: those at the fixed atoms, along new axes. Size 1 has no atom."""

    sizes: Sequence[Size]
    axes: list[list[Atom]]
    fixed: dict[Atom, int] = field(default_factory=dict)

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

    def reshape(self, sizes: Sequence[Size]) -> bool:
        """All elements in their order along axes of these sizes; False where it can't be told which pieces go where."""
        found = grouped([atom for axis in self.axes for atom in axis], sizes)
        self.axes = found or []
        return found is not None

    def length(self, axis: int) -> int | None:
        """The size of an axis, where it is a number."""
        sizes = [atom.size for atom in self.axes[axis]]
        return None if any(isinstance(size, str) for size in sizes) else math.prod(int(size) for size in sizes)

    def keep(self, axis: int, start: int, width: int) -> bool:
        """Keep the `width` entries of an axis from `start`, a multiple of it; False where that cuts through pieces."""
        size = self.length(axis)
        pieces = None if size is None else grouped(list(self.axes[axis]), (size // width, width))
        if pieces is None:
            return False
        outer, self.axes[axis] = pieces
        number = start // width
        for atom in reversed(outer):
            self.fixed[atom] = number % int(atom.size)
            number //= int(atom.size)
        return True

    def _keeps_axes(self) -> bool:
        pairs = enumerate(self.axes)
        return len(self.axes) == len(self.sizes) and all(atom.axis == axis for axis, atoms in pairs for atom in atoms)


def _is_ordered(atoms: Sequence[Atom]) -> bool:
    return all((a.axis, a.place) < (b.axis, b.place) for a, b in itertools.pairwise(atoms))


def grouped(atoms: list[Atom], sizes: Sequence[Size]) -> list[list[Atom]] | None:
    """The atoms, as axes of these sizes; from both ends, until one size is left for all that is left."""
    front: list[list[Atom]] = []
    back: list[list[Atom]] = []
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


def _taken(atoms: list[Atom], size: Size, end: int) -> list[Atom] | None:
    """Take atoms of that size together off one end of the list; one that is too large is cut in two."""
    taken: list[Atom] = []
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


def _cut(atom: Atom, outer: int) -> tuple[Atom, Atom]:
    sizes = (outer, int(atom.size) // outer)
    first, second = (Atom(atom.axis, size, (*atom.place, number)) for number, size in enumerate(sizes))
    return first, second
